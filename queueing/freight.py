"""A file on its way through the queue: what it must give, and how its lines become requests.

It knows no format of files, no task and no page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from queueing.bulk import Line, Row
from queueing.stream import Stream
from queueing.work import Request


class Freight(Protocol):
    """Many lines that somebody brings, and where their results go. All is called in threads."""

    def open(self) -> int:
        """How many lines there are; raises Invalid."""
        ...

    def __iter__(self) -> Iterator[Line]: ...

    def prove(self, check: Callable[[Any], object]) -> None:
        """Have all but the lines checked; raises Invalid for what no line could mend."""
        ...

    def payload(self, texts: Sequence[str]) -> Any:
        """What is asked of these texts."""
        ...

    def rows(self, result: Any) -> Sequence[Any]:
        """What each text came to, of those that were computed."""
        ...

    def write(self, rows: Sequence[Row]) -> None:
        """Keep the next rows."""
        ...


@dataclass(frozen=True, slots=True)
class Haul:
    """What is done with the lines of a file."""

    freight: Freight
    make: Callable[[Any], Request]  # of a payload; raises Invalid
    finish: Callable[[Request, Any], Any]
    put: Callable[[Request], Stream]  # into the queue; raises Full

    async def check(self, texts: Sequence[str]) -> Request:
        return await asyncio.to_thread(self.make, self.freight.payload(texts))

    def submit(self, request: Request) -> Stream:
        return self.put(request)

    def read(self, request: Request, result: Any) -> Sequence[Any]:
        return self.freight.rows(self.finish(request, result))

    def write(self, rows: Sequence[Row]) -> None:
        self.freight.write(rows)
