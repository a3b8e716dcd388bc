"""Long and short conversations over a memory that holds a few of them, through the dispatcher and a
real text pipeline: little is computed twice, and nobody's words change.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from pipelines.text import TextPipeline
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.stream import Stream
from queueing.work import Policy, Request, Status
from queueing.worker import ThreadWorker
from tests.text_driver import alone, job
from tests.text_models import write_model

PAGE = 4
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, fp32
POLICIES = {"chat": Policy(rows=8, units=64)}
PEOPLE = 12
TURNS = 6


def arguments(folder: Path, pages: int) -> dict[str, object]:
    memory = pages * PAGE * TOKEN_BYTES
    how = {"device": "cpu", "dtype": "float32", "threads": 1, "page": PAGE}
    return {"model": str(folder), "memory_bytes": memory, **how}


def question(person: int, chance: random.Random) -> Request:
    """Every third person brings long texts and wants long answers."""
    long = person % 3 == 0
    prompt = chance.randint(100, 150) if long else chance.randint(10, 30)
    answer = chance.randint(60, 90) if long else chance.randint(8, 24)
    words = [chance.randrange(256) for _ in range(prompt)]
    return job(words, max_tokens=answer, temperature=1.0, seed=chance.randrange(1000))


async def talk(dispatcher: Dispatcher, person: int, asked: list[Request]) -> list[Stream]:
    """One question after the other, as people do."""
    streams = []
    for request in asked:
        stream = dispatcher.submit(request, f"person {person}")
        version = -1
        while not stream.status.terminal:
            version = await stream.changed(version, 30.0)
        streams.append(stream)
    return streams


async def test_little_is_computed_twice_where_memory_holds_few(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", "llama", eos_token_id=None)
    chance = random.Random(5)
    asked = [[question(person, chance) for _ in range(TURNS)] for person in range(PEOPLE)]
    factories = {"chat": ("pipelines.text:TextPipeline", arguments(folder, 160))}
    worker = lambda: ThreadWorker(factories, POLICIES)  # noqa: E731
    dispatcher = Dispatcher(POLICIES, [worker], Limits(waiting=100))
    await dispatcher.start()
    try:
        while (await dispatcher.loaded("chat", 5.0)).card is None:
            pass
        found = await asyncio.gather(
            *(talk(dispatcher, person, own) for person, own in enumerate(asked))
        )
    finally:
        await dispatcher.close()
    wide = TextPipeline(**arguments(folder, 1000))  # type: ignore[arg-type]
    wide.load(lambda fraction, text: None)
    for requests, streams in zip(asked, found, strict=True):
        assert {stream.status for stream in streams} == {Status.FINISHED}
        assert streams[-1].text == alone(wide, requests[-1])[0]
    metrics = dispatcher.metrics.snapshot()
    needed = sum(
        len(request.payload.prompt) + request.payload.settings.max_tokens - 1
        for requests in asked
        for request in requests
    )
    assert metrics.parked > 0
    assert needed <= metrics.units + metrics.reused
    assert metrics.units - needed <= 0.1 * metrics.units
