"""Lost throughput that nobody sees: a process worker with a 5 ms step under one-shot load.

Prints how full calls are, how long the device idles, what an interactive client keeps beside a
background flood, and the same for a bare loop of sleeps, the best that this machine does at all.
Run: python -m tests.benchmarks.process
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.fake import FakeJob, Kind
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.metrics import CallRecord
from queueing.process import ProcessWorker
from queueing.work import Policy, Priority, Status

STEP = 0.005  # seconds
ROWS = 8
SECONDS = 3.0
ROUNDS = 3
POLICIES = {"one": Policy(rows=ROWS)}
FACTORIES = {"one": ("pipelines.fake:FakePipeline", {"forward": STEP, "row": 0.0, "unit": 0.0})}


@dataclass(frozen=True, slots=True)
class Figures:
    """One round: shares of one, and requests a second."""

    fill: float
    idle: float
    rate: float
    solo: float
    beside: float
    background: float


async def ask(dispatcher: Dispatcher, session: str, priority: Priority) -> None:
    request = FakeJob(Kind.SINGLE).request(task="one", priority=priority)
    stream, version = dispatcher.submit(request, session), 0
    while not stream.status.terminal:
        version = await stream.changed(version, 5.0)
    if stream.status is not Status.FINISHED:
        raise RuntimeError(f"a request ended as {stream.status}: {stream.error}")


async def load(dispatcher: Dispatcher, clients: int, priority: Priority) -> float:
    """Requests a second of closed-loop clients."""
    end, done = time.monotonic() + SECONDS, 0

    async def client(session: str) -> None:
        nonlocal done
        while time.monotonic() < end:
            await ask(dispatcher, session, priority)
            done += 1

    await asyncio.gather(*(client(f"{priority.name}{i}") for i in range(clients)))
    return done / SECONDS


def busy(calls: Sequence[CallRecord]) -> tuple[float, float]:
    """(rows over the most there could be, share of the time in which no call ran)."""
    spent = sum(record.call.seconds for record in calls[1:])
    wall = calls[-1].at - calls[0].at
    return statistics.mean(record.call.rows for record in calls) / ROWS, 1 - spent / wall


async def round_of(dispatcher: Dispatcher) -> Figures:
    calls = dispatcher.metrics.calls
    calls.clear()
    rate = await load(dispatcher, 4 * ROWS, Priority.STANDARD)
    fill, idle = busy(list(calls)[5:-5])
    solo = await load(dispatcher, 1, Priority.INTERACTIVE)
    flood = asyncio.create_task(load(dispatcher, 8 * ROWS, Priority.BACKGROUND))
    beside = await load(dispatcher, 1, Priority.INTERACTIVE)
    return Figures(fill, idle, rate, solo, beside, await flood)


async def main() -> None:
    dispatcher = Dispatcher(
        POLICIES, [lambda: ProcessWorker(FACTORIES, POLICIES)], Limits(total=10_000)
    )
    await dispatcher.start()
    while (await dispatcher.loaded("one", 1.0)).card is None:
        pass
    rounds = [await round_of(dispatcher) for _ in range(ROUNDS)]
    await dispatcher.close()
    write = sys.stdout.write
    write("| figure | median | all rounds |\n|---|---|---|\n")
    rows = [
        ("calls: rows over full", "{:.3f}", [each.fill for each in rounds]),
        ("device idle", "{:.3f}", [each.idle for each in rounds]),
        ("one-shot requests a second", "{:.0f}", [each.rate for each in rounds]),
        ("interactive alone, a second", "{:.0f}", [each.solo for each in rounds]),
        ("interactive beside a flood", "{:.0f}", [each.beside for each in rounds]),
        ("kept by interactive", "{:.3f}", [each.beside / each.solo for each in rounds]),
        ("background beside it, a second", "{:.0f}", [each.background for each in rounds]),
    ]
    for name, shape, values in rows:
        every = ", ".join(shape.format(value) for value in values)
        write(f"| {name} | {shape.format(statistics.median(values))} | {every} |\n")


if __name__ == "__main__":
    asyncio.run(main())
