"""Summaries by a model of their own: a text becomes the tokens that its encoder reads, and a wish
becomes how many tokens may be written.

Nothing is cut: a text that the model cannot read whole is refused. It does not know the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipelines.chat import ChatResult, Settings, counted
from pipelines.fronts import PER_TOKEN
from pipelines.summarise import judged, line
from pipelines.texts import texts
from queueing.work import Card, Invalid, Request, Work, message

ENCODE, DECODE = "encode", "decode"
LENGTHS: Mapping[str, tuple[int, int]] = {  # tokens of a summary, at least and at most
    "short": (8, 48),
    "medium": (30, 142),
    "long": (80, 320),
}
LIKELIEST = Settings(
    max_tokens=1, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, seed=0, stop=()
)
SHARE = 2  # half of a text is always short enough a summary


@message
class SummaryJob:
    """A text as token ids, how many are written, and before how many the model may not end."""

    source: tuple[int, ...]
    settings: Settings
    least: int


class SummaryFront:
    """Checks texts; the model writes its likeliest words."""

    task = "summarise"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return judged(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        written, length = judged(payload)
        least, most = LENGTHS[length]
        source = _tokens(written, card)
        most = min(most, card.limits["answer"])
        least = min(least, most, len(source) // SHARE)
        settings = replace(LIKELIEST, max_tokens=most)
        opening = card.limits["opening"]
        reads = Work(ENCODE, len(source) + opening, len(source) + opening)
        plan = (reads, Work(DECODE, 1, most, serial=True))
        size = _bytes(len(source), opening + most, card)
        return Request(self.task, SummaryJob(source, settings, least), plan, size)

    def finish(self, request: Request, result: ChatResult) -> ChatResult:
        """A summary is its text; the result says how it ended, and how much was read."""
        return replace(result, prompt_tokens=len(request.payload.source))

    def summary(self, result: ChatResult, took: float, ran: float) -> str:
        """A line for a page."""
        return line(result, took)


def _tokens(written: str, card: Card) -> tuple[int, ...]:
    """A text as the model reads it, with what it was taught to read before; raises Invalid."""
    limit = card.limits["context"]
    if len(written) > limit * PER_TOKEN:  # before tokenising, which takes time
        raise Invalid(
            f"There are {len(written):,} characters in text; a model that reads {limit:,} tokens "
            f"takes at most {limit * PER_TOKEN:,}. Shorten it."
        )
    found = texts(card.details["folder"], limit).singles([card.details["prefix"] + written])[0]
    if found.cut:
        total = len(found.item.tokens) + found.cut
        raise Invalid(
            f"There are {counted(total, 'token')} in text, with those that the model adds; it "
            f"reads at most {limit:,}. Shorten it by {counted(found.cut, 'token')} or more."
        )
    if not found.item.tokens:
        raise Invalid("text has nothing that this model reads; write it in other characters.")
    return found.item.tokens


def _bytes(source: int, written: int, card: Card) -> int:
    """Memory that a row may come to hold, in whole pages of either kind."""
    page = card.limits["page"]
    pages = -(-source // page) + -(-written // page)
    return math.ceil(pages * page * card.bytes_per_unit)
