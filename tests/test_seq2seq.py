"""Summaries by models of the T5 and BART families: together as alone, as transformers generates
them, wherever they stop and go on.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from text_driver import Driver
from text_engine import Ticker
from tiny_seq2seq import ENDS, FAMILIES, LENGTH, make, write

from pipelines.seq2seq import Seq2SeqPipeline, barred
from pipelines.seq2seq_attention import Part
from pipelines.seq2seq_loading import bring
from pipelines.summary import DECODE, ENCODE, LIKELIEST, SummaryJob
from queueing.messages import Cancel
from queueing.work import Advance, Invalid, OutOfMemory, Policy, Request, Row, Status, Work

PAGE = 16
POLICY = Policy(rows=8, units=300)


class Rides(Driver):
    """Rows of two keys: all texts that are there are read before anybody writes on."""

    def call(self, chunk: int = 0, serial: int = 1) -> Sequence[Advance | Exception]:
        rows = self.running()
        works = {row.order: self.pipeline.next(row) for row in rows}
        reading = [row for row in rows if works[row.order].key == ENCODE]
        riding = reading or rows
        grants = [works[row.order].most if reading else serial for row in riding]
        grants = [min(n, works[row.order].most) for row, n in zip(riding, grants, strict=True)]
        reserved = [self.pipeline.reserve(row, n) for row, n in zip(riding, grants, strict=True)]
        assert reserved == grants
        advances = self.pipeline.step(riding, grants)
        for row, advance in zip(riding, advances, strict=True):
            self.commit(row, advance)
        self.calls += 1
        return advances


def job(source: Sequence[int], most: int = 24, least: int = 0) -> Request:
    """A request for a text of token ids."""
    asked = SummaryJob(tuple(source), replace(LIKELIEST, max_tokens=most), least)
    plan = Work(ENCODE, len(source), len(source)), Work(DECODE, 1, most, serial=True)
    return Request("chat", asked, plan)  # as the ticker calls its one task


def strangers(count: int, seed: int = 0) -> list[Request]:
    """Texts of very different lengths, with different wishes."""
    chance = random.Random(seed)
    lengths = [1, 2, 15, 16, 17, LENGTH, *(chance.randrange(1, LENGTH) for _ in range(count))]
    return [
        job([chance.randrange(256) for _ in range(length)], 3 + 7 * place % 40, 5 * (place % 3))
        for place, length in enumerate(lengths[:count])
    ]


def fresh(folder: Path, **settings: object) -> Seq2SeqPipeline:
    return Seq2SeqPipeline(str(folder), "cpu", "float32", threads=1, **settings)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def pipeline(family: Path) -> Seq2SeqPipeline:
    return loaded(family)


def loaded(folder: Path) -> Seq2SeqPipeline:
    """A pipeline that has been loaded, and is not again when an engine asks."""
    made = fresh(folder)
    card = made.load(lambda fraction, text: None)
    made.load = lambda tell: card
    return made


def generated(model: object, request: Request) -> tuple[int, ...]:
    """What transformers writes: without its opening, up to its end."""
    source, settings = torch.tensor([request.payload.source]), model.generation_config
    repeats = model.config.task_specific_params["summarization"]["no_repeat_ngram_size"]
    opening = 1 if settings.forced_bos_token_id is None else 2
    forced = settings.forced_eos_token_id is not None
    with torch.inference_mode():
        wanted = model.generate(
            source,
            attention_mask=torch.ones_like(source),
            num_beams=1,
            do_sample=False,
            min_length=opening + request.payload.least,
            max_length=opening + request.payload.settings.max_tokens + forced,
            no_repeat_ngram_size=repeats,
        )
    tokens = tuple(wanted[0, opening:].tolist())
    ended = [place for place, token in enumerate(tokens) if token in ENDS]
    return tokens[: ended[0]] if ended else tokens


def test_summaries_are_those_of_transformers(pipeline: Seq2SeqPipeline, family: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(family, dtype=torch.float32)
    asked = strangers(20)
    rides = Rides(pipeline)
    for request in asked:
        rides.add(request)
    rides.finish(serial=3)
    wanted = [generated(model, request) for request in asked]
    assert [rides.marks[place] for place in range(len(asked))] == wanted
    assert len({tokens[:3] for tokens in wanted}) > 6  # they do not all say the same
    assert {result.reason for result in rides.results.values()} == {"stop", "length"}


def test_logits_together_are_those_alone(family: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(family, attn_implementation="eager").eval()
    body = bring(family, torch.device("cpu"), torch.float32, PAGE).body
    body.make_pages(200)
    chance = random.Random(1)
    sources = [[chance.randrange(256) for _ in range(length)] for length in (1, 40, 97, 16)]
    written = [[chance.randrange(256) for _ in range(length)] for length in (20, 33, 5, 17)]
    starts, steps = [20, 30, 1, 14], 3
    pages = [range(1 + 20 * row, 21 + 20 * row) for row in range(4)]

    def part(row: int, before: int, until: int) -> Part:
        first = -(-len(sources[row]) // PAGE)
        tokens = written[row][before:until]
        return Part(len(sources[row]), tokens, before, pages[row][:first], pages[row][first:])

    def truth(row: int, until: int) -> torch.Tensor:
        given = torch.tensor([sources[row]]), torch.tensor([written[row][:until]])
        return model(input_ids=given[0], decoder_input_ids=given[1], use_cache=False).logits[0, -1]

    with torch.inference_mode():
        found = [body.begin(sources, [part(row, 0, starts[row]) for row in range(4)])]
        wanted = [torch.stack([truth(row, starts[row]) for row in range(4)])]
        riding = [row for row in range(4) if starts[row] + steps <= len(written[row])]
        for step in range(steps):
            ends = {row: starts[row] + step for row in riding}
            found += [body.go_on([part(row, end, end + 1) for row, end in ends.items()])]
            wanted += [torch.stack([truth(row, end + 1) for row, end in ends.items()])]
    assert len(riding) == 3
    for one, other in zip(found, wanted, strict=True):
        assert ((one - other).abs().max() / other.abs().max()).item() <= 1e-5


def test_rows_join_leave_park_and_go_on_as_if_alone(pipeline: Seq2SeqPipeline) -> None:
    asked = strangers(14, seed=2)
    rides = Rides(pipeline)
    for place, request in enumerate(asked):
        rides.add(request)
        rides.call(serial=1 + place % 3)
        if place % 4 == 3 and place - 2 not in rides.results:
            rides.park(place - 2)
    rides.finish(serial=2)
    assert pipeline.pages[1] == 0
    for place, request in enumerate(asked):
        assert (rides.text[place], rides.marks[place]) == summed(pipeline, request)


def summed(pipeline: Seq2SeqPipeline, request: Request) -> tuple[str, tuple[int, ...]]:
    """What one request gives when nobody else rides."""
    rides = Rides(pipeline)
    rides.add(request)
    rides.finish()
    return rides.text[0], rides.marks[0]


def test_a_row_goes_on_elsewhere_from_its_mark(pipeline: Seq2SeqPipeline, family: Path) -> None:
    request = strangers(6, seed=3)[5]
    text, tokens = summed(pipeline, request)
    elsewhere = fresh(family)
    elsewhere.load(lambda fraction, text: None)
    for count in (1, len(tokens) // 2, len(tokens) - 1):
        rides = Rides(elsewhere)
        rides.add(request, tokens[:count])
        before = rides.rows[0].state.text.at
        rides.text[0] = text[:before]
        rides.finish()
        assert rides.marks[0] == tokens
        assert rides.text[0] == text
    elsewhere.unload()


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Seq2SeqPipeline:
    return loaded(write(tmp_path_factory.mktemp("models") / "bart", "bart"))


def test_the_engine_batches_strangers_and_changes_nothing(pipeline: Seq2SeqPipeline) -> None:
    asked = {f"row{place}": request for place, request in enumerate(strangers(10, seed=4))}
    ticker = Ticker(pipeline, POLICY)
    for id, request in asked.items():
        ticker.start(id, request)
        ticker.tick()
    first = next(id for id in asked if id not in ticker.ended)
    ticker.park(first)
    ticker.resume(first)
    ticker.finish()
    assert set(ticker.ended.values()) == {Status.FINISHED}
    assert {call.key for call in ticker.calls} == {ENCODE, DECODE}
    assert max(call.rows for call in ticker.calls if call.key == DECODE) >= 6
    assert len(ticker.calls) < sum(len(mark) for mark in ticker.marks.values())
    assert pipeline.pages[1] == 0
    for id, request in asked.items():
        assert (ticker.text[id], ticker.marks[id]) == summed(pipeline, request)


def test_a_cancelled_row_frees_its_pages_and_disturbs_nobody(bart: Seq2SeqPipeline) -> None:
    one, other = job(range(90), 60, least=60), job(range(50), 20, least=20)
    ticker = Ticker(bart, POLICY)
    ticker.start("one", one)
    ticker.start("other", other)
    ticker.until(lambda: len(ticker.marks["one"]) > 3)
    held = bart.pages[1]
    ticker.engine.handle(Cancel("one"))
    ticker.until(lambda: "one" in ticker.ended)
    assert ticker.ended["one"] is Status.CANCELLED
    assert bart.pages[1] < held
    ticker.finish()
    assert (ticker.text["other"], ticker.marks["other"]) == summed(bart, other)
    assert bart.pages[1] == 0


def test_a_text_with_bad_numbers_fails_alone(pipeline: Seq2SeqPipeline) -> None:
    good = [job(range(30 + place), 12) for place in range(4)]
    wanted = [summed(pipeline, request) for request in good]
    encoder = pipeline._brought.body.model.get_encoder()
    sound = encoder.embed_tokens
    encoder.embed_tokens = copy.deepcopy(sound)
    with torch.no_grad():
        encoder.embed_tokens.weight[255] = float("nan")
    ticker = Ticker(pipeline, POLICY)
    ticker.start("bad", job([1, 2, 255, *range(28)], 12))
    for place, request in enumerate(good):
        ticker.start(f"good{place}", request)
    ticker.finish()
    encoder.embed_tokens = sound
    assert ticker.ended.pop("bad") is Status.FAILED
    assert "ArithmeticError" in str(ticker.errors["bad"])
    assert set(ticker.ended.values()) == {Status.FINISHED}
    found = [(ticker.text[f"good{n}"], ticker.marks[f"good{n}"]) for n in range(4)]
    assert found == wanted
    assert pipeline.pages[1] == 0


def test_a_call_that_fails_is_repeated_in_halves_until_one_is_alone(
    bart: Seq2SeqPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {f"row{place}": request for place, request in enumerate(strangers(6, seed=5))}
    step = bart.step

    def short(rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        found = step(rows, grants)
        if len(rows) > 2:
            raise OutOfMemory("Too many rows, once all was computed.")
        return found

    monkeypatch.setattr(bart, "step", short)
    ticker = Ticker(bart, POLICY)
    for id, request in asked.items():
        ticker.start(id, request)
    ticker.finish()
    monkeypatch.undo()
    assert set(ticker.ended.values()) == {Status.FINISHED}
    for id, request in asked.items():
        assert (ticker.text[id], ticker.marks[id]) == summed(bart, request)


def test_rows_that_memory_cannot_hold_together_take_turns(
    bart: Seq2SeqPipeline, tmp_path: Path
) -> None:
    small = fresh(write(tmp_path / "bart", "bart"), memory_bytes=20 * PAGE * 512)
    card = small.load(lambda fraction, text: None)
    assert card.bytes == 20 * PAGE * card.bytes_per_unit
    asked = {f"row{n}": job(range(100 + n), 60, least=60) for n in range(5)}
    ticker = Ticker(small, POLICY)
    for id, request in asked.items():
        ticker.start(id, request)
    while not ticker.engine.idle:
        ticker.until(lambda: bool(ticker.parked) or ticker.engine.idle)
        for id in list(ticker.parked):
            ticker.resume(id)
    assert set(ticker.ended.values()) == {Status.FINISHED}
    for id, request in asked.items():
        assert (ticker.text[id], ticker.marks[id]) == summed(bart, request)
    assert small.pages == (20, 0)


def test_a_summary_is_as_long_as_was_asked(pipeline: Seq2SeqPipeline) -> None:
    source = range(100)
    most = {n: summed(pipeline, job(source, n))[1] for n in (1, 2, 40)}
    assert len(most[1]) == 1
    assert most[40][:2] == most[2]
    for least in (10, 40):
        tokens = summed(pipeline, job(source, 40, least))[1]
        assert least <= len(tokens) <= 40
        assert not set(ENDS) & set(tokens)


def test_an_early_end_says_so(pipeline: Seq2SeqPipeline) -> None:
    rides = Rides(pipeline)
    for request in strangers(20, seed=6):
        rides.add(replace(request, payload=replace(request.payload, least=0)))
    rides.finish(serial=4)
    early = [row for row in rides.rows if rides.results[row.order].reason == "stop"]
    assert early
    for row in early:
        assert rides.results[row.order].output_tokens == len(rides.marks[row.order])
        assert len(rides.marks[row.order]) < row.request.payload.settings.max_tokens


def test_what_may_not_be_said_twice_is_barred(bart: Seq2SeqPipeline) -> None:
    manner = replace(bart._brought.manner, opening=(9,), repeats=2, ends=frozenset((7,)))
    state = bart.open(job([1, 2], 30), (4, 5, 6, 4))
    assert barred(state, 0, manner) == {5}
    assert barred(state, 5, manner) == {5, 7}
    assert barred(state, 0, replace(manner, repeats=1)) == {*state.known()}
    assert barred(state, 0, replace(manner, repeats=0)) == set()
    assert barred(bart.open(job([1]), ()), 0, replace(manner, repeats=4)) == set()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (job([1] * (LENGTH + 1)), f"has {LENGTH + 1} tokens; 1 to {LENGTH} are taken"),
        (job([]), "has 0 tokens"),
        (job([1, 999]), "token ids outside 0 to 263"),
        (job([1], LENGTH), "at most 126 are written"),
        (job([1], 5, 6), "max_tokens is 5 and at least 6 are wanted"),
    ],
)
def test_what_it_cannot_take_is_refused(bart: Seq2SeqPipeline, wrong: Request, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        bart.open(wrong)


def test_unloading_lets_go_of_everything(tmp_path: Path) -> None:
    pipeline = fresh(write(tmp_path / "t5", "t5"))
    card = pipeline.load(lambda fraction, text: None)
    model = make("t5")
    weights = sum(weight.nbytes for weight in model.parameters())
    assert card.held == weights + card.bytes
    rides = Rides(pipeline)
    rides.add(job(range(20)))
    rides.call()
    pipeline.unload()
    with pytest.raises(RuntimeError, match="before load"):
        pipeline.open(job(range(20)))
    assert pipeline.pages == (1, 0)
