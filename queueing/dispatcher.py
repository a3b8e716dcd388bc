"""The asynchronous half of the dispatcher: workers supervised, messages carried, deadlines kept.

Lives on one event loop, the handlers' own. All decisions are in `admission`; it knows no task and
no page.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from queueing.admission import Admission
from queueing.clock import Clock, monotonic
from queueing.forecast import Place
from queueing.limits import Limits
from queueing.messages import Down, Load, Loaded, Loading, Ready, Up
from queueing.metrics import Metrics
from queueing.stream import Stream
from queueing.work import (
    Policy,
    Request,
    TaskState,
    WorkerLost,
)
from queueing.worker import Worker

log = logging.getLogger("carpool.dispatcher")

BACK_OFF = (0.1, 30.0)  # seconds before a worker that died is started again, doubling
STEADY = 60.0  # seconds of life after which a death counts as the first


class Dispatcher:
    """What the application talks to."""

    def __init__(
        self,
        policies: Mapping[str, Policy],
        workers: Sequence[Callable[[], Worker]],
        limits: Limits | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._factories = workers
        self._workers: list[Worker | None] = [None] * len(workers)
        self._clock = clock
        self._admission = Admission(policies, limits or Limits(), len(workers), clock, self._send)
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._closing = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None
        self._wanted: set[str] = set()  # tasks whose models were asked for and are still to come

    @property
    def metrics(self) -> Metrics:
        return self._admission.metrics

    async def start(self) -> None:
        """Start the workers behind; returns at once."""
        for index in range(len(self._factories)):
            self._tasks.append(asyncio.create_task(self._supervise(index)))

    async def close(self) -> None:
        """End every request and every worker."""
        self._closing.set()
        self._tell()
        for id in self._admission.inside():
            self._admission.cancel(id, "The server is going down; please try again in a minute")
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.gather(*(worker.stop() for worker in self._workers if worker is not None))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, request: Request, session: str, capped: bool = True) -> Stream:
        """Queue a checked request for a person; raises Full. `capped` False: known by address
        only.
        """
        id = secrets.token_urlsafe(16)
        request = replace(request, id=id, session=session)
        stream = self._admission.submit(request, capped, lambda: self._cancel(id))
        self._keep_time(self._clock() + self._admission.policies[request.task].timeout)
        return stream

    def place(self, id: str) -> Place | None:
        """Position and seconds to go while it waits; None when it does not."""
        return self._admission.place(id)

    def state(self, task: str) -> TaskState:
        """Whether the task's model is there, and if not what is being done about it."""
        return self._admission.states[task]

    def want(self, task: str) -> None:
        """Somebody will ask a task: have its model loaded, also if that has failed before."""
        state = self.state(task)
        if state.error:
            self._admission.states[task] = TaskState(text="Trying again.")
            self._tell()
        elif state.card is not None or task in self._wanted:
            return
        self._wanted.add(task)
        for index in range(len(self._workers)):
            self._send(index, Load(task))

    async def loaded(self, task: str, seconds: float) -> TaskState:
        """The state after its next change, or after so many seconds; at once when it is
        loaded.
        """
        if self.state(task).card is None:
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait((changed,), timeout=seconds)
            changed.cancel()
        return self.state(task)

    async def states(self, task: str) -> AsyncIterator[TaskState]:
        """The state now and after each change, until the dispatcher closes."""
        while not self._closing.is_set():
            changed = self._changed
            yield self.state(task)
            await changed.wait()

    def _tell(self) -> None:
        """Whoever waits for a change of a state gets to see it."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _cancel(self, id: str) -> None:
        self._admission.cancel(id)

    def _send(self, index: int, message: Down) -> None:
        worker = self._workers[index]
        if worker is not None:
            worker.send(message)

    async def _supervise(self, index: int) -> None:
        """Keep one worker alive."""
        delay = BACK_OFF[0]
        while not self._closing.is_set():
            worker = self._workers[index] = self._factories[index]()
            began = self._clock()
            try:
                await worker.run(lambda message: self._receive(index, message))
            except WorkerLost as error:
                if not self._closing.is_set():
                    log.warning("worker %d: %s", index, error)
            except Exception:  # the border of the worker loop: a message that cannot be read
                log.exception("worker %d cannot be understood", index)
            if self._closing.is_set():
                return
            self._admission.lost(index)
            self._tell()
            delay = BACK_OFF[0] if self._clock() - began > STEADY else min(2 * delay, BACK_OFF[1])
            await self._pause(delay)

    async def _pause(self, seconds: float) -> None:
        closing = asyncio.create_task(self._closing.wait())
        await asyncio.wait((closing,), timeout=seconds)
        closing.cancel()

    def _receive(self, index: int, message: Up) -> None:
        self._admission.receive(index, message)
        if isinstance(message, Ready):
            for task, policy in self._admission.policies.items():
                if policy.preload or task in self._wanted:
                    self._send(index, Load(task))
            self._wanted.clear()
        if isinstance(message, Loaded):
            self._wanted.discard(message.task)
        if isinstance(message, Loading | Loaded):
            self._tell()

    def _keep_time(self, deadline: float) -> None:
        """Look for requests that waited too long when the first of them has."""
        loop = asyncio.get_running_loop()
        due = loop.time() + max(deadline - self._clock(), 0.0)
        if self._expiry is not None and self._expiry.when() <= due:
            return
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        soonest = self._admission.expire()
        if soonest != float("inf"):
            self._keep_time(soonest)
