"""Chaos at full length: 200,000 events, twice, checked as they go and compared by hash.

Run: python -m tests.benchmarks.simulation [events]
"""

from __future__ import annotations

import sys
import time

from queueing.work import Status
from tests.worlds import chaos


def main(events: int = 200_000) -> None:
    write = sys.stdout.write
    write("| run | events | seconds | requests | finished | failed | cancelled | expired | ")
    write("parked | worker deaths | hash |\n" + "|---" * 11 + "|\n")
    digests = set()
    for run in (1, 2):
        began = time.perf_counter()
        made = chaos(2026, events)
        made.verdict()
        seconds = time.perf_counter() - began
        metrics = made.simulation.admission.metrics
        counts = [
            metrics.ended[status]
            for status in (Status.FINISHED, Status.FAILED, Status.CANCELLED, Status.EXPIRED)
        ]
        digest = made.simulation.digest()
        digests.add(digest)
        cells = [run, f"{made.simulation.events:,}", f"{seconds:.1f}", metrics.submitted, *counts]
        cells += [metrics.parked, metrics.restarts, digest[:12]]
        write("| " + " | ".join(map(str, cells)) + " |\n")
    write("identical\n" if len(digests) == 1 else "NOT identical\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
