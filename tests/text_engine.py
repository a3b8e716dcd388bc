"""A text pipeline in a real engine, ticked by hand under a clock of its own.

It is told when a device call was made and how long that counts; it knows no dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from queueing.engine import Engine
from queueing.messages import Call, Report, Start
from queueing.work import Mark, Pipeline, Policy, Request, Status


class Ticker:
    """Starts requests, ticks, and keeps what the reports say."""

    def __init__(
        self, pipeline: Pipeline, policy: Policy, clock: Callable[[], float] | None = None
    ) -> None:
        self.now = 0.0
        self.engine = Engine({"chat": pipeline}, {"chat": policy}, clock or self.read)
        self.text: dict[str, str] = {}
        self.marks: dict[str, Mark] = {}
        self.ended: dict[str, Status] = {}
        self.errors: dict[str, Exception | None] = {}
        self.parked: dict[str, Mark] = {}
        self.calls: list[Call] = []
        self._requests: dict[str, Request] = {}

    def read(self) -> float:
        """A clock that goes a little further whenever it is read."""
        self.now += 0.001
        return self.now

    def start(self, id: str, request: Request, mark: Mark = ()) -> None:
        self._requests[id] = request
        self.text.setdefault(id, "")
        self.marks[id] = mark
        named = replace(request, id=id, session=id)
        marks = {id: mark} if mark else {}
        self.engine.start(Start(1, (named,), marks, {id: 0.0}, {id: 1e9}))

    def tick(self) -> Report | None:
        report = self.engine.tick()
        if report is None:
            return None
        for id, output in report.outputs.items():
            have = self.text[id]
            assert output.at <= len(have)
            self.text[id] = have + output.delta[len(have) - output.at :]
        for id, mark in report.marks.items():
            self.marks[id] += mark
        self.ended.update({id: end.status for id, end in report.ended.items()})
        self.errors.update({id: end.error for id, end in report.ended.items()})
        for id, mark in report.parked.items():
            assert mark == self.marks[id]
            self.parked[id] = mark
        if report.call is not None and report.call.key != "load":
            self.calls.append(report.call)
        return report

    def until(self, holds: Callable[[], bool]) -> None:
        """Tick until something holds; an engine with nothing to do is a failure."""
        while not holds():
            assert self.tick() is not None, f"the engine has nothing to do: {self.ended}"

    def park(self, id: str) -> None:
        self.engine.park(id)
        self.until(lambda: id in self.parked)

    def resume(self, id: str) -> None:
        """Start a parked request again, from its mark."""
        self.start(id, self._requests[id], self.parked.pop(id))

    def finish(self) -> Ticker:
        self.until(lambda: self.engine.idle)
        return self
