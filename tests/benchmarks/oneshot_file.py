"""Somebody's single texts while nothing else runs, and beside a file of 100,000 lines.

The file goes the way that files go: in chunks as background requests, two in flight. It does not
know pipelines.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from queueing.bulk import Bulk, Progress, Row
from queueing.messages import Call
from queueing.metrics import CallRecord
from queueing.stream import Stream
from queueing.work import Request
from tests.benchmarks import report
from tests.benchmarks.oneshot_house import House, Outcome, seconds
from tests.benchmarks.oneshot_texts import Source, arrivals, lines, mixed, short
from tests.benchmarks.peers.entrants import Setting
from tests.benchmarks.replay import percentiles

Say: TypeAlias = Callable[[str], None]

LINES = 100_000
ROUNDS = 3
MORE = 1.05
RAMP = 1.5  # seconds that the file runs before anybody comes


@dataclass(slots=True, eq=False)
class Errand:
    """Lines embedded and forgotten."""

    house: House
    ids: set[str] = field(default_factory=set)

    async def check(self, texts: Sequence[str]) -> Request:
        return await asyncio.to_thread(self.house.request, texts=list(texts))

    def submit(self, request: Request) -> Stream:
        stream = self.house.dispatcher.submit(request, "file")
        self.ids.add(stream.id)
        return stream

    def read(self, request: Request, result: Any) -> Sequence[Any]:
        vectors: Sequence[Any] = self.house.front.finish(request, result)["embeddings"]
        return vectors

    def write(self, rows: Sequence[Row]) -> None:
        """Nowhere."""


@dataclass(slots=True)
class Beside:
    """What all rounds gave."""

    idle: list[float] = field(default_factory=list)  # seconds
    busy: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # seconds of the file's calls
    rates: list[float] = field(default_factory=list)  # tokens a second


async def file(folder: Path, setting: Setting, length: float, rate: float, say: Say) -> Beside:
    """The part."""
    source, found = Source.read(folder), Beside()
    texts, pieces = source.pieces(1000, short), source.pieces(1000, mixed)
    house = House(setting)
    await house.start()
    try:
        requests = [house.request(texts=[text]) for text in texts]
        await house.replay(requests[:200], [0.0] * 200, 60.0)
        for turn in range(ROUNDS):
            moments = arrivals(rate, length, turn)
            mine = [requests[n % len(requests)] for n in range(len(moments))]
            found.idle += seconds(await house.replay(mine, moments))
            await beside(house, pieces, lambda m=mine, t=moments: house.replay(m, t), found)
    finally:
        await house.close()
    say(table(found, rate))
    say("\n".join(f"- {line}" for line in verdicts(found)))
    return found


async def beside(
    house: House, pieces: Sequence[str], ask: Callable[[], Any], found: Beside
) -> None:
    """One round with the file running all the while."""
    errand = Errand(house)
    run = Bulk(lines(pieces, LINES), LINES, errand)
    task = asyncio.create_task(ran(run))
    await asyncio.sleep(RAMP)
    house.calls()
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcomes: Sequence[Outcome] = await ask()
    calls = own(house.calls(), errand.ids)
    found.rates.append(sum(call.units for call in calls) / (loop.time() - began))
    found.busy += seconds(outcomes)
    found.steps += [call.seconds for call in calls]
    run.stop()
    last = await task
    if last.error != "Stopped":
        raise RuntimeError(f"the file ended as {last.status}: {last.error}")


async def ran(run: Bulk) -> Progress:
    """The last word of a run."""
    async with aclosing(run.run()) as news:
        async for progress in news:
            last = progress
    return last


def own(calls: Sequence[CallRecord], ids: set[str]) -> list[Call]:
    """The calls in which a file's requests rode."""
    return [record.call for record in calls if ids & set(record.call.ids)]


def table(found: Beside, rate: float) -> str:
    def shown(values: Sequence[float]) -> str:
        return " / ".join(f"{1000 * value:.1f}" for value in percentiles(values))

    rows = [
        [f"single texts, {rate:g}/s, idle, ms, p50 / p95 / p99", shown(found.idle)],
        ["the same beside a file", shown(found.busy)],
        ["calls of the file, ms, p50 / p95 / p99", shown(found.steps)],
        ["tokens/s of the file meanwhile, rounds", ", ".join(f"{one:,.0f}" for one in found.rates)],
        ["single texts measured, idle and beside", f"{len(found.idle)}, {len(found.busy)}"],
    ]
    return report.table(["figure", "value"], rows)


def verdicts(found: Beside) -> list[str]:
    """Beside a file p95 is at most that of idle, one call of the file and 5 %."""
    idle, busy = percentiles(found.idle)[1], percentiles(found.busy)[1]
    said = []
    for name, step in (
        ("median", statistics.median(found.steps)),
        ("p95", percentiles(found.steps)[1]),
    ):
        bound = MORE * (idle + step)
        word = "met" if busy <= bound else "MISSED"
        said.append(
            f"p95 {1000 * busy:.1f} ms beside, bound {1000 * bound:.1f} ms "
            f"(idle p95 {1000 * idle:.1f} + one step, {name}, {1000 * step:.1f} + 5 %): {word}"
        )
    return said
