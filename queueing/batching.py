"""Which rows share the next device call, and with how many units: lanes, anchor and fill, grants.

A lane is the rows of one task and key. The most deserving row anchors the call and others of its
lane fill it, within the policy, the memory cap, the latency target and the deadlines. It calls no
pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from queueing.costs import Costs, MemoryCaps
from queueing.ledger import Floor
from queueing.turns import Lane, Turns, rank, work_of
from queueing.work import Policy, Priority, Reason, Row, Work

QUIET = 0.05  # seconds at most that background waits for others to come back, or one call's length
STRIDE = 0.01  # seconds of consecutive forwards worth one report, when no other lane waits
SHARE = 0.5  # of a latency target that divisible work gets at least, however much rides beside it
AGE = 0.001  # seconds of waiting that everybody is credited with
BURST = 0.02  # share of a call's seconds that it may be held back while a burst arrives
BURST_GAP = (0.0005, 0.002)  # seconds since the last arrival, not worth a timer below, not longer
BURST_LENGTH = 5  # such gaps in all


@dataclass(frozen=True, slots=True)
class Batch:
    """One device call to be: `grants[i]` units of `works[i]` for `rows[i]`, and its size in
    sums.
    """

    lane: Lane
    rows: tuple[Row, ...]
    works: tuple[Work, ...]
    grants: tuple[int, ...]
    reason: Reason
    weight: float  # weighted rows
    units: float  # weighted units
    depth: float  # for every unit, the units of its row behind it
    load: float  # weighted units of its widest forward, the measure of memory caps
    forwards: int  # consecutive ones

    def only(self, holds: Callable[[Row], bool]) -> Batch | None:
        """What is left of a call to be repeated, or None."""
        pairs = [(r, g) for r, g in zip(self.rows, self.grants, strict=True) if holds(r)]
        if not pairs:
            return None
        return Batch.of([row for row, _ in pairs], [grant for _, grant in pairs], Reason.RETRY)

    def halves(self) -> tuple[Batch, Batch]:
        """The same call as two, to be repeated."""
        half = len(self.rows) // 2
        return (
            Batch.of(self.rows[:half], self.grants[:half], Reason.RETRY),
            Batch.of(self.rows[half:], self.grants[half:], Reason.RETRY),
        )

    @classmethod
    def of(cls, rows: Sequence[Row], grants: Sequence[int], reason: Reason) -> Batch:
        works = tuple([work_of(row) for row in rows])
        weight = units = depth = load = 0.0
        forwards = 1
        for work, grant in zip(works, grants, strict=True):
            weight += work.weight
            units += work.weight * grant
            depth += work.weight * grant * work.behind
            load += work.weight * (1 if work.serial else grant)
            forwards = max(forwards, grant) if work.serial else forwards
        lane = rows[0].request.task, works[0].key
        sums = weight, units, depth, load, forwards
        return cls(lane, tuple(rows), works, tuple(grants), reason, *sums)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing goes now; look again at `until`."""

    until: float


class Batcher:
    """Chooses the next call of one device from the rows that are ready."""

    def __init__(
        self,
        policy: Callable[[str], Policy],
        sizes: Callable[[Lane], tuple[int, ...] | None],
        costs: Costs,
        caps: MemoryCaps,
    ) -> None:
        self._policy = policy
        self._sizes = sizes
        self._costs = costs
        self._caps = caps
        self._turns = Turns(costs.seconds)
        self._held = False  # a call was held back for a burst
        self._disturbed = -math.inf  # when somebody other than background last came or was served
        self._floor = Floor()
        self._waits = False  # background rows are ready

    def arrived(self, row: Row, now: float) -> None:
        """A row was opened."""
        if row.request.priority is not Priority.BACKGROUND:
            self._disturbed = now

    def ran(self, batch: Batch, seconds: float, now: float) -> None:
        """A call ended, well or not."""
        self._turns.ran(batch.lane, now)
        background = all(row.request.priority is Priority.BACKGROUND for row in batch.rows)
        self._floor.ran(seconds, background, self._waits)
        if not background:
            self._disturbed = now

    def choose(
        self, rows: Sequence[Row], served: Mapping[str, float], now: float
    ) -> Batch | Wait | None:
        """The next call; None when no row is ready."""
        if not rows:
            return None
        behind = [row for row in rows if row.request.priority is Priority.BACKGROUND]
        self._waits = bool(behind)
        owed = self._waits and self._floor.owed
        background = owed or len(behind) == len(rows)
        pool = behind if background else rows
        if behind and not background:
            pool = [row for row in rows if row.request.priority is not Priority.BACKGROUND]
        lanes: dict[Lane, list[Row]] = {}  # in order of their best rows
        for row in sorted(pool, key=lambda row: rank(row, served)):
            if row.work is not None:
                lanes.setdefault((row.request.task, row.work.key), []).append(row)
        lane = self._turns.choose(lanes, served, now)
        ordered = _shortest_first(lanes[lane], served, now)
        batch = self._fill(lane, ordered, len(lanes) == 1, now)
        until = self._yield(batch) if background and not owed else self._hold(batch, now)
        if until > now:
            self._held = not background
            return Wait(until)
        if self._held and batch.reason is Reason.IDLE:
            batch = replace(batch, reason=Reason.BURST_OVER)
        self._held = False
        return batch

    def seconds(self, batch: Batch) -> float:
        """Predicted seconds of a call."""
        sums = batch.forwards, batch.weight, batch.units, batch.depth
        return self._costs.seconds(batch.lane, *sums)

    def _fill(self, lane: Lane, rows: Sequence[Row], alone: bool, now: float) -> Batch:
        """Rows in order until a limit is met; then what is left of the units goes to divisible
        rows.

        Time bounds how many whole units of work ride and how large a divisible one is; it never
        keeps a serial row out, since its next unit would only wait for another call.
        """
        policy = self._policy(lane[0])
        memory, chosen, reason = self._caps.limit(lane), list[Row](), Reason.IDLE
        a, c, b, _ = self._costs.coefficients(lane)
        weight = load = 0.0
        limit = math.inf if policy.target is None else policy.target
        for row in rows:
            work = work_of(row)
            wide, heavy = weight + work.weight, load + work.weight * work.least
            seconds = a + c * wide + b * heavy
            left = row.deadline - now
            tight = min(limit, left) if left >= seconds else limit
            whole = work.most == work.least and not work.serial
            if chosen and (wide > policy.rows or heavy > policy.units):
                reason = Reason.FULL
            elif chosen and heavy > memory:
                reason = Reason.MEMORY
            elif chosen and whole and seconds > tight:
                reason = Reason.BUDGET if tight == policy.target else Reason.DEADLINE
            if reason is not Reason.IDLE:
                break
            chosen.append(row)
            weight, load, limit = wide, heavy, tight
        return self._grant(lane, self._round(lane, chosen), reason, alone, limit)

    def _round(self, lane: Lane, rows: list[Row]) -> list[Row]:
        """Compiled sizes: the one with the least predicted seconds a row; up pads, down leaves
        rows for the next call.
        """
        sizes = self._sizes(lane)
        if not sizes:
            return rows
        weight = sum(work_of(row).weight for row in rows)

        def each(size: int) -> float:
            return self._costs.seconds(lane, 1, size, size) / min(size, weight)

        up = [size for size in sizes if size >= weight][:1]
        down = [size for size in sizes if size < weight][-1:]
        best = min(up + down, key=each)
        kept, total = list[Row](), 0.0
        for row in rows:
            total += work_of(row).weight
            if kept and total > best:
                break
            kept.append(row)
        return kept

    def _grant(
        self, lane: Lane, rows: list[Row], reason: Reason, alone: bool, limit: float
    ) -> Batch:
        """Serial rows get a stride of units; what room is left goes to divisible rows in order, and
        those for whom none is left wait for the next call.
        """
        policy = self._policy(lane[0])
        works = [work_of(row) for row in rows]
        pairs = [(row, work) for row, work in zip(rows, works, strict=True) if not work.divisible]
        weight = sum([work.weight for _, work in pairs])
        load = sum([work.weight * work.least for _, work in pairs])
        depth = sum([work.weight * work.least * work.behind for _, work in pairs])
        forward = self._costs.seconds(lane, 1, weight, load, depth)
        stride = 1
        if alone and all(work.serial for work in works):
            stride = max(int(min(STRIDE, limit) / max(forward, 1e-9)), 1)
        if len(pairs) == len(rows):
            grants = [min(work.most, max(work.least, stride)) for work in works]
            return Batch.of(rows, grants, reason)
        timed = Reason.BUDGET if limit == policy.target else Reason.DEADLINE
        behind = max([work.behind for work in works if work.divisible])
        most = load + self._units(lane, behind, limit - forward, limit)
        memory = self._caps.limit(lane)
        bound, why = min((policy.units, Reason.FULL), (memory, Reason.MEMORY), (most, timed))
        kept, grants, room, first = list[Row](), list[int](), bound - load, True
        for row, work in zip(rows, works, strict=True):
            grant = work.least
            if work.divisible:
                grant = int(min(work.most, max(room, 0) / work.weight))
                if grant < work.most and reason is Reason.IDLE:
                    reason = why
                if grant < work.least and not first:
                    continue
                grant, first = max(grant, work.least), False
                room -= grant * work.weight
            kept.append(row)
            grants.append(grant)
        return Batch.of(kept, grants, reason)

    def _units(self, lane: Lane, behind: int, left: float, limit: float) -> float:
        """Units, with so many behind them, for what is left of a time; where single units take most
        of it, for half of it again, and never for less than a call costs without any.
        """
        a, _, b, d = self._costs.coefficients(lane)
        each = b + d * behind
        return math.inf if limit == math.inf or each <= 0 else max(left, limit * SHARE, a) / each

    def _yield(self, batch: Batch) -> float:
        """Background waits for those who were just served as long as its call would hold them
        up.
        """
        return self._disturbed + min(QUIET, self.seconds(batch))

    def _hold(self, batch: Batch, now: float) -> float:
        """Until when an incomplete call of single-call rows is held back while a burst arrives."""
        policy = self._policy(batch.lane[0])
        if batch.reason is not Reason.IDLE or batch.weight >= policy.rows:
            return now
        arrivals = [row.arrived for row in batch.rows if row.request.single]
        if len(arrivals) < len(batch.rows):
            return now
        gap = min(BURST_GAP[1], BURST * self.seconds(batch))
        gap = gap if gap >= BURST_GAP[0] else 0.0
        first, last = min(arrivals), max(arrivals)
        return max(min(last + gap, first + BURST_LENGTH * gap), first + policy.wait)


def _shortest_first(rows: list[Row], served: Mapping[str, float], now: float) -> list[Row]:
    """Ranked rows of a lane with each session's divisible work by what is left of it over how long
    it has waited, as in highest response ratio next (Brinch Hansen, 1971): a short question passes
    the long prompt that the same person sent before it.
    """
    if not any(row.work is not None and row.work.divisible for row in rows):
        return rows

    def left_of(row: Row) -> tuple[float, int, float, int]:
        number, priority, order = rank(row, served)
        left = work_of(row).most / max(now - row.arrived, AGE) if work_of(row).divisible else 0.0
        return number, priority, left, order

    return sorted(rows, key=left_of)
