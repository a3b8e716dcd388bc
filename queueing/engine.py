"""The one loop of a device: sweep, open, choose, reserve, step, commit, report.

Progress moves only when a step has returned, so a failed call is repeated in halves until the
culprit stands alone. It does not know people's limits, streams or processes; it reads the clock it
was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from queueing.batching import Batch, Batcher, Wait
from queueing.clock import Clock
from queueing.costs import Costs, MemoryCaps
from queueing.draft import Draft
from queueing.messages import (
    FINISHED,
    Call,
    Calling,
    Cancel,
    Down,
    Drain,
    End,
    Load,
    Park,
    Report,
    Start,
    Unload,
    Up,
)
from queueing.models import Models, ask, open_rows, told
from queueing.work import (
    Advance,
    Cancelled,
    CarpoolError,
    Expired,
    OutOfMemory,
    Pipeline,
    Policy,
    Reason,
    Room,
    Row,
    Status,
)


class Engine:
    """Rows and device calls of one worker. Not thread-safe, except `flag`."""

    def __init__(
        self,
        pipelines: Mapping[str, Pipeline],
        policies: Mapping[str, Policy],
        clock: Clock,
        tell: Callable[[Up], None] = lambda message: None,
        budget: int | None = None,  # bytes that models may hold together
    ) -> None:
        self._clock = clock
        self._tell = tell
        self._models = Models(pipelines, policies, clock, tell, budget)
        self._rows: dict[str, Row] = {}
        self._served: dict[str, float] = {}
        self._retries: list[Batch] = []  # parts of calls that failed, the next one last
        self._draft = Draft()
        self._orders = self._seen = 0
        self.wake: float | None = None  # when to tick again although no message came
        self.draining = False
        self.costs, self.caps = Costs(), MemoryCaps()
        self._batcher = Batcher(self._models.policy, self._models.sizes, self.costs, self.caps)

    # Messages

    def handle(self, message: Down) -> None:
        """Take one message from the dispatcher, between ticks."""
        match message:
            case Start():
                self.start(message)
            case Cancel(id):
                self.flag(id)
            case Park(id):
                self.park(id)
            case Load(task):
                self._models.residency.ask(task, self._clock())
            case Unload(task):
                if all(row.request.task != task for row in self._rows.values()):
                    self._models.unload(task)
            case Drain():
                self.draining = True

    def start(self, message: Start) -> None:
        """Take rows in; they are opened at the next tick, once their model is loaded."""
        now = self._clock()
        self._seen, self._draft.news = message.number, True
        self._served.update(message.served)
        for request in message.requests:
            if request.id in self._rows:
                raise RuntimeError(f"{request.id} was started twice. This is a bug.")
            self._orders += 1
            deadline = now + message.left[request.id]
            mark = message.marks.get(request.id)
            row = Row(request, None, self._orders, deadline, now, request.share, mark)
            self._rows[request.id] = row
            self._batcher.arrived(row, now)

    def flag(self, id: str) -> None:
        """Mark a row cancelled; safe from any thread, seen between forwards and at boundaries."""
        row = self._rows.get(id)
        if row is not None:
            row.cancelled = True

    def park(self, id: str) -> None:
        """Give a row's memory back and hand its mark to the dispatcher."""
        row = self._rows.get(id)
        if row is None or row.cancelled:
            return
        mark = ask(self._models.pipeline(row).park, row) if row.opened else row.mark or ()
        if isinstance(mark, Exception):
            self._end(row, Status.FAILED, told(mark))
        else:
            self._drop(row)
            self._draft.parked[id] = mark

    @property
    def idle(self) -> bool:
        """No row is held."""
        return not self._rows

    # The loop

    def tick(self) -> Report | None:
        """At most one device call. None: nothing to say or do until `wake` or a message."""
        self.wake = None
        self._sweep()
        if self._draft.parked or self._draft.ended:
            return self._report()  # room is credit: who waits for it need not wait for a call
        if not self._bring_up():
            self._open()
            batch = self._next()
            if batch is not None:
                self._call(batch)
        return self._report()

    def room(self) -> dict[str, Room]:
        """The credit for the next Start."""
        return self._models.room(self._rows.values(), self.caps)

    def check(self) -> None:
        """Raise when the tables contradict each other; for tests and simulations."""
        for id, row in self._rows.items():
            if row.request.id != id or (row.opened and row.work is None):
                raise RuntimeError(f"{id} is held without work. This is a bug.")

    def _sweep(self) -> None:
        now = self._clock()
        for row in list(self._rows.values()):
            if row.cancelled:
                self._end(row, Status.CANCELLED, Cancelled("Stopped"))
            elif now > row.deadline:
                self._end(row, Status.EXPIRED, Expired("The time limit passed while it ran."))

    def _bring_up(self) -> bool:
        """Load one model that is asked for, as a call of its own; others may make way."""
        task, self.wake = self._models.make_way(self._rows.values())
        if task is None:
            return False
        call = self._draft.call = self._models.load(task, self._rows.values())
        if call.error:
            for row in [row for row in self._rows.values() if row.request.task == task]:
                self._end(row, Status.FAILED, CarpoolError(call.error))
        return True

    def _open(self) -> None:
        opens = self._models.residency.open
        for row in [r for r in self._rows.values() if not r.opened and opens(r.request.task)]:
            pipeline = self._models.pipeline(row)
            state = ask(pipeline.open, row.request, row.mark)
            if isinstance(state, Exception):
                self._end(row, Status.FAILED, told(state))
            else:
                row.state, row.opened, row.mark = state, True, None
                self._advance(pipeline, row)

    def _next(self) -> Batch | None:
        """The next call with its memory reserved, or None."""
        while self._retries:
            rest = self._retries.pop().only(self._holds)
            if rest is not None:
                return rest
        ready = [row for row in self._rows.values() if row.work is not None]
        choice = self._batcher.choose(ready, self._served, self._clock())
        if isinstance(choice, Wait):
            self.wake = min(choice.until, self.wake or choice.until)
            return None
        return None if choice is None else self._reserve(choice)

    def _reserve(self, batch: Batch) -> Batch | None:
        """Ask for memory; rows that get none sit out, and if all do, somebody makes room."""
        rows, grants = [], []
        for row, grant in zip(batch.rows, batch.grants, strict=True):
            got = ask(self._models.pipeline(row).reserve, row, grant)
            if isinstance(got, Exception):
                self._end(row, Status.FAILED, told(got))
            elif row.work is not None and got >= row.work.least:
                rows.append(row)
                grants.append(min(got, grant))
        if grants == list(batch.grants):
            return batch
        if rows:
            short = len(rows) < len(batch.rows)
            return Batch.of(rows, grants, Reason.MEMORY if short else batch.reason)
        left = [row for row in batch.rows if self._holds(row)]
        if left:
            self._make_room(left[0])
        return None

    def _call(self, batch: Batch) -> None:
        """One device call, and what came of it."""
        ids = tuple(row.request.id for row in batch.rows)
        task, key = batch.lane
        self._tell(Calling(ids, self._batcher.seconds(batch)))
        began = self._clock()
        results = ask(self._models[task].pipeline.step, batch.rows, batch.grants)
        ended = self._clock()
        seconds = ended - began
        self._batcher.ran(batch, seconds, ended)
        if not isinstance(results, Exception) and len(results) != len(ids):
            results = RuntimeError(f"{len(results)} results for {len(ids)} rows. This is a bug.")
        error = type(results).__name__ if isinstance(results, Exception) else ""
        if isinstance(results, Exception):
            forwards, units = self._failed(batch, results, seconds)
        else:
            forwards, units = self._commit(batch, results, seconds)
        size = self._models[task].policy.rows
        sums = forwards, batch.weight, units, seconds, size
        self._draft.call = Call(task, key, batch.reason, ids, *sums, error, self._draft.reused)

    def _commit(
        self, batch: Batch, results: Sequence[Advance | Exception], seconds: float
    ) -> tuple[int, float]:
        """Where alone progress moves: take what a step gave; returns forwards and units used."""
        used, forwards = [], 1
        for result, work, grant in zip(results, batch.works, batch.grants, strict=True):
            count = grant if isinstance(result, Exception) else result.units
            used.append(work.weight * count)
            forwards = max(forwards, count) if work.serial else forwards
        total = sum(used)
        self.costs.observe(batch.lane, forwards, batch.weight, total, seconds, batch.depth)
        self.caps.passed(batch.lane, batch.load)
        self.caps.passed(open_rows(batch.lane[0]), len(self._rows))
        self._charge(batch.rows, seconds, used)
        pipeline = self._models[batch.lane[0]].pipeline
        for row, result in zip(batch.rows, results, strict=True):
            row.blame = 0.0
            if row.cancelled:
                self._end(row, Status.CANCELLED, Cancelled("Stopped"))
            elif isinstance(result, Exception):
                self._end(row, Status.FAILED, told(result))
            elif result.units < 1:
                self._end(row, Status.FAILED, CarpoolError("A step made no progress."))
            else:
                self._accept(pipeline, row, result)
        return forwards, total

    def _accept(self, pipeline: Pipeline, row: Row, advance: Advance) -> None:
        row.state = advance.state
        row.computed += advance.units
        self._draft.reused += advance.reused
        if advance.output is not None:
            self._draft.outputs[row.request.id] = advance.output
        if advance.mark:
            self._draft.marks[row.request.id] = advance.mark
        self._advance(pipeline, row)

    def _advance(self, pipeline: Pipeline, row: Row) -> None:
        """Ask a row for its next work; none means that it has finished."""
        work = ask(pipeline.next, row)
        if isinstance(work, Exception):
            self._end(row, Status.FAILED, told(work))
        elif work is None:
            self._end(row, Status.FINISHED)
        else:
            row.work = work

    def _charge(self, rows: Sequence[Row], seconds: float, units: Sequence[float]) -> None:
        """Split a call's seconds among its rows by weighted units."""
        total = sum(units)
        for row, count in zip(rows, units, strict=True):
            share = seconds * count / total if total else seconds / len(rows)
            session = row.request.session
            self._draft.seconds[row.request.id] = share
            self._served[session] = self._served.get(session, 0.0) + share / row.request.pace

    def _failed(self, batch: Batch, error: Exception, seconds: float) -> tuple[int, float]:
        """Repeat a failed call in halves; who fails alone is the culprit, or wants memory."""
        rows, memory = batch.rows, isinstance(error, OutOfMemory)
        if memory:
            self.caps.failed(batch.lane, batch.load)
            self._charge(rows, seconds, [1.0] * len(rows))
        if len(rows) > 1:
            self._retries.extend(reversed(batch.halves()))
            for row in rows:
                row.blame += 0.0 if memory else seconds
        elif not memory:
            self._charge(rows, seconds + rows[0].blame, [1.0])
            self._end(rows[0], Status.FAILED, told(error))
        elif batch.load <= batch.works[0].weight * batch.works[0].least:
            self._make_room(rows[0])
        return batch.forwards, batch.units

    def _make_room(self, row: Row) -> None:
        """Memory ran out for a row alone: park the least deserving other row, or fail this one."""
        task = row.request.task
        peers = [other for other in self._rows.values() if other.request.task == task]
        others = [other for other in peers if other is not row and other.computed]
        if not others:
            asked = f"{row.request.bytes:,} bytes" if row.request.bytes else "its size"
            self._end(row, Status.FAILED, OutOfMemory(f"There is not enough memory for {asked}."))
            return
        self.caps.failed(open_rows(task), len(others) + 1)
        self.park(max(others, key=self._undeserving).request.id)

    def _undeserving(self, row: Row) -> tuple[int, float, int, int]:
        served = self._served.get(row.request.session, 0.0)
        return row.request.priority, served, -row.computed, row.order

    def _end(self, row: Row, status: Status, error: CarpoolError | None = None) -> None:
        """The one place where a row reaches its terminal state."""
        self._drop(row)
        if status is not Status.FINISHED and status is not Status.FAILED:
            self._draft.outputs.pop(row.request.id, None)
        self._draft.ended[row.request.id] = FINISHED if error is None else End(status, error)

    def _drop(self, row: Row) -> None:
        del self._rows[row.request.id]
        row.work = None
        if row.opened:
            ask(self._models.pipeline(row).close, row)
        row.state = None  # a retry that still holds the row must not hold its tensors

    def _holds(self, row: Row) -> bool:
        return self._rows.get(row.request.id) is row

    def _report(self) -> Report | None:
        draft = self._draft
        if draft.empty:
            return None
        self._draft = Draft()
        if not self._rows:
            self._served.clear()
        return draft.report(self.room(), self._seen)
