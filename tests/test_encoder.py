"""Encoders of several families and heads, tiny and random: strangers in one call change nothing,
whatever the engine grants, parks or repeats, and transformers' own classes give the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from encoder_bench import Bench, Loaded, row, run
from text_engine import Ticker
from tiny_encoders import CONTEXT, item, job, truth

from pipelines import ITEMS
from pipelines.oneshot import Item, ItemsJob
from queueing.work import Advance, Policy, Priority, Request, Status

pytestmark = pytest.mark.usefixtures("one_thread")

NEAR = 1e-5  # in fp32
NEAR_BF16 = 0.03  # of the largest number; it has 8 bits
CASES = [
    *product(["bert"], ["embed", "classify", "fill", "answer"]),
    ("electra", "embed"),
    ("roberta", "classify"),
    ("roberta", "fill"),
    ("distilbert", "answer"),
    ("distilbert", "fill"),
    ("bart", "classify"),
]
PADDED = {"bart"}
BOTH = [("bert", "answer"), ("bart", "classify")]  # the packed path and the padded one


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("encoders"))


def one(loaded: Loaded, item: Item) -> Any:
    """An item's result in a call of its own."""
    return run(loaded, [row(loaded, ItemsJob((item,)))], random.Random(0))[0][0]


def apart(one: Any, other: Any) -> float:
    """The largest difference of two results; tokens must be the same."""
    if isinstance(one, list):
        assert [list(ids) for ids, _ in one] == [list(ids) for ids, _ in other]
        pairs = zip(one, other, strict=True)
        return max(apart(mine, yours) for (_, mine), (_, yours) in pairs)
    assert one.shape == other.shape
    return float(np.abs(one - other).max())


def numbers(results: Sequence[Any]) -> Any:
    """All numbers of results, one after another."""
    parts = [share for one in results for share in (one if isinstance(one, list) else [one])]
    return np.concatenate([np.ravel(p[1] if isinstance(p, tuple) else p) for p in parts])


@pytest.mark.parametrize(("family", "task"), CASES)
def test_a_batch_of_strangers_equals_each_alone_and_transformers(
    bench: Bench, family: str, task: str
) -> None:
    loaded = bench.get(family, task)
    assert loaded.card.details["path"].startswith("padded" if family in PADDED else "packed")
    jobs = [job(family, task, seed, items=1 + seed % 4) for seed in range(8)]
    rows = [row(loaded, each) for each in jobs]
    whole = [each.request.plan[0].most for each in rows]
    advances = loaded.step(rows, whole)
    alone = truth(bench.folder(family, task), task)
    for each, advance in zip(jobs, advances, strict=True):
        assert isinstance(advance, Advance)
        for asked, found in zip(each.items, advance.output.result, strict=True):
            assert apart(found, one(loaded, asked)) <= NEAR
            assert apart(found, alone(asked)) <= NEAR


@pytest.mark.parametrize(("family", "task"), CASES)
def test_any_grants_cut_at_items_and_change_nothing(bench: Bench, family: str, task: str) -> None:
    loaded = bench.get(family, task)
    jobs = [job(family, task, seed, items=5) for seed in range(20, 26)]
    alone = [[one(loaded, item) for item in each.items] for each in jobs]
    for seed in range(3):
        found = run(loaded, [row(loaded, each) for each in jobs], random.Random(seed))
        for wanted, got in zip(alone, found, strict=True):
            assert max(map(apart, wanted, got)) <= NEAR


def test_a_model_of_one_kind_of_tokens_takes_pairs_as_it_takes_single_texts(bench: Bench) -> None:
    loaded = bench.get("roberta", "classify")
    single = item("roberta", "classify", 3)
    assert apart(one(loaded, replace(single, second=2)), one(loaded, single)) <= NEAR


def test_a_grant_smaller_than_a_row_computes_whole_items(bench: Bench) -> None:
    loaded = bench.get("bert", "embed")
    items = [item("bert", "embed", seed) for seed in range(4)]
    (advance,) = loaded.step(
        [row(loaded, ItemsJob(tuple(items)))], [sum(len(each.tokens) for each in items) - 1]
    )
    assert len(advance.state.results) == 3
    assert advance.units == sum(len(each.tokens) for each in items[:3])
    assert len(advance.mark) == 3
    assert advance.output.result is None


@pytest.mark.parametrize(("family", "task"), BOTH)
def test_in_bf16_strangers_stay_within_its_rounding(bench: Bench, family: str, task: str) -> None:
    loaded = bench.get(family, task, "bfloat16")
    items = [item(family, task, seed) for seed in range(50, 62)]
    found = run(loaded, [row(loaded, ItemsJob((each,))) for each in items], random.Random(1))
    together = numbers([each for (each,) in found])
    alone = numbers([one(loaded, each) for each in items])
    exact = numbers([one(bench.get(family, task), each) for each in items])
    scale = np.abs(exact).max()
    assert np.abs(together - alone).max() <= NEAR_BF16 * scale
    assert np.abs(together - exact).max() <= NEAR_BF16 * scale
    assert np.abs(together - exact).max() > NEAR * scale  # it was bf16


class Results(Ticker):
    """An engine over one pipeline that is loaded."""

    def __init__(self, loaded: Loaded, policy: Policy = ITEMS) -> None:
        super().__init__(loaded, policy)
        self.results = dict[str, Any]()

    def begin(self, id: str, job: ItemsJob, priority: Priority = Priority.STANDARD) -> None:
        request: Request = replace(job.request("chat", "encode"), priority=priority)
        self.start(id, request)

    def tick(self) -> Any:
        """Waits are jumped over."""
        while (report := super().tick()) is None and self.engine.wake is not None:
            self.now = max(self.now, self.engine.wake)
        for id, output in report.outputs.items() if report else ():
            if output.result is not None:
                self.results[id] = output.result
        return report


@pytest.mark.parametrize(("family", "task"), BOTH)
def test_parked_rows_continue_from_their_marks(bench: Bench, family: str, task: str) -> None:
    loaded = bench.get(family, task)
    engine = Results(loaded, Policy(rows=8, units=150))
    jobs = {f"row{seed}": job(family, task, seed, items=12) for seed in range(70, 73)}
    for id, each in jobs.items():
        engine.begin(id, each)
    engine.until(lambda: all(len(engine.marks[id]) >= 2 for id in jobs))
    for id in ("row70", "row72"):
        engine.park(id)
        assert 2 <= len(engine.parked[id]) < 12
        engine.resume(id)
    engine.finish()
    assert set(engine.ended.values()) == {Status.FINISHED}
    for id, each in jobs.items():
        alone = [one(loaded, item) for item in each.items]
        assert max(map(apart, alone, engine.results[id])) <= NEAR


@pytest.mark.parametrize(("family", "task"), BOTH)
@pytest.mark.parametrize("wrong", ["no number", "token too high", "token too low", "nothing"])
def test_one_malformed_request_of_32_fails_alone(
    bench: Bench, family: str, task: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = bench.get(family, task)
    jobs = {f"row{seed}": job(family, task, seed, items=2, most=20) for seed in range(32)}
    alone = {id: [one(loaded, item) for item in each.items] for id, each in jobs.items()}
    poison = 76  # a token that no other item has
    token = {"no number": poison, "token too high": 10**6, "token too low": -1}.get(wrong)
    tail = jobs["row9"].items[1].tokens[-2:]
    items = (jobs["row9"].items[0], Item((10, token, *tail) if token is not None else ()))
    jobs["row9"] = ItemsJob(items)
    model = loaded.pipeline._known().encoder.model
    table = model.get_input_embeddings().weight
    before = table[poison].clone()
    with torch.no_grad():
        table[poison] = float("nan")
    try:
        engine = Results(loaded)
        for id, each in jobs.items():
            engine.begin(id, each)
        engine.finish()
    finally:
        with torch.no_grad():
            table[poison] = before
    assert [id for id, status in engine.ended.items() if status is Status.FAILED] == ["row9"]
    assert len(engine.results) == 31
    for id, results in engine.results.items():
        assert max(map(apart, alone[id], results)) <= NEAR


def test_ten_thousand_items_let_others_through(bench: Bench) -> None:
    loaded = bench.get("bert", "embed")
    engine = Results(loaded)
    many = tuple(item("bert", "embed", seed, most=20) for seed in range(10_000))
    engine.begin("many", ItemsJob(many), Priority.BACKGROUND)
    engine.until(lambda: len(engine.calls) == 1)
    engine.begin("few", job("bert", "embed", 5), Priority.INTERACTIVE)
    engine.until(lambda: "few" in engine.ended)
    assert len(engine.calls) <= 3
    assert "many" not in engine.ended
    engine.finish()
    assert len(engine.calls) >= 5
    assert max(call.units for call in engine.calls) <= ITEMS.units
    assert len(engine.results["many"]) == 10_000


def test_what_is_too_long_for_the_model_is_refused_when_it_opens(bench: Bench) -> None:
    loaded = bench.get("bert", "embed")
    engine = Results(loaded)
    engine.begin("long", ItemsJob((Item((10,) * (CONTEXT + 1), ask=None),)))
    engine.finish()
    assert engine.ended == {"long": Status.FAILED}
    assert str(CONTEXT) in str(engine.errors["long"])
