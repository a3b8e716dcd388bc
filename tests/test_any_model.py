"""Any causal model, in fp32, through the real engine: the path it takes, and that company changes
no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from text_driver import alone, job
from text_engine import Ticker
from text_models import ALONE, PACKED, prompts, write_model

from pipelines.text import TextPipeline
from queueing.work import Card, Policy, Request, Status

CHUNKED = Policy(rows=8, units=13)  # so that every longer prompt takes several calls
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


@dataclass(slots=True)
class Family:
    """One family's model, loaded."""

    name: str
    folder: Path
    pipeline: TextPipeline
    card: Card
    warnings: list[str]


@pytest.fixture(scope="module", params=[*PACKED, *ALONE])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp("models") / request.param
    write_model(folder, request.param, eos_token_id=None)  # so that nobody leaves early
    yield load(request.param, folder)


def load(name: str, folder: Path) -> Family:
    pipeline = TextPipeline(
        str(folder), device="cpu", dtype="float32", threads=1, memory_bytes=8 << 20, page=4
    )
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("carpool")
    logger.addHandler(handler)
    card = pipeline.load(lambda fraction, text: None)
    logger.removeHandler(handler)
    return Family(name, folder, pipeline, card, said)


def requests() -> list[Request]:
    """Greedy, sampled, penalised, with a stop string, of different lengths."""
    kinds: list[dict[str, object]] = [
        {}, SAMPLED, {"temperature": 1.3}, {"temperature": 0.7, "top_k": 5},
        {"repetition_penalty": 1.5, "stop": ("e", "th")}, SAMPLED | {"repetition_penalty": 1.2},
    ]  # fmt: skip
    return [
        job(prompt, max_tokens=8 + 3 * place, seed=place, **kinds[place])
        for place, prompt in enumerate(prompts(len(kinds), seed=1))
    ]


def test_the_path_is_told_by_card_and_log(family: Family) -> None:
    path, why = family.card.details["path"], family.card.details["why"]
    if family.name in PACKED:
        assert (path, why, family.warnings) == ("packed", "", [])
    else:
        assert path == "one row at a time"
        assert family.warnings == [
            f"{family.name} runs one row at a time, slower than packed: {why}."
        ]
        assert why.strip()


def test_company_changes_no_answer(family: Family) -> None:
    asked = requests()
    ticker = Ticker(family.pipeline, CHUNKED)
    for place, request in enumerate(asked):  # they join while others compute
        ticker.start(str(place), request)
        ticker.tick()
    ticker.start("gone", job(range(60), max_tokens=50))
    ticker.until(lambda: len(ticker.marks["5"]) > 1)
    ticker.park("5")
    ticker.until(lambda: len(ticker.marks["gone"]) > 2)
    ticker.engine.flag("gone")
    ticker.tick()
    ticker.resume("5")
    ticker.finish()
    assert ticker.ended.pop("gone") is Status.CANCELLED
    assert set(ticker.ended.values()) == {Status.FINISHED}
    assert max(len(call.ids) for call in ticker.calls) >= 4
    mixed = [call for call in ticker.calls if len(call.ids) > 1 and call.units > len(call.ids)]
    assert mixed, "no call had a chunk of a prompt beside other rows"
    for place, request in enumerate(asked):
        assert (ticker.text[str(place)], ticker.marks[str(place)]) == alone(
            family.pipeline, request
        )
    assert family.pipeline.pages[1] == 0


def test_greedy_equals_generate_of_transformers(family: Family) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(family.folder, dtype=torch.float32).eval()
    for prompt in prompts(3, seed=5):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            truth = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
            )
        wanted = tuple(truth[0, len(prompt) :].tolist())
        assert alone(family.pipeline, job(prompt, max_tokens=24))[1] == wanted
