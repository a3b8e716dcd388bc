"""Three behaviours without a model: a token stream, a stepped loop with previews, a one-shot.

Runs the whole application for demos, load and fault tests. Its device is a function that spends
seconds, so it runs under a virtual clock too. It needs no torch and proves nothing about real
models.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pipelines import fronts
from pipelines.chat import ChatResult
from pipelines.fronts import check_settings, too_long
from queueing.work import (
    Advance,
    Card,
    CarpoolError,
    Key,
    Mark,
    OutOfMemory,
    Output,
    Request,
    Row,
    Tell,
    Work,
    message,
)

WIDTH = 6  # characters of a word, with its space


class Kind(StrEnum):
    STREAM = "stream"
    STEPPED = "stepped"
    SINGLE = "single"


@message
class FakeJob:
    """What to pretend: `length` units of preparation, then `steps`; faults strike at a step, or
    never (-1).
    """

    kind: Kind
    length: int = 8
    steps: int = 16
    seed: int = 0
    weight: float = 1.0
    shape: int = 0  # only equal shapes share a call
    poison_at: int = -1
    hang_at: int = -1
    crash_at: int = -1
    result: Any = None  # what a stream gives with its last word

    def request(self, **fields: Any) -> Request:
        """A checked request for this job."""
        return Request(payload=self, plan=self.plan(), **fields)

    def plan(self) -> tuple[Work, ...]:
        if self.kind is Kind.STREAM:
            return Work("stream", 1, self.length), Work("stream", 1, self.steps, serial=True)
        if self.kind is Kind.SINGLE:
            return (Work(("single", self.shape), weight=self.weight),)
        loop = Work(("denoise", self.shape), 1, self.steps, self.weight, serial=True)
        return Work("encode"), loop, Work(("decode", self.shape))


@dataclass(frozen=True, slots=True)
class FakeState:
    prepared: int = 0
    done: int = 0
    kept: int = 0  # steps done before it was opened, to be prepared again
    plan: tuple[Work, ...] = ()


def _poison() -> None:
    raise ValueError("poison")


def word(job: FakeJob, step: int) -> str:
    """The output of one step: a function of (request, progress) alone."""
    return f"{zlib.crc32(f'{job.seed}:{step}'.encode()) % 16**5:05x} "


class FakePipeline:
    """One pretended model; a call costs forwards * (forward + row * rows) + unit * units
    seconds.
    """

    def __init__(
        self,
        forward: float = 0.02,
        row: float = 0.001,
        unit: float = 0.0001,
        load: float = 0.0,
        memory: int = 0,
        target: float | None = None,
        out_of_memory_at: float = 0.0,
        needs: str = "",
        spend: Callable[[float], None] = time.sleep,
        crash: Callable[[], None] = lambda: os._exit(13),
    ) -> None:
        self.compiled: tuple[int, ...] | None = None  # sizes to pretend
        self.calls = 0
        self.held: dict[str, int] = {}  # request id -> units of memory
        self._forward, self._row, self._unit = forward, row, unit
        self._load = load
        self._memory = memory  # units there are; 0 for no limit
        self._target = target  # what its card says
        self._out_of_memory_at = out_of_memory_at  # weighted rows; 0 for never
        self._needs = needs  # a file without which it does not load
        self._spend = spend
        self._crash = crash

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        return self.compiled

    def load(self, tell: Tell) -> Card:
        if self._needs and not os.path.exists(self._needs):
            raise CarpoolError(f"There is no {self._needs}.")
        for part in range(4):
            tell(part / 4, "Pretending to load a model")
            self._spend(self._load / 4)
        limits = {"context": 8192, "vocabulary": 16**5}
        words = {"model": "a pretended model", "device": "none"}
        return Card(limits, self._memory, 1.0, words, self._target)

    def unload(self) -> None:
        self.held.clear()

    def open(self, request: Request, mark: Mark | None = None) -> FakeState:
        kept = len(mark or ())
        return FakeState(done=kept, kept=kept, plan=request.plan)

    def next(self, row: Row) -> Work | None:
        job: FakeJob = row.request.payload
        state: FakeState = row.state
        if job.kind is Kind.STREAM:
            if state.prepared < job.length + state.kept:
                return Work("stream", 1, job.length + state.kept - state.prepared)
            left = job.steps - state.done
            return Work("stream", 1, left, serial=True) if left else None
        plan = state.plan
        if job.kind is Kind.SINGLE:
            return None if state.done else plan[0]
        if state.prepared == 0:
            return plan[0]
        if state.done < job.steps:
            return replace(plan[1], most=job.steps - state.done)
        return plan[2] if state.prepared == 1 else None

    def reserve(self, row: Row, units: int) -> int:
        if not self._memory or row.request.payload.kind is not Kind.STREAM:
            return units
        held = self.held.get(row.request.id, 0)
        used: int = row.state.prepared + row.state.done - row.state.kept
        free = self._memory - sum(self.held.values())
        got = min(units, held - used + free)
        self.held[row.request.id] = max(held, used + got)
        return got

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance | Exception]:
        self.calls += 1
        works = [row.work for row in rows if row.work is not None]
        weight = sum(work.weight for work in works)
        if self._out_of_memory_at and weight >= self._out_of_memory_at:
            raise OutOfMemory("The pretended device is full.")
        self._strike(rows, grants, works, "crash_at", self._crash)
        self._strike(rows, grants, works, "hang_at", lambda: self._spend(3600.0))
        forwards = max((g for w, g in zip(works, grants, strict=True) if w.serial), default=1)
        units = sum(w.weight * grant for w, grant in zip(works, grants, strict=True))
        self._spend(forwards * (self._forward + self._row * weight) + self._unit * units)
        self._strike(rows, grants, works, "poison_at", _poison)
        return [
            self._advance(row, work, grant)
            for row, work, grant in zip(rows, works, grants, strict=True)
        ]

    def park(self, row: Row) -> Mark:
        """A stream continues from its words; a stepped row starts again."""
        self.close(row)
        return tuple(range(row.state.done)) if row.request.payload.kind is Kind.STREAM else ()

    def close(self, row: Row) -> None:
        self.held.pop(row.request.id, None)

    def _strike(
        self,
        rows: Sequence[Row],
        grants: Sequence[int],
        works: Sequence[Work],
        fault: str,
        strike: Callable[[], None],
    ) -> None:
        """Let a fault happen if a row reaches the step at which it was told to."""
        for row, grant, work in zip(rows, grants, works, strict=True):
            at = getattr(row.request.payload, fault)
            done = row.state.done
            if at >= 0 and done <= at < done + (grant if work.serial else 1):
                strike()

    def _advance(self, row: Row, work: Work, grant: int) -> Advance:
        job: FakeJob = row.request.payload
        state: FakeState = row.state
        if job.kind is Kind.SINGLE:
            return Advance(replace(state, done=1), 1, Output(result=word(job, 0)))
        if not work.serial:
            last = job.kind is Kind.STEPPED and state.prepared == 1
            output = Output(progress=1.0, result=word(job, job.steps)) if last else None
            return Advance(replace(state, prepared=state.prepared + grant), grant, output)
        done = state.done + grant
        output = self._output(job, state.done, done)
        mark = tuple(range(state.done, done)) if job.kind is Kind.STREAM else ()
        return Advance(replace(state, done=done), grant, output, mark)

    def _output(self, job: FakeJob, start: int, end: int) -> Output:
        progress = end / job.steps
        if job.kind is Kind.STEPPED:
            return Output(preview=word(job, end), progress=progress)
        text = "".join(word(job, step) for step in range(start, end))
        result = job.result if end == job.steps else None
        return Output(at=start * WIDTH, delta=text, progress=progress, result=result)


class ChatFront(fronts.ChatFront):
    """Takes what the chat front takes, judged as it does, for the pretended model."""

    def check(self, payload: Any, card: Card) -> Request:
        settings, context = check_settings(payload, card.limits), card.limits["context"]
        length = sum(len(message["content"]) // 4 + 1 for message in payload["messages"])
        if length >= context:
            raise too_long(length, context)
        steps = min(settings.max_tokens, context - length)
        result = ChatResult("length", length, steps, settings.seed)
        job = FakeJob(Kind.STREAM, length, steps, settings.seed, result=result)
        return job.request(task=self.task)


def expected(job: FakeJob) -> tuple[str, Any]:
    """(text, result) of a request that finishes, whatever happened on the way."""
    if job.kind is Kind.STREAM:
        return "".join(word(job, step) for step in range(job.steps)), job.result
    return "", word(job, 0 if job.kind is Kind.SINGLE else job.steps)
