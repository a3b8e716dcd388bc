"""Where an engine runs: the loop around it, and the worker that is a thread of this process.

A worker takes messages down and gives messages up; it does not know requests' callers or sessions'
limits.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from queueing.clock import Clock, monotonic
from queueing.engine import Engine
from queueing.messages import Cancel, Down, Drain, Ready, Up
from queueing.work import (
    Pipeline,
    Policy,
    WorkerLost,
)

log = logging.getLogger("carpool.worker")

STOP_SECONDS = 2.0

Factory: TypeAlias = str | tuple[str, Mapping[str, Any]]  # "package.module:name", keyword arguments
Receive: TypeAlias = Callable[[Up], None]
Inbox: TypeAlias = "queue.SimpleQueue[Down]"


class Worker(Protocol):
    """One owner of one device."""

    async def run(self, receive: Receive) -> None:
        """Live, passing every message up on the event loop; raises WorkerLost when it dies."""
        ...

    def send(self, message: Down) -> None:
        """Pass a message down; never blocks; ignored when nobody is there."""
        ...

    async def stop(self) -> None:
        """End it now, whatever it does."""
        ...


def build(factories: Mapping[str, Factory]) -> dict[str, Pipeline]:
    """Make the pipelines that dotted names stand for."""
    made = {}
    for task, factory in factories.items():
        name, arguments = (factory, {}) if isinstance(factory, str) else factory
        module, _, attribute = name.partition(":")
        made[task] = getattr(importlib.import_module(module), attribute)(**arguments)
    return made


class Outbox:
    """Messages on their way up: what a call gave rides with the news that the next one begins."""

    def __init__(self, send: Callable[[Sequence[Up]], None]) -> None:
        self._send = send
        self._held: list[Up] = []

    def hold(self, message: Up) -> None:
        """Send it with the next message, or at the next flush."""
        self._held.append(message)

    def tell(self, message: Up) -> None:
        """Send it now."""
        self._held.append(message)
        self.flush()

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._send(held)


def serve(engine: Engine, inbox: Inbox, outbox: Outbox, clock: Clock) -> None:
    """Run an engine until it is drained: read what came, tick, report; wait when there is
    nothing.
    """
    outbox.tell(Ready(engine.room()))
    quiet = True
    while not (engine.draining and engine.idle):
        if quiet:
            timeout = None if engine.wake is None else max(engine.wake - clock(), 0.0)
            _read(engine, inbox, timeout)
        while not inbox.empty():
            engine.handle(inbox.get())
        report = engine.tick()
        quiet = report is None
        if report is not None:
            outbox.hold(report)
        else:
            outbox.flush()
    outbox.flush()


def _read(engine: Engine, inbox: Inbox, timeout: float | None) -> None:
    try:
        engine.handle(inbox.get(timeout=timeout))
    except queue.Empty:
        return


class ThreadWorker:
    """An engine in a thread; for tests, and for pipelines that cannot take the process down."""

    def __init__(
        self,
        factories: Mapping[str, Factory],
        policies: Mapping[str, Policy],
        clock: Clock = monotonic,
        budget: int | None = None,
    ) -> None:
        self._budget = budget
        self._factories = factories
        self._policies = policies
        self._clock = clock
        self._inbox: Inbox = queue.SimpleQueue()
        self._engine: Engine | None = None
        self._over: asyncio.Future[Exception | None] | None = None

    async def run(self, receive: Receive) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Exception | None] = loop.create_future()
        self._over = over

        def send(messages: Sequence[Up]) -> None:
            for message in messages:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(receive, message)

        def work() -> None:
            error: Exception | None = None
            try:
                pipelines = build(self._factories)
                outbox = Outbox(send)
                engine = Engine(pipelines, self._policies, self._clock, outbox.tell, self._budget)
                self._engine = engine
                serve(engine, self._inbox, outbox, self._clock)
            except Exception as problem:  # the border of a worker: what gets here is our bug
                log.exception("the engine failed")
                error = problem
            if not loop.is_closed():
                loop.call_soon_threadsafe(over.set_result, error)

        threading.Thread(target=work, name="carpool-engine", daemon=True).start()
        if (await asyncio.shield(over)) is not None:
            raise WorkerLost("The engine failed.")

    def send(self, message: Down) -> None:
        if isinstance(message, Cancel) and self._engine is not None:
            self._engine.flag(message.id)
        self._inbox.put(message)

    async def stop(self) -> None:
        """Drain; a thread in a long step cannot be ended and is left behind."""
        self.send(Drain())
        if self._over is not None:
            await asyncio.wait((self._over,), timeout=STOP_SECONDS)
