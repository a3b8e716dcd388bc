"""Pictures through an engine under a virtual clock, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelines.drawn import Drawn
from pipelines.image import ImagePipeline
from queueing.clock import VirtualClock
from queueing.engine import Engine
from queueing.messages import Call, End, Load, Park, Start
from queueing.work import Advance, Card, OutOfMemory, Policy, Reason, Request, Row, Status, Tell


class Loaded:
    """A pipeline that is there already; its calls take virtual seconds."""

    def __init__(self, pipeline: ImagePipeline, card: Card) -> None:
        self.pipeline, self.card = pipeline, card
        self.clock, self.seconds = VirtualClock(), 0.05
        self.latents: dict[str, np.ndarray] = {}  # of the stage that was made last
        self.before: Callable[[Sequence[Row], str], None] = lambda rows, kind: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def load(self, tell: Tell) -> Card:
        return self.card

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        works = [self.pipeline.next(row) for row in rows]
        kind = works[0].key[0]  # type: ignore[union-attr, index]
        assert {work.key for work in works if work} == {works[0].key}  # type: ignore[union-attr]
        self.before(rows, kind)
        results = self.pipeline.step(rows, grants)
        if kind == "decode":
            for row in rows:
                self.latents[row.request.id] = row.state.latents.numpy()
        self.clock.advance(self.seconds)
        return results


@dataclass(slots=True)
class Stage:
    """A fresh engine, and everything it has said."""

    loaded: Loaded
    hasty: bool = False  # calls are so quick that steps are granted by the handful
    rows: float = 16
    engine: Engine = field(init=False)
    latents: dict[str, np.ndarray] = field(default_factory=dict)  # as they were decoded
    results: dict[str, Drawn] = field(default_factory=dict)
    previews: dict[str, list[Any]] = field(default_factory=dict)
    ends: dict[str, End] = field(default_factory=dict)
    parked: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    first: dict[str, int] = field(default_factory=dict)  # calls ridden when a preview came
    number: int = 0

    def __post_init__(self) -> None:
        self.loaded.clock, self.loaded.latents = VirtualClock(), self.latents
        self.loaded.before = lambda rows, kind: None
        self.loaded.seconds = 0.001 if self.hasty else 0.05
        policies = {"image": Policy(rows=int(self.rows))}
        self.engine = Engine({"image": self.loaded}, policies, self.loaded.clock)  # type: ignore[dict-item]
        self.engine.handle(Load("image"))
        self.tick()

    def start(self, *requests: Request, marks: Mapping[str, Any] | None = None) -> None:
        self.number += 1
        served = {request.session: 0.0 for request in requests}
        left = {request.id: 1e6 for request in requests}
        self.engine.handle(Start(self.number, requests, marks or {}, served, left))

    def tick(self) -> bool:
        """Whether there is more to do."""
        report = self.engine.tick()
        self.engine.check()
        if report is None:
            self.loaded.clock.now = max(self.loaded.clock.now, self.engine.wake or 0.0)
            return self.engine.wake is not None
        for id, output in report.outputs.items():
            if output.result is not None:
                self.results[id] = output.result
            if output.preview is not None:
                self.previews.setdefault(id, []).append(output.preview)
        self.ends.update(report.ended)
        self.parked.update(report.parked)
        if report.call is not None and report.call.reason is not Reason.LOAD:
            self.calls.append(report.call)
        for id in report.outputs.keys() & self.previews.keys():
            self.first.setdefault(id, sum(id in call.ids for call in self.calls))
        return True

    def run(self, arrivals: Mapping[int, Sequence[Request]] | None = None) -> Stage:
        waiting, tick, more = dict(arrivals or {}), 0, True
        while more or waiting:
            if tick in waiting:
                self.start(*waiting.pop(tick))
            more = self.tick()
            tick += 1
        return self

    def until(self, kind: str, count: int) -> None:
        """So many calls of a kind have been made."""
        while sum(call.key[0] == kind for call in self.calls) < count:  # type: ignore[index]
            assert self.tick()

    def park(self, request: Request, onto: Stage | None = None) -> None:
        """Stop a row and let it go on from its mark, here or elsewhere."""
        self.engine.handle(Park(request.id))
        self.tick()
        (onto or self).start(request, marks={request.id: self.parked.pop(request.id)})

    def statuses(self) -> dict[str, Status]:
        return {id: end.status for id, end in self.ends.items()}


def refuse_decoding(stage: Stage, times: int) -> None:
    """Memory runs out in the next decode calls."""
    left = [times]

    def before(rows: Sequence[Row], kind: str) -> None:
        if kind == "decode" and left[0]:
            left[0] -= 1
            raise OutOfMemory("The device has no memory for this call.")

    stage.loaded.before = before
