"""The models of one worker: loaded when asked for, asked with care, and the room that is left in
them.

Whatever a pipeline raises is data from here on. It does not know rows' order, batches or people.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from queueing.clock import Clock
from queueing.costs import MemoryCaps
from queueing.messages import Call, Loaded, Loading, Up
from queueing.residency import Residency
from queueing.work import (
    Card,
    CarpoolError,
    Key,
    OutOfMemory,
    Pipeline,
    Policy,
    Reason,
    Room,
    Row,
)

log = logging.getLogger("carpool.models")
T = TypeVar("T")


@dataclass(slots=True)
class Model:
    """One task's pipeline and policy; `card` stays known after it was put away."""

    pipeline: Pipeline
    policy: Policy
    card: Card | None = None


class Models:
    """All models of a worker, by task."""

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        policies: Mapping[str, Policy],
        clock: Clock,
        tell: Callable[[Up], None],
        budget: int | None = None,
    ) -> None:
        self.residency = Residency({task: policies[task] for task in pipelines}, budget)
        self._models = {task: Model(pipelines[task], policies[task]) for task in pipelines}
        self._clock = clock
        self._tell = tell

    def __getitem__(self, task: str) -> Model:
        return self._models[task]

    def pipeline(self, row: Row) -> Pipeline:
        return self._models[row.request.task].pipeline

    def policy(self, task: str) -> Policy:
        """A task's policy, which takes from the model's card what it leaves open."""
        return self._models[task].policy

    def sizes(self, lane: tuple[str, Key]) -> tuple[int, ...] | None:
        """Row counts that a task's key is compiled for."""
        return self._models[lane[0]].pipeline.sizes(lane[1])

    def make_way(self, rows: Collection[Row]) -> tuple[str | None, float | None]:
        """Put away what has to go; returns the model to load now, or when to look again."""
        while True:
            step = self.residency.step(rows, self._clock())
            for task in step.away:
                self.unload(task)
            if step.load is not None or not step.away:
                return step.load, step.wake if step.wake < math.inf else None

    def load(self, task: str, rows: Collection[Row]) -> Call:
        """Bring a model up, as a device call of its own; a failure is told and in the call's
        error. Where memory runs out, models without rows are put away, and it is tried again.
        """
        model = self._models[task]
        began = self._clock()

        def tell(fraction: float, text: str) -> None:
            self._tell(Loading(task, fraction, text))

        tell(0.0, "Starting to load")
        card = ask(model.pipeline.load, tell)
        while isinstance(card, OutOfMemory):
            other = self.residency.oldest(rows, self._clock())
            if other is None:
                break
            self.unload(other)
            card = ask(model.pipeline.load, tell)
        now, error = self._clock(), ""
        if isinstance(card, Exception):
            error = str(told(card))
            self.residency.went(task, now)
            self._tell(Loaded(task, None, error))
        else:
            model.card = card
            self.residency.came(task, card.held, now - began, now)
            model.policy = replace(
                model.policy, target=self.residency.models[task].policy.within(card)
            )
            self._tell(Loaded(task, card))
        return Call(task, "load", Reason.LOAD, (), 1, 0.0, 1.0, now - began, 0.0, error)

    def unload(self, task: str) -> None:
        """Put a model away that nobody uses."""
        if self.residency.models[task].loaded:
            ask(self._models[task].pipeline.unload)
            self.residency.went(task, self._clock())
            self._tell(Loaded(task))

    def room(self, rows: Iterable[Row], caps: MemoryCaps) -> dict[str, Room]:
        """The credit for the next Start: the policy's rows and the card's bytes, less what is
        promised.
        """
        taken = dict.fromkeys(self._models, 0.0)
        promised = dict.fromkeys(self._models, 0)
        for row in rows:
            taken[row.request.task] += row.share
            promised[row.request.task] += row.request.bytes
        rooms = {}
        for task, model in self._models.items():
            most = min(model.policy.rows, caps.limit(open_rows(task)))
            limit = int(model.card.bytes * model.policy.overcommit) if model.card else 0
            bytes = max(limit - promised[task], 0) if limit else None
            rooms[task] = Room(max(most - taken[task], 0.0), bytes)
        return rooms


def open_rows(task: str) -> tuple[str, str]:
    """The key under which a task's open rows have their memory cap."""
    return "open", task


def ask(function: Callable[..., T], *arguments: object) -> T | Exception:
    """Call into a pipeline; whatever it raises is returned. The engine's one broad except."""
    try:
        return function(*arguments)
    except Exception as error:
        # The traceback would pin tensors (pytorch/pytorch#27600), so it is told and dropped.
        log.info("a pipeline raised", exc_info=not isinstance(error, CarpoolError))
        return error.with_traceback(None)


def told(error: Exception) -> CarpoolError:
    """What people are told: our own words, or the kind of a stranger's error without its
    internals.
    """
    if isinstance(error, CarpoolError):
        return error
    return CarpoolError(f"The model could not process this request ({type(error).__name__}).")
