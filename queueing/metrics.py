"""Counts and times of what happened, bounded, for pages and benchmarks.

It is told of every device call and of every end; it does not know why they happened beyond their
reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from queueing.messages import Call
from queueing.stream import Times
from queueing.work import (
    Reason,
    Status,
)

KEPT = 4096  # calls and ended requests that are remembered one by one


@dataclass(frozen=True, slots=True)
class CallRecord:
    """A device call as the dispatcher heard of it; `at` is when its report came, in the clock's
    seconds.
    """

    at: float
    worker: int
    call: Call


@dataclass(frozen=True, slots=True)
class EndRecord:
    """A request that ended."""

    task: str
    status: Status
    times: Times


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything so far in a few numbers; durations are seconds, over the requests remembered."""

    calls: int
    failed_calls: int
    device_seconds: float
    forwards: int
    units: float  # computed, such as tokens
    reused: int  # of further ones, that a cache had
    mean_rows: float
    mean_fill: float  # rows over the policy's rows, weighted by seconds
    reasons: Mapping[tuple[str, Reason], int]
    submitted: int
    ended: Mapping[Status, int]
    parked: int
    restarts: int
    wait: tuple[float, float, float]  # p50, p95, p99 from submit to start
    first: tuple[float, float, float]  # from submit to first output
    total: tuple[float, float, float]  # from submit to end


class Metrics:
    """Bounded memory of what happened."""

    def __init__(self) -> None:
        self.calls: deque[CallRecord] = deque(maxlen=KEPT)
        self.ends: deque[EndRecord] = deque(maxlen=KEPT)
        self.reasons: Counter[tuple[str, Reason]] = Counter()
        self.ended: Counter[Status] = Counter()
        self.submitted = self.parked = self.restarts = 0
        self._calls = self._failed = self._forwards = 0
        self._reused = 0
        self._seconds = self._rows = self._fill = self._units = 0.0

    def called(self, at: float, worker: int, call: Call) -> None:
        """A device call ended."""
        self.calls.append(CallRecord(at, worker, call))
        self.reasons[call.task, call.reason] += 1
        self._calls += 1
        self._failed += bool(call.error)
        self._seconds += call.seconds
        self._forwards += call.forwards
        self._units += call.units
        self._reused += call.reused
        self._rows += call.rows
        self._fill += call.seconds * call.rows / call.size if call.size else 0.0

    def finished(self, task: str, status: Status, times: Times) -> None:
        """A request reached its terminal state."""
        self.ends.append(EndRecord(task, status, times))
        self.ended[status] += 1

    def snapshot(self) -> Snapshot:
        done = [record.times for record in self.ends]
        return Snapshot(
            calls=self._calls,
            failed_calls=self._failed,
            device_seconds=self._seconds,
            forwards=self._forwards,
            units=self._units,
            reused=self._reused,
            mean_rows=self._rows / max(self._calls, 1),
            mean_fill=self._fill / max(self._seconds, 1e-9),
            reasons=dict(self.reasons),
            submitted=self.submitted,
            ended=dict(self.ended),
            parked=self.parked,
            restarts=self.restarts,
            wait=percentiles([t.started - t.submitted for t in done if t.started is not None]),
            first=percentiles([t.first - t.submitted for t in done if t.first is not None]),
            total=percentiles([t.ended - t.submitted for t in done if t.ended is not None]),
        )


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p95 and p99 by nearest rank; zeros of nothing."""
    if not values:
        return 0.0, 0.0, 0.0
    ordered = sorted(values)
    last = len(ordered) - 1
    return ordered[last // 2], ordered[round(0.95 * last)], ordered[round(0.99 * last)]
