"""The front desk: takes one payload from check to end and says, in sentences, what becomes of it.

Pages and APIs differ only in how they show a View. It knows no page, no transport and no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

from queueing.bulk import Bulk, Progress, Seats
from queueing.clock import monotonic
from queueing.dispatcher import Dispatcher
from queueing.freight import Freight, Haul
from queueing.lines import carrying_line, loading_line, restarting_line, running_line, waiting_line
from queueing.people import Person
from queueing.stream import Stream
from queueing.work import Card, CarpoolError, Front, Full, Invalid, Request, Status, TaskState

BEAT = 0.9  # seconds: at least one View in each, because only a yield notices a caller that left
PACE = 1 / 12  # seconds between two Views of one ride, longer when many ride
SHARE = (
    1 / 150
)  # seconds of pace that each ride adds: a View costs 1.3 ms, so at most a fifth of a core
CALM = 0.25  # seconds between two Views of a file


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


ENDS = {
    Status.FINISHED: Phase.FINISHED,
    Status.CANCELLED: Phase.STOPPED,
    Status.FAILED: Phase.FAILED,
}


@dataclass(frozen=True, slots=True)
class View:
    """What a caller may see now: where the request is, in a sentence, and all text so far."""

    phase: Phase
    line: str
    text: str = ""
    result: Any = None  # of what has finished
    progress: Progress | None = None  # of a file
    preview: Any = None  # the latest, of what shows before it has finished
    fraction: float | None = None  # done of it, where that is told


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, under which id, and which tab may cancel that id."""

    person: Person
    id: str
    tab: str
    gone: bool = False  # cancelled before the call got here

    @property
    def seat(self) -> str:
        """What has one file at a time; of an address, which may be many people, a tab."""
        return self.person.name if self.person.capped else f"{self.person.name} {self.tab}"


class Unloaded(CarpoolError):
    """Raised for a request to a model that could not be brought up."""


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
    bulk: Bulk | None = None  # of a file
    asked: float = field(default_factory=monotonic)

    def stop(self) -> None:
        self.stopped = True
        if self.stream is not None:
            self.stream.cancel()
        if self.bulk is not None:
            self.bulk.stop()


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
        self._seats = Seats()

    @property
    def tasks(self) -> Sequence[str]:
        """What may be asked for, by name."""
        return tuple(self._services)

    def states(self, name: str) -> AsyncIterator[TaskState]:
        """What becomes of the model of a task, at every change; of the first one for no task."""
        service = self._services.get(name) or next(iter(self._services.values()))
        return self.dispatcher.states(service.task)

    def want(self, name: str) -> None:
        """Somebody will ask for this task soon."""
        self.dispatcher.want(self._services[name].task)

    def stop(self, id: str, tab: str, forget: bool = False) -> bool:
        """Stop a call if that tab made it; a foreign or unknown id changes nothing."""
        ride = self._rides.get(id)
        if ride is None or ride.caller.tab != tab:
            return False
        ride.forgotten = forget
        ride.stop()
        return True

    def follow(self, task: str, payload: Any, caller: Caller) -> AsyncGenerator[View, None]:
        """Views of one request until its end; closing the iterator early counts as leaving."""
        ride = Ride(caller, stopped=caller.gone)
        return self._told(ride, self._views(ride, self._services[task], payload))

    def carry(self, task: str, freight: Freight, caller: Caller) -> AsyncGenerator[View, None]:
        """The same of a whole file, one a person; it rides when nobody else waits, and ends at once
        when its caller leaves.
        """
        ride = Ride(caller, stopped=caller.gone)
        return self._told(ride, self._carried(ride, self._services[task], freight))

    async def _told(
        self, ride: Ride, views: AsyncGenerator[View, None]
    ) -> AsyncGenerator[View, None]:
        self._rides[ride.caller.id] = ride
        try:
            yield View(Phase.WAITING, "One moment")
            async with aclosing(views):
                async for view in views:
                    if not ride.forgotten:
                        yield view
            if ride.forgotten:
                yield View(Phase.FORGOTTEN, "")
        except (Invalid, Full) as error:
            yield View(Phase.REFUSED, str(error))
        except Unloaded as error:
            yield View(Phase.FAILED, str(error))
        finally:
            del self._rides[ride.caller.id]
            self._leave(ride)

    async def _views(
        self, ride: Ride, service: Service, payload: Any
    ) -> AsyncGenerator[View, None]:
        if self._card(service) is None:  # refused now rather than after it has waited
            service.judge(payload)
        async with aclosing(self._loading(ride, service.task)) as views:
            async for view in views:
                yield view
        if card := self._card(service):
            request = await asyncio.to_thread(service.check, payload, card)
        if ride.stopped:
            yield View(Phase.STOPPED, "Stopped before it began")
            return
        ride.stream = self._submit(request, ride.caller)
        async for view in self._stream_views(service.task, ride.stream):
            yield view
        yield await self._last(service, request, ride)

    async def _carried(
        self, ride: Ride, service: Service, freight: Freight
    ) -> AsyncGenerator[View, None]:
        caller = ride.caller
        with self._seats.taken(caller.seat):
            total = await asyncio.to_thread(freight.open)
            await asyncio.to_thread(freight.prove, service.judge)
            async with aclosing(self._loading(ride, service.task)) as views:
                async for view in views:
                    yield view
            if card := self._card(service):
                check = partial(service.check, card=card)
                await asyncio.to_thread(freight.prove, check)
            if ride.stopped or card is None:
                yield View(Phase.STOPPED, "Stopped before it began")
                return
            haul = Haul(freight, check, service.finish, partial(self._submit, caller=caller))
            ride.bulk = Bulk(freight, total, haul)
            async with aclosing(ride.bulk.run()) as news:
                due = monotonic()
                async for progress in news:
                    if progress.status.terminal or monotonic() >= due:
                        due = monotonic() + max(CALM, self._pace())
                        yield self._carrying(service.task, progress)

    async def _loading(self, ride: Ride, task: str) -> AsyncGenerator[View, None]:
        """Until the model is there or the ride is stopped; raises Unloaded."""
        self.dispatcher.want(task)
        state = self.dispatcher.state(task)
        while state.card is None and not ride.stopped:
            if state.error:
                raise Unloaded(f"The model could not be loaded. {state.error}")
            yield View(Phase.LOADING, loading_line(state))
            await asyncio.sleep(self._pace())
            state = await self.dispatcher.loaded(task, BEAT - self._pace())

    def _card(self, service: Service) -> Card | None:
        return self.dispatcher.state(service.task).card

    def _submit(self, request: Request, caller: Caller) -> Stream:
        person = caller.person
        if not person.capped:  # an address may be many people: no cache serves two of their tabs
            request = replace(request, salt=caller.tab)
        return self.dispatcher.submit(request, person.name, capped=person.capped)

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
        seen = {"preview": stream.preview, "fraction": stream.progress}
        return View(Phase.RUNNING, running_line(stream), stream.text, **seen)

    def _carrying(self, task: str, progress: Progress) -> View:
        state, phase = self.dispatcher.state(task), ENDS.get(progress.status, Phase.RUNNING)
        if phase is Phase.RUNNING and (state.card is None or state.away):
            line = loading_line(state, "Your file goes on after that")
            return View(Phase.LOADING, line, progress=progress)
        return View(phase, carrying_line(progress), progress=progress)

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
