"""The synchronous half of the dispatcher: who waits, who runs where, who is charged, who makes
room.

Every event is a method with a result in messages to workers and moves of streams; nothing here
awaits, so the same code runs under asyncio and under a virtual clock. It does not know how messages
travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from queueing.clock import Clock
from queueing.costs import Costs
from queueing.fairqueue import FairQueue, Ticket
from queueing.forecast import Forecast, Place
from queueing.ledger import Ledger
from queueing.limits import Limits, furthest_over
from queueing.messages import (
    Call,
    Calling,
    Cancel,
    Down,
    End,
    Loaded,
    Loading,
    Park,
    Ready,
    Report,
    Up,
)
from queueing.metrics import Metrics
from queueing.starting import Starter, overdue
from queueing.states import after, joined
from queueing.station import Station
from queueing.stream import Stream
from queueing.work import (
    Cancelled,
    CarpoolError,
    Expired,
    Policy,
    Priority,
    Reason,
    Request,
    Status,
    TaskState,
    WorkerLost,
)


class Admission:
    """Requests from submit to their end, over the stations of all workers."""

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
        self._stations = [Station(index) for index in range(workers)]
        self._starter = Starter(policies, limits, self.queue, clock, send, self._expire)
        self._forecast = Forecast(policies, self.costs, self.queue, self._stations)

    # Callers

    def submit(self, request: Request, capped: bool, cancel: Callable[[], None]) -> Stream:
        """Queue a checked request with its id and session; raises Full.

        One that does not say otherwise has the class of its task's policy.
        """
        now = self._clock()
        policy = self.policies[request.task]
        if request.priority is Priority.STANDARD:
            request = replace(request, priority=policy.priority)
        self.limits.check_size(request, policy, self.states[request.task].card)
        self._limit(request, capped)
        stream = Stream(request.id, now, cancel)
        charge, work = self._forecast.cost(request)
        ticket = Ticket(request, stream, charge, work, policy.timeout, now, capped)
        self.ledger.enter(request.session)
        self.queue.push(ticket)
        self.metrics.submitted += 1
        self.fill()
        return stream

    def cancel(self, id: str, why: str = "Stopped") -> bool:
        """End a request for its caller now; its row closes at the next boundary. False when it is
        over.
        """
        return self._leave(id, Status.CANCELLED, Cancelled(why))

    def inside(self) -> list[str]:
        """Ids of all requests that wait or run."""
        suspects = [t.request.id for station in self._stations for t in station.suspects]
        return [*(t.request.id for t in self.queue.tickets()), *self._starter.where, *suspects]

    def expire(self) -> float:
        """End those whose time is over while they wait for the first time; returns the next
        deadline.
        """
        now, soonest = self._clock(), math.inf
        for ticket in list(self.queue.tickets()):
            if overdue(ticket, now):
                self.queue.remove(ticket.request.id)
                self._expire(ticket)
            elif ticket.stream.status is Status.WAITING:
                soonest = min(soonest, ticket.deadline)
        return soonest

    def place(self, id: str) -> Place | None:
        """Position and seconds to go of a waiting request."""
        return self._forecast.place(id, self._clock())

    # Workers

    def receive(self, worker: int, message: Up) -> None:
        """Take one message of a living worker and answer it with work."""
        station = self._stations[worker]
        match message:
            case Ready(room):
                station.room, station.alive, station.number, station.seen = room, True, 0, 0
                self.states = joined(self.states, self.policies)
                self.fill()
            case Loading() | Loaded():
                self.states[message.task] = after(self.states[message.task], message)
            case Calling(ids):  # what an earlier call gave may be lost, and have been the cause
                station.calling = frozenset(ids) | (station.calling or frozenset())
            case Report():
                self._report(station, message)

    def lost(self, worker: int) -> None:
        """A worker is gone: what it ran continues elsewhere from its marks, suspects alone."""
        station = self._stations[worker]
        calling = station.calling or frozenset()
        read = {
            id
            for id, ticket in station.tickets.items()
            if ticket.number <= station.seen or id in calling
        }
        inside = calling or read
        for id in list(station.tickets):
            ticket = self._off(station, id)
            if ticket is None:
                continue
            if ticket.alone and id in inside:
                error = WorkerLost("The worker died while it ran this request alone.")
                self._finish(ticket, Status.FAILED, error)
            elif id in inside:
                ticket.alone, ticket.hurdle = True, ticket.calls
                self._starter.rest(ticket, Status.PARKED)
                station.suspects.append(ticket)
            else:
                self._starter.rest(ticket, Status.PARKED if id in read else Status.WAITING)
                self.queue.push(ticket, front=True)
        station.alive, station.calling, station.room = False, None, {}
        station.promised.clear()
        if not any(one.alive for one in self._stations):  # nobody has the models now
            self.states = {
                task: TaskState(text="The worker is restarting.") for task in self.states
            }
        self.metrics.restarts += 1
        self.fill()

    def fill(self) -> None:
        """Start what there is room for, everywhere."""
        for station in self._stations:
            self._starter.fill(station)

    def check(self) -> None:
        """Raise when the tables contradict each other; for tests and simulations."""
        for id, station in self._starter.where.items():
            if id not in station.tickets or self.queue.has(id):
                raise RuntimeError(f"{id} is in two places. This is a bug.")
        for station in self._stations:
            for ticket in station.tickets.values():
                if self._starter.where.get(ticket.request.id) is not station:
                    raise RuntimeError(f"{ticket.request.id} runs nowhere. This is a bug.")
        inside = (
            len(self.queue)
            + len(self._starter.where)
            + sum(len(d.suspects) for d in self._stations)
        )
        if inside != self.ledger.inside():
            raise RuntimeError(f"{inside} inside, {self.ledger.inside()} booked. This is a bug.")
        for ticket in self.queue.tickets():
            if ticket.stream.status not in (Status.WAITING, Status.PARKED):
                raise RuntimeError(f"{ticket.request.id} waits as {ticket.stream.status}.")

    # Limits

    def _limit(self, request: Request, capped: bool) -> None:
        waiting = self.queue.waiting(request.session)
        predicted = self._forecast.wait(request.session, self.limits.wait)
        self.limits.check_person(waiting, capped, predicted)
        if self._forecast.known(request) and request.priority is not Priority.BACKGROUND:
            self.limits.check_wait(predicted)
            promised = self.policies[request.task].latency
            if promised is not None:
                self.limits.check_promise(self._forecast.finish(request, self.states), promised)
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

    # Reports and ends

    def _report(self, station: Station, report: Report) -> None:
        now = self._clock()
        station.room, station.seen = report.room, report.seen
        if report.call is not None:
            station.calling = None
            self._called(station, report.call, now)
        for id, seconds in report.seconds.items():
            self._charge(station, id, seconds)
        for id, mark in report.marks.items():
            if id in station.tickets:
                station.tickets[id].marks.extend(mark)
                self._clear(station, station.tickets[id])
        for id, output in report.outputs.items():
            if id in station.tickets:
                station.tickets[id].stream.put(output, now)
        for id, end in report.ended.items():
            self._ended(station, id, end)
        for id, parked in report.parked.items():
            self._parked(station, id, list(parked))
        for id in [*report.ended, *report.parked]:
            self._starter.keep_promise(station, id)
        self.fill()

    def _clear(self, station: Station, ticket: Ticket) -> None:
        """A suspect got further than when its worker died, by a new mark or by more calls than it
        had seen then; it makes way for the next one.
        """
        if ticket.alone:
            ticket.alone = False
            if station.suspects:
                self._send(station.index, Park(ticket.request.id))

    def _called(self, station: Station, call: Call, now: float) -> None:
        self.metrics.called(now, station.index, call)
        if call.reason is Reason.LOAD or call.error:
            return
        lane = (call.task, call.key)
        self.costs.observe(lane, call.forwards, call.rows, call.units, call.seconds)
        for id in call.ids:
            ticket = station.tickets.get(id)
            if ticket is not None:
                ticket.rode += call.seconds
                ticket.calls += 1
                ticket.stream.riders = len(call.ids)
                if ticket.calls > ticket.hurdle:
                    self._clear(station, ticket)

    def _charge(self, station: Station, id: str, seconds: float) -> None:
        ticket = station.tickets.get(id)
        if ticket is None:
            return
        ticket.spent += seconds
        ticket.stream.times.device += seconds
        self.queue.charge(ticket.request, seconds, -ticket.prepaid)
        ticket.prepaid = 0.0

    def _parked(self, station: Station, id: str, marks: list[object]) -> None:
        """A row gave its place up: it waits at the front of its session."""
        ticket = self._off(station, id)
        if ticket is not None:
            ticket.marks = marks
            self._starter.rest(ticket, Status.PARKED)
            self.metrics.parked += 1
            self.queue.push(ticket, front=True)

    def _ended(self, station: Station, id: str, end: End) -> None:
        ticket = self._off(station, id)
        if ticket is not None:
            self._finish(ticket, end.status, end.error)

    def _off(self, station: Station, id: str) -> Ticket | None:
        """The ticket of a row that is closed; None when it was over for its caller before."""
        ticket = station.tickets.get(id)
        if ticket is None:
            return None
        self._starter.give_back(station, ticket)
        if not ticket.stream.status.terminal:
            return ticket
        self._close(ticket)
        return None

    def _leave(self, id: str, status: Status, error: CarpoolError) -> bool:
        """End a request for its caller, wherever it is."""
        ticket = self.queue.remove(id)
        if ticket is None:
            ticket = self._suspect(id)
        if ticket is not None:
            self._finish(ticket, status, error)
            return True
        station = self._starter.where.get(id)
        if station is None or station.tickets[id].stream.status.terminal:
            return False
        ticket = station.tickets[id]
        ticket.stream.move(status, error, self._clock())
        self.metrics.finished(ticket.request.task, status, ticket.stream.times)
        self._send(station.index, Cancel(id))
        return True

    def _expire(self, ticket: Ticket) -> None:
        error = Expired(f"It waited {ticket.left:.0f} s, the limit, and was not started.")
        self._finish(ticket, Status.EXPIRED, error)

    def _suspect(self, id: str) -> Ticket | None:
        for station in self._stations:
            for ticket in station.suspects:
                if ticket.request.id == id:
                    station.suspects.remove(ticket)
                    return ticket
        return None

    def _finish(self, ticket: Ticket, status: Status, error: CarpoolError | None) -> None:
        ticket.stream.move(status, error, self._clock())
        self.metrics.finished(ticket.request.task, status, ticket.stream.times)
        self._close(ticket)

    def _close(self, ticket: Ticket) -> None:
        self.ledger.leave(ticket.request.session)
