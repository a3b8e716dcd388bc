"""The words of pictures between their front and their pipeline: what to draw, and what came of it.

Both sides import it, so it imports neither torch nor a tokenizer. It does not know which models
draw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from queueing.work import Invalid, Request, Work, message

Picture: TypeAlias = "NDArray[np.uint8]"  # [height, width, 3]
Adapter: TypeAlias = "tuple[str, float]"  # its name and weight
MOST = 4  # pictures of one request
STEPS = 500  # with more, some solvers look beyond the noises a model was taught
GUIDANCE = 100.0


@message
class Facts:
    """What a model lets people ask for, and what it suggests."""

    family: str
    steps: int
    guidance: float
    size: int  # of a side, in pixels
    multiple: int
    least: int
    most: int
    shown: bool = False  # guidance is shown to the model, so it takes no second row
    negatives: bool = True


@message
class ImageJob:
    """What to draw: `count` pictures of the seeds from `seed` on, in pixels of `height` and
    `width`; no negative is not the same as an empty one.

    An `image` of that size is drawn over, for the last `strength` of the steps. `shown` is the
    model's own, see Facts; `original` and `crop` are conditions of SDXL.
    """

    prompt: str
    negative: str | None = None
    steps: int = 25
    guidance: float = 5.0
    seed: int = 0
    count: int = 1
    height: int = 512
    width: int = 512
    solver: str = "euler"
    adapter: Adapter | None = None
    image: Picture | None = None
    strength: float = 0.8
    shown: bool = False
    original: tuple[int, int] | None = None  # height and width
    crop: tuple[int, int] = (0, 0)  # top and left

    @property
    def guided(self) -> bool:
        """Every picture takes two rows of a forward: without the prompt, and with it."""
        return self.guidance > 1 and not self.shown

    @property
    def weight(self) -> int:
        """Rows of a forward."""
        return self.count * (2 if self.guided else 1)

    @property
    def begin(self) -> int:
        """The first step that is taken, of `steps`."""
        return 0 if self.image is None else self.steps - max(int(self.steps * self.strength), 1)

    @property
    def seeds(self) -> tuple[int, ...]:
        """One for each picture."""
        return tuple((self.seed + place) % 2**64 for place in range(self.count))

    def encoding(self) -> Work:
        """Texts, and the picture to draw over."""
        size = () if self.image is None else (self.height, self.width)
        return Work(("encode", *size), weight=2 if self.guided else 1)

    def denoising(self, done: int = 0) -> Work:
        """The steps that are left after so many."""
        left = self.steps - self.begin - done
        key = "denoise", self.height, self.width
        return Work(key, 1, left, self.weight, serial=True)

    def decoding(self, done: int = 0) -> Work:
        """The pictures that are left after so many, each a forward."""
        left = self.count - done
        return Work(("decode", self.height, self.width), 1, left, serial=left > 1)

    def request(self, task: str = "image", **fields: Any) -> Request:
        """A checked request for this job."""
        return Request(task, self, (self.encoding(), self.denoising(), self.decoding()), **fields)


@message
class Drawn:
    """Pictures and their seeds; one that must not be shown is None. `cut` tokens of the prompt,
    and `cut_negative` of the negative, were more than the model reads.
    """

    images: tuple[Picture | None, ...]
    seeds: tuple[int, ...]
    cut: int = 0
    cut_negative: int = 0


def suggested(facts: Facts, prompt: str, **fields: Any) -> ImageJob:
    """A job with what a model suggests, but for these fields."""
    job = ImageJob(
        prompt,
        steps=facts.steps,
        guidance=facts.guidance,
        height=facts.size,
        width=facts.size,
        shown=facts.shown,
    )
    return replace(job, **fields)


def told(facts: Facts) -> Mapping[str, str]:
    """What a card says of a model, for `heard`."""
    return {each.name: json.dumps(getattr(facts, each.name)) for each in fields(Facts)}


def heard(details: Mapping[str, str]) -> Facts:
    """What a card said."""
    return Facts(**{each.name: json.loads(details[each.name]) for each in fields(Facts)})


def check(job: ImageJob, facts: Facts, adapters: Sequence[str] = ()) -> None:
    """Raises Invalid for what this model does not draw; names the field and the limit."""
    _within("steps", job.steps, 1, STEPS)
    _within("count", job.count, 1, MOST)
    _within("guidance", job.guidance, 0.0, GUIDANCE)
    _within("seed", job.seed, 0, 2**64 - 1)
    for name, side in (("height", job.height), ("width", job.width)):
        _within(name, side, facts.least, facts.most)
        if side % facts.multiple:
            raise Invalid(f"{name} is {side}; it must be a multiple of {facts.multiple}.")
    if job.image is not None:
        _within("strength", job.strength, 0.0, 1.0)
        if job.image.shape != (job.height, job.width, 3) or job.image.dtype != np.uint8:
            raise Invalid(f"image must be bytes of {job.height} by {job.width} pixels.")
    if job.negative is not None and not facts.negatives:
        raise Invalid(f"{facts.family} takes no negative prompt. Leave it out.")
    if job.shown != facts.shown:
        raise Invalid(f"The request was not made for {facts.family}. Send it again.")
    if job.adapter is not None:
        name, weight = job.adapter
        if name not in adapters:
            known = ", ".join(adapters) or "there are none"
            raise Invalid(f"adapter is {name!r}; known: {known}.")
        _within("adapter weight", weight, -10.0, 10.0)


def _within(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise Invalid(f"{name} is {value}; it may be {least} to {most}.")
