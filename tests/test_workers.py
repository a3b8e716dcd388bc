"""Real threads and real processes around fake pipelines: races, crashes, hangs, leaks."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipelines.fake import FakeJob, FakePipeline, Kind, expected
from queueing import process
from queueing.clock import monotonic
from queueing.dispatcher import Dispatcher
from queueing.engine import Engine
from queueing.limits import Limits
from queueing.messages import Calling, Drain, Load, Ready, Report, Start, Up
from queueing.process import ProcessWorker
from queueing.stream import Stream
from queueing.work import Policy, Status, WorkerLost
from queueing.worker import Inbox, Outbox, ThreadWorker, Worker, serve

ROOT = Path(__file__).resolve().parent.parent
POLICIES = {"chat": Policy(rows=8)}
FAKE = "pipelines.fake:FakePipeline"
QUICK = {"forward": 0.002, "row": 0.0, "unit": 0.0}


class Room:
    """A dispatcher with one worker, and the worker at hand."""

    def __init__(self, kind: type, pipeline: str = FAKE, **knobs: Any) -> None:
        self.workers: list[Any] = []
        self.kind = kind
        self.factories = {"chat": (pipeline, {**QUICK, **knobs})}
        self.dispatcher = Dispatcher(POLICIES, [self._worker], Limits(waiting=1000))

    def _worker(self) -> Worker:
        self.workers.append(self.kind(self.factories, POLICIES))
        return self.workers[-1]

    def submit(self, job: FakeJob, session: str = "s") -> Stream:
        return self.dispatcher.submit(job.request(task="chat"), session)

    async def up(self) -> None:
        while self.dispatcher.state("chat").card is None:
            await self.dispatcher.loaded("chat", 5.0)


@asynccontextmanager
async def room(kind: type, pipeline: str = FAKE, **knobs: Any) -> AsyncIterator[Room]:
    made = Room(kind, pipeline, **knobs)
    await made.dispatcher.start()
    try:
        yield made
    finally:
        await made.dispatcher.close()


async def until(stream: Stream, holds: Callable[[Stream], bool]) -> None:
    async with asyncio.timeout(30):
        version = -1
        while not holds(stream):
            version = await stream.changed(version, 5.0)


async def ended(*streams: Stream) -> list[Status]:
    for stream in streams:
        await until(stream, lambda stream: stream.status.terminal)
    return [stream.status for stream in streams]


BOTH = pytest.mark.parametrize("kind", [ThreadWorker, ProcessWorker])


@BOTH
async def test_three_kinds_of_work_finish_with_their_own_output(kind):
    async with room(kind) as it:
        jobs = [FakeJob(Kind(k), 8, 10, seed=i) for i in range(6) for k in Kind]
        streams = [it.submit(job, f"p{i % 5}") for i, job in enumerate(jobs)]
        assert set(await ended(*streams)) == {Status.FINISHED}
        assert [(s.text, s.result) for s in streams] == [expected(job) for job in jobs]


@BOTH
async def test_a_request_may_be_submitted_before_the_worker_is_there(kind):
    async with room(kind, load=0.2) as it:
        stream = it.submit(FakeJob(Kind.STREAM, 8, 5))
        assert stream.status is Status.WAITING
        assert await ended(stream) == [Status.FINISHED]


@BOTH
async def test_loading_is_a_status_with_progress(kind):
    async with room(kind, load=0.4) as it:
        fractions = []
        while (state := await it.dispatcher.loaded("chat", 5.0)).card is None:
            fractions.append(state.fraction)
        assert len(set(fractions)) >= 3
        assert it.dispatcher.state("chat").card is not None


@BOTH
async def test_a_cancel_stops_one_and_leaves_its_siblings(kind):
    async with room(kind) as it:
        jobs = [FakeJob(Kind.STREAM, 8, 300, seed=i) for i in range(3)]
        streams = [it.submit(job) for job in jobs]
        await until(streams[1], lambda stream: bool(stream.text))
        streams[1].cancel()
        assert streams[1].status is Status.CANCELLED
        assert (await ended(*streams))[::2] == [Status.FINISHED] * 2
        assert streams[2].text == expected(jobs[2])[0]


async def test_close_ends_everything_and_leaves_no_process():
    made = Room(ProcessWorker)
    await made.dispatcher.start()
    await made.up()
    stream = made.submit(FakeJob(Kind.STREAM, 8, 10_000))
    waiting = [made.submit(FakeJob(Kind.STREAM, 8, 10_000)) for _ in range(20)]
    await until(stream, lambda stream: bool(stream.text))
    pid = made.workers[0].pid
    await made.dispatcher.close()
    assert stream.status is Status.CANCELLED
    assert {one.status for one in waiting} == {Status.CANCELLED}
    assert not psutil.pid_exists(pid)


async def test_kill_9_in_mid_stream_continues_every_stream_to_its_exact_text():
    async with room(ProcessWorker) as it:
        jobs = [FakeJob(Kind.STREAM, 8, 400, seed=i) for i in range(12)]
        streams = [it.submit(job, f"p{i}") for i, job in enumerate(jobs)]
        await until(streams[0], lambda stream: len(stream.text) > 60)
        os.kill(it.workers[0].pid, signal.SIGKILL)
        assert set(await ended(*streams)) == {Status.FINISHED}
        assert [stream.text for stream in streams] == [expected(job)[0] for job in jobs]
        assert it.dispatcher.metrics.restarts == 1


async def test_a_request_that_crashes_its_worker_is_refused_and_nobody_else():
    async with room(ProcessWorker) as it:
        crash = it.submit(replace(FakeJob(Kind.STREAM, 4, 30), crash_at=10), "bad")
        jobs = [FakeJob(Kind.STREAM, 4, 100, seed=i) for i in range(6)]
        streams = [it.submit(job, f"p{i}") for i, job in enumerate(jobs)]
        assert set(await ended(*streams)) == {Status.FINISHED}
        assert await ended(crash) == [Status.FAILED]
        assert isinstance(crash.error, WorkerLost)


@pytest.mark.parametrize("kind", [Kind.SINGLE, Kind.STREAM])
async def test_a_crash_in_a_first_call_counts_as_one(kind):
    async with room(ProcessWorker) as it:
        crash = it.submit(replace(FakeJob(kind, 1, 1), crash_at=0))
        assert await ended(crash) == [Status.FAILED]
        assert it.dispatcher.metrics.restarts == 2  # in a call, then alone


def test_a_report_rides_with_the_news_of_the_next_call_or_goes_when_nothing_follows():
    sent: list[list[Up]] = []
    outbox, pipelines = (
        Outbox(lambda messages: sent.append(list(messages))),
        {"chat": FakePipeline()},
    )
    engine = Engine(pipelines, POLICIES, monotonic, outbox.tell)
    inbox: Inbox = queue.SimpleQueue()
    job = FakeJob(Kind.STREAM, 1, 2).request(task="chat", id="r", session="s")
    for message in (Load("chat"), Start(1, (job,), {}, {"s": 0.0}, {"r": 60.0}), Drain()):
        inbox.put(message)
    serve(engine, inbox, outbox, monotonic)
    kinds = [[type(message) for message in messages] for messages in sent]
    assert kinds[0] == [Ready]
    assert kinds[-2:] == [[Report, Calling], [Report]]
    assert sum(kind is Calling for each in kinds for kind in each) == 3


async def test_a_hang_costs_the_worker_and_not_the_application(monkeypatch):
    monkeypatch.setattr(process, "HANG_SECONDS", 0.5)
    monkeypatch.setattr(process, "HANG_FACTOR", 1.0)
    async with room(ProcessWorker) as it:
        hang = it.submit(replace(FakeJob(Kind.STREAM, 4, 30), hang_at=10), "bad")
        good = it.submit(FakeJob(Kind.STREAM, 4, 50), "good")
        assert await ended(good) == [Status.FINISHED]
        assert await ended(hang) == [Status.FAILED]


@pytest.mark.parametrize("steps", [0, 10_000])
async def test_a_worker_leaves_when_its_application_is_killed(steps):
    script = (
        "import asyncio\n"
        "from tests.test_workers import *\n"
        "async def main():\n"
        "    room = Room(ProcessWorker)\n"
        "    await room.dispatcher.start()\n"
        "    await room.up()\n"
        f"    for _ in range({min(steps, 8)}):\n"
        f"        stream = room.submit(FakeJob(Kind.STREAM, 8, {steps}))\n"
        "        await until(stream, lambda stream: bool(stream.text))\n"
        "    import sys; sys.stdout.write(f'{room.workers[0].pid}\\n'); sys.stdout.flush()\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    application = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert application.stdout is not None
    worker = psutil.Process(int(await application.stdout.readline()))
    application.kill()
    await application.wait()
    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


async def test_an_idle_worker_uses_no_processor():
    async with room(ProcessWorker) as it:
        await it.up()
        worker = psutil.Process(it.workers[0].pid)
        before = sum(worker.cpu_times()[:2])
        await asyncio.sleep(1.0)
        assert sum(worker.cpu_times()[:2]) - before <= 0.02


async def test_two_workers_share_one_queue():
    factories = {"chat": ("pipelines.fake:FakePipeline", QUICK)}

    def worker() -> Worker:
        return ThreadWorker(factories, POLICIES)

    dispatcher = Dispatcher(POLICIES, [worker, worker], Limits(waiting=1000))
    await dispatcher.start()
    jobs = [FakeJob(Kind.STREAM, 4, 60, seed=i) for i in range(32)]
    streams = [dispatcher.submit(job.request(task="chat"), f"p{i}") for i, job in enumerate(jobs)]
    assert set(await ended(*streams)) == {Status.FINISHED}
    assert [stream.text for stream in streams] == [expected(job)[0] for job in jobs]
    assert {record.worker for record in dispatcher.metrics.calls} == {0, 1}
    await dispatcher.close()


async def test_waiting_requests_expire_without_anybody_asking():
    policies = {"chat": Policy(rows=1, timeout=0.3)}
    factories = {"chat": ("pipelines.fake:FakePipeline", {"forward": 0.2})}
    dispatcher = Dispatcher(policies, [lambda: ThreadWorker(factories, policies)])
    await dispatcher.start()
    job = FakeJob(Kind.STREAM, 4, 100)
    streams = [dispatcher.submit(job.request(task="chat"), "one") for _ in range(3)]
    assert await ended(*streams) == [Status.EXPIRED] * 3
    await dispatcher.close()


async def test_ids_cannot_be_guessed():
    async with room(ThreadWorker) as it:
        ids = {it.submit(FakeJob(Kind.SINGLE)).id for _ in range(50)}
        assert len(ids) == 50
        assert all(len(id) >= 20 for id in ids)


async def test_a_model_that_could_not_be_loaded_is_tried_again_when_somebody_asks(tmp_path):
    flag = tmp_path / "there"
    async with room(ThreadWorker, needs=str(flag)) as it:
        while not (state := await it.dispatcher.loaded("chat", 5.0)).error:
            assert state.card is None
        assert "There is no" in state.error
        flag.touch()
        it.dispatcher.want("chat")
        await it.up()
        assert await ended(it.submit(FakeJob(Kind.STREAM, 2, 3))) == [Status.FINISHED]


async def test_whoever_is_cut_off_by_a_shutdown_is_told_so():
    made = Room(ThreadWorker)
    await made.dispatcher.start()
    stream = made.submit(FakeJob(Kind.STREAM, 8, 10_000))
    await until(stream, lambda stream: bool(stream.text))
    await made.dispatcher.close()
    assert "going down" in str(stream.error)
