"""Bulk work: a long list fed as background requests, two in flight, its results in order.

A chunk that fails costs its own lines; stopping, or closing the iterator, ends what is in flight at
once and keeps what was written. It knows no task, no file and no page.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

from queueing.clock import Clock, monotonic
from queueing.stream import Stream
from queueing.work import Cancelled, CarpoolError, Full, Invalid, Priority, Request, Status

CHUNK, CHARACTERS = 256, 200_000  # lines of one request, and characters of more lines than one
FLIGHT = 2  # requests that wait or run, so that the device need not wait for us
FAILURES = 3  # chunks in a row of which nothing came, after which the rest would not fare better
TRIES, PATIENCE = (
    20,
    60.0,
)  # times that a full queue is asked again, and seconds between two at most
BEAT = 0.9  # seconds: at least one Progress in each, because only a yield notices a page that left
LATELY = 10  # chunks over which speed is told


class Line(Protocol):
    """A text, or the reason why there is none."""

    @property
    def text(self) -> str: ...

    @property
    def error(self) -> str: ...


Row: TypeAlias = tuple[Any, Any, str]  # a line, its result or None, its error or nothing


class Errand(Protocol):
    """What is done with lines."""

    async def check(self, texts: Sequence[str]) -> Request:
        """A request for all texts but those in its payload's `errors`; raises Invalid."""
        ...

    def submit(self, request: Request) -> Stream:
        """Queue it; raises Full."""
        ...

    def read(self, request: Request, result: Any) -> Sequence[Any]:
        """What each text came to, of those that were computed; called in a thread."""
        ...

    def write(self, rows: Sequence[Row]) -> None:
        """Keep the next rows; called in a thread."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is: RUNNING, then FINISHED, CANCELLED or FAILED, with what was written."""

    status: Status
    done: int
    total: int
    failed: int  # lines among those done
    seconds: float
    rate: float | None = None  # lines a second, lately
    error: str = ""

    @property
    def fraction(self) -> float:
        return self.done / self.total if self.total else 1.0

    @property
    def eta(self) -> float | None:
        """Seconds to go."""
        return (self.total - self.done) / self.rate if self.rate else None


class Seats:
    """Who has a run: one a person, so many in all."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._taken: set[str] = set()

    @contextmanager
    def taken(self, person: str) -> Iterator[None]:
        """Raises Full."""
        if person in self._taken:
            raise Full("A file of yours is running; wait for its end, or stop it.", 10.0)
        if len(self._taken) >= self._most:
            raise Full(f"{self._most} files are running, the limit; try again in a minute.", 60.0)
        self._taken.add(person)
        try:
            yield
        finally:
            self._taken.remove(person)


@dataclass(slots=True, eq=False)
class Ride:
    """One chunk on its way, as one request, or as several where no single one could hold it."""

    lines: list[Line]
    stream: Stream | None = None
    lost: CarpoolError | None = None
    task: asyncio.Task[list[Row]] = field(init=False)

    def cancel(self) -> None:
        if self.stream is not None:
            self.stream.cancel()
        self.task.cancel()


class Bulk:
    """One run over many lines."""

    def __init__(
        self, lines: Iterable[Line], total: int, errand: Errand, clock: Clock = monotonic
    ) -> None:
        self._lines = iter(lines)
        self._ahead: Line | None = None
        self._errand = errand
        self._clock = clock
        self._began = clock()
        self._rides: deque[Ride] = deque()
        self._progress = Progress(Status.RUNNING, 0, total, 0, 0.0)
        self._landings: deque[tuple[float, int]] = deque(maxlen=LATELY)
        self._failures = 0
        self._writing: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """End what is in flight now; what has come is still written."""
        self._end(Status.CANCELLED, "Stopped")

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Where it is, whenever a chunk has been written and at least once a second."""
        try:
            await self._depart()
            while self._rides and (self._running or self._arrived):
                yield self._now()
                await self._land()
        except Cancelled as error:  # by a server that goes down
            self._end(Status.FAILED, str(error))
        except OSError as error:
            why = f"The results could not be written: {error.strerror or error}."
            self._end(Status.FAILED, why)
        finally:
            for ride in self._rides:
                ride.cancel()
            left: list[asyncio.Future[Any]] = [ride.task for ride in self._rides]
            left += [self._writing] if self._writing is not None else []
            await asyncio.gather(*left, return_exceptions=True)
        self._end(Status.FINISHED, "")
        yield self._now()

    @property
    def _running(self) -> bool:
        return self._progress.status is Status.RUNNING

    @property
    def _arrived(self) -> bool:
        task = self._rides[0].task
        return task.done() and not task.cancelled()

    def _end(self, status: Status, error: str) -> None:
        """The first end is the one."""
        if self._running:
            self._progress = replace(self._progress, status=status, error=error)
            for ride in self._rides:
                ride.cancel()

    def _now(self) -> Progress:
        now, rate = self._clock(), None
        if self._landings:
            since, before = self._landings[0]
            rate = (self._progress.done - before) / max(now - since, 1e-3)
        self._progress = replace(self._progress, seconds=now - self._began, rate=rate)
        return self._progress

    async def _depart(self) -> None:
        while len(self._rides) < FLIGHT:
            lines = await asyncio.to_thread(self._take)
            if not lines or not self._running:
                return
            ride = Ride(lines)
            ride.task = asyncio.create_task(self._ride(ride))
            self._rides.append(ride)
            if not self._landings:
                self._landings.append((self._clock(), 0))

    def _take(self) -> list[Line]:
        """The next lines, as many as one request may have."""
        taken, characters = list[Line](), 0
        while len(taken) < CHUNK:
            line = next(self._lines, None) if self._ahead is None else self._ahead
            self._ahead = line
            if line is None or (taken and characters + len(line.text) > CHARACTERS):
                break
            taken.append(line)
            characters += len(line.text)
            self._ahead = None
        return taken

    async def _land(self) -> None:
        """Write the first chunk once it is there, and send the next one off."""
        await asyncio.wait((self._rides[0].task,), timeout=BEAT)
        if not self._arrived:
            return
        ride = self._rides.popleft()
        rows = ride.task.result()
        if self._running:
            await self._depart()
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._errand.write, rows))
        await asyncio.shield(self._writing)
        failed = sum(bool(error) for _, _, error in rows)
        done, failed = self._progress.done + len(rows), self._progress.failed + failed
        self._progress = replace(self._progress, done=done, failed=failed)
        self._landings.append((self._clock(), done))
        self._judge(ride, rows)

    def _judge(self, ride: Ride, rows: Sequence[Row]) -> None:
        """Chunks of nothing but bad lines say nothing of how others will fare."""
        if any(not error for _, _, error in rows):
            self._failures = 0
        elif ride.lost is not None:
            self._failures += 1
            if self._failures == FAILURES:
                why = f"{FAILURES} parts in a row failed. {ride.lost}"
                self._end(Status.FAILED, why)

    async def _ride(self, ride: Ride) -> list[Row]:
        """What became of every line of a chunk."""
        texts = [line.text for line in ride.lines if not line.error]
        came = iter(await self._results(ride, texts) if texts else [])
        return [
            (line, None, line.error) if line.error else (line, *next(came)) for line in ride.lines
        ]

    async def _results(self, ride: Ride, texts: Sequence[str]) -> list[tuple[Any, str]]:
        """A result or an error for every text; those that no single request may hold go in two."""
        errors: dict[int, str] = {}
        try:
            request = await self._errand.check(texts)
            errors = dict(request.payload.errors)
            result = await self._sent(ride, replace(request, priority=Priority.BACKGROUND))
        except Cancelled:
            raise
        except Invalid as error:
            if len(texts) == 1:
                return [(None, str(error))]
            half = len(texts) // 2
            first = await self._results(ride, texts[:half])
            return [*first, *await self._results(ride, texts[half:])]
        except CarpoolError as error:
            ride.lost = error
            return [(None, errors.get(place, str(error))) for place in range(len(texts))]
        came = iter(await asyncio.to_thread(self._errand.read, request, result))
        return [
            (None, errors[place]) if place in errors else (next(came), "")
            for place in range(len(texts))
        ]

    async def _sent(self, ride: Ride, request: Request) -> Any:
        """The result of a request; a full queue is waited for, as long as it says."""
        for _ in range(TRIES):
            try:
                stream = ride.stream = self._errand.submit(request)
                version = -1
                while not stream.status.terminal:
                    version = await stream.changed(version, BEAT)
                if stream.status is Status.FINISHED:
                    return stream.result
                error = stream.error or CarpoolError(f"The request is {stream.status}.")
            except Full as full:
                error = full
            if not isinstance(error, Full):
                break
            await asyncio.sleep(min(error.retry_after, PATIENCE))
        raise error
