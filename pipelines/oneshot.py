"""The words of one-shot tasks between their fronts and their pipelines: items as token ids, what is
asked of each, and what came of it.

Both sides import it, so it imports neither torch nor a tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from queueing.work import Key, Request, Work, message

Pooling: TypeAlias = Literal["mean", "cls", "last"]


@message
class Item:
    """One text, or two of which the second is its last `second` tokens; computed in one piece."""

    tokens: tuple[int, ...]
    second: int = 0
    ask: Any = None  # a Pool, a Blank, or nothing


@message
class Pool:
    """A vector out of the vectors of all tokens."""

    pooling: Pooling
    normalise: bool  # to length 1


@message
class Blank:
    """Which tokens may stand at these places: these targets, or the `top` likeliest."""

    places: tuple[int, ...]
    top: int
    targets: tuple[int, ...] = ()


class Kept(Protocol):
    """What a front keeps for the end, by the places of what its caller sent."""

    @property
    def errors(self) -> tuple[tuple[int, str], ...]: ...

    @property
    def cut(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def unknown(self) -> tuple[tuple[int, int], ...]: ...


@message
class ItemsJob:
    """Items to compute, in order, and what their front keeps for the end: which of what a caller
    sent are no items and why, by place; of others how many tokens were cut off, and how many words
    the model does not know; notes of its own.
    """

    items: tuple[Item, ...]
    errors: tuple[tuple[int, str], ...] = ()
    cut: tuple[tuple[int, int], ...] = ()
    notes: Any = None
    unknown: tuple[tuple[int, int], ...] = ()

    @property
    def tokens(self) -> int:
        """Of all items."""
        return sum(len(item.tokens) for item in self.items)

    def request(self, task: str, key: str) -> Request:
        """One row, of as many calls as it takes; every call computes whole items."""
        return Request(task, self, (work(key, self.items),))


def work(key: Key, items: tuple[Item, ...]) -> Work:
    """These items, of which a call takes the first at least."""
    return Work(key, len(items[0].tokens), sum(len(item.tokens) for item in items))


@dataclass(frozen=True, slots=True)
class ItemsState:
    """A row: what came of its first items, on the host."""

    results: tuple[Any, ...] = ()

    def after(self, results: tuple[Any, ...]) -> ItemsState:
        return ItemsState((*self.results, *results))
