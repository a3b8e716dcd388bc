"""What a worker process says, in which order, and what is known of a call when it dies."""

from __future__ import annotations

import os
import pickle
import random
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from pipelines.fake import FakeJob, FakePipeline, Kind, expected
from queueing import process
from queueing.messages import Call, Calling, Drain, Load, Loading, Ready, Report, Start, Up
from queueing.process import HEADER, ProcessWorker, _Note, _Pipe
from queueing.work import Advance, Output, Policy, Reason, Row, Status, WorkerLost
from queueing.worker import Outbox
from tests.test_workers import ended, room

POLICIES = {"chat": Policy(rows=2)}
OVER = Loading("chat", 1.0, "over")


class Greedy(FakePipeline):
    """Lets no other thread run, unless it waits itself, and strikes in its third call."""

    def __init__(self, strike: str, **knobs: Any) -> None:
        super().__init__(**knobs)
        self._third = {"crash": lambda: os._exit(13), "hang": self._spin}[strike]
        sys.setswitchinterval(1000.0)

    def _spin(self) -> None:
        while True:
            pass

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> list[Advance | Exception]:
        if self.calls == 2:
            self._third()
        return super().step(rows, grants)


class Sealed(FakePipeline):
    """Its results, unlike its words, cannot cross processes."""

    def _output(self, job: FakeJob, start: int, end: int) -> Output:
        output = super()._output(job, start, end)
        return Output(output.at, output.delta, result=lambda: None) if job.result else output


def report(ids: tuple[str, ...], size: int = 0) -> Report:
    call = Call("chat", "key", Reason.FULL, ids, 1, 1.0, 1.0, 0.1, 8.0)
    return Report({"a": Output(result=b"x" * size)}, {}, {}, {}, {}, call, {}, 0)


def schedule(seed: int, count: int) -> list[tuple[str, Up]]:
    """What an engine may say, and whether it is held for the next message or told at once."""
    rng, steps = random.Random(seed), list[tuple[str, Up]]()
    for number in range(count):
        ids = (str(number),)
        steps.append(("tell", Calling(ids, 0.1)))
        steps.append(("hold", report(ids, rng.choice((0, 100, 300_000)))))
        if rng.random() < 0.2:
            steps.append(("tell", Loading("chat", number, "")))
        if rng.random() < 0.2:
            steps.append(("hold", Report({}, {}, {}, {}, {}, None, {}, number)))
    return steps


class Recorded(_Note):
    """One that knows all that was ever noted."""

    def __init__(self) -> None:
        super().__init__(tempfile.TemporaryFile())
        self.written: list[Calling] = []

    def write(self, calling: Calling) -> None:
        self.written.append(calling)
        super().write(calling)


class Line:
    """An outbox over a pipe, and an application that reads from when it is told to until the end
    of the block.
    """

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self.note = Recorded()
        self.outbox = Outbox(_Pipe(theirs.detach(), self.note).send)
        self.arrived: list[Up] = []
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        if self._reader.ident is None:
            self.open()
        self.outbox.tell(OVER)
        self._reader.join(10)

    def open(self) -> None:
        self._reader.start()

    def _read(self) -> None:
        with self._ours, self._ours.makefile("rb") as file:
            while OVER not in self.arrived:
                self.arrived.extend(pickle.loads(file.read(*HEADER.unpack(file.read(HEADER.size)))))


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_in_the_order_in_which_they_were_told(seed):
    steps = schedule(seed, 60)
    with Line() as line:
        line.open()
        for verb, message in steps:
            getattr(line.outbox, verb)(message)
    assert line.arrived == [*(message for _, message in steps), OVER]


def test_a_call_begins_before_the_earlier_ones_report_is_sent_and_is_noted_until_then():
    large, calling = report(("a",), 5_000_000), Calling(("b",), 0.1)
    with Line() as line:
        line.outbox.hold(large)
        line.outbox.tell(calling)  # nobody reads yet
        assert line.note.read() == [calling]
    assert line.note.read() == []
    assert line.arrived == [large, calling, OVER]


@pytest.mark.parametrize("first", [report(()), Loading("chat", 0.0, "")])
def test_a_call_that_follows_none_is_told_before_it_begins(first):
    """There the application watches no call, so that a hang would never be seen."""
    calling = Calling(("b",), 0.1)
    with Line() as line:
        line.outbox.hold(first)
        line.outbox.tell(calling)
    assert line.note.written == []
    assert line.arrived == [first, calling, OVER]


async def lives(worker: ProcessWorker, *ids: str) -> list[Up]:
    """Everything a worker says that is given these streams at once, until it leaves or dies."""
    said: list[Up] = []

    def receive(message: Up) -> None:
        said.append(message)
        if isinstance(message, Ready):
            job = FakeJob(Kind.STREAM, 8, 6)
            requests = tuple(job.request(task="chat", id=id, session=id) for id in ids)
            served, left = dict.fromkeys(ids, 0.0), dict.fromkeys(ids, 60.0)
            for order in (Load("chat"), Start(1, requests, {}, served, left), Drain()):
                worker.send(order)

    with pytest.raises(WorkerLost):
        await worker.run(receive)
    return said


def calls(said: Sequence[Up]) -> list[tuple[str, tuple[str, ...]]]:
    """The calls that began and those that are reported."""
    return [
        ("began", one.ids) if isinstance(one, Calling) else ("ended", one.call.ids)
        for one in said
        if isinstance(one, Calling) or (isinstance(one, Report) and one.call and one.call.ids)
    ]


async def test_every_report_comes_before_the_next_call_and_the_last_one_before_a_worker_leaves():
    factories = {"chat": ("pipelines.fake:FakePipeline", {"forward": 0.001})}
    said = await lives(ProcessWorker(factories, POLICIES), "a", "b", "c", "d")
    pairs = calls(said)
    assert [kind for kind, _ in pairs] == ["began", "ended"] * (len(pairs) // 2)
    assert [ids for _, ids in pairs[::2]] == [ids for _, ids in pairs[1::2]]
    assert {id for one in said if isinstance(one, Report) for id in one.ended} == set("abcd")


@pytest.mark.parametrize("strike", ["crash", "hang"])
async def test_a_call_that_dies_before_its_news_is_sent_is_known_nevertheless(strike, monkeypatch):
    monkeypatch.setattr(process, "HANG_SECONDS", 0.5)
    factories = {"chat": ("tests.test_reports:Greedy", {"strike": strike, "forward": 0.001})}
    said = await lives(ProcessWorker(factories, {"chat": Policy(rows=1)}), "a", "b")
    assert [kind for kind, _ in calls(said)] == ["began", "ended", "began", "began"]
    assert isinstance(said[-1], Calling)


async def test_a_result_that_cannot_cross_costs_its_request_and_nobody_elses():
    async with room(ProcessWorker, "tests.test_reports:Sealed") as it:
        jobs = [FakeJob(Kind.STREAM, 4, 150, seed=i) for i in range(4)]
        good = [it.submit(job, f"p{i}") for i, job in enumerate(jobs)]
        bad = it.submit(FakeJob(Kind.STREAM, 4, 10, result="sealed"), "bad")
        assert set(await ended(*good)) == {Status.FINISHED}
        assert [stream.text for stream in good] == [expected(job)[0] for job in jobs]
        assert await ended(bad) == [Status.FAILED]
        assert isinstance(bad.error, WorkerLost)
