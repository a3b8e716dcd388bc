"""A pretended one-shot model that takes lists: every item of a list is so many units of one row.

A step takes whole items up to its grant, at least one, so that a long list is many short calls.
Items that are named for a fault strike when they are computed. It needs no torch and no clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from queueing.work import (
    Advance,
    Card,
    Key,
    Mark,
    Output,
    Priority,
    Request,
    Row,
    Tell,
    Work,
    message,
)

CRASH, POISON = "crash", "poison"


@message
class ListJob:
    """Items, and what was wrong with those that are not among them."""

    items: tuple[str, ...]
    errors: tuple[tuple[int, str], ...] = ()
    cut: tuple[tuple[int, int], ...] = ()
    unknown: tuple[tuple[int, int], ...] = ()
    notes: Any = None

    def request(self, **fields: Any) -> Request:
        return Request("lists", self, (work(self.items),), **fields)


@dataclass(frozen=True, slots=True)
class Done:
    """The results so far."""

    results: tuple[str, ...] = ()


def work(items: Sequence[str]) -> Work:
    return Work("list", len(items[0]), sum(map(len, items)))


def reversed_text(item: str) -> str:
    return item[::-1]


class ListPipeline:
    """Turns every text around, for `forward` seconds a call and `unit` seconds a character."""

    def __init__(
        self,
        forward: float = 0.002,
        unit: float = 0.0,
        spend: Callable[[float], None] = time.sleep,
        crash: Callable[[], None] = lambda: os._exit(13),
    ) -> None:
        self._forward, self._unit = forward, unit
        self._spend, self._crash = spend, crash

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        return None

    def load(self, tell: Tell) -> Card:
        return Card()

    def unload(self) -> None:
        """Nothing is held."""

    def open(self, request: Request, mark: Mark | None = None) -> Done:
        return Done(tuple(mark or ()))

    def next(self, row: Row) -> Work | None:
        left = row.request.payload.items[len(row.state.results) :]
        return work(left) if left else None

    def reserve(self, row: Row, units: int) -> int:
        return units

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        parts = [self._part(row, grant) for row, grant in zip(rows, grants, strict=True)]
        if any(CRASH in part for part in parts):
            self._crash()
        units = sum(len(item) for part in parts for item in part)
        self._spend(self._forward + self._unit * units)
        if any(POISON in part for part in parts):
            raise ValueError(POISON)
        return [self._advance(row, part) for row, part in zip(rows, parts, strict=True)]

    def park(self, row: Row) -> Mark:
        results: Mark = row.state.results
        return results

    def close(self, row: Row) -> None:
        """Nothing is held."""

    def _part(self, row: Row, grant: int) -> list[str]:
        part = list[str]()
        for item in row.request.payload.items[len(row.state.results) :]:
            grant -= len(item)
            if part and grant < 0:
                break
            part.append(item)
        return part

    def _advance(self, row: Row, part: Sequence[str]) -> Advance:
        fresh = tuple(map(reversed_text, part))
        results = (*row.state.results, *fresh)
        whole = len(results) == len(row.request.payload.items)
        output = Output(progress=1.0, result=results) if whole else None
        return Advance(Done(results), sum(map(len, part)), output, fresh)


def asked(item: str, session: str, priority: Priority = Priority.INTERACTIVE) -> Request:
    """One item of somebody who waits for it."""
    return ListJob((item,)).request(session=session, priority=priority)
