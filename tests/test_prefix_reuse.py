"""What one turn computed is not computed again in the next, and never found by anybody else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from text_driver import Driver, alone, job
from text_models import prompts, write_model

from pipelines.text import TextPipeline
from queueing.work import Request

PAGE = 4


def pipeline_of(folder: Path, **settings: object) -> TextPipeline:
    made = TextPipeline(
        str(folder), device="cpu", dtype="float32", threads=1, page=PAGE, **settings
    )
    made.load(lambda fraction, text: None)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def pipeline(folder: Path) -> TextPipeline:
    return pipeline_of(folder, memory_bytes=4 << 20)


def answered(
    pipeline: TextPipeline, request: Request, session: str = "me"
) -> tuple[tuple[int, ...], int, int]:
    """The answer's tokens, how many were reused, how many computed."""
    driver, reused, units = Driver(pipeline), 0, 0
    driver.add(replace(request, session=session))
    while driver.running():
        for advance in driver.call():
            assert not isinstance(advance, Exception)
            reused, units = reused + advance.reused, units + advance.units
    return driver.marks[0], reused, units


def test_a_second_turn_computes_only_what_is_new(folder: Path, pipeline: TextPipeline) -> None:
    first = list(range(30))
    answer, reused, units = answered(pipeline, job(first, max_tokens=10))
    assert (reused, units) == (0, 30 + 9)
    second = [*first, *answer, 200, 201, 202]
    told, reused, units = answered(pipeline, job(second, max_tokens=5))
    assert reused == (30 + 9) // PAGE * PAGE
    assert reused + units == len(second) + 4
    assert told == alone(pipeline_of(folder, memory_bytes=4 << 20), job(second, max_tokens=5))[1]


def test_another_person_finds_nothing(pipeline: TextPipeline) -> None:
    request = job(range(30), max_tokens=5)
    answered(pipeline, request, "me")
    assert answered(pipeline, request, "you")[1] == 0
    assert answered(pipeline, replace(request, salt="a tab"), "me")[1] == 0
    assert answered(pipeline, request, "me")[1] > 0


def test_public_words_are_found_by_everybody(pipeline: TextPipeline) -> None:
    request = job(range(30), max_tokens=5)
    request = replace(request, payload=replace(request.payload, public=10))
    answered(pipeline, request, "me")
    assert answered(pipeline, request, "you")[1] == 8


@pytest.mark.parametrize("pages", [1, 2, 5])
def test_a_prompt_of_exactly_some_pages_computes_its_last_page_again(
    pipeline: TextPipeline, pages: int
) -> None:
    request = job(range(pages * PAGE), max_tokens=3)
    first, _, _ = answered(pipeline, request)
    again, reused, units = answered(pipeline, request)
    assert again == first
    assert reused == (pages - 1) * PAGE
    assert reused + units == pages * PAGE + 2


def test_rows_that_run_share_what_is_committed(pipeline: TextPipeline) -> None:
    driver = Driver(pipeline)
    driver.add(job(range(30), max_tokens=12))
    driver.call()
    driver.call()  # the pages of the prompt have names once it goes on
    driver.add(job(range(30), max_tokens=12))
    driver.finish()
    assert driver.marks[0] == driver.marks[1]
    assert driver.rows[1].state.cached == 28
    assert pipeline.pages[1] == 0


def test_what_a_failed_call_wrote_is_never_found(
    pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = job(range(30), max_tokens=5)
    driver = Driver(pipeline)
    driver.add(replace(request, session="me"))
    real = pipeline._known().body.forward

    def spoilt(*given: object) -> object:
        real(*given)
        raise RuntimeError("after it wrote")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline._known().body, "forward", spoilt)
        with pytest.raises(RuntimeError, match="after it wrote"):
            driver.call()
    pipeline.close(driver.rows[0])
    assert answered(pipeline, request, "me")[1] == 0


def test_a_small_memory_forgets_and_the_answers_stay_the_same(folder: Path) -> None:
    tokens = 2 * 2 * 2 * 8 * 4  # bytes of a token
    small = pipeline_of(folder, memory_bytes=20 * PAGE * tokens)
    asked = [job(prompt, max_tokens=8) for prompt in prompts(12, seed=9)]
    wanted = [alone(pipeline_of(folder, memory_bytes=4 << 20), request)[1] for request in asked]
    for _ in range(2):
        assert [answered(small, request)[0] for request in asked] == wanted
    small._tables.check()
    assert small._tables.resting > 0
