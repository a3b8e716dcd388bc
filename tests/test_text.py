"""The text pipeline on tiny random models in fp32: riding together changes nothing, and failing
little.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from text_driver import Driver, alone, job
from text_models import FAMILIES, prompts, write_model

from pipelines.chat import ChatResult
from pipelines.text import TextPipeline
from queueing.work import Invalid, OutOfMemory, Request

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 0}


def loaded(folder: Path, **settings: object) -> TextPipeline:
    pipeline = TextPipeline(
        str(folder), device="cpu", dtype="float32", threads=1, page=4, **settings
    )
    pipeline.load(lambda fraction, text: None)
    return pipeline


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_model(root / family, family) for family in FAMILIES}


@pytest.fixture(scope="module", params=list(FAMILIES))
def pipeline(request: pytest.FixtureRequest, folders: dict[str, Path]) -> TextPipeline:
    return loaded(folders[request.param], memory_bytes=4 << 20)


@pytest.fixture(scope="module")
def llama(folders: dict[str, Path]) -> TextPipeline:
    return loaded(folders["llama"], memory_bytes=4 << 20)


@pytest.fixture(autouse=True)
def pages_return(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did, it left no page behind."""
    yield
    for name in ("pipeline", "llama"):
        if name in request.fixturenames:
            assert request.getfixturevalue(name).pages[1] == 0


def requests(count: int = 8) -> list[Request]:
    """Greedy, sampled, penalised, of different lengths."""
    kinds: list[dict[str, object]] = [
        {}, SAMPLED, {"temperature": 1.3}, {"temperature": 0.7, "top_k": 5},
        {"repetition_penalty": 1.5}, SAMPLED | {"repetition_penalty": 1.2, "min_p": 0.01},
        {"temperature": 1.1, "presence_penalty": 3.0}, {"frequency_penalty": 2.0, "min_p": 0.3},
    ]  # fmt: skip
    return [
        job(prompt, max_tokens=8 + 3 * place, seed=place, **kinds[place % len(kinds)])
        for place, prompt in enumerate(prompts(count))
    ]


def test_equals_generate_of_transformers(folders: dict[str, Path], pipeline: TextPipeline) -> None:
    from transformers import AutoModelForCausalLM

    family = pipeline._known().body.model.config.model_type
    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    for prompt in prompts(3, seed=5):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            truth = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        wanted = [token for token in truth[0, len(prompt) :].tolist() if token != 257]
        assert list(alone(pipeline, job(prompt, max_tokens=24))[1]) == wanted


def test_together_equals_alone(pipeline: TextPipeline) -> None:
    asked = requests()
    driver = Driver(pipeline)
    for request in asked:  # one more row each call, prompts in small chunks, decoding in between
        driver.add(request)
        driver.call(chunk=5)
    driver.finish(chunk=5)
    for place, request in enumerate(asked):
        assert (driver.text[place], driver.marks[place]) == alone(pipeline, request)


def test_chunks_and_serial_grants_change_nothing(pipeline: TextPipeline) -> None:
    for request in requests(4):
        for chunk, serial in ((1, 1), (3, 4), (10**9, 100)):
            driver = Driver(pipeline)
            driver.add(request)
            driver.finish(chunk, serial)
            assert (driver.text[0], driver.marks[0]) == alone(pipeline, request)


def test_parked_rows_continue_as_if_nothing_was(pipeline: TextPipeline) -> None:
    asked = requests()
    driver = Driver(pipeline)
    for request in asked:
        driver.add(request)
    for round in range(6):
        driver.call(chunk=7)
        for row in driver.running()[round % 2 :: 2]:
            driver.park(row.order)
    driver.finish(chunk=7)
    for place, request in enumerate(asked):
        assert (driver.text[place], driver.marks[place]) == alone(pipeline, request)


def test_a_call_repeated_in_halves_gives_the_same_and_leaves_rows_alone(
    pipeline: TextPipeline,
) -> None:
    driver = Driver(pipeline)
    for request in requests():
        driver.add(request)
    while rows := driver.running():
        works = [pipeline.next(row) for row in rows]
        grants = [
            pipeline.reserve(row, 1 if work.serial else work.most)
            for row, work in zip(rows, works, strict=True)
        ]
        before = copy.deepcopy([row.state for row in rows])
        lost = pipeline.step(rows, grants)  # as if it had failed at the end
        assert [row.state for row in rows] == before
        half = len(rows) // 2
        again = [
            *pipeline.step(rows[:half], grants[:half]),
            *pipeline.step(rows[half:], grants[half:]),
        ]
        assert again == lost
        for row, advance in zip(rows, again, strict=True):
            driver.commit(row, advance)
    assert len(driver.results) == len(driver.rows)


def test_a_cancel_is_seen_between_forwards(
    llama: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(llama)
    for prompt in prompts(2):
        driver.add(job(prompt, max_tokens=50))
    driver.call()
    real, forwards = llama._known().body.forward, []

    def forward(*given: object) -> torch.Tensor:
        forwards.append(len(given[1]))
        driver.rows[0].cancelled = len(forwards) >= 3
        return real(*given)

    monkeypatch.setattr(llama._known().body, "forward", forward)
    stopped, other = driver.call(serial=8)
    assert (stopped.units, other.units) == (3, 8)
    assert forwards == [2, 2, 2, 1, 1, 1, 1, 1]
    for row in driver.rows:
        llama.close(row)


def test_ends_early_and_says_why(llama: TextPipeline) -> None:
    prompt = prompts(1)[0]
    text, mark = alone(llama, job(prompt, max_tokens=40))
    limited = Driver(llama)
    limited.add(job(prompt, max_tokens=40))
    limited.finish()
    assert limited.results[0] == ChatResult("length", len(prompt), len(mark), 7)
    llama._words = type(llama._words)(llama._words.tokenizer, frozenset({mark[9]}))
    try:
        driver = Driver(llama)
        driver.add(job(prompt, max_tokens=40))
        driver.call()
        advance = driver.call(serial=30)[0]
        first = mark.index(mark[9])
        assert advance.units == max(first, 1)
        assert driver.results[0] == ChatResult("stop", len(prompt), first, 7)
        assert text.startswith(driver.text[0].rstrip("\ufffd"))
    finally:
        llama._words = type(llama._words)(llama._words.tokenizer, frozenset({257}))


def test_stop_strings_end_an_answer_and_are_not_given_out(llama: TextPipeline) -> None:
    prompt = prompts(1)[0]
    request = job(prompt, max_tokens=60, seed=3, temperature=1.0)
    text, _ = alone(llama, request)
    stop = text[20:23]
    driver = Driver(llama)
    driver.add(job(prompt, max_tokens=60, seed=3, temperature=1.0, stop=("never this", stop)))
    driver.finish()
    assert driver.text[0] == text[: text.index(stop)]
    assert driver.results[0].reason == "stop string"


def test_a_long_prompt_says_how_far_it_is_read(llama: TextPipeline) -> None:
    driver = Driver(llama)
    driver.add(replace(job(range(100), max_tokens=2), session="reader"))
    outputs = [driver.call(chunk=40)[0].output for _ in range(2)]
    driver.finish()
    assert [output.progress for output in outputs] == [0.4, 0.8]


def test_a_mark_with_a_whole_answer_is_finished_at_once(llama: TextPipeline) -> None:
    request = job(prompts(1)[0], max_tokens=10)
    _, mark = alone(llama, request)
    driver = Driver(llama)
    driver.add(request, mark)
    assert driver.running() == []


def test_reserve_gives_what_there_is(folders: dict[str, Path]) -> None:
    pipeline = loaded(folders["llama"], memory_bytes=4 * 4 * 2 * 2 * 2 * 8 * 4)  # four pages
    assert pipeline.pages == (4, 0)
    driver = Driver(pipeline)
    driver.add(job(range(10), max_tokens=3))
    driver.add(job(range(9), max_tokens=3))
    first, second = driver.rows
    assert pipeline.reserve(first, 10) == 10
    assert pipeline.reserve(second, 9) == 4
    assert pipeline.reserve(second, 9) == 4
    assert pipeline.pages == (0, 4)
    pipeline.close(first)
    pipeline.close(first)
    assert pipeline.pages == (3, 1)
    assert pipeline.reserve(second, 9) == 9
    pipeline.park(second)
    pipeline.close(second)
    assert pipeline.pages == (4, 0)


def test_a_grant_beyond_the_reserve_is_our_bug(llama: TextPipeline) -> None:
    driver = Driver(llama)
    driver.add(job(range(10)))
    with pytest.raises(RuntimeError, match="This is a bug"):
        llama.step(driver.rows, [10])
    llama.close(driver.rows[0])


def test_a_row_without_numbers_fails_alone(
    llama: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(4)
    real = llama._known().body.forward

    def forward(tokens: list[int], spans: list[object], keep: list[int]) -> torch.Tensor:
        logits = real(tokens, spans, keep)
        if len(spans) == 4:
            logits[1] = float("nan")
        return logits

    driver = Driver(llama)
    for request in asked:
        driver.add(request)
    with monkeypatch.context() as patch:
        patch.setattr(llama._known().body, "forward", forward)
        driver.call()
    assert list(driver.errors) == [1]
    driver.finish()
    for place in (0, 2, 3):
        assert (driver.text[place], driver.marks[place]) == alone(llama, asked[place])


def test_what_a_page_held_before_does_not_matter(pipeline: TextPipeline) -> None:
    asked = requests()
    wanted = [alone(pipeline, request) for request in asked]
    for key, value in pipeline._known().body.pages.layers.values():
        key[1:], value[1:] = float("nan"), float("nan")
    driver = Driver(pipeline)
    for request in asked:
        driver.add(replace(request, session="somebody else"))
    driver.finish()
    assert [(driver.text[place], driver.marks[place]) for place in range(len(asked))] == wanted


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_out_of_memory_is_told_in_our_words(
    llama: TextPipeline, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def forward(*given: object) -> torch.Tensor:
        raise error

    driver = Driver(llama)
    driver.add(job(range(5)))
    with monkeypatch.context() as patch:
        patch.setattr(llama._known().body, "forward", forward)
        with pytest.raises(OutOfMemory) as raised:
            driver.call()
    assert raised.value.__context__ is None  # nothing holds the tensors of the failed call
    driver.finish()
    assert driver.results[0].output_tokens == 16


def test_another_error_stays_what_it_is(
    llama: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*given: object) -> torch.Tensor:
        raise RuntimeError("poison")

    driver = Driver(llama)
    driver.add(job(range(5)))
    with monkeypatch.context() as patch:
        patch.setattr(llama._known().body, "forward", forward)
        with pytest.raises(RuntimeError, match="poison"):
            driver.call()
    llama.close(driver.rows[0])
    assert llama.pages[1] == 0


@pytest.mark.parametrize("prompt", [(), (1, 300), (-1,), tuple(range(250))])
def test_refuses_what_can_never_run(llama: TextPipeline, prompt: tuple[int, ...]) -> None:
    with pytest.raises(Invalid):
        llama.open(job(prompt))


def test_unload_leaves_nothing_and_loads_again(folders: dict[str, Path]) -> None:
    pipeline = loaded(folders["llama"], memory_bytes=1 << 20)
    request = job(range(5))
    before = alone(pipeline, request)
    pipeline.unload()
    with pytest.raises(RuntimeError, match="before load"):
        pipeline.open(request)
    pipeline.load(lambda fraction, text: None)
    assert alone(pipeline, request) == before
