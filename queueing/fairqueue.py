"""Who is admitted next: start-time fair queueing over device-seconds, with classes and held room.

A waiting request is tagged with its session's number plus the weighted cost of its first call.
Lines are (class, task); background lines come last, above a floor. It does not know workers,
devices or streams.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TypeAlias

from queueing.ledger import Floor, Ledger
from queueing.stream import Stream
from queueing.work import Mark, Priority, Request

PASSES = 8  # how often a request that does not fit may be overtaken before room is held for it
SCAN = 64  # requests looked at in one pull


class Fit(Enum):
    """What stands between a request and a worker."""

    YES = auto()
    ROWS = auto()  # no row for this task and class: nobody behind it fits either
    BYTES = auto()  # not enough memory for this one: a smaller one may pass
    CAP = auto()  # its person runs enough already: no pass


@dataclass(slots=True, eq=False)
class Ticket:
    """A request inside the dispatcher, from submit to the end of its row."""

    request: Request
    stream: Stream
    charge: float  # predicted device-seconds of its first call
    work: float  # predicted device-seconds in all
    left: float  # seconds it may still take, as of `since`
    since: float
    capped: bool = True
    marks: list[object] = field(default_factory=list)
    order: int = 0
    passes: int = 0
    alone: bool = False  # was in a device call when a worker died
    calls: int = 0  # device calls it rode since it (re)started
    hurdle: int = 0  # of those, how many when its worker died
    number: int = 0  # of the Start that carried it
    prepaid: float = 0.0  # weighted device-seconds charged ahead
    rode: float = 0.0  # seconds of the calls it rode since it (re)started
    spent: float = 0.0  # its own device-seconds since it (re)started

    @property
    def mark(self) -> Mark:
        return tuple(self.marks)

    @property
    def deadline(self) -> float:
        return self.since + self.left


Line: TypeAlias = tuple[Priority, str]


class _Waiting:
    """The waiting requests of one session in one line, and which of its heap entries lives."""

    __slots__ = ("tickets", "version")

    def __init__(self) -> None:
        self.tickets: deque[Ticket] = deque()
        self.version = 0


_Entry: TypeAlias = tuple[float, int, str, int]  # tag, order of its first ticket, session, version


class _Lineup:
    """One line: sessions by the tag of their first request."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._heap: list[_Entry] = []
        self._versions = 0
        self.sessions: dict[str, _Waiting] = {}

    def add(self, ticket: Ticket, front: bool) -> None:
        waiting = self.sessions.setdefault(ticket.request.session, _Waiting())
        waiting.tickets.appendleft(ticket) if front else waiting.tickets.append(ticket)
        if front or len(waiting.tickets) == 1:
            self.refresh(ticket.request.session)

    def discard(self, ticket: Ticket) -> None:
        session = ticket.request.session
        waiting = self.sessions[session]
        first = waiting.tickets[0] is ticket
        waiting.tickets.popleft() if first else waiting.tickets.remove(ticket)
        if not waiting.tickets:
            del self.sessions[session]
        elif first:
            self.refresh(session)

    def refresh(self, session: str) -> None:
        """Give the session a new entry; the old ones are dropped when they surface."""
        waiting = self.sessions.get(session)
        if waiting is None:
            return
        self._versions += 1
        waiting.version = self._versions
        head = waiting.tickets[0]
        tag = self._ledger.served(session) + head.charge / head.request.pace
        heapq.heappush(self._heap, (tag, head.order, session, waiting.version))
        if len(self._heap) > 4 * len(self.sessions) + 64:
            self._heap = [entry for entry in self._heap if self._lives(entry)]
            heapq.heapify(self._heap)

    def top(self) -> _Entry | None:
        while self._heap:
            if self._lives(self._heap[0]):
                return self._heap[0]
            heapq.heappop(self._heap)
        return None

    def pop(self) -> _Entry:
        return heapq.heappop(self._heap)

    def push(self, entry: _Entry) -> None:
        heapq.heappush(self._heap, entry)

    def _lives(self, entry: _Entry) -> bool:
        waiting = self.sessions.get(entry[2])
        return waiting is not None and waiting.version == entry[3]


class FairQueue:
    """Requests that wait, ordered by what their sessions have been served."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._lines: dict[Line, _Lineup] = {}
        self._tickets: dict[str, Ticket] = {}
        self._waiting: dict[str, int] = {}  # session -> requests that wait
        self._orders = 0
        self.ahead: dict[str, int] = {}  # the same, background left out
        self.work = 0.0  # predicted device-seconds of those
        self._floor = Floor()

    def __len__(self) -> int:
        return len(self._tickets)

    def has(self, id: str) -> bool:
        return id in self._tickets

    def waiting(self, session: str) -> int:
        return self._waiting.get(session, 0)

    def sessions(self) -> dict[str, int]:
        """How many requests wait, by session."""
        return self._waiting

    def tickets(self) -> Iterator[Ticket]:
        return iter(self._tickets.values())

    def newest(self, session: str) -> Ticket | None:
        """The request of this session that came last."""
        mine = [ticket for ticket in self.tickets() if ticket.request.session == session]
        return max(mine, key=lambda ticket: ticket.order, default=None)

    def push(self, ticket: Ticket, front: bool = False) -> None:
        """Wait; `front` puts it before the others of its session (it was running before)."""
        request = ticket.request
        if not ticket.order:
            self._orders += 1
            ticket.order = self._orders
        line = (request.priority, request.task)
        lineup = self._lines.get(line)
        if lineup is None:
            lineup = self._lines[line] = _Lineup(self.ledger)
        lineup.add(ticket, front)
        self._tickets[request.id] = ticket
        self._count(ticket, 1)

    def remove(self, id: str) -> Ticket | None:
        """Take a waiting request out; None when it does not wait."""
        ticket = self._tickets.pop(id, None)
        if ticket is None:
            return None
        request = ticket.request
        self._lines[request.priority, request.task].discard(ticket)
        self._count(ticket, -1)
        return ticket

    def pull(self, fits: Callable[[Ticket], Fit]) -> Ticket | None:
        """The most deserving request that fits; those it overtakes for their size count a pass.

        None also while room is held for one that has been passed often enough.
        """
        for background in (True, False) if self.background_owed() else (False, True):
            ticket, held = self._pull(background, fits)
            if ticket is not None:
                self.remove(ticket.request.id)
            if ticket is not None or held:
                return ticket
        return None

    def charge(self, request: Request, seconds: float, correction: float = 0.0) -> None:
        """Charge device-seconds to a request's session, less what was charged ahead."""
        background = request.priority is Priority.BACKGROUND
        self._floor.ran(seconds, background, self._background_waits())
        self.adjust(request.session, seconds / request.pace + correction)

    def adjust(self, session: str, weighted: float) -> None:
        """Add weighted device-seconds to the session's number, for instance ahead of a Start."""
        self.ledger.charge(session, weighted)
        if session in self._waiting:
            for lineup in self._lines.values():
                lineup.refresh(session)

    def background_owed(self) -> bool:
        """Background waits and has had less than its floor since it began to."""
        return self._floor.owed and self._background_waits()

    def heads(self, count: int) -> list[Ticket]:
        """The first requests of the most deserving sessions, background left out."""
        found: list[Ticket] = []
        taken: list[tuple[_Lineup, _Entry]] = []
        for lineup, _, ticket in self._ordered(False):
            taken.append((lineup, lineup.pop()))
            found.append(ticket)
            if len(found) == count:
                break
        for lineup, entry in taken:
            lineup.push(entry)
        return found

    def _count(self, ticket: Ticket, change: int) -> None:
        session = ticket.request.session
        tables = [self._waiting]
        if ticket.request.priority is not Priority.BACKGROUND:
            tables.append(self.ahead)
            self.work += change * ticket.work
        for table in tables:
            table[session] = table.get(session, 0) + change
            if not table[session]:
                del table[session]
        if not self.ahead:
            self.work = 0.0  # no drift from sums of floats

    def _background_waits(self) -> bool:
        return any(
            lineup.sessions
            for (priority, _), lineup in self._lines.items()
            if priority is Priority.BACKGROUND
        )

    def _ordered(
        self, background: bool, closed: set[int] | None = None
    ) -> Iterator[tuple[_Lineup, _Entry, Ticket]]:
        """The least tag over the lines, again and again; the reader pops it or closes its line."""
        lineups = [
            lineup
            for (priority, _), lineup in self._lines.items()
            if (priority is Priority.BACKGROUND) is background
        ]
        tops = [(entry, place) for place, each in enumerate(lineups) if (entry := each.top())]
        heapq.heapify(tops)
        while tops:
            entry, place = tops[0]
            lineup = lineups[place]
            yield lineup, entry, lineup.sessions[entry[2]].tickets[0]
            following = None if closed and id(lineup) in closed else lineup.top()
            if following is None:
                heapq.heappop(tops)
            else:
                heapq.heapreplace(tops, (following, place))

    def _pull(self, background: bool, fits: Callable[[Ticket], Fit]) -> tuple[Ticket | None, bool]:
        """(the request, or None; whether room is held for another)."""
        closed: set[int] = set()
        taken: list[tuple[_Lineup, _Entry]] = []
        passed: list[Ticket] = []
        found: Ticket | None = None
        held = False
        for lineup, _, ticket in self._ordered(background, closed):
            fit = fits(ticket)
            if fit is Fit.YES:
                found = ticket
            elif fit is Fit.ROWS:
                closed.add(id(lineup))
            elif fit is Fit.BYTES and ticket.passes >= PASSES:
                held = True
            else:
                taken.append((lineup, lineup.pop()))
                if fit is Fit.BYTES:
                    passed.append(ticket)
            if found or held or len(taken) >= SCAN:
                break
        for lineup, entry in taken:
            lineup.push(entry)
        for ticket in passed if found else ():
            ticket.passes += 1
        return found, held
