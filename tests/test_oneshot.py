"""The default encoder and the tasks that go by its vectors: what one call computes for strangers is
what each gets alone, and what transformers' own class gives.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_bench import Loaded, run

from pipelines.answer import AnswerFront
from pipelines.classify import ClassifyFront
from pipelines.embed import EmbedFront
from pipelines.encode import EncodePipeline
from queueing.work import Advance, Row

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(600),  # the first run fetches
    pytest.mark.usefixtures("one_thread"),
]

NEAR = 1e-5
TEXTS = [
    "A cat sleeps on the sofa.",
    "Shares fell in early trading, and the naïve ones sold at once.",
    "word " * 400,
    "[CLS] is plain text here [SEP]",
    "!",
]
DOCUMENT = (
    "The town library opened in 1906. It is open from nine to six on weekdays. On Saturdays it "
    "closes at two in the afternoon. On Sundays it stays shut. Late books cost ten cents a day."
)
LABELS = ["sport", "economy", "cooking", "animals"]
ASKED: list[tuple[Any, dict[str, Any]]] = [
    (EmbedFront(), {"texts": TEXTS}),
    (EmbedFront(), {"texts": [TEXTS[1], ""], "pooling": "cls", "normalise": False}),
    (ClassifyFront(), {"texts": TEXTS[:2], "labels": LABELS}),
    (ClassifyFront(), {"texts": TEXTS[1], "labels": LABELS[:2], "multi": True}),
    (AnswerFront(), {"questions": ["When does it close on Saturday?"], "document": DOCUMENT}),
    (AnswerFront(), {"questions": ["What do late books cost?", "When?"], "document": DOCUMENT}),
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    pipeline = EncodePipeline("embed", device="cpu", dtype="float32", threads=1)
    return Loaded(pipeline, pipeline.load(lambda fraction, text: None))


def rows(loaded: Loaded) -> list[Row]:
    made = []
    for front, payload in ASKED:
        request = front.check(payload, loaded.card)
        made.append(Row(request, loaded.open(request), 0, float("inf")))
    return made


def near(one: Any, other: Any) -> bool:
    """Results that differ in nothing but the last digits of their numbers."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(near(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(near, one, other))
    return abs(one - other) <= NEAR if isinstance(one, float) else bool(one == other)


def test_embeddings_classes_and_answers_ride_together_as_alone(loaded: Loaded) -> None:
    together = rows(loaded)
    assert {row.request.plan[0].key for row in together} == {"encode"}
    advances = loaded.step(together, [row.request.plan[0].most for row in together])
    alone = [run(loaded, [row], random.Random(0))[0] for row in rows(loaded)]
    for (front, _), row, advance, own in zip(ASKED, together, advances, alone, strict=True):
        assert isinstance(advance, Advance)
        found = advance.output.result
        assert max(np.abs(a - b).max() for a, b in zip(found, own, strict=True)) <= NEAR
        assert near(front.finish(row.request, found), front.finish(row.request, own))


def test_any_grants_in_any_company_change_nothing(loaded: Loaded) -> None:
    alone = [run(loaded, [row], random.Random(0))[0] for row in rows(loaded)]
    mixed = run(loaded, rows(loaded), random.Random(1))
    for own, found in zip(alone, mixed, strict=True):
        assert max(np.abs(a - b).max() for a, b in zip(found, own, strict=True)) <= NEAR


def test_vectors_are_the_means_of_what_transformers_gives(loaded: Loaded) -> None:
    assert loaded.card.details["path"] == "packed"
    folder = loaded.card.details["folder"]
    request = EmbedFront().check({"texts": TEXTS}, loaded.card)
    row = Row(request, loaded.open(request), 0, float("inf"))
    found = EmbedFront().finish(request, run(loaded, [row], random.Random(2))[0])["embeddings"]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, item, vector in zip(TEXTS, request.payload.items, found, strict=True):
        limit = loaded.card.limits["context"]
        own = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        assert list(item.tokens) == own or "[CLS]" in text
        with torch.inference_mode():
            mean = model(torch.tensor([item.tokens])).last_hidden_state[0].mean(0)
        wanted = (mean / mean.norm()).numpy()
        assert np.abs(np.array(vector) - wanted).max() <= NEAR
