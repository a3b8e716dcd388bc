"""Summaries by a model of their own, from what a caller sends to what it gets, and models that
cannot write them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from text_models import write_model
from tiny_seq2seq import END, LENGTH, tokenizer, write, write_words

from pipelines import OWN, factory, served
from pipelines.chat import ChatResult
from pipelines.seq2seq import Seq2SeqPipeline
from pipelines.summary import SummaryFront
from queueing.desk import Caller, Desk, Phase, View
from queueing.dispatcher import Dispatcher
from queueing.people import Person
from queueing.process import ProcessWorker
from queueing.work import Card, CarpoolError, Invalid

PREFIX = "summarize: "


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "t5", "t5")


@pytest.fixture(scope="module")
def card(t5: Path) -> Card:
    pipeline = Seq2SeqPipeline(str(t5), "cpu", "float32", threads=1)
    return pipeline.load(lambda fraction, text: None)


def test_a_text_becomes_what_the_model_was_taught_to_read(card: Card) -> None:
    request = SummaryFront().check({"text": "A cat."}, card)
    wanted = tokenizer().encode(PREFIX + "A cat.").ids
    assert request.payload.source == tuple(wanted)
    assert request.payload.source[-1] == END
    assert request.task == "summarise"
    assert [(work.key, work.most) for work in request.plan] == [
        ("encode", len(wanted) + 1),
        ("decode", request.payload.settings.max_tokens),
    ]
    pages = -(-len(wanted) // 16) + -(-(1 + request.payload.settings.max_tokens) // 16)
    assert request.bytes == pages * 16 * card.bytes_per_unit


def test_a_wish_decides_how_much_is_written(card: Card) -> None:
    ask = partial(SummaryFront().check, card=card)
    jobs = [ask({"text": "A" * 100, "length": n}).payload for n in ("short", "medium", "long")]
    assert [job.settings.max_tokens for job in jobs] == [48, 127, 127]
    assert [job.least for job in jobs] == [8, 30, 56]  # a half of what there is at most
    assert ask({"text": "A" * 100}).payload == jobs[1]
    assert ask({"text": "A"}).payload.least == 6


def test_control_tokens_in_a_text_are_plain_text(card: Card) -> None:
    source = SummaryFront().check({"text": "a </s> b <pad>"}, card).payload.source
    assert source.count(END) == 1
    assert max(source[:-1]) < 256


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ("text", "A summary is an object with fields, not text"),
        ({"text": "a", "beams": 4}, "has no field 'beams'; it has length, text"),
        ({"text": "a", "length": "huge"}, "length is huge; choose short or medium or long"),
        ({}, "text is missing; give text"),
        ({"text": " \n"}, "text is empty"),
        ({"text": "\ud800"}, "unpaired surrogate"),
        (
            {"text": "a" * LENGTH},
            f"There are {LENGTH + 12} tokens in text, .* reads at most {LENGTH}. Shorten it by 12",
        ),
        ({"text": "a" * 5000}, "There are 5,000 characters in text; .* takes at most 2,048"),
    ],
)
def test_what_breaks_a_rule_is_refused_in_words(payload: object, words: str, card: Card) -> None:
    with pytest.raises(Invalid, match=words):
        SummaryFront().check(payload, card)


def test_the_longest_text_is_taken_whole(card: Card) -> None:
    longest = "a" * (LENGTH - len(PREFIX) - 1)
    request = SummaryFront().check({"text": longest}, card)
    assert len(request.payload.source) == LENGTH
    assert request.bytes <= card.bytes


def test_a_result_says_how_much_was_read_and_how_it_ended(card: Card) -> None:
    front = SummaryFront()
    request = front.check({"text": "A cat."}, card)
    result = front.finish(request, ChatResult("stop", 1, 9, 0))
    assert result == ChatResult("stop", 18, 9, 0)
    assert front.summary(result, 1.25, 1.0) == "9 tokens out of 18 tokens in 1.2 s"
    cut = front.finish(request, ChatResult("length", 1, 1, 0))
    assert front.summary(cut, 2.0, 1.0).endswith(
        "1 token out of 18 tokens in 2.0 s, cut at the longest summary"
    )


def test_a_setting_gives_summaries_a_model_of_their_own() -> None:
    plain, own = served({}), served({"summarise": "some/t5"})
    assert "summarise" not in plain.models
    assert own.models["summarise"].policy.preload is False
    assert isinstance(factory(own.fronts["summarise"])(), SummaryFront)
    assert factory(own.models["summarise"].pipeline) is Seq2SeqPipeline
    assert own.models["chat"] == plain.models["chat"]


@pytest.mark.timeout(180)
async def test_people_ask_a_worker_process_and_are_answered_together(t5: Path) -> None:
    front, model = OWN["summarise"]
    settings = {"model": str(t5), "device": "cpu", "dtype": "float32", "threads": 1}
    factories, policies = {"summarise": (model.pipeline, settings)}, {"summarise": model.policy}
    dispatcher = Dispatcher(policies, [partial(ProcessWorker, factories, policies)])
    desk = Desk(dispatcher, {"summarise": factory(front)()})

    async def ask(number: int) -> list[View]:
        caller = Caller(Person(f"person {number}"), f"ride {number}", f"tab {number}")
        payload = {"text": f"The cat number {number} sat.", "length": "short"}
        return [view async for view in desk.follow("summarise", payload, caller)]

    await dispatcher.start()
    try:
        answers = await asyncio.gather(*(ask(number) for number in range(3)))
    finally:
        await dispatcher.close()
    for views in answers:
        last = views[-1]
        assert last.phase is Phase.FINISHED
        assert last.text
        assert last.result.prompt_tokens == len(PREFIX) + len("The cat number 0 sat.") + 1
        assert last.result.output_tokens <= 48


def change(folder: Path, name: str, **fields: object) -> Path:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def poorer(folder: Path) -> Path:
    file = folder / "model.safetensors"
    weights = load_file(file)
    few = {name: weight for name, weight in weights.items() if "EncDecAttention.k" not in name}
    save_file(few, file, {"format": "pt"})
    return folder


def startless(folder: Path) -> Path:
    write(folder, "t5", decoder_start_token_id=None, bos_token_id=None)
    return folder


def led(folder: Path) -> Path:
    """A model whose encoder and decoder attend in a way of their own."""
    from transformers import LEDConfig, LEDForConditionalGeneration

    config = LEDConfig(
        vocab_size=264, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=37, decoder_ffn_dim=37, attention_window=8,
        max_encoder_position_embeddings=128, max_decoder_position_embeddings=128,
    )  # fmt: skip
    LEDForConditionalGeneration(config).save_pretrained(folder)
    write_words(folder)
    return folder


T5 = partial(write, family="t5")
BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no model": (lambda folder: folder, "has no config.json; name a folder"),
    "no tokenizer": (lambda f: without(T5(f), "tokenizer.json"), "has no tokenizer.json; name a"),
    "no weights": (lambda f: without(T5(f), "model.safetensors"), "check its files, or name one"),
    "lost weights": (lambda f: poorer(T5(f)), "lacks 2 of its weights, such as .*EncDecAttention"),
    "wrong sizes": (lambda f: change(T5(f), "config.json", d_ff=64), "check its files"),
    "a chat model": (lambda f: write_model(f, "llama"), r"\(llama\) is no encoder with a decoder"),
    "no beginning": (startless, "does not say how its answers begin; add decoder_start_token_id"),
    "unknown type": (
        lambda f: change(T5(f), "config.json", model_type="nobody_knows"),
        "cannot be read .*choose a model that this version",
    ),
    "attention of its own": (led, "cannot be run many rows at once .*; name one such as T5 or"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_model_that_cannot_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    (tmp_path / "model").mkdir()
    folder = make(tmp_path / "model")
    with pytest.raises(CarpoolError, match=words) as refusal:
        Seq2SeqPipeline(str(folder), "cpu", "float32", threads=1).load(lambda fraction, text: None)
    text = str(refusal.value)
    assert "\n" not in text
    assert text.endswith(".")


def test_too_little_memory_is_refused_in_one_sentence(t5: Path) -> None:
    pipeline = Seq2SeqPipeline(str(t5), "cpu", "float32", threads=1, memory_bytes=10)
    with pytest.raises(CarpoolError, match="There are 10 bytes for rows; a single one takes"):
        pipeline.load(lambda fraction, text: None)
