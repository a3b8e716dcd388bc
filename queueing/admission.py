"""The synchronous half of the dispatcher: who waits, who runs where, who is charged, who makes room.

Every event is a method with a result in messages to workers and moves of streams; nothing here awaits, so
the same code runs under asyncio and under a virtual clock. It does not know how messages travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from queueing.clock import Clock
from queueing.costs import Costs
from queueing.fairqueue import FairQueue, Fit, Ticket
from queueing.ledger import Ledger
from queueing.limits import Limits, furthest_over
from queueing.metrics import Metrics
from queueing.places import Place, Places
from queueing.stream import Stream
from queueing.work import (
    Call,
    Calling,
    Cancel,
    Cancelled,
    Card,
    CarpoolError,
    Down,
    End,
    Expired,
    Full,
    Loaded,
    Loading,
    Park,
    Policy,
    Priority,
    Ready,
    Reason,
    Report,
    Request,
    Room,
    Start,
    Status,
    Up,
    WorkerLost,
)

QUANTUM = 0.2  # seconds of calls a row has had before it may be displaced
HEADS = 8  # waiting sessions looked at for displacement


@dataclass(frozen=True, slots=True)
class TaskState:
    """A model as the application sees it; `card` is None until it has been loaded."""

    card: Card | None = None
    fraction: float = 0.0
    text: str = "The worker is starting."
    error: str = ""


@dataclass(slots=True)
class _Desk:
    """A worker as the dispatcher knows it."""

    room: Mapping[str, Room] = field(default_factory=dict)
    alive: bool = False
    number: int = 0  # of the last Start sent
    seen: int = 0  # of the last Start read
    tickets: dict[str, Ticket] = field(default_factory=dict)  # started and not yet closed
    calling: frozenset[str] | None = None  # who is in the device call that runs
    suspects: list[Ticket] = field(default_factory=list)  # to run alone next
    promised: dict[str, Ticket] = field(default_factory=dict)  # victim -> for whom it is parked

    @property
    def alone(self) -> bool:
        return any(ticket.alone for ticket in self.tickets.values())


class Admission:
    """Requests from submit to their end, over the desks of all workers."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        limits: Limits,
        workers: int,
        clock: Clock,
        send: Callable[[int, Down], None],
    ) -> None:
        self.policies = policies
        self.limits = limits
        self.states = {task: TaskState() for task in policies}
        self.metrics = Metrics()
        self.costs = Costs()
        self.ledger = Ledger()
        self.queue = FairQueue(self.ledger)
        self._clock = clock
        self._send = send
        self._desks = [_Desk() for _ in range(workers)]
        self._where: dict[str, _Desk] = {}  # id -> the desk where it runs
        self._places = Places(self.queue, self._running)

    # Callers

    def submit(self, request: Request, capped: bool, cancel: Callable[[], None]) -> Stream:
        """Queue a checked request with its id and session; raises Full."""
        now = self._clock()
        policy = self.policies[request.task]
        weight = max(work.weight for work in request.plan)
        if weight > policy.rows:
            raise Full(f"It needs {weight:.0f} rows of a batch and the limit is {policy.rows}.")
        card = self.states[request.task].card
        if card and card.bytes and request.bytes > card.bytes:
            raise Full(
                f"It needs {request.bytes:,} bytes of memory and there are {card.bytes:,}. "
                "Ask for less.",
            )
        self._limit(request, capped)
        stream = Stream(request.id, now, cancel)
        charge, work = self._predict(request)
        ticket = Ticket(request, stream, charge, work, policy.timeout, now, capped)
        self.ledger.enter(request.session)
        self.queue.push(ticket)
        self.metrics.submitted += 1
        self.fill()
        return stream

    def cancel(self, id: str) -> bool:
        """End a request for its caller now; its row closes at the next boundary. False when it is over."""
        return self._leave(id, Status.CANCELLED, Cancelled("The request was cancelled."))

    def inside(self) -> list[str]:
        """Ids of all requests that wait or run."""
        suspects = [t.request.id for desk in self._desks for t in desk.suspects]
        return [*(t.request.id for t in self.queue.tickets()), *self._where, *suspects]

    def expire(self) -> float:
        """End those whose time is over while they wait for the first time; returns the next deadline."""
        now, soonest = self._clock(), math.inf
        for ticket in list(self.queue.tickets()):
            if self._overdue(ticket, now):
                self.queue.remove(ticket.request.id)
                self._expire(ticket)
            elif ticket.stream.status is Status.WAITING:
                soonest = min(soonest, ticket.deadline)
        return soonest

    def place(self, id: str) -> Place | None:
        """Position and seconds to go of a waiting request."""
        return self._places.place(id, self._clock())

    # Workers

    def receive(self, worker: int, message: Up) -> None:
        """Take one message of a living worker and answer it with work."""
        desk = self._desks[worker]
        match message:
            case Ready(room):
                desk.room, desk.alive, desk.number, desk.seen = room, True, 0, 0
                self.fill()
            case Loading(task, fraction, text):
                self.states[task] = TaskState(self.states[task].card, fraction, text)
            case Loaded(task, card, error):
                text = "" if card else "Not in memory; it is loaded when somebody asks."
                self.states[task] = TaskState(card or self.states[task].card, 1.0, text, error)
            case Calling(ids):
                desk.calling = frozenset(ids)
            case Report():
                self._report(worker, desk, message)

    def lost(self, worker: int) -> None:
        """A worker is gone: what it ran continues elsewhere from its marks, suspects alone."""
        desk = self._desks[worker]
        read = [ticket for ticket in desk.tickets.values() if ticket.number <= desk.seen]
        inside = desk.calling or frozenset(ticket.request.id for ticket in read)
        for ticket in list(desk.tickets.values()):
            self._give_back(desk, ticket)
            if ticket.stream.status.terminal:
                self._close(ticket)
            elif ticket.alone and ticket.request.id in inside:
                error = WorkerLost("The worker died while it ran this request alone.")
                self._finish(ticket, Status.FAILED, error)
            elif ticket.request.id in inside and ticket in read:
                ticket.alone = True
                self._rest(ticket, Status.PARKED)
                desk.suspects.append(ticket)
            else:
                self._rest(ticket, Status.PARKED if ticket in read else Status.WAITING)
                self.queue.push(ticket, front=True)
        desk.alive, desk.calling, desk.room = False, None, {}
        desk.promised.clear()
        self.metrics.restarts += 1
        self.fill()

    def fill(self) -> None:
        """Start what there is room for, and make room where fairness asks for it."""
        for worker, desk in enumerate(self._desks):
            if desk.alive:
                self._start(worker, desk, self._pick(desk))
                self._displace(worker, desk)

    def check(self) -> None:
        """Raise when the tables contradict each other; for tests and simulations."""
        for id, desk in self._where.items():
            if id not in desk.tickets or self.queue.has(id):
                raise RuntimeError(f"{id} is in two places. This is a bug.")
        for desk in self._desks:
            for ticket in desk.tickets.values():
                if self._where.get(ticket.request.id) is not desk:
                    raise RuntimeError(f"{ticket.request.id} runs nowhere. This is a bug.")
        inside = len(self.queue) + len(self._where) + sum(len(d.suspects) for d in self._desks)
        if inside != self.ledger.inside():
            raise RuntimeError(f"{inside} inside, {self.ledger.inside()} booked. This is a bug.")
        for ticket in self.queue.tickets():
            if ticket.stream.status not in (Status.WAITING, Status.PARKED):
                raise RuntimeError(f"{ticket.request.id} waits as {ticket.stream.status}.")

    # Limits and predictions

    def _limit(self, request: Request, capped: bool) -> None:
        waiting = self.queue.waiting(request.session)
        predicted = self._wait_ahead(request.session)
        self.limits.check_person(waiting, capped, predicted)
        known = all(self.costs.known((request.task, work.key)) for work in request.plan)
        if known and request.priority is not Priority.BACKGROUND:
            self.limits.check_wait(predicted)
        if len(self.queue) >= self.limits.total:
            self._shed(request.session, predicted)

    def _shed(self, newcomer: str, predicted: float) -> None:
        """Make place by refusing the newest request of whoever is furthest over, or raise Full."""
        full = self.limits.full(len(self.queue), predicted)
        session = furthest_over(self.queue.sessions(), newcomer)
        ticket = self.queue.newest(session) if session is not None else None
        if ticket is None:
            raise full
        self._leave(ticket.request.id, Status.REFUSED, full)

    def _wait_ahead(self, session: str) -> float:
        """Predicted seconds until one more request of this session starts; cheap while little waits."""
        left, _ = self._running()
        work, count = self.queue.work, sum(self.queue.ahead.values())
        if left + work <= self.limits.wait or not count:
            return left + work if count else 0.0
        mine = self.queue.ahead.get(session, 0) + 1
        ahead = sum(min(theirs, mine) for theirs in self.queue.ahead.values())
        return left + work * ahead / count

    def _running(self) -> tuple[float, float]:
        """(predicted device-seconds still to run over the workers, rows they run in)."""
        left = sum(max(t.work - t.spent, 0.0) for d in self._desks for t in d.tickets.values())
        rows = sum(len(desk.tickets) for desk in self._desks)
        return left / max(sum(desk.alive for desk in self._desks), 1), float(rows)

    def _predict(self, request: Request) -> tuple[float, float]:
        """Device-seconds of the first call's share, and of the whole, in company of full calls."""
        policy = self.policies[request.task]
        seconds = []
        for work in request.plan:
            a, c, b = self.costs.coefficients((request.task, work.key))
            forwards = work.most if work.serial else math.ceil(work.most / policy.units)
            each = a * work.weight / policy.rows + c * work.weight
            seconds.append(forwards * each + b * work.weight * work.most)
        first = request.plan[0]
        calls = first.most if first.serial else math.ceil(first.most / policy.units)
        return seconds[0] / calls, sum(seconds)

    # Starting

    def _pick(self, desk: _Desk) -> list[Ticket]:
        """Who starts at this desk now: a suspect alone, else those promised a row, else in fair order."""
        if desk.alone:
            return []
        if desk.suspects:
            return [] if desk.tickets else [self._book(desk, desk.suspects.pop(0))]
        picked, now = [], self._clock()
        while (ticket := self.queue.pull(lambda ticket: self._fits(desk, ticket))) is not None:
            if self._overdue(ticket, now):
                self._expire(ticket)
            else:
                picked.append(self._book(desk, ticket))
        return picked

    def _fits(self, desk: _Desk, ticket: Ticket) -> Fit:
        request = ticket.request
        room = self._free(desk, request.task)
        share, rows = request.share, room.rows
        if request.priority is Priority.BACKGROUND and self.policies[request.task].rows > 1:
            rows -= 1  # one row stays free for whoever comes next
        if rows <= 0:
            return Fit.ROWS
        if share > rows:
            return Fit.BYTES if share > 1 else Fit.ROWS
        limit = self.limits.running
        if limit is not None and ticket.capped and self.ledger.running(request.session) >= limit:
            return Fit.CAP
        if room.bytes is not None and request.bytes > room.bytes and desk.tickets:
            return Fit.BYTES
        return Fit.YES

    def _free(self, desk: _Desk, task: str) -> Room:
        """The room a desk last reported, less what was started since."""
        room = desk.room.get(task, Room(0.0))
        unseen = [
            ticket.request
            for ticket in desk.tickets.values()
            if ticket.number > desk.seen and ticket.request.task == task
        ]
        if not unseen:
            return room
        rows = room.rows - sum(request.share for request in unseen)
        bytes = None if room.bytes is None else room.bytes - sum(r.bytes for r in unseen)
        return Room(rows, bytes)

    def _book(self, desk: _Desk, ticket: Ticket) -> Ticket:
        """Enter a ticket at a desk, paying for its first call ahead."""
        ticket.number = desk.number + 1
        ticket.rode = ticket.spent = 0.0
        ticket.prepaid = ticket.charge / ticket.request.pace
        desk.tickets[ticket.request.id] = ticket
        self._where[ticket.request.id] = desk
        self.ledger.account(ticket.request.session).running += 1
        self.queue.adjust(ticket.request.session, ticket.prepaid)
        return ticket

    def _start(self, worker: int, desk: _Desk, tickets: list[Ticket]) -> None:
        if not tickets:
            return
        now = self._clock()
        desk.number += 1
        for ticket in tickets:
            if ticket.stream.status is not Status.PARKED:
                ticket.left = max(ticket.deadline - now, 0.0)
            ticket.since = now
            ticket.stream.move(Status.RUNNING, None, now)
        sessions = {ticket.request.session for ticket in desk.tickets.values()}
        self._send(
            worker,
            Start(
                desk.number,
                tuple(ticket.request for ticket in tickets),
                {t.request.id: t.mark for t in tickets if t.marks},
                {session: self.ledger.served(session) for session in sessions},
                {t.request.id: t.left for t in tickets},
            ),
        )

    # Displacement

    def _displace(self, worker: int, desk: _Desk) -> None:
        """Park rows of the most served for sessions that wait with nothing running."""
        if desk.alone or desk.suspects or not len(self.queue) or not desk.tickets:
            return
        waiting = {ticket.request.id for ticket in desk.promised.values()}
        for ticket in self.queue.heads(HEADS):
            session = ticket.request.session
            if self.ledger.running(session) or ticket.request.id in waiting:
                continue
            victim = self._victim(desk, ticket)
            if victim is None:
                return
            desk.promised[victim.request.id] = ticket
            self._send(worker, Park(victim.request.id))

    def _victim(self, desk: _Desk, ticket: Ticket) -> Ticket | None:
        """The row to displace: of the most served session with two rows or more, the least computed."""
        task, served = ticket.request.task, self.ledger.served
        rows = [t for t in desk.tickets.values() if t.request.task == task]
        natural = min((max(t.work - t.spent, 0.0) * len(rows) for t in rows), default=0.0)
        mine = served(ticket.request.session)
        able = [
            row
            for row in rows
            if row.rode >= QUANTUM
            and row.request.id not in desk.promised
            and not row.stream.status.terminal
            and row.spent < natural
            and self._yields(desk, row, mine)
        ]
        if not able:
            return None
        return max(able, key=lambda row: (served(row.request.session), -row.spent, row.order))

    def _yields(self, desk: _Desk, row: Ticket, mine: float) -> bool:
        """Background yields always; others only with two rows or more, served more than the newcomer."""
        if row.request.priority is Priority.BACKGROUND:
            return True
        session = row.request.session
        leaving = sum(desk.tickets[id].request.session == session for id in desk.promised)
        running = self.ledger.running(session) - leaving
        return running >= 2 and self.ledger.served(session) > mine

    def _keep_promise(self, worker: int, desk: _Desk, victim: str) -> None:
        """The row of a victim is free: it goes to the one for whom it was asked."""
        ticket = desk.promised.pop(victim, None)
        if ticket is None or not self.queue.has(ticket.request.id):
            return
        if self._fits(desk, ticket) is Fit.YES:
            self.queue.remove(ticket.request.id)
            self._start(worker, desk, [self._book(desk, ticket)])

    # Reports and ends

    def _report(self, worker: int, desk: _Desk, report: Report) -> None:
        now = self._clock()
        desk.room, desk.seen = report.room, report.seen
        if report.call is not None:
            desk.calling = None
            self._called(worker, desk, report.call, now)
        for id, seconds in report.seconds.items():
            self._charge(desk, id, seconds)
        for id, mark in report.marks.items():
            if id in desk.tickets:
                desk.tickets[id].marks.extend(mark)
                self._clear(worker, desk, desk.tickets[id])
        for id, output in report.outputs.items():
            if id in desk.tickets:
                desk.tickets[id].stream.put(output, now)
        for id, end in report.ended.items():
            self._ended(desk, id, end)
        for id, parked in report.parked.items():
            self._parked(desk, id, list(parked))
        for id in [*report.ended, *report.parked]:
            self._keep_promise(worker, desk, id)
        self.fill()

    def _clear(self, worker: int, desk: _Desk, ticket: Ticket) -> None:
        """A suspect got further than when its worker died; it makes way for the next one."""
        if ticket.alone:
            ticket.alone = False
            if desk.suspects:
                self._send(worker, Park(ticket.request.id))

    def _called(self, worker: int, desk: _Desk, call: Call, now: float) -> None:
        self.metrics.called(now, worker, call)
        if call.reason is Reason.LOAD or call.error:
            return
        lane = (call.task, call.key)
        self.costs.observe(lane, call.forwards, call.rows, call.units, call.seconds)
        for id in call.ids:
            if id in desk.tickets:
                desk.tickets[id].rode += call.seconds
                desk.tickets[id].stream.riders = len(call.ids)

    def _charge(self, desk: _Desk, id: str, seconds: float) -> None:
        ticket = desk.tickets.get(id)
        if ticket is None:
            return
        ticket.spent += seconds
        ticket.stream.times.device += seconds
        self.queue.charge(ticket.request, seconds, -ticket.prepaid)
        ticket.prepaid = 0.0

    def _parked(self, desk: _Desk, id: str, marks: list[object]) -> None:
        """A row gave its place up: it waits at the front of its session."""
        ticket = desk.tickets.get(id)
        if ticket is None:
            return
        self._give_back(desk, ticket)
        if ticket.stream.status.terminal:
            self._close(ticket)
        else:
            ticket.marks = marks
            self._rest(ticket, Status.PARKED)
            self.metrics.parked += 1
            self.queue.push(ticket, front=True)

    def _ended(self, desk: _Desk, id: str, end: End) -> None:
        ticket = desk.tickets.get(id)
        if ticket is None:
            return
        self._give_back(desk, ticket)
        if ticket.stream.status.terminal:
            self._close(ticket)
        else:
            self._finish(ticket, end.status, end.error)

    def _leave(self, id: str, status: Status, error: CarpoolError) -> bool:
        """End a request for its caller, wherever it is."""
        ticket = self.queue.remove(id)
        if ticket is None:
            ticket = self._suspect(id)
        if ticket is not None:
            self._finish(ticket, status, error)
            return True
        desk = self._where.get(id)
        if desk is None or desk.tickets[id].stream.status.terminal:
            return False
        ticket = desk.tickets[id]
        ticket.stream.move(status, error, self._clock())
        self.metrics.finished(ticket.request.task, status, ticket.stream.times)
        self._send(self._desks.index(desk), Cancel(id))
        return True

    def _overdue(self, ticket: Ticket, now: float) -> bool:
        """Its time is over and it has never run; what was parked does not die for being polite."""
        return ticket.stream.status is Status.WAITING and ticket.deadline <= now

    def _expire(self, ticket: Ticket) -> None:
        error = Expired(f"It waited {ticket.left:.0f} s, the limit, and was not started.")
        self._finish(ticket, Status.EXPIRED, error)

    def _suspect(self, id: str) -> Ticket | None:
        for desk in self._desks:
            for ticket in desk.suspects:
                if ticket.request.id == id:
                    desk.suspects.remove(ticket)
                    return ticket
        return None

    def _rest(self, ticket: Ticket, status: Status) -> None:
        """Off a worker; the time that a parked request may take stands still."""
        now = self._clock()
        ticket.left, ticket.since = max(ticket.deadline - now, 0.0), now
        ticket.stream.move(status, None, now)

    def _give_back(self, desk: _Desk, ticket: Ticket) -> None:
        """Take a ticket off its desk, and return what it prepaid and did not use."""
        session = ticket.request.session
        del desk.tickets[ticket.request.id], self._where[ticket.request.id]
        self.ledger.account(session).running -= 1
        self.queue.adjust(session, -ticket.prepaid)
        ticket.prepaid = 0.0

    def _finish(self, ticket: Ticket, status: Status, error: CarpoolError | None) -> None:
        ticket.stream.move(status, error, self._clock())
        self.metrics.finished(ticket.request.task, status, ticket.stream.times)
        self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        self.ledger.leave(ticket.request.session)
