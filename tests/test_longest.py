"""The longest text of an encoder is as long as the model's own positions allow, however it counts
them, and not a token longer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_bench import Loaded, row, run
from tiny_encoders import BYTES, CONTEXT, asks, truth, write_encoder

from pipelines.embed import EmbedFront
from pipelines.encode import EncodePipeline
from pipelines.extract import ExtractFront
from pipelines.mask import MaskFront
from pipelines.oneshot import Item, ItemsJob
from queueing.work import Invalid, Row

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {}),
    "distilbert": ("distilbert", {}),
    "roberta": ("roberta", {}),
    "roberta with pad 3": (
        "roberta",
        {"pad_token_id": 3, "max_position_embeddings": CONTEXT + 4},
    ),
    "bart": ("bart", {}),
    "bart with pad 0": ("bart", {"pad_token_id": 0, "bos_token_id": 1}),
    "bart with pad 70": ("bart", {"pad_token_id": 70}),
    "mpnet": ("mpnet", {}),
    "mpnet with pad 0": ("mpnet", {"pad_token_id": 0}),
}
TASKS = ["fill", "embed", "answer"]


def brought(folder: Path, kind: str, task: str) -> Loaded:
    family, changed = KINDS[kind]
    write_encoder(folder, family, task, **changed)
    pipeline = EncodePipeline(task, str(folder), device="cpu", dtype="float32", threads=1)
    return Loaded(pipeline, pipeline.load(lambda fraction, text: None))


def item(family: str, task: str, count: int) -> Item:
    """One of exactly so many tokens."""
    tokens = (*(10 + place % 50 for place in range(count - 1)), 2 if family in BYTES else 3)
    return Item(tokens, ask=asks(task, count, random.Random(0)))


def numbers(result: Any) -> Any:
    return np.concatenate([share for _, share in result]) if isinstance(result, list) else result


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_model_itself_takes_is_taken_and_no_more(
    tmp_path: Path, kind: str, task: str
) -> None:
    loaded, family = brought(tmp_path, kind, task), KINDS[kind][0]
    assert loaded.card.limits["context"] == CONTEXT
    alone = truth(tmp_path, task)
    longest, longer = (item(family, task, count) for count in (CONTEXT, CONTEXT + 1))
    ((found,),) = run(loaded, [row(loaded, ItemsJob((longest,)))], random.Random(0))
    np.testing.assert_allclose(numbers(found), numbers(alone(longest)), atol=1e-5)
    with pytest.raises(Invalid, match=f"1 to {CONTEXT} tokens"):
        row(loaded, ItemsJob((longer,)))
    with pytest.raises((IndexError, RuntimeError)):
        alone(longer)


def ask(front: Any, loaded: Loaded, payload: Mapping[str, Any]) -> tuple[list[int], Any]:
    """How long its items are, and what comes of them."""
    request = front.check(payload, loaded.card)
    row = Row(request, loaded.open(request), 0, float("inf"))
    lengths = [len(item.tokens) for item in request.payload.items]
    return lengths, front.finish(request, run(loaded, [row], random.Random(0))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_blanks_are_filled_in_the_longest_text_and_a_longer_one_is_refused(
    tmp_path: Path, kind: str
) -> None:
    loaded, words = brought(tmp_path, kind, "fill"), " dog" * (CONTEXT - 3)
    lengths, found = ask(MaskFront(), loaded, {"texts": [f"___{words}"]})
    assert lengths == [CONTEXT]
    assert len(found["results"][0]["blanks"]) == 1
    with pytest.raises(Invalid, match=f"has {CONTEXT + 1} tokens; at most {CONTEXT} are taken"):
        MaskFront().check({"texts": [f"___ dog{words}"]}, loaded.card)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_cut_and_a_document_read_in_parts_as_long_as_can_be(
    tmp_path: Path, kind: str
) -> None:
    words = " dog" * (CONTEXT - 2)
    loaded = brought(tmp_path / "embed", kind, "embed")
    lengths, found = ask(EmbedFront(), loaded, {"texts": [words, f"{words} cat"]})
    assert lengths == [CONTEXT, CONTEXT]
    assert [each["index"] for each in found["cut"]] == [1]
    np.testing.assert_allclose(*found["embeddings"], atol=1e-5)
    loaded = brought(tmp_path / "answer", kind, "answer")
    asked = {"questions": ["the cat"], "document": words * 3}
    lengths, found = ask(ExtractFront(), loaded, asked)
    assert max(lengths) == CONTEXT
    assert len(found["results"]) == 1
