"""A picture on its way: the state of a row, what it asks for next, and its mark.

All that a later step depends on is here, and every step makes a new one. It does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipelines.drawn import Drawn, ImageJob, Picture
from pipelines.readers import Condition
from pipelines.solvers import Solver
from queueing.work import Mark, Work


@dataclass(frozen=True, slots=True, eq=False)
class Sketch:
    """`conditions` are those without the prompt, where there is guidance, and those with it."""

    job: ImageJob
    solver: Solver
    latents: Tensor | None = None  # float32 [count, channels, height, width]
    conditions: tuple[Condition, ...] = ()
    cut: tuple[int, int] = (0, 0)  # tokens of the prompt and of the negative
    done: int = 0  # steps
    images: tuple[Picture | None, ...] = ()
    aim: Tensor | None = None  # the latents that the last step aimed at, for a preview

    @classmethod
    def opened(cls, job: ImageJob, solver: Solver, mark: Mark) -> Sketch:
        """A new one, or one that goes on; nothing has been read and all is on the host."""
        if not mark:
            return cls(job, solver)
        done, latents, memory, images, cut = mark
        kept = torch.from_numpy(latents)
        return cls(job, solver.remembering(memory), kept, (), cut, done, images)

    def mark(self) -> Mark:
        """Host data from which another one goes on; what was read is read again."""
        if self.latents is None or not self.done:
            return ()
        latents = self.latents.cpu().numpy()
        return self.done, latents, self.solver.memory(), self.images, self.cut

    def next(self) -> Work | None:
        """None when all pictures are there."""
        if len(self.images) == self.job.count:
            return None
        if self.done == self.steps:
            return self.job.decoding(len(self.images))
        if not self.conditions:
            return self.job.encoding()
        return self.job.denoising(self.done)

    @property
    def steps(self) -> int:
        """That are taken in all."""
        return self.job.steps - self.job.begin

    @property
    def step(self) -> int:
        """The next one, as solvers count."""
        return self.job.begin + self.done

    @property
    def progress(self) -> float:
        return (self.done + len(self.images)) / (self.steps + self.job.count)

    def due(self, since: int, every: int) -> bool:
        """Whether a preview is due after steps since that many; the first step always has one."""
        return (self.done - 1) // every > (since - 1) // every

    def known(self) -> Tensor:
        """Latents of a row that was encoded."""
        if self.latents is None:
            raise RuntimeError("A picture before it was begun. This is a bug.")
        return self.latents

    def sample(self) -> Tensor:
        """What the denoiser sees: [weight, channels, height, width]."""
        scaled = self.solver.scaled(self.known(), self.step)
        return torch.cat([scaled, scaled]) if self.job.guided else scaled

    def told(self) -> list[Condition]:
        """What it is told with it, for each row."""
        return [each for each in self.conditions for _ in range(self.job.count)]

    def advanced(self, predicted: Tensor) -> Sketch:
        """A step further; predicted [weight, channels, height, width]."""
        if self.job.guided:
            without, prompted = predicted.chunk(2)
            predicted = without + self.job.guidance * (prompted - without)
        solver, latents, aim = self.solver.stepped(
            predicted, self.known(), self.step, self.job.seeds
        )
        return replace(self, solver=solver, latents=latents, aim=aim, done=self.done + 1)

    def painted(self, image: Picture | None) -> Sketch:
        """With one more picture."""
        return replace(self, images=(*self.images, image))

    def result(self) -> Any:
        """All pictures, once they are there."""
        whole = len(self.images) == self.job.count
        return Drawn(self.images, self.job.seeds, *self.cut) if whole else None
