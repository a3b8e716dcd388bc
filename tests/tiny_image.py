"""A tiny random SDXL whose rows join and leave at every step: encode, denoise, decode.

Test material, built from configurations on the components of diffusers. A row owns its solver, step
count, guidance, seed and time ids; a call owns nothing. It knows no prompts, only token ids.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_euler_ancestral_discrete import (
    EulerAncestralDiscreteScheduler,
)
from torch import Tensor, nn
from transformers import CLIPTextConfig
from transformers.models.clip.modeling_clip import CLIPTextModel, CLIPTextModelWithProjection

from pipelines.device import guarded
from queueing.work import Advance, Card, Key, Mark, Output, Request, Row, Tell, Work

WORDS, LENGTH, END = 100, 16, 1
SOLVERS = {
    "euler": EulerAncestralDiscreteScheduler,  # noise in every step
    "multistep": DPMSolverMultistepScheduler,  # a list of earlier predictions
}


@dataclass(frozen=True, slots=True)
class ImageJob:
    """What to draw; sizes are of the latents, `crop` is one of SDXL's conditions."""

    prompt: tuple[int, ...]
    negative: tuple[int, ...] = ()
    steps: int = 4
    guidance: float = 5.0
    seed: int = 0
    height: int = 16
    width: int = 16
    crop: tuple[int, int] = (0, 0)
    solver: str = "euler"

    @property
    def weight(self) -> int:
        """Rows of a forward: the prompt's, and with guidance the negative's before it."""
        return 2 if self.guidance > 1 else 1

    def plan(self) -> tuple[Work, ...]:
        shape = self.height, self.width
        return (
            Work("encode", weight=self.weight),
            Work(("denoise", *shape), 1, self.steps, self.weight, serial=True),
            Work(("decode", *shape)),
        )

    def request(self, **fields: Any) -> Request:
        """A checked request for this job."""
        return Request("image", self, self.plan(), **fields)

    def noise(self, progress: int) -> torch.Generator:
        """Made anew from (seed, progress), so it lives nowhere."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + progress)

    def time_ids(self) -> Tensor:
        size = 2 * self.height, 2 * self.width
        return torch.tensor([[*size, *self.crop, *size]], dtype=torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class ImageState:
    """All there is to a row; whatever changes it makes another."""

    latents: Tensor  # [1, 4, height, width]
    solver: Any
    done: int = 0
    words: Tensor | None = None  # [weight, length, 64]
    pooled: Tensor | None = None  # [weight, 32]
    decoded: bool = False

    def advanced(self, job: ImageJob, predicted: Tensor) -> ImageState:
        """One step of a solver of its own; predicted [weight, 4, height, width]."""
        if job.weight == 2:
            without, guided = predicted.chunk(2)
            predicted = without + job.guidance * (guided - without)
        solver = copied(self.solver)
        solver.scale_model_input(self.latents, self.time)  # it wants to have been asked
        generator = job.noise(self.done + 1)
        (latents, *_) = solver.step(
            predicted, self.time, self.latents, generator=generator, return_dict=False
        )
        return replace(self, latents=latents, solver=solver, done=self.done + 1)

    @property
    def time(self) -> Tensor:
        return self.solver.timesteps[self.done]

    def scaled(self) -> Tensor:
        return copied(self.solver).scale_model_input(self.latents, self.time)

    def preview(self) -> np.ndarray:
        """Small and rough, from the latents: [height, width, 3] of bytes."""
        rough = self.latents[0, :3] / self.latents.abs().max()
        return ((rough + 1) * 127).byte().permute(1, 2, 0).numpy()


def copied(solver: Any) -> Any:
    """A shallow copy with lists of its own; tensors are never written to."""
    twin = copy.copy(solver)
    vars(twin).update({n: list(v) for n, v in vars(solver).items() if isinstance(v, list)})
    return twin


def memory(solver: Any) -> dict[str, Any]:
    """The counters and earlier predictions of a solver, as host data."""
    found = {}
    for name, value in vars(solver).items():
        if isinstance(value, list):
            found[name] = [each.numpy() if isinstance(each, Tensor) else each for each in value]
        elif isinstance(value, int):
            found[name] = value
    return found


def remembered(solver: Any, memory: dict[str, Any]) -> Any:
    """A fresh solver that goes on where another one was."""
    for name, value in memory.items():
        if isinstance(value, list):
            value = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in value]
        setattr(solver, name, value)
    return solver


class TinyImagePipeline:
    """Three kinds of calls; rows with guidance count twice and ride beside rows without."""

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        return None

    def load(self, tell: Tell) -> Card:
        torch.manual_seed(0)
        text = CLIPTextConfig(
            vocab_size=WORDS, hidden_size=32, intermediate_size=37, num_attention_heads=4,
            num_hidden_layers=3, projection_dim=32, max_position_embeddings=LENGTH,
            bos_token_id=0, eos_token_id=END, pad_token_id=END,
        )  # fmt: skip
        self._first = lively(CLIPTextModel(text))
        self._second = lively(CLIPTextModelWithProjection(text))
        self._unet = lively(unet())
        self._vae = lively(vae())
        return Card()

    def unload(self) -> None:
        del self._first, self._second, self._unet, self._vae

    def open(self, request: Request, mark: Mark | None = None) -> ImageState:
        job: ImageJob = request.payload
        solver = SOLVERS[job.solver]()
        solver.set_timesteps(job.steps)
        solver.set_begin_index(0)
        if mark:
            done, latents, kept = mark
            return ImageState(torch.from_numpy(latents), remembered(solver, kept), done)
        noise = torch.randn(1, 4, job.height, job.width, generator=job.noise(0))
        return ImageState(noise * solver.init_noise_sigma, solver)

    def next(self, row: Row) -> Work | None:
        job: ImageJob = row.request.payload
        state: ImageState = row.state
        encode, denoise, decode = job.plan()
        if state.decoded:
            return None
        if state.done == job.steps:
            return decode
        if state.words is None:
            return encode
        return replace(denoise, most=job.steps - state.done)

    def reserve(self, row: Row, units: int) -> int:
        return units

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        return guarded(lambda: self._step(rows, grants))

    def park(self, row: Row) -> Mark:
        """Steps are kept; what was encoded is encoded again."""
        state: ImageState = row.state
        return (state.done, state.latents.numpy(), memory(state.solver)) if state.done else ()

    def close(self, row: Row) -> None:
        """A state holds all its memory and goes with its row."""

    @torch.inference_mode()
    def _step(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance]:
        work = self.next(rows[0])
        if work is None:
            raise RuntimeError("A finished row in a call. This is a bug.")
        if work.serial:
            return self._denoise(rows, grants)
        return self._encode(rows) if work.key == "encode" else self._decode(rows)

    def _encode(self, rows: Sequence[Row]) -> list[Advance]:
        jobs: list[ImageJob] = [row.request.payload for row in rows]
        asked = [(job.negative, job.prompt)[-job.weight :] for job in jobs]
        tokens = torch.tensor([padded(text) for texts in asked for text in texts])
        first = self._first(tokens, output_hidden_states=True)
        second = self._second(tokens, output_hidden_states=True)
        words = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        weights = [job.weight for job in jobs]
        parts = zip(rows, words.split(weights), second.text_embeds.split(weights), strict=True)
        return [Advance(replace(r.state, words=w, pooled=p), 1) for r, w, p in parts]

    def _denoise(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance]:
        """As many forwards as the largest grant; a row leaves after its own, or when cancelled."""
        states: list[ImageState] = [row.state for row in rows]
        for turn in range(max(grants)):
            going = [
                place
                for place, row in enumerate(rows)
                if turn < grants[place] and not (turn and row.cancelled)
            ]
            if not going:
                break
            jobs = [rows[place].request.payload for place in going]
            ahead = self._forward(jobs, [states[place] for place in going])
            for place, state in zip(going, ahead, strict=True):
                states[place] = state
        return [self._advance(row, state) for row, state in zip(rows, states, strict=True)]

    def _advance(self, row: Row, state: ImageState) -> Advance:
        output = Output(preview=state.preview(), progress=state.done / row.request.payload.steps)
        return Advance(state, state.done - row.state.done, output)

    def _forward(
        self, jobs: Sequence[ImageJob], states: Sequence[ImageState]
    ) -> Sequence[ImageState]:
        """One denoiser forward: every row at its own time, under its own conditions."""
        weights = [job.weight for job in jobs]
        samples = [s.scaled().expand(w, -1, -1, -1) for s, w in zip(states, weights, strict=True)]
        times = [s.time.float().expand(w) for s, w in zip(states, weights, strict=True)]
        conditions = {
            "text_embeds": torch.cat([known(state.pooled) for state in states]),
            "time_ids": torch.cat([job.time_ids().expand(job.weight, -1) for job in jobs]),
        }
        predicted = self._unet(
            torch.cat(samples),
            torch.cat(times),  # [rows]
            encoder_hidden_states=torch.cat([known(state.words) for state in states]),
            added_cond_kwargs=conditions,
        ).sample
        parts = zip(states, jobs, predicted.split(weights), strict=True)
        return [state.advanced(job, part) for state, job, part in parts]

    def _decode(self, rows: Sequence[Row]) -> list[Advance]:
        latents = torch.cat([row.state.latents for row in rows])
        images = self._vae.decode(latents / self._vae.config.scaling_factor).sample
        return [
            Advance(replace(row.state, decoded=True), 1, Output(progress=1.0, result=image.numpy()))
            for row, image in zip(rows, images, strict=True)
        ]


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(2, 4), layers_per_block=1, norm_num_groups=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), use_linear_projection=True, cross_attention_dim=64,
        transformer_layers_per_block=(1, 2), addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=80,
    )  # fmt: skip


def vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=32,
    )  # fmt: skip


def lively(model: nn.Module) -> nn.Module:
    """Random weights large enough that every input moves the output."""
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=1.5 / weight[0].numel() ** 0.5)
    return model.eval()


def padded(tokens: Sequence[int]) -> list[int]:
    """As CLIP does it: always the same length, so that nobody's length shows in another's row."""
    return [0, *tokens, *[END] * LENGTH][: LENGTH - 1] + [END]


def known(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("A denoise call before encode. This is a bug.")
    return tensor
