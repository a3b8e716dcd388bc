"""Blanks filled by the chat pipeline, on tiny random models in fp32: riding together, in any parts,
parked or not, gives what the plain model gives for each candidate's whole text.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from text_models import write_model
from transformers import AutoModelForCausalLM

from pipelines.cloze import Blanked, ClozeJob, Filled
from pipelines.fill import FillFront
from pipelines.text import TextPipeline
from queueing.work import Card, Invalid, Request, Row, Work

FAMILIES = ("llama", "gemma2", "falcon")  # packed, packed with a window and caps, one at a time
START = (65, 66, 10)
WORDS = ((67,), (68, 69), (70, 71, 72))  # of one to three tokens


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> TextPipeline:
    made = TextPipeline(
        str(folder), device="cpu", dtype="float32", threads=1, page=4, memory_bytes=4 << 20
    )
    made.load(lambda fraction, text: None)
    return made


def text(seed: int, blanks: int = 1, spaced: bool = True) -> Blanked:
    chance = random.Random(seed)

    def piece() -> tuple[int, ...]:
        return tuple(chance.randrange(97, 123) for _ in range(chance.randrange(1, 12)))

    pieces = tuple(piece() for _ in range(blanks + 1))
    return Blanked(pieces if spaced else ((), *pieces[1:]), (spaced,) * blanks, piece())


def request(*texts: Blanked, words: tuple[tuple[int, ...], ...] = WORDS) -> Request:
    job = ClozeJob(texts, 4, START, words, tuple(word[::-1] for word in words))
    return Request("chat", job, (Work("score"),))


def row(pipeline: TextPipeline, asked: Request, mark: tuple[Filled, ...] = ()) -> Row:
    return Row(asked, pipeline.open(asked, mark), 0, float("inf"))


def run(pipeline: TextPipeline, rows: list[Row], seed: int) -> list[tuple[Filled, ...]]:
    """Calls of any of the rows that are left, each with any grant it may get."""
    chance, results = random.Random(seed), dict[int, tuple[Filled, ...]]()
    while left := [each for each in rows if pipeline.next(each) is not None]:
        riding = chance.sample(left, chance.randrange(1, len(left) + 1))
        works = [pipeline.next(each) for each in riding]
        grants = [chance.randrange(work.least, work.most + 1) for work in works]
        for each, advance, grant in zip(riding, pipeline.step(riding, grants), grants, strict=True):
            assert not isinstance(advance, Exception)
            assert 1 <= advance.units <= grant
            each.state = advance.state
            if advance.output is not None and advance.output.result is not None:
                results[id(each)] = advance.output.result
    return [results[id(each)] for each in rows]


def truth(folder: Path, asked: Request) -> list[Filled]:
    """From whole texts through transformers alone, one candidate at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    job: ClozeJob = asked.payload
    found: list[Filled] = []
    for each in job.texts:
        left = list(each.pieces[0])
        for place, spaced in enumerate(each.spaced):
            scores = {}
            for word in job.spaced if spaced else job.bare:
                ids = [*job.start, *left, *word, *each.pieces[place + 1]]
                with torch.inference_mode():
                    shares = model(torch.tensor([ids])).logits[0].log_softmax(-1)
                first = len(job.start) + len(left)
                scores[word] = sum(float(shares[at - 1, ids[at]]) for at in range(first, len(ids)))
            whole = torch.tensor(list(scores.values())).double().softmax(0).tolist()
            filled = sorted(zip(scores, whole, strict=True), key=lambda pair: -pair[1])
            found.append(tuple(filled[: job.top]))
            left += [*filled[0][0], *each.pieces[place + 1]]
    return found


def same(one: list[Filled] | tuple[Filled, ...], other: list[Filled] | tuple[Filled, ...]) -> bool:
    """The same words in the same order, shares within 1e-5."""
    return all(
        [word for word, _ in first] == [word for word, _ in second]
        and all(abs(a - b) < 1e-5 for (_, a), (_, b) in zip(first, second, strict=True))
        for first, second in zip(one, other, strict=True)
    )


def test_scores_are_those_of_whole_texts(folder: Path, pipeline: TextPipeline) -> None:
    asked = request(text(1), text(2, blanks=3), text(3, spaced=False))
    assert same(run(pipeline, [row(pipeline, asked)], seed=0)[0], truth(folder, asked))


def test_strangers_in_any_parts_change_nothing(pipeline: TextPipeline) -> None:
    asked = [request(text(n, blanks=1 + n % 2), words=WORDS if n % 3 else ()) for n in range(6)]
    alone = [run(pipeline, [row(pipeline, each)], seed=9)[0] for each in asked]
    for seed in range(3):
        together = run(pipeline, [row(pipeline, each) for each in asked], seed)
        assert all(same(one, other) for one, other in zip(alone, together, strict=True))


def test_a_row_continues_from_the_blanks_that_are_filled(pipeline: TextPipeline) -> None:
    asked = request(text(4, blanks=3))
    whole = run(pipeline, [row(pipeline, asked)], seed=1)[0]
    again = row(pipeline, asked, whole[:1])
    assert pipeline.park(again) == whole[:1]
    assert same(run(pipeline, [row(pipeline, asked, whole[:1])], seed=2)[0], whole)


def test_without_targets_the_model_proposes_words(pipeline: TextPipeline) -> None:
    asked = request(text(5, spaced=False), words=())
    (found,) = run(pipeline, [row(pipeline, asked)], seed=3)[0]
    assert len(found) == asked.payload.top
    assert all(len(word) == 1 for word, _ in found)
    assert [share for _, share in found] == sorted((share for _, share in found), reverse=True)


def test_numbers_that_are_none_fail_their_row_alone(pipeline: TextPipeline) -> None:
    rows = [row(pipeline, request(text(n))) for n in (6, 7)]
    layers = pipeline.step(rows, [1000, 1000])
    for each, advance in zip(rows, layers, strict=True):
        assert not isinstance(advance, Exception)
        each.state = advance.state
    read = rows[0].state.read
    bad = {at: (key * float("nan"), value) for at, (key, value) in read.layers.items()}
    rows[0].state = replace(rows[0].state, read=replace(read, layers=bad))
    first, second = pipeline.step(rows, [1000, 1000])
    assert isinstance(first, ArithmeticError) == bool(bad)  # one at a time nothing is kept
    assert not isinstance(second, Exception)


@pytest.fixture
def card(folder: Path) -> Card:
    return Card(limits={"context": 4096}, details={"folder": str(folder)})


def test_the_front_keeps_places_of_good_texts_and_names_bad_ones(card: Card) -> None:
    asked = FillFront().check(
        {"texts": ["A ___ b", "none", "", "[MASK] c", "x" * 999 + "___"]}, card
    )
    job: ClozeJob = asked.payload
    assert [each.spaced for each in job.texts] == [(True,), (False,)]
    assert [place for place, _ in job.errors] == [1, 2, 4]
    assert "128" in job.errors[2][1]
    one: Filled = (((72,), 1.0),)
    told = FillFront().finish(asked, (one, one))
    assert [each and each["text"] for each in told["results"]] == [
        "A i b", None, None, "i c", None
    ]  # fmt: skip
    assert [each["index"] for each in told["errors"]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"texts": []}, "texts"),
        ({"texts": ["no blank"]}, "no blank"),
        ({"texts": ["___"], "targets": ["a", "a"]}, "targets"),
        ({"texts": ["___"], "top": 0}, "top"),
        ({"texts": ["___"], "color": 1}, "color"),
    ],
)
def test_the_front_refuses_in_words(card: Card, payload: dict[str, object], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        FillFront().check(payload, card)
