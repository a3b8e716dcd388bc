"""The default model behind the dispatcher: fairness, stops and equality where it counts.

In fp32 a text is a function of its request alone, so every comparison here is token for token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from pipelines.fronts import ChatFront
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.stream import Stream
from queueing.work import Policy, Status
from queueing.worker import ThreadWorker

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

POLICIES = {"chat": Policy(rows=8, units=512, target=0.2)}
FACTORIES = {"chat": ("pipelines.text:TextPipeline", {"dtype": "float32", "threads": 1})}
STORIES = [
    f"Tell me a long story about a {who}."
    for who in "cat,dog,horse,bird,whale,wolf,bear,lion".split(",")
]


class House:
    """A dispatcher with the real model in a thread, and what tests ask of it."""

    def __init__(self) -> None:
        self.worker = ThreadWorker(FACTORIES, POLICIES)
        self.dispatcher = Dispatcher(POLICIES, [lambda: self.worker], Limits(waiting=100))
        self.front = ChatFront()

    def say(self, text: str, session: str, **settings: Any) -> Stream:
        card = self.dispatcher.state("chat").card
        assert card is not None
        payload = {"messages": [{"role": "user", "content": text}], **settings}
        return self.dispatcher.submit(self.front.check(payload, card), session)

    @property
    def pages(self) -> tuple[int, int]:
        """Free and used."""
        assert self.worker._engine is not None
        pages: tuple[int, int] = self.worker._engine._models["chat"].pipeline.pages  # type: ignore[attr-defined]
        return pages

    @property
    def calls(self) -> int:
        return len(self.dispatcher.metrics.calls)


async def until(stream: Stream, holds: Callable[[Stream], bool]) -> None:
    version = -1
    while not holds(stream):
        assert not stream.status.terminal, (stream.status, stream.error)
        version = await stream.changed(version, 30.0)


async def texts(*streams: Stream) -> list[str]:
    for stream in streams:
        version = -1
        while not stream.status.terminal:
            version = await stream.changed(version, 30.0)
        assert stream.status is Status.FINISHED, stream.error
    return [stream.text for stream in streams]


async def quiet(house: House) -> None:
    """Until the engine has closed every row."""
    assert house.worker._engine is not None
    async with asyncio.timeout(60):
        while not house.worker._engine.idle:  # noqa: ASYNC110 it is a thread that tells nobody
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    made = House()
    await made.dispatcher.start()
    while (state := await made.dispatcher.loaded("chat", 5.0)).card is None:
        assert not state.error
    yield made
    await made.dispatcher.close()


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """Texts of requests that ran by themselves."""
    return {}


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 8},
    {"temperature": 0.7, "repetition_penalty": 1.2, "seed": 9},
]


async def test_greedy_and_sampled_answers_in_company_equal_those_alone(house):
    asked = [(STORIES[i], {**SETTINGS[i % 4], "max_tokens": 16}) for i in range(8)]
    by_itself = []
    for text, settings in asked:
        by_itself += await texts(house.say(text, "solo", **settings))
    before = house.calls
    together = [house.say(text, f"p{i}", **s) for i, (text, s) in enumerate(asked)]
    assert await texts(*together) == by_itself
    assert len({*by_itself}) == 8
    calls = list(house.dispatcher.metrics.calls)[before:]
    assert max(record.call.rows for record in calls) == 8


async def test_whoever_comes_after_forty_long_chats_is_admitted_at_once(house):
    many = [house.say(STORIES[i % 8], "many", max_tokens=400, seed=i) for i in range(40)]
    for stream in many[:8]:
        await until(stream, lambda stream: len(stream.text) > 40)
    one = house.say("What is the capital of France?", "one", max_tokens=8, temperature=0.0)
    await until(one, lambda stream: bool(stream.text))
    for stream in many:
        stream.cancel()
    assert "Paris" in (await texts(one))[0]
    times, ends = one.times, [record.at for record in house.dispatcher.metrics.calls]
    assert times.started is not None
    assert times.first is not None
    # The call that ran when it came, and one more if that was just about to begin.
    assert sum(times.submitted < end <= times.started for end in ends) <= 2
    assert sum(times.started < end <= times.first for end in ends) <= 3
    await quiet(house)


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_stop_leaves_pages_at_baseline_and_neighbours_unchanged(house, phase):
    await quiet(house)
    free, used = house.pages
    assert used == 0
    settings = {"max_tokens": 12, "temperature": 0.9}
    alone = await texts(*[house.say(STORIES[i], "solo", seed=i, **settings) for i in range(2)])
    long = "Sum up: " + "the quick brown fox jumps over the lazy dog. " * 60
    victim = house.say(long if phase == "prefill" else STORIES[5], "victim", max_tokens=200)
    neighbours = [house.say(STORIES[i], f"p{i}", seed=i, **settings) for i in range(2)]
    if phase == "prefill":
        await until(neighbours[0], lambda stream: bool(stream.text))
        assert victim.times.device > 0
        assert victim.text == ""
    if phase == "decode":
        await until(victim, lambda stream: len(stream.text) > 20)
    text, before = victim.text, house.calls
    victim.cancel()
    assert victim.status is Status.CANCELLED
    assert await texts(*neighbours) == alone
    await quiet(house)
    assert victim.text == text
    assert house.pages == (free, 0)
    after = [record.call for record in list(house.dispatcher.metrics.calls)[before:]]
    assert sum(victim.id in call.ids for call in after) <= 1


async def test_a_parked_row_ends_with_the_text_it_has_alone(house):
    settings = {"max_tokens": 24, "temperature": 0.8}
    alone = await texts(house.say(STORIES[0], "solo", seed=0, **settings))
    parked = house.dispatcher.metrics.parked
    many = [house.say(STORIES[i], "many", seed=i, **settings) for i in range(8)]
    await until(many[0], lambda stream: len(stream.text) > 10)
    newcomers = [house.say(STORIES[i], f"n{i}", seed=i, **settings) for i in range(6)]
    got = await texts(*many, *newcomers)
    assert house.dispatcher.metrics.parked > parked
    assert got[0] == alone[0]
    assert got[8:] == got[:6]  # the same requests, from people who were not parked
