"""Training that may end at any moment and goes on where it was: one file holds all that matters.

It is written aside and renamed, so that there is always a whole one: network, average, optimizer,
step, seconds, and the one generator that every chance comes from.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("emoji.loop")

_CLIP = 1.0  # the largest norm of a gradient
_EVERY = 100  # steps between two lines of the log


@dataclass(frozen=True, slots=True)
class Plan:
    """How fast to learn: a warm-up, a plain, and, where an end is known, a straight way down."""

    rate: float
    warm: int = 200
    down: int = 0  # steps of the way down
    end: int | None = None  # the step to stop at
    average: float = 0.9995

    def at(self, step: int) -> float:
        rate = self.rate * min(1.0, (step + 1) / self.warm)
        if self.end is not None and self.down:
            rate *= min(1.0, (self.end - step) / self.down)
        return rate


class Loop:
    """A network in training. `draw` makes a loss of it, all chance taken from the generator."""

    def __init__(
        self, network: Any, plan: Plan, file: Path, draw: Callable[[Any, torch.Generator], Tensor]
    ) -> None:
        self.network = network.train()
        self.plan = plan
        self.file = file
        self.step = 0
        self.seconds = 0.0  # of training, whichever process did it
        self.average = [part.detach().clone() for part in network.parameters()]
        self._draw = draw
        self._chance = torch.Generator().manual_seed(0)
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )

    def run(self, every: float, until: int | None = None) -> None:
        """To the end of the plan, if it has one, or until an earlier step; kept every so many
        seconds and at the end.
        """
        ends = [step for step in (self.plan.end, until) if step is not None]
        began = last = saved = time.monotonic()
        losses: list[float] = []
        while not ends or self.step < min(ends):
            losses.append(self._one())
            now = time.monotonic()
            self.seconds, last = self.seconds + now - last, now
            if self.step % _EVERY == 0:
                loss = sum(losses) / len(losses)
                log.info("step %d, %.0f s, loss %.4f", self.step, self.seconds, loss)
                losses.clear()
            if now - saved > every:
                self.save()
                saved = time.monotonic()
        self.save()
        log.info("step %d: done, %.0f s in this process", self.step, time.monotonic() - began)

    def _one(self) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.at(self.step)
        loss = self._draw(self.network, self._chance)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), _CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        # A young average forgets quickly, else it would keep what the network began with.
        kept = min(self.plan.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, list(self.network.parameters()), 1 - kept)
        return float(loss.detach())

    def save(self) -> None:
        """All of it, on the disk before it gets its name."""
        state = {
            "network": self.network.state_dict(),
            "average": self.average,
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "chance": self._chance.get_state(),
            "end": self.plan.end,
            "down": self.plan.down,
        }
        part = self.file.with_suffix(".part")
        with part.open("wb") as opened:
            torch.save(state, opened)
            opened.flush()
            os.fsync(opened.fileno())
        part.rename(self.file)

    def load(self, file: Path | None = None) -> bool:
        """Go on where a file says it was; whether there is one."""
        found = file or self.file
        if not found.exists():
            return False
        state = torch.load(found, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.average = state["average"]
        self._optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self._chance.set_state(state["chance"])
        return True


def averaged(network: Any, file: Path) -> int:
    """Give a network the average that a file holds; the step it was at."""
    state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for part, value in zip(network.parameters(), state["average"], strict=True):
            part.copy_(value)
    return int(state["step"])
