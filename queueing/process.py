"""The worker that is a process of its own: a crash, a hang or a leak takes it and not the
application.

Started as a module with dotted factory names, never by importing the application again. Messages
are length-prefixed pickles over a socket pair that nobody else holds; what a call gave is sent
while the next one runs. It knows engines only through `serve`.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from queueing.clock import monotonic
from queueing.engine import Engine
from queueing.messages import Call, Calling, Cancel, Down, Report, Up
from queueing.work import (
    Policy,
    WorkerLost,
)
from queueing.worker import Factory, Inbox, Outbox, Receive, build, serve

log = logging.getLogger("carpool.process")

ROOT = str(Path(__file__).resolve().parent.parent)
HEADER = struct.Struct("!I")
HANG_SECONDS = 60.0  # a call may take this long at least
HANG_FACTOR = 20.0  # and this many times what was predicted
# Threads that wait for each other sleep: spinning, two on two cores were five times slower as soon
# as anybody else used one of them.
CALM = {"OMP_WAIT_POLICY": "PASSIVE"}
LEAVE_SECONDS = 2.0  # to end by itself before it is killed


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message down."""

    factories: Mapping[str, Factory]
    policies: Mapping[str, Policy]
    budget: int | None


def _frame(message: object) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


class _Note:
    """Which call has begun while its news is still to be sent, where a crash does not reach it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, calling: Calling) -> None:
        os.pwrite(self._file.fileno(), pickle.dumps(calling), 0)

    def clear(self) -> None:
        os.ftruncate(self._file.fileno(), 0)

    def read(self) -> Sequence[Calling]:
        """It, or none."""
        body = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        return [pickle.loads(body)] if body else []


def _memory() -> BinaryIO:
    """A file for processes to share; on Linux it takes no disk."""
    if sys.platform == "linux":
        return open(os.memfd_create("carpool"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


class ProcessWorker:
    """The application's side of one worker process."""

    def __init__(
        self,
        factories: Mapping[str, Factory],
        policies: Mapping[str, Policy],
        budget: int | None = None,  # bytes that models may hold together
    ) -> None:
        self._setup = Setup(factories, policies, budget)
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    async def run(self, receive: Receive) -> None:
        ours, theirs = socket.socketpair()
        with _memory() as memory:
            with theirs:
                self._process = await _spawn(theirs.fileno(), memory.fileno())
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._writer.write(_frame(self._setup))
            try:
                await self._listen(reader, receive)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                status = await self._reap()
                for calling in _Note(memory).read():
                    receive(calling)
                raise WorkerLost(f"The worker process ended with {status}.") from error
            finally:
                await self.stop()

    async def _listen(self, reader: asyncio.StreamReader, receive: Receive) -> NoReturn:
        while True:
            (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
            messages: list[Up] = pickle.loads(await reader.readexactly(size))
            for message in messages:
                self._watch(message)
                receive(message)

    def send(self, message: Down) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_frame(message))

    async def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._writer is not None:
            self._writer.close()  # the process sees its end of the pair close, and leaves
        await self._reap()

    async def _reap(self) -> int | None:
        """Wait for the process, a little; then end it."""
        if self._process is None:
            return None
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            self._kill()
            return await self._process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _watch(self, message: Up) -> None:
        """A call that takes far longer than predicted is a hang, and its worker is killed."""
        if isinstance(message, Calling | Report) and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if isinstance(message, Calling):
            bound = max(HANG_SECONDS, HANG_FACTOR * message.seconds)
            self._alarm = asyncio.get_running_loop().call_later(bound, self._hung, bound)

    def _hung(self, bound: float) -> None:
        log.error("a device call took over %.0f s; its worker is killed", bound)
        self._kill()


async def _spawn(*descriptors: int) -> asyncio.subprocess.Process:
    paths = [ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "queueing.process",
        *map(str, descriptors),
        pass_fds=descriptors,
        env={**CALM, **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


class _Pipe:
    """The process's side of the socket pair."""

    def __init__(self, descriptor: int, note: _Note) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._file = self._socket.makefile("rb")
        self._note = note
        self._later: queue.SimpleQueue[Sequence[Up]] = queue.SimpleQueue()
        self._all_sent = threading.Lock()  # held while a frame is on its way
        threading.Thread(target=self._send_later, daemon=True).start()

    def read(self) -> object | None:
        """The next message; None when the application is gone."""
        try:
            header = self._file.read(HEADER.size)
            if len(header) < HEADER.size:
                return None
            message: object = pickle.loads(self._file.read(*HEADER.unpack(header)))
        except OSError:
            return None
        return message

    def send(self, messages: Sequence[Up]) -> None:
        """In order. A call that follows another begins before its news is sent: it is in the note,
        and the application watches the earlier one until then.
        """
        self._all_sent.acquire()
        match messages:
            case [Report(call=Call(ids=[_, *_])), Calling() as calling]:
                self._note.write(calling)
                self._later.put(messages)
            case _:
                self._write(messages)
                self._all_sent.release()

    def _send_later(self) -> None:
        """Send while the call runs; what cannot be sent ends the process, as in its main thread."""
        try:
            while True:
                self._write(self._later.get())
                self._note.clear()
                self._all_sent.release()
        finally:
            log.critical("a report cannot be sent", exc_info=True)
            os._exit(1)

    def _write(self, messages: Sequence[Up]) -> None:
        try:
            self._socket.sendall(_frame(messages))
        except OSError:
            _leave()


def _listen(pipe: _Pipe, inbox: Inbox, engine: Engine) -> None:
    """Read messages for ever; cancels are flagged at once, for a long step to see."""
    while (message := pipe.read()) is not None:
        if isinstance(message, Cancel):
            engine.flag(message.id)
        inbox.put(message)  # type: ignore[arg-type]
    _leave()


def _leave() -> NoReturn:
    """The application is gone: so are we, whatever the device does."""
    os._exit(0)


def main(descriptor: int, note: int) -> None:
    """The life of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the application, which closes us
    pipe = _Pipe(descriptor, _Note(open(note, "r+b", buffering=0)))
    setup = pipe.read()
    if not isinstance(setup, Setup):
        raise TypeError(f"expected Setup, got {type(setup).__name__}. This is a bug.")
    inbox: Inbox = queue.SimpleQueue()
    outbox = Outbox(pipe.send)
    pipelines = build(setup.factories)
    engine = Engine(pipelines, setup.policies, monotonic, outbox.tell, setup.budget)
    threading.Thread(target=_listen, args=(pipe, inbox, engine), daemon=True).start()
    gc.freeze()  # what is there by now stays; looking through it again would hold calls up
    serve(engine, inbox, outbox, monotonic)


if __name__ == "__main__":
    # Run under its real name, so that messages pickle as what the application knows.
    from queueing import process

    logging.basicConfig(level=(os.environ.get("CARPOOL_LOG") or "WARNING").upper())
    process.main(*map(int, sys.argv[1:]))
