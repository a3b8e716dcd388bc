"""One request's whole output, kept while anybody may read it, read by offset.

Text accumulates, a preview, progress and a result replace. A slow reader costs nothing and a reader
that returns continues where it was. It does not know queues, workers or pages; only `changed` needs
a loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from queueing.work import CarpoolError, Output, Status


@dataclass(slots=True)
class Times:
    """When a request reached each stage, in seconds of the dispatcher's clock; None where it did
    not.
    """

    submitted: float
    started: float | None = None
    first: float | None = None  # first output beyond mere progress
    ended: float | None = None
    device: float = 0.0  # device-seconds charged


class Stream:
    """The life and output of one request; readers wait for `version` to move."""

    def __init__(self, id: str, submitted: float, cancel: Callable[[], None]) -> None:
        self.id = id
        self.cancel = cancel  # final when called; harmless afterwards
        self.status = Status.WAITING
        self.error: CarpoolError | None = None
        self.preview: Any = None
        self.progress: float | None = None
        self.result: Any = None
        self.times = Times(submitted)
        self.version = 0
        self.riders = 0  # rows in the last device call it rode
        self._parts: list[str] = []
        self._length = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def read(self, offset: int) -> str:
        """The text from `offset` on."""
        return self.text[offset:]

    def put(self, output: Output, now: float) -> None:
        """Take an output; text that the stream already has is skipped, a gap is our bug."""
        if self.status.terminal:
            return
        if output.delta:
            known = self._length - output.at
            if known < 0:
                raise RuntimeError(
                    f"output at {output.at} leaves a gap after {self._length}. This is a bug."
                )
            self._parts.append(output.delta[known:])
            self._length += max(len(output.delta) - known, 0)
        self.preview = self.preview if output.preview is None else output.preview
        self.progress = self.progress if output.progress is None else output.progress
        self.result = self.result if output.result is None else output.result
        shows = output.delta or output.preview is not None or output.result is not None
        if self.times.first is None and shows:
            self.times.first = now
        self._moved()

    def move(self, status: Status, error: CarpoolError | None, now: float) -> None:
        """Enter a status; a terminal one is entered once and for ever."""
        if self.status.terminal:
            raise RuntimeError(
                f"{self.id} ended twice: {self.status}, then {status}. This is a bug."
            )
        self.status, self.error = status, error
        if status is Status.RUNNING and self.times.started is None:
            self.times.started = now
        if status.terminal:
            self.times.ended = now
        self._moved()

    async def changed(self, version: int, seconds: float) -> int:
        """Wait until `version` is not the current one, at most `seconds`; returns the current."""
        if self.version != version or self.status.terminal:
            return self.version
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=seconds)
        finally:
            self._waiters.discard(waiter)
        return self.version

    def _moved(self) -> None:
        self.version += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()
