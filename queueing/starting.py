"""Who starts where, and who gives way: tickets from the queue to stations and back.

A start pays for its first call ahead. It does not know callers' limits beyond a person's running
rows, and it reads no reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from queueing.clock import Clock
from queueing.fairqueue import FairQueue, Fit, Ticket
from queueing.limits import Limits
from queueing.messages import Down, Park, Start
from queueing.station import Station
from queueing.work import (
    Policy,
    Room,
    Status,
)

HEADS = 8  # waiting sessions looked at for displacement


class Starter:
    """Moves tickets between one queue and the stations."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        limits: Limits,
        queue: FairQueue,
        clock: Clock,
        send: Callable[[int, Down], None],
        expire: Callable[[Ticket], None],
    ) -> None:
        self.where: dict[str, Station] = {}  # id -> the station where it runs
        self._policies = policies
        self._limits = limits
        self._queue = queue
        self._ledger = queue.ledger
        self._clock = clock
        self._send = send
        self._expire = expire  # told of a ticket whose time was over before it could start

    def fill(self, station: Station) -> None:
        """Start what there is room for, and make room where fairness asks for it."""
        if station.alive:
            self._start(station, self._pick(station))
            self._displace(station)

    def keep_promise(self, station: Station, victim: str) -> None:
        """The row of a victim is free: it goes to the one for whom it was asked."""
        ticket = station.promised.pop(victim, None)
        if ticket is None or not self._queue.has(ticket.request.id):
            return
        if self._fits(station, ticket, {}) is Fit.YES:
            self._queue.remove(ticket.request.id)
            self._start(station, [self._book(station, ticket)])

    def give_back(self, station: Station, ticket: Ticket) -> None:
        """Take a ticket off its station, and return what it prepaid and did not use."""
        session = ticket.request.session
        del station.tickets[ticket.request.id], self.where[ticket.request.id]
        self._ledger.account(session).running -= 1
        self._queue.adjust(session, -ticket.prepaid)
        ticket.prepaid = 0.0

    def rest(self, ticket: Ticket, status: Status) -> None:
        """Off a worker; the time that a parked request may take stands still."""
        now = self._clock()
        ticket.left, ticket.since = max(ticket.deadline - now, 0.0), now
        ticket.stream.move(status, None, now)

    def _pick(self, station: Station) -> list[Ticket]:
        """Who starts at this station now: a suspect alone, or else whoever fits in fair order."""
        if station.alone:
            return []
        if station.suspects:
            return [] if station.tickets else [self._book(station, station.suspects.pop(0))]
        picked, now, rooms = list[Ticket](), self._clock(), dict[str, Room]()
        while True:
            rooms.clear()  # of each task, worked out once a pull
            ticket = self._queue.pull(lambda ticket: self._fits(station, ticket, rooms))
            if ticket is None:
                return picked
            if overdue(ticket, now):
                self._expire(ticket)
            else:
                picked.append(self._book(station, ticket))

    def _fits(self, station: Station, ticket: Ticket, rooms: dict[str, Room]) -> Fit:
        request, limit = ticket.request, self._limits.running
        if limit is not None and ticket.capped and self._ledger.running(request.session) >= limit:
            return Fit.CAP
        if request.task not in rooms:
            rooms[request.task] = station.free(request.task)
        return station.fits(ticket, self._policies[request.task].rows, rooms[request.task])

    def _book(self, station: Station, ticket: Ticket) -> Ticket:
        """Enter a ticket at a station, paying for its first call ahead."""
        ticket.number = station.number + 1
        ticket.rode = ticket.spent = 0.0
        ticket.calls = 0
        ticket.prepaid = ticket.charge / ticket.request.pace
        station.tickets[ticket.request.id] = ticket
        self.where[ticket.request.id] = station
        self._ledger.account(ticket.request.session).running += 1
        self._queue.adjust(ticket.request.session, ticket.prepaid)
        return ticket

    def _start(self, station: Station, tickets: list[Ticket]) -> None:
        if not tickets:
            return
        now = self._clock()
        station.number += 1
        for ticket in tickets:
            if ticket.stream.status is not Status.PARKED:
                ticket.left = max(ticket.deadline - now, 0.0)
            ticket.since = now
            ticket.stream.move(Status.RUNNING, None, now)
        sessions = {ticket.request.session for ticket in station.tickets.values()}
        self._send(
            station.index,
            Start(
                station.number,
                tuple(ticket.request for ticket in tickets),
                {t.request.id: t.mark for t in tickets if t.marks},
                {session: self._ledger.served(session) for session in sessions},
                {t.request.id: t.left for t in tickets},
            ),
        )

    def _displace(self, station: Station) -> None:
        """Park rows of the most served for sessions that wait with nothing running."""
        if station.alone or station.suspects or not len(self._queue):
            return
        rows = station.displaceable(self._ledger)
        if not rows:
            return
        waiting = {ticket.request.id for ticket in station.promised.values()}
        for ticket in self._queue.heads(HEADS):
            session = ticket.request.session
            if self._ledger.running(session) or ticket.request.id in waiting:
                continue
            victim = station.victim(ticket, rows, self._ledger)
            if victim is None:
                return
            station.promised[victim.request.id] = ticket
            self._send(station.index, Park(victim.request.id))
            rows = station.displaceable(self._ledger)


def overdue(ticket: Ticket, now: float) -> bool:
    """Its time is over and it has never run; what was parked does not die for being polite."""
    return ticket.stream.status is Status.WAITING and ticket.deadline <= now
