"""Errands for tests: lines sent to be turned around, what came of them kept, flights counted.

Knows the pretended model of `lists`, on real workers and on virtual ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from queueing.bulk import CHUNK, FLIGHT, Bulk, Progress, Row
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.simulate import Simulation
from queueing.stream import Stream
from queueing.work import Full, Invalid, Policy, Priority, Request
from queueing.worker import ThreadWorker
from tests.lists import ListJob, reversed_text

POLICIES = {"lists": Policy(rows=8, units=2000)}
LISTS = "tests.lists:ListPipeline"
BAD = "bad"


@dataclass(frozen=True, slots=True)
class Text:
    """A line of a file."""

    text: str
    error: str = ""


@dataclass(slots=True, eq=False)
class Errand:
    """Sends lists to be turned around, keeps what comes, and counts what is in flight."""

    put: Callable[[Request], Stream]
    rows: list[Row] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    most: int = 0  # in flight at once
    refusals: int = 0  # to come
    limit: int = CHUNK  # items of a request
    problem: Exception | None = None  # of writing
    workers: list[Any] = field(default_factory=list)
    dispatcher: Any = None
    full: asyncio.Event = field(default_factory=asyncio.Event)  # as many are in flight as may be

    async def check(self, texts: Sequence[str]) -> Request:
        good = tuple(text for text in texts if text != BAD)
        if not good or len(texts) > self.limit:
            raise Invalid("It is bad.")
        errors = tuple((i, "It is bad.") for i, text in enumerate(texts) if text == BAD)
        return ListJob(good, errors).request()

    def submit(self, request: Request) -> Stream:
        assert request.priority is Priority.BACKGROUND
        if self.refusals:
            self.refusals -= 1
            raise Full("The queue is full.", 0.001)
        self.streams.append(self.put(request))
        self.sizes.append(len(request.payload.items))
        flying = sum(not one.status.terminal for one in self.streams)
        self.most = max(self.most, flying)
        if flying == FLIGHT:
            self.full.set()
        return self.streams[-1]

    def read(self, request: Request, result: Any) -> Sequence[Any]:
        assert len(result) == len(request.payload.items)
        return list(result)

    def write(self, rows: Sequence[Row]) -> None:
        if self.problem is not None:
            raise self.problem
        self.rows.extend(rows)


def lines(*texts: str) -> list[Text]:
    return [Text(text, "" if text else "It is empty.") for text in texts]


def numbered(count: int) -> list[Text]:
    return lines(*(f"line {i}" for i in range(count)))


def right(rows: Sequence[Row], given: Sequence[Text]) -> bool:
    """Every line that could be turned around was, in order."""
    return [(line, result) for line, result, error in rows if not error] == [
        (line, reversed_text(line.text)) for line in given
    ]


@asynccontextmanager
async def errands(kind: type = ThreadWorker, **knobs: Any) -> AsyncIterator[Errand]:
    """An errand to a worker whose model is loaded."""
    errand = Errand(lambda request: dispatcher.submit(request, "bulk"))

    def worker() -> Any:
        errand.workers.append(kind({"lists": (LISTS, knobs)}, POLICIES))
        return errand.workers[-1]

    dispatcher = errand.dispatcher = Dispatcher(POLICIES, [worker], Limits())
    await dispatcher.start()
    try:
        while dispatcher.state("lists").card is None:
            await dispatcher.loaded("lists", 5.0)
        yield errand
    finally:
        await dispatcher.close()


async def ran(run: Bulk, seen: Callable[[Progress], object] = lambda _: None) -> Progress:
    """The last word of a run; `seen` hears all."""
    async with asyncio.timeout(60), aclosing(run.run()) as news:
        async for progress in news:
            seen(progress)
    return progress


class Beside(Errand):
    """An errand to a virtual device, which stands still while nothing is in flight to it."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(lambda request: simulation.submit(request, "bulk"))
        self.simulation = simulation

    async def play(self, total: int) -> None:
        """Event by event, with as much in flight as there is left to do."""
        while (ended := sum(stream.status.terminal for stream in self.streams)) < total:
            if len(self.streams) - ended == min(FLIGHT, total - ended):
                self.simulation.run(events=self.simulation.events + 1)
            await asyncio.sleep(0)
