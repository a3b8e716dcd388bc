"""The default chat model: it is prepared, it answers, and riding together changes no answer."""

from __future__ import annotations

import pytest
import torch
from text_driver import Driver, alone

from pipelines.fronts import ChatFront
from pipelines.text import TextPipeline
from queueing.work import Card, Request

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]  # the first run fetches and converts


@pytest.fixture(scope="module")
def chat(request: pytest.FixtureRequest) -> tuple[TextPipeline, Card]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CARPOOL_CHAT_MODEL", raising=False)
        pipeline = TextPipeline(dtype="float32", device="cpu", threads=1, memory_bytes=256 << 20)
    card = pipeline.load(lambda fraction, text: None)
    request.addfinalizer(pipeline.unload)
    return pipeline, card


def ask(card: Card, message: str, **fields: object) -> Request:
    messages = [{"role": "user", "content": message}]
    return ChatFront().check({"messages": messages, "temperature": 0, **fields}, card)


def test_knows_the_capital_of_france(chat: tuple[TextPipeline, Card]) -> None:
    pipeline, card = chat
    driver = Driver(pipeline)
    driver.add(ask(card, "What is the capital of France?", max_tokens=32))
    driver.finish(serial=8)
    assert "Paris" in driver.text[0]
    assert driver.results[0].reason == "stop"
    assert pipeline.pages[1] == 0


def test_together_equals_alone(chat: tuple[TextPipeline, Card]) -> None:
    pipeline, card = chat
    asked = [
        ask(card, "Name three colours.", max_tokens=10),
        ask(card, "Tell me about the sea.", max_tokens=12, temperature=0.9, top_p=0.9, seed=1),
        ask(card, "Écris un poème 🎉", max_tokens=12, temperature=1.0, seed=2),
        ask(card, "Count to ten. " * 8, max_tokens=8, repetition_penalty=1.2),
    ]
    driver = Driver(pipeline)
    for request in asked:
        driver.add(request)
        driver.call(chunk=32)
    driver.park(1)
    driver.finish(chunk=32, serial=4)
    for place, request in enumerate(asked):
        assert (driver.text[place], driver.marks[place]) == alone(pipeline, request)


def test_the_card_tells_what_a_front_needs(chat: tuple[TextPipeline, Card]) -> None:
    _, card = chat
    assert card.limits == {
        "context": 256 * 1024 * 1024 // 46080 // 16 * 16,
        "vocabulary": 49152,
        "page": 16,
        "fixed": 0,
    }
    assert card.bytes_per_unit == 2 * 30 * 3 * 64 * 4
    assert card.details["licence"] == "Apache-2.0"
    assert card.details["dtype"] == "float32"
    assert card.target == 0.15


def test_greedy_answers_are_those_of_transformers(chat: tuple[TextPipeline, Card]) -> None:
    from transformers import AutoModelForCausalLM

    pipeline, card = chat
    model = AutoModelForCausalLM.from_pretrained(card.details["folder"], dtype=torch.float32)
    driver = Driver(pipeline)
    asked = [ask(card, text, max_tokens=20) for text in ("Tell me of a whale.", "What is rain?")]
    for request in asked:
        driver.add(request)
    driver.finish(chunk=7, serial=3)
    for place, request in enumerate(asked):
        prompt = torch.tensor([request.payload.prompt])
        with torch.inference_mode():
            wanted = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=20,
                do_sample=False,
                repetition_penalty=1.0,
            )
        answer = tuple(wanted[0, prompt.shape[1] :].tolist())
        assert driver.marks[place] == answer[: len(driver.marks[place])]
        assert len(driver.marks[place]) >= 10
