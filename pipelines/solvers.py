"""From noise to a picture, step by step: the schedulers of diffusers by name, one for each row.

A step works on a copy, so that it can be repeated; what it draws at random comes from generators
made anew from (seed, step). It does not know models, rows of a call, or devices.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelines.fetch import Unprepared
from queueing.work import Invalid

FLOW = "flow-match euler"
_FLOW_CLASS = "FlowMatchEulerDiscreteScheduler"
_CLASSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # and what makes them what they are
    "euler": ("EulerDiscreteScheduler", {}),
    "euler ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {}),
    "dpm++ 2m": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "solver_order": 2},
    ),
    "unipc": ("UniPCMultistepScheduler", {"predict_x0": True}),
    "lcm": ("LCMScheduler", {}),
}
_CLIPPING = ("DDIMScheduler", "LCMScheduler")  # to -1 and 1, where nothing is said
_PREDICTIONS = ("epsilon", "v_prediction")
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = 2**64 - 1


def generators(seeds: Sequence[int], step: int) -> list[torch.Generator]:
    """One for each seed. Step 0 begins the picture, from the seed as it is, as diffusers does."""
    return [torch.Generator().manual_seed(_mixed(seed, step) if step else seed) for seed in seeds]


def _mixed(seed: int, step: int) -> int:
    """A number that looks unlike those of all other pairs (splitmix64, Steele and others, 2014)."""
    number = (seed + _mix(step * _MIX[0] & _BITS)) & _BITS
    return _mix(number)


def _mix(number: int) -> int:
    number = (number ^ number >> 30) * _MIX[1] & _BITS
    number = (number ^ number >> 27) * _MIX[2] & _BITS
    return number ^ number >> 31


@dataclass(frozen=True, slots=True, eq=False)
class Solver:
    """A row's own scheduler, all of it on the host; `made` is what it was before any step, `draws`
    whether its steps want something random.
    """

    scheduler: Any
    made: Any
    draws: bool

    def time(self, step: int) -> float:
        """What the model is told of the noise before a step."""
        return float(self.scheduler.timesteps[step])

    def scaled(self, latents: Tensor, step: int) -> Tensor:
        """Latents as the model wants to see them before a step."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return latents
        scaled: Tensor = self.scheduler.scale_model_input(latents, self.scheduler.timesteps[step])
        return scaled

    def stepped(
        self, predicted: Tensor, latents: Tensor, step: int, seeds: Sequence[int]
    ) -> tuple[Solver, Tensor, Tensor]:
        """Itself after a step, the latents after it, and the picture that it aims at."""
        scheduler = _copied(self.scheduler)
        drawn = {}
        if self.draws:
            drawn["generator"] = generators(seeds, step + 1)
        time = scheduler.timesteps[step]
        found = scheduler.step(predicted, time, latents, **drawn)
        aim = self._aim(found, scheduler, predicted, latents, step)
        return replace(self, scheduler=scheduler), found.prev_sample, aim

    def noised(self, latents: Tensor, noise: Tensor, step: int) -> Tensor:
        """A picture as it is before this step, the first one taken; both on the host."""
        scheduler = _copied(self.scheduler)
        times = scheduler.timesteps[step : step + 1].expand(len(latents))
        found: Tensor = (
            scheduler.add_noise(latents, noise, times)
            if hasattr(scheduler, "add_noise")
            else scheduler.scale_noise(latents, times, noise)
        )
        return found

    def begun(self, noise: Tensor) -> Tensor:
        """Noise as the first of all steps expects it."""
        return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)

    def memory(self) -> dict[str, Any]:
        """What its steps changed, as host data."""
        before = vars(self.made)
        now = vars(self.scheduler).items()
        return {name: _stored(v) for name, v in now if v is not before.get(name)}

    def remembering(self, memory: Mapping[str, Any]) -> Solver:
        """Where another one was when it gave this memory."""
        scheduler = _copied(self.scheduler)
        for name, value in memory.items():
            setattr(scheduler, name, _restored(value))
        return replace(self, scheduler=scheduler)

    @staticmethod
    def _aim(found: Any, scheduler: Any, predicted: Tensor, latents: Tensor, step: int) -> Tensor:
        aim: Tensor
        if hasattr(found, "pred_original_sample"):
            aim = found.pred_original_sample
        elif hasattr(found, "denoised"):
            aim = found.denoised
        elif hasattr(scheduler, "model_outputs"):  # of multistep solvers, already converted
            aim = scheduler.model_outputs[-1]
        else:
            aim = latents - scheduler.sigmas[step] * predicted
        return aim


class Solvers:
    """All that fit one model, from its folder's configuration of a scheduler."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        flow = config.get("_class_name") == _FLOW_CLASS
        prediction = config.get("prediction_type", "epsilon")
        if not flow and prediction not in _PREDICTIONS:
            raise Unprepared(
                f"{where} predicts {prediction!r}; known are {', '.join(_PREDICTIONS)} and flow "
                "matching. Choose another model."
            )
        wanted = {FLOW: (_FLOW_CLASS, {})} if flow else _CLASSES
        self._made = {name: _made(*each, config) for name, each in wanted.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Those that may be asked for, the suggested one first."""
        return tuple(self._made)

    def begin(self, name: str, steps: int, first: int, length: int) -> Solver:
        """For so many steps, the first of which to be taken is `first`; some models shift their
        times by the length of a picture in tokens.
        """
        if name not in self._made:
            raise Invalid(
                f"solver is {name!r}; this model takes {', '.join(self._made)}. Choose one."
            )
        scheduler = _copied(self._made[name])
        try:
            scheduler.set_timesteps(steps, **_times(scheduler, steps, length))
        except ValueError as error:
            raise Invalid(f"steps is {steps}, which {name} cannot do: {error}") from None
        if len(scheduler.timesteps) != steps:
            raise Invalid(f"steps is {steps}, which {name} cannot do; take another number.")
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(first)
        if hasattr(scheduler, "scale_model_input"):  # from here on it only reads
            scheduler.scale_model_input(torch.zeros(1), scheduler.timesteps[first])
        draws = "generator" in inspect.signature(scheduler.step).parameters
        return Solver(scheduler, scheduler, draws)


def _made(name: str, own: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """A scheduler that clips no latents, unless the configuration says so."""
    import diffusers

    kind: Any = getattr(diffusers, name)
    unclipped = {"clip_sample": False} if name in _CLIPPING else {}
    return kind.from_config({**unclipped, **config, **own})


def _times(scheduler: Any, steps: int, length: int) -> dict[str, Any]:
    """What flow matching is told of its times: even ones, shifted by the length of a picture."""
    if type(scheduler).__name__ != _FLOW_CLASS:
        return {}
    config = scheduler.config
    given: dict[str, Any] = {"sigmas": np.linspace(1.0, 1 / steps, steps)}
    if config.use_dynamic_shifting:
        short, long = config.base_image_seq_len, config.max_image_seq_len
        slope = (config.max_shift - config.base_shift) / (long - short)
        given["mu"] = length * slope + config.base_shift - slope * short
    return given


def _copied(scheduler: Any) -> Any:
    """A shallow copy with lists of its own; no step writes to a tensor."""
    twin = copy.copy(scheduler)
    vars(twin).update({n: list(v) for n, v in vars(scheduler).items() if isinstance(v, list)})
    return twin


def _stored(value: Any) -> Any:
    if isinstance(value, list):
        return [_stored(each) for each in value]
    return value.float().cpu().numpy() if isinstance(value, Tensor) else value


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(each) for each in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
