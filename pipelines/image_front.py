"""Pictures by diffusion, as they are asked for: what a caller sends is checked against what the
loaded model draws, and becomes a job.

It does not know the model; it runs on the host, without torch.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines import checks
from pipelines.chat import counted
from pipelines.checks import check_unicode, choice, kind, number, shown, text, whole
from pipelines.drawn import GUIDANCE, MOST, STEPS, Adapter, Drawn, Facts, ImageJob, heard
from pipelines.pictures import looked, pixels
from queueing.work import Card, Invalid, Request

CHARACTERS = 100_000  # of a prompt; a model reads far fewer, and says what it left out
SEED = (1 << 64) - 1
HEAVIEST = 10.0  # weight of an adapter, to either side
STRENGTH = 0.8
FIELDS = (
    "prompt",
    "negative",
    "width",
    "height",
    "steps",
    "guidance",
    "seed",
    "count",
    "solver",
    "adapter",
    "weight",
    "image",
    "strength",
)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a loaded model draws, by its card; of its limits, "steps" and "pixels" of a picture
    stand for what the device allows, and may be left out.
    """

    facts: Facts
    solvers: Sequence[str]
    adapters: Sequence[str]
    steps: int
    pixels: int

    @classmethod
    def of(cls, card: Card) -> Offer:
        facts = heard(card.details)
        return cls(
            facts,
            json.loads(card.details["solvers"]),
            json.loads(card.details["adapters"]),
            card.limits.get("steps", STEPS),
            card.limits.get("pixels", facts.most**2),
        )


class ImageFront:
    """Checks what is asked for a picture."""

    task = "image"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        checks.fields("A picture", payload, FIELDS)
        text("prompt", payload.get("prompt"), CHARACTERS)
        _negative(payload)
        for side in ("width", "height"):
            whole(side, payload, 1, 1, None)
        whole("steps", payload, 1, 1, STEPS)
        number("guidance", payload, 1.0, 0.0, GUIDANCE)
        whole("seed", payload, 0, 0, SEED)
        whole("count", payload, 1, 1, MOST)
        number("weight", payload, 1.0, -HEAVIEST, HEAVIEST)
        number("strength", payload, STRENGTH, 0.0, 1.0, above=True)
        if payload.get("image") is not None:
            return looked("image", payload["image"])
        return None

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        self.judge(payload)
        offer = Offer.of(card)
        facts, image = offer.facts, payload.get("image")
        negative = _negative(payload)
        if negative and not facts.negatives:
            raise Invalid(f"{facts.family} takes no negative; leave it out.")
        width, height = _sides(payload, offer)
        job = ImageJob(
            text("prompt", payload.get("prompt"), CHARACTERS),
            negative if facts.negatives else None,
            steps=whole("steps", payload, min(facts.steps, offer.steps), 1, offer.steps),
            guidance=number("guidance", payload, facts.guidance, 0.0, GUIDANCE),
            # Short enough to be copied, and exact in a browser.
            seed=whole("seed", payload, secrets.randbelow(1 << 32), 0, SEED),
            count=whole("count", payload, 1, 1, MOST),
            height=height,
            width=width,
            solver=choice("solver", payload, offer.solvers[0], offer.solvers),
            adapter=_adapter(payload, offer.adapters),
            image=None if image is None else pixels("image", image, width, height),
            strength=number("strength", payload, STRENGTH, 0.0, 1.0, above=True),
            shown=facts.shown,
        )
        return job.request(self.task)

    def finish(self, request: Request, result: Drawn) -> Drawn:
        """Pictures as they are, for a page to show."""
        return result

    def summary(self, result: Drawn, took: float, ran: float) -> str:
        """How much, how fast, and what was left out."""
        hidden = sum(image is None for image in result.images)
        line = f"{counted(len(result.images), 'picture')} in {took:.1f} s"
        line += f" · {hidden} hidden by the model's safety checker" if hidden else ""
        for name, cut in (("prompt", result.cut), ("negative", result.cut_negative)):
            if cut:
                were = "was" if cut == 1 else "were"
                line += f" · the last {counted(cut, 'token')} of {name} {were} not read"
        return line


def _negative(payload: Mapping[str, Any]) -> str | None:
    """None is not the same as empty."""
    value = payload.get("negative")
    if value is None:
        return None
    if not isinstance(value, str):
        raise Invalid(f"negative is {kind(value)}; give text, or leave it out.")
    if len(value) > CHARACTERS:
        raise Invalid(f"negative has {len(value):,} characters; at most {CHARACTERS:,} are taken.")
    check_unicode("negative", value)
    return value


def _sides(payload: Mapping[str, Any], offer: Offer) -> tuple[int, int]:
    """Width and height: as asked, else as a picture that was brought, else as suggested."""
    image = payload.get("image")
    if image is not None and payload.get("width") is None and payload.get("height") is None:
        width, height = _like(looked("image", image), offer.facts)
    else:
        width, height = (_side(name, payload, offer.facts) for name in ("width", "height"))
    if width * height > offer.pixels:
        raise Invalid(
            f"width times height is {width * height:,} pixels; this device draws at most "
            f"{offer.pixels:,}. Make one of them smaller."
        )
    return width, height


def _side(name: str, payload: Mapping[str, Any], facts: Facts) -> int:
    side = whole(name, payload, facts.size, facts.least, facts.most)
    over = side % facts.multiple
    if over:
        near = [each for each in (side - over, side - over + facts.multiple) if each <= facts.most]
        raise Invalid(
            f"{name} is {side}; it must be a multiple of {facts.multiple}, such as "
            f"{' or '.join(str(each) for each in near)}."
        )
    return side


def _like(size: tuple[int, int], facts: Facts) -> tuple[int, int]:
    """Of nearly these proportions, and about as many pixels as the model suggests."""
    scale = facts.size / (size[0] * size[1]) ** 0.5
    step = facts.multiple
    least, largest = -(-facts.least // step) * step, facts.most // step * step
    width, height = (min(max(round(s * scale / step) * step, least), largest) for s in size)
    return width, height


def _adapter(payload: Mapping[str, Any], names: Sequence[str]) -> Adapter | None:
    name = payload.get("adapter")
    if name is None or name == "":
        return None
    if name not in names:
        known = f"there are: {', '.join(names)}" if names else "there are none here; leave it out"
        raise Invalid(f"adapter is {shown(name)}; {known}.")
    return name, number("weight", payload, 1.0, -HEAVIEST, HEAVIEST)
