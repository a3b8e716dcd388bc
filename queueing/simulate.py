"""Virtual devices under a virtual clock: the same admission and engines, a million events in a
test.

Deterministic: equal inputs give equal event hashes. It proves policy; it knows no threads and no
processes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from queueing.admission import Admission
from queueing.clock import VirtualClock
from queueing.engine import Engine
from queueing.limits import Limits
from queueing.messages import Calling, Cancel, Down, Ready, Report, Up
from queueing.stream import Stream
from queueing.work import (
    Pipeline,
    Policy,
    Request,
)


class Crash(BaseException):
    """A pretended death of a worker in the middle of a step."""


Pipelines = Callable[[VirtualClock], Mapping[str, Pipeline]]


@dataclass(slots=True)
class _Machine:
    """One virtual worker: an engine, its device's clock, and what it has not read yet."""

    engine: Engine
    clock: VirtualClock
    inbox: list[Down] = field(default_factory=list)
    outbox: list[Up] = field(default_factory=list)
    busy: bool = False
    alive: bool = True
    life: int = 0  # counts restarts; events of an earlier life are void


class Simulation:
    """Requests against virtual workers; `at` schedules, `run` plays."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        pipelines: Pipelines,
        limits: Limits | None = None,
        workers: int = 1,
        restart: float = 1.0,
        budget: int | None = None,  # bytes that the models of a worker may hold together
    ) -> None:
        self.clock = VirtualClock()
        self.events = 0
        self.streams: list[Stream] = []
        self.touched: Callable[[str], None] = lambda id: (
            None
        )  # called with the request an event is about
        self._pipelines = pipelines
        self._policies = policies
        self._budget = budget
        self._restart = restart
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ids = itertools.count(1)
        self._hash = hashlib.sha256()
        self.admission = Admission(policies, limits or Limits(), workers, self.clock, self._send)
        self.machines = [self._machine() for _ in range(workers)]
        for worker in range(workers):
            self.at(0.0, lambda worker=worker: self._join(worker))  # type: ignore[misc]

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time of the virtual clock."""
        heapq.heappush(self._heap, (time, next(self._order), action))

    def submit(self, request: Request, session: str, capped: bool = True) -> Stream:
        """Submit now; raises Full."""
        id = f"r{next(self._ids)}"
        request = replace(request, id=id, session=session)
        self._note("submit", id)
        stream = self.admission.submit(request, capped, lambda: self.cancel(id))
        self.streams.append(stream)
        return stream

    def cancel(self, id: str) -> None:
        self._note("cancel", id)
        self.admission.cancel(id)

    def kill(self, worker: int) -> None:
        """The worker dies now, whatever it does, and is back after a while."""
        machine = self.machines[worker]
        if machine.alive:
            self._note("kill", str(worker))
            self._die(worker)

    def run(self, until: float = float("inf"), events: int | None = None) -> None:
        """Play what is scheduled, up to a time or a number of events."""
        while self._heap and self._heap[0][0] <= until and (events is None or self.events < events):
            time, _, action = heapq.heappop(self._heap)
            self.clock.now = max(self.clock.now, time)
            action()
        if until != float("inf"):
            self.clock.now = max(self.clock.now, until)

    def digest(self) -> str:
        """A hash over all events so far."""
        return self._hash.hexdigest()

    def check(self) -> None:
        """Raise when tables contradict each other, or room is negative."""
        self.admission.check()
        for machine in self.machines:
            machine.engine.check()
            for room in machine.engine.room().values():
                if room.rows < 0 or (room.bytes is not None and room.bytes < 0):
                    raise RuntimeError("there is negative room. This is a bug.")

    def _note(self, kind: str, id: str) -> None:
        self.events += 1
        self._hash.update(f"{self.clock.now:.9f} {kind} {id}\n".encode())
        self.touched(id)

    def _machine(self) -> _Machine:
        clock, outbox = VirtualClock(self.clock.now), list[Up]()
        return _Machine(
            Engine(self._pipelines(clock), self._policies, clock, outbox.append, self._budget),
            clock,
            outbox=outbox,
        )

    def _send(self, worker: int, message: Down) -> None:
        machine = self.machines[worker]
        machine.inbox.append(message)
        if isinstance(message, Cancel):
            machine.engine.flag(message.id)
        if not machine.busy:
            self._later(worker, self.clock.now, self._tick)

    def _later(self, worker: int, time: float, action: Callable[[int], None]) -> None:
        """Schedule for this life of the worker only."""
        life = self.machines[worker].life

        def act() -> None:
            if self.machines[worker].life == life and self.machines[worker].alive:
                action(worker)

        self.at(time, act)

    def _join(self, worker: int) -> None:
        self._receive(worker, Ready(self.machines[worker].engine.room()))

    def _tick(self, worker: int) -> None:
        machine = self.machines[worker]
        if machine.busy:
            return
        machine.clock.now = self.clock.now
        inbox, machine.inbox = machine.inbox, []
        for message in inbox:
            machine.engine.handle(message)
        try:
            report = machine.engine.tick()
        except Crash:
            self._call_began(worker)
            self._die(worker)
            return
        self._call_began(worker)
        if report is None:
            if machine.engine.wake is not None:
                self._later(worker, machine.engine.wake, self._tick)
            return
        machine.busy = True
        outbox = [*machine.outbox, report]
        machine.outbox.clear()
        self._later(worker, machine.clock.now, lambda worker: self._done(worker, outbox))

    def _call_began(self, worker: int) -> None:
        """The news that a call begins travels ahead of the call."""
        machine = self.machines[worker]
        for message in [m for m in machine.outbox if isinstance(m, Calling)]:
            machine.outbox.remove(message)
            self._receive(worker, message)

    def _done(self, worker: int, messages: list[Up]) -> None:
        machine = self.machines[worker]
        machine.busy = False
        for message in messages:
            self._receive(worker, message)
        self._later(worker, self.clock.now, self._tick)

    def _receive(self, worker: int, message: Up) -> None:
        if isinstance(message, Report):
            for id in (*message.seconds, *message.ended, *message.parked):
                self._note("report", id)
        self.admission.receive(worker, message)

    def _die(self, worker: int) -> None:
        machine = self.machines[worker]
        machine.alive = False
        self.admission.lost(worker)

        def back() -> None:
            fresh = self._machine()
            fresh.life = machine.life + 1
            self.machines[worker] = fresh
            self._join(worker)

        self.at(self.clock.now + self._restart, back)
