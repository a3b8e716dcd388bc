"""A worker dies under people: what they are told, and that nothing of theirs is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial

import httpx
import psutil
import pytest

from pipelines.fake import ChatFront
from pipelines.talk import SAMPLING, Question
from queueing.admission import Admission
from queueing.desk import Caller, Desk, Phase, View
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.lines import badge
from queueing.messages import Loaded, Ready
from queueing.people import Person
from queueing.process import ProcessWorker
from queueing.work import Card, Policy, TaskState
from tests.conftest import Launch

POLICIES = {"chat": Policy()}
FACTORIES = {"chat": ("pipelines.fake:FakePipeline", {"load": 0.5})}


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    dispatcher = Dispatcher(POLICIES, [partial(ProcessWorker, FACTORIES, POLICIES)])
    await dispatcher.start()
    yield Desk(dispatcher, {"chat": ChatFront()})
    await dispatcher.close()


def ask(desk: Desk, id: str, tokens: int) -> AsyncIterator[View]:
    sampling = {**SAMPLING, "max_tokens": tokens}
    payload = Question("", None, "Hi", sampling).payload()
    return desk.follow("chat", payload, Caller(Person(id), id, id))


async def ended(views: AsyncIterator[View]) -> list[View]:
    return [view async for view in views]


def kill_worker(desk: Desk) -> None:
    worker = desk.dispatcher._workers[0]
    assert isinstance(worker, ProcessWorker) and worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)


async def test_an_answer_says_that_it_continues_and_does(desk: Desk) -> None:
    views = ask(desk, "one", 60)
    before = [await anext(views)]
    while not before[-1].text:
        before.append(await anext(views))
    kill_worker(desk)
    after = await ended(views)
    lost = [view for view in after if "restarting" in view.line]
    assert {view.phase for view in lost} == {Phase.LOADING}
    assert all("Your answer continues after that" in view.line for view in lost)
    assert all(view.text.startswith(before[-1].text) for view in after)
    assert (after[-1].phase, len(after[-1].text.split())) == (Phase.FINISHED, 60)
    assert not [view for view in after if "Paused" in view.line]


async def test_whoever_comes_while_it_restarts_waits_and_is_answered(desk: Desk) -> None:
    running = asyncio.create_task(ended(ask(desk, "one", 200)))
    async for state in desk.dispatcher.states("chat"):
        if state.card is not None:
            kill_worker(desk)
            break
    async for state in desk.dispatcher.states("chat"):
        if state.card is None:
            break
    views = await ended(ask(desk, "two", 5))
    assert {view.phase for view in views[1:3]} == {Phase.LOADING}
    assert "Your turn comes right after" in views[1].line
    assert views[-1].phase is Phase.FINISHED
    assert (await running)[-1].phase is Phase.FINISHED


def test_while_another_worker_lives_the_model_is_there() -> None:
    admission = Admission(POLICIES, Limits(), 2, lambda: 0.0, lambda *_: None)
    for worker in (0, 1):
        admission.receive(worker, Ready({}))
        admission.receive(worker, Loaded("chat", Card()))
    admission.lost(0)
    assert admission.states["chat"].card == Card()
    admission.lost(1)
    assert admission.states["chat"] == TaskState(text="The worker is restarting.")
    assert "The worker is restarting, 0%" in badge(admission.states["chat"])


def test_the_badge_is_told_every_change_for_as_long_as_somebody_looks(launch: Launch) -> None:
    app, told = launch(), []
    with httpx.stream("GET", f"{app.url}/model", timeout=60) as answer:
        for line in answer.iter_lines():
            told.append(line)
            if "ready" in line and not any("restarting" in one for one in told):
                worker = psutil.Process(app.process.pid).children()[0]
                worker.kill()
            elif "ready" in line:
                break
    assert told[-1].startswith('data: <p class="ready"')
    assert any("The worker is restarting, 0%" in line for line in told)
    with httpx.stream("GET", f"{app.url}/model", timeout=60) as answer:
        lines = filter(None, answer.iter_lines())
        assert next(lines) == told[-1]
        assert app.stop() == []  # although somebody still looks
        assert list(lines) == []


def test_the_badge_says_that_a_model_is_not_batched_and_why() -> None:
    details = {"model": "Falcon", "path": "one row at a time", "why": 'it looks "ahead"'}
    shown = badge(TaskState(Card(details=details)))
    assert "Falcon, one row at a time" in shown
    assert 'title="it looks &quot;ahead&quot;"' in shown
    quick = badge(TaskState(Card(details={"model": "Llama", "path": "packed", "why": ""})))
    assert "Llama<" in quick
    assert "title" not in quick
