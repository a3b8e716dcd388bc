"""Who is refused, and with which words: bounds on the queue and on one person's share of it.

It does not know workers or pages; it counts what it is shown and never changes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from queueing.work import Card, Full, Policy, Request

SURE = 0.9  # share of a promise that is filled: messages and other processes take time as well


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a queue. A cap on a person does not apply to callers known only by a shared
    address.
    """

    total: int = 1000  # requests that wait, of everybody
    waiting: int = 64  # requests of one person that wait
    running: int | None = None  # rows of one person; None leaves that to fairness
    wait: float = 900.0  # seconds a newcomer may be predicted to wait

    def check_person(self, waiting: int, capped: bool, predicted: float) -> None:
        """Raises Full when this person has enough waiting already."""
        if capped and waiting >= self.waiting:
            raise Full(
                f"You have {waiting} requests waiting and the limit is {self.waiting} for one "
                f"person. Try again in {_words(predicted)}, when some of them have run.",
                retry_after=_polite(predicted),
            )

    def check_wait(self, predicted: float) -> None:
        """Raises Full when the newcomer would wait longer than anybody should."""
        if predicted > self.wait:
            over = predicted - self.wait
            raise Full(
                f"The wait is about {_words(predicted)} now and the limit is {_words(self.wait)}. "
                f"Try again in {_words(over)}.",
                retry_after=_polite(over),
            )

    def check_size(self, request: Request, policy: Policy, card: Card | None) -> None:
        """Raises Full for what would not fit if it were alone."""
        weight = max(work.weight for work in request.plan)
        if weight > policy.rows:
            raise Full(f"It needs {weight:.0f} rows of a batch and the limit is {policy.rows}.")
        if card and card.bytes and request.bytes > card.bytes:
            raise Full(
                f"It needs {request.bytes:,} bytes of memory and there are {card.bytes:,}. "
                "Ask for less.",
            )

    def check_promise(self, predicted: float, promised: float) -> None:
        """Raises Full when the newcomer would not have its answer as soon as its task promises."""
        over = predicted - SURE * promised
        if over > 0:
            raise Full(
                f"The answer would take longer now than the {promised:g} s that this task "
                f"promises. Try again in {_words(over)}.",
                retry_after=_polite(over),
            )

    def full(self, waiting: int, predicted: float) -> Full:
        """The refusal of a full queue."""
        return Full(
            f"The queue is full: {waiting} requests wait and the limit is {self.total}. "
            f"Try again in {_words(predicted)}.",
            retry_after=_polite(predicted),
        )


def furthest_over(waiting: Mapping[str, int], newcomer: str) -> str | None:
    """The session with the most requests waiting, if that is more than the newcomer would have."""
    if not waiting:
        return None
    session = max(waiting, key=waiting.__getitem__)
    return session if waiting[session] > waiting.get(newcomer, 0) + 1 else None


def _polite(seconds: float) -> float:
    return min(max(seconds, 1.0), 600.0)


def _words(seconds: float) -> str:
    seconds = max(seconds, 1.0)
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
