"""Position and time to go of those who wait, from one snapshot a second of the fair order.

It reads the queue and the learned costs and changes neither.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from queueing.fairqueue import FairQueue, Ticket
from queueing.work import Priority

EVERY = 1.0  # seconds between snapshots
SHORT = 100  # a queue so short is looked at anew for a newcomer


@dataclass(frozen=True, slots=True)
class Place:
    """Where a waiting request stands: 1 is next; `seconds` until it starts, None while nothing is known."""

    position: int
    seconds: float | None


class Places:
    """The last snapshot, made anew when it is asked for and a second old."""

    def __init__(self, queue: FairQueue, running: Callable[[], tuple[float, float]]) -> None:
        self._queue = queue
        self._running = running  # predicted device-seconds still to run, and the rows they run in
        self._places: dict[str, Place] = {}
        self._made = float("-inf")

    def place(self, id: str, now: float) -> Place | None:
        """The place of a waiting request; None when it does not wait."""
        if not self._queue.has(id):
            return None
        newcomer = id not in self._places
        if now - self._made >= EVERY or (newcomer and len(self._queue) <= SHORT):
            self._places, self._made = self._snapshot(), now
        return self._places.get(id, Place(len(self._queue), None))

    def _snapshot(self) -> dict[str, Place]:
        """Play the fair order forward: the session with the least number is next and pays for its work."""
        sessions: dict[tuple[bool, str], list[Ticket]] = defaultdict(list)
        for ticket in self._queue.tickets():
            request = ticket.request
            sessions[request.priority is Priority.BACKGROUND, request.session].append(ticket)
        heap = []
        for (background, session), tickets in sessions.items():
            tickets.sort(key=lambda ticket: (ticket.request.priority, ticket.order), reverse=True)
            heap.append((background, self._number(tickets[-1]), tickets[-1].order, session))
        heapq.heapify(heap)
        left, rows = self._running()
        ahead, places = 0.0, dict[str, Place]()
        while heap:
            background, number, _, session = heapq.heappop(heap)
            tickets = sessions[background, session]
            ticket = tickets.pop()
            position = len(places) + 1
            places[ticket.request.id] = Place(position, _seconds(left + ahead, position, rows))
            ahead += ticket.work
            if tickets:
                number += ticket.work / ticket.request.pace
                heapq.heappush(heap, (background, number, tickets[-1].order, session))
        return places

    def _number(self, ticket: Ticket) -> float:
        request = ticket.request
        return self._queue.ledger.served(request.session) + ticket.charge / request.pace


def _seconds(work: float, position: int, rows: float) -> float | None:
    """Until the `position`th of those who wait starts, with `work` ahead of it and `rows` at once.

    The first row is free when about 1/rows of the running work is done, the last when all of it is.
    """
    return work * position / (position + rows - 1) if rows >= 1 else None
