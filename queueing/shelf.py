"""Files that people brought or get, and the room they may take: the oldest make way for others.

It knows HTTP requests and which files the page holds; what is in them it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from os import stat_result
from pathlib import Path

from queueing.payload import Application, Message, Receive, Send

MOST, COUNT = 4_000_000_000, 10_000  # bytes, and files
AGE, OFTEN = 3600, 300  # seconds that one is kept, and between two looks at their ages


class Held(set[str]):
    """Names of all files; they may be looked through while others come, as Gradio does in a
    thread, whose cleaning would end for ever at the first that came in between.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(list(super().__iter__()))


@dataclass(frozen=True, slots=True)
class Shelf:
    """ASGI middleware: before a file comes, room is made for it."""

    app: Application

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].rstrip("/").endswith("/upload"):
            files: set[str] = scope["app"].get_blocks().upload_file_set
            await asyncio.to_thread(make_room, files)
        await self.app(scope, receive, send)


def make_room(files: set[str], most: int = MOST, count: int = COUNT) -> None:
    """Delete the oldest, until the others are within bounds."""
    found = sorted(_held(files), key=lambda each: each[0].st_mtime)
    total = sum(stat.st_size for stat, _ in found)
    for place, (stat, path) in enumerate(found):
        if total <= most and len(found) - place <= count:
            return
        path.unlink(missing_ok=True)
        with suppress(OSError):
            path.parent.rmdir()
        files.discard(str(path))
        total -= stat.st_size


def _held(files: set[str]) -> Iterator[tuple[stat_result, Path]]:
    """Those that are still there; the others are forgotten."""
    for name in tuple(files):
        try:
            yield Path(name).stat(), Path(name)
        except FileNotFoundError:
            files.discard(name)
