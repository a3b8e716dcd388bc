"""What will be: the cost of a request, the wait of a newcomer, position and time to go of those who
wait.

All from the learned costs and the fair order, positions from one snapshot a second. It changes
nothing.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from queueing.costs import Costs
from queueing.fairqueue import FairQueue, Ticket
from queueing.station import Station
from queueing.work import Policy, Priority, Request, TaskState

EVERY = 1.0  # seconds between snapshots
SHORT = 100  # a queue so short is looked at anew for a newcomer
USEFUL = 0.1  # share of a call that is not its fixed cost, at least


@dataclass(frozen=True, slots=True)
class Place:
    """Where a waiting request stands: 1 is next; `seconds` until it starts, None while unknown."""

    position: int
    seconds: float | None


class Forecast:
    """Predictions over one queue and its workers."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        costs: Costs,
        queue: FairQueue,
        stations: Sequence[Station],
    ) -> None:
        self._policies = policies
        self._costs = costs
        self._queue = queue
        self._stations = stations
        self._places: dict[str, Place] = {}
        self._made = -math.inf

    def cost(self, request: Request) -> tuple[float, float]:
        """Device-seconds of the first call's share, and of the whole, in company of full calls."""
        policy = self._policies[request.task]
        seconds = []
        for work in request.plan:
            a, c, b, _ = self._costs.coefficients((request.task, work.key))
            forwards = work.most if work.serial else math.ceil(work.most / policy.units)
            each = a * work.weight / policy.rows + c * work.weight
            seconds.append(forwards * each + b * work.weight * work.most)
        first = request.plan[0]
        calls = first.most if first.serial else math.ceil(first.most / policy.units)
        return seconds[0] / calls, sum(seconds)

    def known(self, request: Request) -> bool:
        """The costs of its kind have been seen; before that a prediction is a guess."""
        return all(self._costs.known((request.task, work.key)) for work in request.plan)

    def wait(self, session: str, bound: float) -> float:
        """Predicted seconds until one more request of this session starts; exact only above
        `bound`.
        """
        left, _ = self._running()
        work, count = self._queue.work, sum(self._queue.ahead.values())
        if left + work <= bound or not count:
            return left + work if count else 0.0
        mine = self._queue.ahead.get(session, 0) + 1
        ahead = sum(min(theirs, mine) for theirs in self._queue.ahead.values())
        return left + work * ahead / count

    def finish(self, request: Request, states: Mapping[str, TaskState]) -> float:
        """Predicted seconds until one more request ends, or the first call of one that needs many:
        the call that runs, then those who are served before it, in calls that are all full.
        """
        calls = {
            task: policy.within(states[task].card) or 0.0 for task, policy in self._policies.items()
        }
        running, waiting = self._tickets(), self._queue.tickets()
        rest = max((calls[ticket.request.task] for ticket in running), default=0.0)
        awake = [t for t in (*running, *waiting) if t.request.priority is not Priority.BACKGROUND]
        others = {ticket.request.task for ticket in awake} - {request.task}
        call = calls[request.task]
        ahead = sum(
            min(max(ticket.work - ticket.spent, 0.0), call)
            for ticket in awake
            if ticket.request.task == request.task and self._before(ticket, request)
        )
        fixed = self._costs.coefficients((request.task, request.plan[0].key))[0]
        useful = max(call - fixed, USEFUL * call)
        own = min(self.cost(request)[1], useful)
        turns = max((ahead / self._alive() + own) / useful, 1.0)
        return rest + turns * call + sum(calls[task] for task in others)

    def _before(self, ticket: Ticket, request: Request) -> bool:
        """Whether it is served before a newcomer; what is charged ahead has not been served yet."""
        session, served = ticket.request.session, self._queue.ledger.served
        if session == request.session:
            return True
        return served(session) - ticket.prepaid <= served(request.session)

    def place(self, id: str, now: float) -> Place | None:
        """The place of a waiting request; None when it does not wait."""
        if not self._queue.has(id):
            return None
        newcomer = id not in self._places
        if now - self._made >= EVERY or (newcomer and len(self._queue) <= SHORT):
            self._places, self._made = self._snapshot(), now
        return self._places.get(id, Place(len(self._queue), None))

    def _running(self) -> tuple[float, float]:
        """(predicted device-seconds still to run on each worker, rows that run)."""
        tickets = self._tickets()
        left = sum(max(ticket.work - ticket.spent, 0.0) for ticket in tickets)
        return left / self._alive(), float(len(tickets))

    def _tickets(self) -> list[Ticket]:
        """Of all that runs."""
        return [ticket for station in self._stations for ticket in station.tickets.values()]

    def _alive(self) -> int:
        """Workers that share what is left, or the one that will come up."""
        return max(sum(station.alive for station in self._stations), 1)

    def _snapshot(self) -> dict[str, Place]:
        """Play the fair order forward: the session with the least number is next and pays for its
        work.
        """
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
            seconds = _start(left + ahead, position, rows) if self.known(ticket.request) else None
            places[ticket.request.id] = Place(position, seconds)
            ahead += ticket.work
            if tickets:
                number += ticket.work / ticket.request.pace
                heapq.heappush(heap, (background, number, tickets[-1].order, session))
        return places

    def _number(self, ticket: Ticket) -> float:
        request = ticket.request
        return self._queue.ledger.served(request.session) + ticket.charge / request.pace


def _start(work: float, position: int, rows: float) -> float | None:
    """Seconds until the `position`th of those who wait starts, with `work` ahead and `rows` at
    once.

    The first row is free when about 1/rows of the running work is done, the last when all of it is.
    """
    return work * position / (position + rows - 1) if rows >= 1 else None
