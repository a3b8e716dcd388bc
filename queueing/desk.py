"""The front desk: takes one payload from check to end and says, in sentences, what becomes of it.

Pages and APIs differ only in how they show a View. It knows no page, no transport and no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from queueing.clock import monotonic
from queueing.dispatcher import Dispatcher
from queueing.lines import loading_line, restarting_line, running_line, waiting_line
from queueing.people import Person
from queueing.stream import Stream
from queueing.work import Front, Full, Invalid, Request, Status, TaskState

BEAT = 0.9  # seconds: at least one View in each, because only a yield notices a caller that left
PACE = 1 / 12  # seconds between two Views of one ride, longer when many ride
SHARE = (
    1 / 150
)  # seconds of pace that each ride adds: a View costs 1.3 ms, so at most a fifth of a core


class Phase(StrEnum):
    """What a caller sees of a request's life; the last five are terminal."""

    LOADING = "loading"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    REFUSED = "refused"  # before it was queued
    FORGOTTEN = "forgotten"  # stopped, and nothing of it is to be shown

    @property
    def terminal(self) -> bool:
        return self not in (Phase.LOADING, Phase.WAITING, Phase.RUNNING)


@dataclass(frozen=True, slots=True)
class View:
    """What a caller may see now: where the request is, in a sentence, and all text so far."""

    phase: Phase
    line: str
    text: str = ""
    result: Any = None  # of what has finished


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, under which id, and which tab may cancel that id."""

    person: Person
    id: str
    tab: str
    gone: bool = False  # cancelled before the call got here


class Service(Front, Protocol):
    """What people may ask for; `task` is the model that does it."""

    task: str

    def judge(self, payload: Any) -> object:
        """Raises Invalid for what needs no model to be refused."""
        ...

    def finish(self, request: Request, result: Any) -> Any:
        """What the caller gets, made of what the model gave."""
        ...

    def summary(self, result: Any, took: float, ran: float) -> str:
        """Of what the caller gets, with the seconds since it was asked and of running."""
        ...


@dataclass(slots=True, eq=False)
class Ride:
    """One call at the desk, from its first moment, when there is no stream yet, to its end."""

    caller: Caller
    stopped: bool = False
    forgotten: bool = False
    stream: Stream | None = None
    asked: float = field(default_factory=monotonic)

    def stop(self) -> None:
        self.stopped = True
        if self.stream is not None:
            self.stream.cancel()


class Desk:
    """Follows every call of this application; lives on one event loop."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        services: Mapping[str, Service],
        grace: float = 0.0,
    ) -> None:
        self.dispatcher = dispatcher
        self._services = services
        self._grace = grace  # seconds a stream outlives a caller that vanished
        self._rides: dict[str, Ride] = {}

    @property
    def tasks(self) -> Sequence[str]:
        """What may be asked for, by name."""
        return tuple(self._services)

    def states(self, name: str) -> AsyncIterator[TaskState]:
        """What becomes of the model of a task, at every change; of the first one for no task."""
        service = self._services.get(name) or next(iter(self._services.values()))
        return self.dispatcher.states(service.task)

    def stop(self, id: str, tab: str, forget: bool = False) -> bool:
        """Stop a call if that tab made it; a foreign or unknown id changes nothing."""
        ride = self._rides.get(id)
        if ride is None or ride.caller.tab != tab:
            return False
        ride.forgotten = forget
        ride.stop()
        return True

    async def follow(self, task: str, payload: Any, caller: Caller) -> AsyncGenerator[View, None]:
        """Views of one request until its end; closing the iterator early counts as leaving."""
        ride = self._rides[caller.id] = Ride(caller, stopped=caller.gone)
        try:
            yield View(Phase.WAITING, "One moment")
            async for view in self._views(ride, task, payload):
                if not ride.forgotten:
                    yield view
            if ride.forgotten:
                yield View(Phase.FORGOTTEN, "")
        except (Invalid, Full) as error:
            yield View(Phase.REFUSED, str(error))
        finally:
            del self._rides[caller.id]
            self._leave(ride)

    async def _views(self, ride: Ride, name: str, payload: Any) -> AsyncIterator[View]:
        service = self._services[name]
        task = service.task
        self.dispatcher.want(task)
        state = self.dispatcher.state(task)
        if state.card is None:  # refused now rather than after it has waited
            service.judge(payload)
        while state.card is None and not ride.stopped:
            if state.error:
                yield View(Phase.FAILED, f"The model could not be loaded. {state.error}")
                return
            yield View(Phase.LOADING, loading_line(state))
            await asyncio.sleep(self._pace())
            state = await self.dispatcher.loaded(task, BEAT - self._pace())
        if state.card is not None:
            request = await asyncio.to_thread(service.check, payload, state.card)
        if ride.stopped:
            yield View(Phase.STOPPED, "Stopped before it began")
            return
        person = ride.caller.person
        if not person.capped:  # an address may be many people: no cache serves two of their tabs
            request = replace(request, salt=ride.caller.tab)
        ride.stream = self.dispatcher.submit(request, person.name, capped=person.capped)
        async for view in self._stream_views(task, ride.stream):
            yield view
        yield await self._last(service, request, ride)

    async def _stream_views(self, task: str, stream: Stream) -> AsyncIterator[View]:
        version = stream.version
        while not stream.status.terminal:
            yield self._view(task, stream)
            await asyncio.sleep(self._pace())
            version = await stream.changed(version, BEAT - self._pace())

    def _view(self, task: str, stream: Stream) -> View:
        state = self.dispatcher.state(task)
        if state.card is None:
            return View(Phase.LOADING, restarting_line(state, stream), stream.text)
        if stream.status is Status.WAITING:
            return View(Phase.WAITING, waiting_line(self.dispatcher.place(stream.id)))
        if state.away:
            return View(Phase.LOADING, restarting_line(state, stream), stream.text)
        return View(Phase.RUNNING, running_line(stream), stream.text)

    async def _last(self, service: Service, request: Request, ride: Ride) -> View:
        stream = ride.stream
        if stream is None:
            raise RuntimeError("A call ended that was never queued. This is a bug.")
        if stream.status is Status.CANCELLED:
            return View(Phase.STOPPED, str(stream.error), stream.text)
        if stream.status is not Status.FINISHED:
            return View(Phase.FAILED, str(stream.error or stream.status), stream.text)
        result = await asyncio.to_thread(service.finish, request, stream.result)
        ended = stream.times.ended or 0.0
        ran = ended - (stream.times.started or ended)
        line = service.summary(result, monotonic() - ride.asked, ran)
        return View(Phase.FINISHED, line, stream.text, result)

    def _pace(self) -> float:
        return min(max(PACE, SHARE * len(self._rides)), BEAT / 2)

    def _leave(self, ride: Ride) -> None:
        stream = ride.stream
        if stream is not None and not stream.status.terminal:
            asyncio.get_running_loop().call_later(self._grace, stream.cancel)
