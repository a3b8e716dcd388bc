"""Push plus pull on a queue that is full of people: microseconds, and their growth.

Run: python -m tests.benchmarks.queue
"""

from __future__ import annotations

import statistics
import sys
import time

from pipelines.fake import FakeJob, Kind
from queueing.fairqueue import FairQueue, Fit, Ticket
from queueing.ledger import Ledger
from queueing.stream import Stream

ROUNDS = 5
PAIRS = 2000


def nothing() -> None:
    return


def ticket(number: int, sessions: int) -> Ticket:
    request = FakeJob(Kind.SINGLE).request(
        task="chat", id=str(number), session=f"s{number % sessions}"
    )
    return Ticket(request, Stream(str(number), 0.0, nothing), 0.01, 0.1, 60.0, 0.0)


def anything(ticket: Ticket) -> Fit:
    return Fit.YES


def pair(waiting: int) -> float:
    """Median microseconds of a push, a pull and its charge with so many waiting, ten a session."""
    sessions = max(waiting // 10, 1)
    queue = FairQueue(Ledger())
    for number in range(waiting):
        one = ticket(number, sessions)
        queue.ledger.enter(one.request.session)
        queue.push(one)
    rounds = []
    for turn in range(ROUNDS):
        fresh = [ticket(waiting * 10 + turn * PAIRS + i, sessions) for i in range(PAIRS)]
        began = time.perf_counter()
        for one in fresh:
            queue.ledger.enter(one.request.session)
            queue.push(one)
            pulled = queue.pull(anything)
            if pulled is not None:
                queue.charge(pulled.request, 0.01)
                queue.ledger.leave(pulled.request.session)
        rounds.append((time.perf_counter() - began) / PAIRS * 1e6)
    return statistics.median(rounds)


def main() -> None:
    write = sys.stdout.write
    write("| waiting | sessions | push + pull + charge, µs | growth |\n|---|---|---|---|\n")
    first = None
    for waiting in (100, 1_000, 10_000, 100_000):
        took = pair(waiting)
        first = first or took
        write(f"| {waiting:,} | {waiting // 10:,} | {took:.1f} | {took / first:.2f} x |\n")


if __name__ == "__main__":
    main()
