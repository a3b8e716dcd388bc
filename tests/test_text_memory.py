"""Pages under every kind of end, through the real engine: exact counts, and the same words.

Cancels come at any moment, memory is too small for all who ride, rows are parked and go on: who
finishes says what it says alone, and an idle engine holds nothing.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from text_driver import alone, job
from text_engine import Ticker
from text_models import prompts, write_model

from pipelines.text import TextPipeline
from queueing.work import Advance, Policy, Request, Row, Status

PAGE = 4
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, fp32
POLICY = Policy(rows=8, units=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama", eos_token_id=None)


def pipeline_of(folder: Path, pages: int, kind: type[TextPipeline] = TextPipeline) -> TextPipeline:
    made = kind(
        str(folder), device="cpu", dtype="float32", threads=1, page=PAGE,
        memory_bytes=pages * PAGE * TOKEN_BYTES,
    )  # fmt: skip
    made.load(lambda fraction, text: None)
    return made


class Struck(TextPipeline):
    """Cancels a row between the launch of a device call and its result."""

    victim: str | None = None

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        results = super().step(rows, grants)
        for row in rows:
            if row.request.id == self.victim:
                row.cancelled = True
        return results


def asked(count: int, seed: int = 3) -> list[Request]:
    kinds: list[dict[str, object]] = [{}, {"temperature": 0.9, "top_p": 0.9}, {"temperature": 1.2}]
    return [
        job(prompt, max_tokens=3 + place % 5, seed=place, **kinds[place % 3])
        for place, prompt in enumerate(prompts(count, seed=seed))
    ]


def test_a_thousand_cancels_at_any_moment_leave_no_page_behind(folder: Path) -> None:
    pipeline = pipeline_of(folder, 200, Struck)
    assert isinstance(pipeline, Struck)
    chance, requests = random.Random(1), asked(8)
    wanted = [alone(pipeline, request) for request in requests]
    ticker, cancelled, turn = Ticker(pipeline, POLICY), 0, 0
    while cancelled < 1000:
        turn += 1
        ids = [f"{turn}:{place}" for place in range(8)]
        for id, request in zip(ids, requests, strict=True):
            ticker.start(id, request)
        for id in chance.sample(ids, 6):
            for _ in range(chance.randrange(3)):
                ticker.tick()
            pipeline.victim = id if chance.random() < 0.5 else None
            if pipeline.victim is None:
                ticker.engine.flag(id)
        ticker.finish()
        cancelled += sum(ticker.ended[id] is Status.CANCELLED for id in ids)
        for id, words in zip(ids, wanted, strict=True):
            if ticker.ended[id] is not Status.CANCELLED:
                assert (ticker.text[id], ticker.marks[id]) == words
        assert pipeline.pages == (200, 0)
        pipeline._tables.check()


def test_a_cancel_in_the_last_call_is_a_cancel(folder: Path) -> None:
    pipeline = pipeline_of(folder, 50, Struck)
    assert isinstance(pipeline, Struck)
    ticker = Ticker(pipeline, POLICY)
    ticker.start("r", job(range(10), max_tokens=2))
    ticker.tick()
    pipeline.victim = "r"
    ticker.finish()
    assert ticker.ended == {"r": Status.CANCELLED}
    assert pipeline.pages == (50, 0)


@pytest.mark.parametrize("pages", [14, 20, 40])
def test_memory_for_few_of_many_changes_no_word(folder: Path, pages: int) -> None:
    requests = asked(8, seed=11)
    wide = pipeline_of(folder, 400)
    wanted = [alone(wide, replace(request, session=str(i))) for i, request in enumerate(requests)]
    small = pipeline_of(folder, pages)
    ticker = Ticker(small, POLICY)
    for place, request in enumerate(requests):
        ticker.start(str(place), request)
    parked = 0
    while len(ticker.ended) < len(requests):
        ticker.tick()
        if ticker.parked and len(ticker.engine._rows) < 2:
            parked += len(ticker.parked)
            ticker.resume(next(iter(ticker.parked)))
    assert set(ticker.ended.values()) == {Status.FINISHED}
    for place in range(len(requests)):
        assert (ticker.text[str(place)], ticker.marks[str(place)]) == wanted[place]
    assert small.pages == (pages, 0)
    assert parked or pages > 20


def test_a_row_that_outgrows_memory_alone_fails_with_its_size(folder: Path) -> None:
    pipeline = pipeline_of(folder, 4)
    ticker = Ticker(pipeline, POLICY)
    request = replace(job(range(10), max_tokens=6), bytes=16 * TOKEN_BYTES)
    ticker.tick()
    ticker.start("first", job(range(3), max_tokens=1))
    ticker.finish()
    pipeline._tables.reserve("somebody else", 4 * PAGE)
    ticker.start("r", request)
    ticker.finish()
    assert ticker.ended["r"] is Status.FAILED
    assert f"{16 * TOKEN_BYTES:,} bytes" in str(ticker.errors["r"])


@torch.inference_mode()
def test_a_seed_gives_the_same_alone_batched_and_parked(folder: Path) -> None:
    pipeline = pipeline_of(folder, 200)
    request = job(range(20), max_tokens=24, temperature=1.0, seed=99)
    wanted = alone(pipeline, replace(request, session="alone"))
    ticker = Ticker(pipeline, POLICY)
    for place, other in enumerate(asked(5)):
        ticker.start(str(place), other)
    ticker.start("seeded", request)
    ticker.until(lambda: len(ticker.marks["seeded"]) > 5)
    ticker.park("seeded")
    ticker.tick()
    ticker.resume("seeded")
    ticker.finish()
    assert (ticker.text["seeded"], ticker.marks["seeded"]) == wanted
