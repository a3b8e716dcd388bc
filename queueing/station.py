"""A worker as the dispatcher knows it: its credit, who was started there, who is to run alone, who
gives way.

It is told what the worker reported and never talks to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from queueing.fairqueue import Fit, Ticket
from queueing.ledger import Ledger
from queueing.work import Priority, Room

QUANTUM = 0.2  # seconds of calls a row has had before it may be displaced


@dataclass(slots=True, eq=False)
class Station:
    """One worker's room, tickets and promises."""

    index: int
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
        """A suspect runs."""
        return any(ticket.alone for ticket in self.tickets.values())

    def free(self, task: str) -> Room:
        """The room last reported, less what was started since."""
        room = self.room.get(task, Room(0.0))
        unseen = [
            ticket.request
            for ticket in self.tickets.values()
            if ticket.number > self.seen and ticket.request.task == task
        ]
        if not unseen:
            return room
        rows = room.rows - sum(request.share for request in unseen)
        bytes = None if room.bytes is None else room.bytes - sum(r.bytes for r in unseen)
        return Room(rows, bytes)

    def fits(self, ticket: Ticket, rows: int, room: Room) -> Fit:
        """Whether the free room takes one more, of a policy with so many rows."""
        request = ticket.request
        free = room.rows
        if request.priority is Priority.BACKGROUND and rows > 1:
            free -= 1  # one row stays free for whoever comes next
        if free <= 0:
            return Fit.ROWS
        if request.share > free:
            return Fit.BYTES if request.share > 1 else Fit.ROWS
        if room.bytes is not None and request.bytes > room.bytes and self.tickets:
            return Fit.BYTES
        return Fit.YES

    def displaceable(self, ledger: Ledger) -> list[Ticket]:
        """Rows that have had their quantum and may give way: background always, others where their
        session runs two rows or more.
        """
        leaving = [self.tickets[id].request.session for id in self.promised]
        return [
            one
            for one in self.tickets.values()
            if one.rode >= QUANTUM
            and one.request.id not in self.promised
            and not one.stream.status.terminal
            and (
                one.request.priority is Priority.BACKGROUND
                or ledger.running(one.request.session) - leaving.count(one.request.session) >= 2
            )
        ]

    def victim(self, ticket: Ticket, rows: Sequence[Ticket], ledger: Ledger) -> Ticket | None:
        """Which of these rows to displace for a session with nothing running: of the session served
        most, and more than the newcomer's, the row that has computed least.

        None when a row will be free sooner than it could be computed again.
        """
        task, mine = ticket.request.task, ledger.served(ticket.request.session)
        peers = [one for one in self.tickets.values() if one.request.task == task]
        natural = min((max(one.work - one.spent, 0.0) * len(peers) for one in peers), default=0.0)
        able = [
            one
            for one in rows
            if one.request.task == task
            and one.spent < natural
            and (
                one.request.priority is Priority.BACKGROUND
                or ledger.served(one.request.session) > mine
            )
        ]
        return max(
            able,
            key=lambda one: (ledger.served(one.request.session), -one.spent, one.order),
            default=None,
        )
