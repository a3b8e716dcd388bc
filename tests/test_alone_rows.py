"""Models that compute one row at a time: what fails is repeated, and memory is what was said."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import pytest
from text_driver import Driver, alone, job
from text_engine import Ticker
from text_models import ALONE, prompts, write_model

from pipelines import alone as alone_module
from pipelines.alone import AloneModel, Memory
from pipelines.text import TextPipeline
from queueing.work import Card, Invalid, OutOfMemory, Policy, Status

ONCE = ("mamba",)  # families whose prompts are computed in one piece


@pytest.fixture(scope="module", params=list(ALONE))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return write_model(folder, request.param, eos_token_id=None)


def load(folder: Path, memory: int = 8 << 20) -> tuple[TextPipeline, Card]:
    pipeline = TextPipeline(
        str(folder), device="cpu", dtype="float32", threads=1, memory_bytes=memory, page=4
    )
    return pipeline, pipeline.load(lambda fraction, text: None)


def body(pipeline: TextPipeline) -> AloneModel:
    found = pipeline._known().body
    assert isinstance(found, AloneModel)
    return found


def test_a_step_repeated_gives_the_same_and_leaves_rows_alone(folder: Path) -> None:
    pipeline, _ = load(folder)
    driver = Driver(pipeline)
    for prompt in prompts(3, seed=2):
        driver.add(job(prompt, temperature=1.0, max_tokens=6))
    while rows := driver.running():
        grants = [min(pipeline.next(row).most, 3 if row.state.pending == 1 else 99) for row in rows]
        grants = [pipeline.reserve(row, grant) for row, grant in zip(rows, grants, strict=True)]
        states = [row.state for row in rows]
        first = pipeline.step(rows, grants)
        assert [row.state for row in rows] == states
        for row, grant, whole in zip(rows, grants, first, strict=True):
            (again,) = pipeline.step([row], [grant])
            assert (again.output, again.mark, again.units) == (
                whole.output, whole.mark, whole.units,
            )  # fmt: skip
            driver.commit(row, again)
    for place, prompt in enumerate(prompts(3, seed=2)):
        wanted = alone(pipeline, job(prompt, temperature=1.0, max_tokens=6))
        assert (driver.text[place], driver.marks[place]) == wanted


@pytest.mark.parametrize(
    "error", [RuntimeError("hiccup"), OutOfMemory("full")], ids=["bug", "full"]
)
def test_calls_that_fail_halfway_change_no_answer(
    folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, _ = load(folder)
    asked = [job(prompt, max_tokens=10, temperature=1.0) for prompt in prompts(4, seed=3)]
    wanted = [alone(pipeline, request) for request in asked]
    ticker = Ticker(pipeline, Policy(rows=8, units=13))
    for place, request in enumerate(asked):
        ticker.start(str(place), request)
    ticker.tick()  # loads it
    real, count = AloneModel.forward, 0

    def forward(self: AloneModel, tokens: list[int], memory: Memory) -> object:
        nonlocal count
        count += 1
        if count in (7, 15, 31):  # never a row that is alone in its call
            raise error
        return real(self, tokens, memory)

    monkeypatch.setattr(AloneModel, "forward", forward)
    ticker.finish()
    assert count > 31
    assert sum(bool(call.error) for call in ticker.calls) == 3
    assert [(ticker.text[str(i)], ticker.marks[str(i)]) for i in range(4)] == wanted


def test_memory_of_a_row_is_bounded_by_what_was_learned(folder: Path) -> None:
    pipeline, card = load(folder)
    driver = Driver(pipeline)
    driver.add(job(range(50), max_tokens=150))
    while driver.running():
        driver.call(serial=16)
        memory = driver.rows[0].state.memory
        held = 2 * alone_module._size(memory.cache)
        assert held <= (memory.length + card.limits["fixed"]) * card.bytes_per_unit
    assert memory.length >= 199


def test_rows_take_turns_in_a_memory_for_few_and_leave_nothing(folder: Path) -> None:
    pipeline, card = load(folder)
    row = (card.limits["fixed"] + 60) * card.bytes_per_unit
    pipeline, card = load(folder, int(2.3 * row))
    asked = [job(range(place, place + 30), max_tokens=24) for place in range(4)]
    ticker = Ticker(pipeline, Policy(rows=8, units=64))
    for place, request in enumerate(asked):
        ticker.start(str(place), request)
    parked = 0
    while len(ticker.ended) < 4:
        assert ticker.tick() is not None, "the engine has nothing to do"
        if ticker.engine.idle and ticker.parked:
            parked += 1
            ticker.resume(next(iter(ticker.parked)))
    assert parked > 0
    assert set(ticker.ended.values()) == {Status.FINISHED}
    assert pipeline.pages[1] == 0
    gc.collect()
    held = [it for it in gc.get_objects() if type(it) is Memory and it.cache is not None]
    assert held == []
    free, _ = load(folder)
    assert [(ticker.text[str(i)], ticker.marks[str(i)]) for i in range(4)] == [
        alone(free, request) for request in asked
    ]


def test_what_can_never_fit_is_refused_at_the_door(folder: Path) -> None:
    pipeline, card = load(folder)
    per_row = (card.limits["fixed"] + 40) * card.bytes_per_unit
    pipeline, card = load(folder, int(per_row))
    context = card.limits["context"]
    assert 30 < context < 256
    with pytest.raises(Invalid, match=f"together they may be 2 to {context}"):
        pipeline.open(job(range(context), max_tokens=1))
    assert len(alone(pipeline, job(range(context - 8), max_tokens=8))[1]) == 8


def test_prompts_are_divided_where_the_cache_allows_it(folder: Path) -> None:
    pipeline, _ = load(folder)
    driver = Driver(pipeline)
    driver.add(job(range(40)))
    work = pipeline.next(driver.rows[0])
    assert work is not None
    assert (work.least, work.most) == (40 if folder.name in ONCE else 1, 40)
    assert body(pipeline).whole == (folder.name in ONCE)


def test_another_turn_of_a_conversation_is_computed_anew(folder: Path) -> None:
    pipeline, _ = load(folder)
    first = alone(pipeline, job(range(40)))
    driver = Driver(pipeline)
    driver.add(job(range(40)))
    assert driver.rows[0].state.computed == 0
    driver.finish()
    assert (driver.text[0], driver.marks[0]) == first


def test_the_log_has_one_line_about_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "carpool"):
        load(folder)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("carpool")]
    assert len(said) == 1
    assert said[0].startswith(f"{folder.name} runs one row at a time, slower than packed: ")
