"""A whole model on our kernels, and steps that are padded for graphs; see tests/test_kernels.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import graphs
from kernels.attention import Batch
from kernels.graphs import Decoder
from kernels.paged_attention import Reader
from kernels.reference import Span
from pipelines.packed import PackedModel
from tests.text_models import VOCABULARY, write_model

SIZE = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LENGTHS = (9, 1, 14)


def again(call: graphs.Call) -> graphs.Call:
    """A capture that is none: every replay calls again, on what the tensors then hold."""
    call()
    return call


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """A tiny model with pages for three rows, whose prompts are computed by our kernels."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    from kernels.attention import NAME, attend

    AttentionInterface.register(NAME, attend)
    folder: Path = write_model(tmp_path_factory.mktemp("model"), request.param)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    made = PackedModel(model.to(DEVICE).eval(), SIZE)
    made.model.set_attn_implementation(NAME)
    made.pages.count = 20
    return made


def rows(grown: int = 0) -> list[list[int]]:
    chance = random.Random(1)
    made = [[chance.randrange(VOCABULARY) for _ in range(length + 9)] for length in LENGTHS]
    return [own[: length + grown] for own, length in zip(made, LENGTHS, strict=True)]


def pages_of(row: int) -> list[int]:
    return list(range(1 + 6 * row, 7 + 6 * row))


def prefill(packed: PackedModel) -> torch.Tensor:
    """All prompts in one call by our kernels; the logits of each one's last token."""
    spans, start = [], 0
    for row, own in enumerate(rows()):
        spans.append(Span(start, len(own), len(own), pages_of(row)))
        start += len(own)
    reader = Reader.of(spans, SIZE, DEVICE)
    return packed.run(
        torch.tensor([sum(rows(), [])], device=DEVICE),
        torch.tensor([[place for own in rows() for place in range(len(own))]], device=DEVICE),
        torch.tensor([span.start + span.count - 1 for span in spans], device=DEVICE),
        Batch(packed.pages, spans, DEVICE, reader),
    )


def alone(packed: PackedModel, tokens: list[int]) -> torch.Tensor:
    """The last logits by transformers' own attention."""
    name = packed.model.config._attn_implementation
    packed.model.set_attn_implementation("eager")
    try:
        out = packed.model(torch.tensor([tokens], device=DEVICE), use_cache=False)
    finally:
        packed.model.set_attn_implementation(name)
    logits: torch.Tensor = out.logits[0, -1]
    return logits


@torch.inference_mode()
def test_prompts_and_padded_steps_are_those_of_transformers(packed: PackedModel) -> None:
    found = prefill(packed)
    for own, logits in zip(rows(), found, strict=True):
        torch.testing.assert_close(logits, alone(packed, own), rtol=1e-3, atol=1e-3)
    decoder = Decoder(packed.run, packed.pages, DEVICE, again)
    for step in (1, 2):
        tokens = [own[-1] for own in rows(step)]
        spans = [Span(row, 1, len(own), pages_of(row)) for row, own in enumerate(rows(step))]
        logits = decoder(tokens, spans)
        assert logits is not None
        assert logits.shape == (3, VOCABULARY)
        for own, row in zip(rows(step), logits, strict=True):
            torch.testing.assert_close(row, alone(packed, own), rtol=1e-3, atol=1e-3)
    assert list(decoder._steps) == [4]  # three rows, rounded up, captured once


def decoder_of(
    run: Callable[..., torch.Tensor], packed: PackedModel
) -> tuple[Decoder, list[tuple[int, ...]]]:
    """A decoder, and the shapes of the tokens that its forwards were given."""
    shapes: list[tuple[int, ...]] = []

    def forward(tokens: torch.Tensor, *more: object) -> torch.Tensor:
        shapes.append(tuple(tokens.shape))
        return run(tokens, *more)

    return Decoder(forward, packed.pages, DEVICE, lambda call: call), shapes


def zeros(tokens: torch.Tensor, *more: object) -> torch.Tensor:
    return torch.zeros(tokens.shape[1], VOCABULARY)


def test_steps_are_rounded_up_and_what_does_not_fit_is_left_to_others(packed: PackedModel) -> None:
    decoder, shapes = decoder_of(zeros, packed)

    def ask(count: int, tokens: int = 1, length: int = 3) -> torch.Tensor | None:
        spans = [Span(place, tokens, length, [1]) for place in range(count)]
        return decoder([5] * count * tokens, spans)

    for count in (1, 3, 4, 5, 128):
        logits = ask(count)
        assert logits is not None
        assert len(logits) == count
    assert shapes == [(1, 1), (1, 4), (1, 4), (1, 8), (1, 128)]
    assert ask(129) is None
    assert ask(2, tokens=2) is None
    assert ask(2, length=graphs.REACH + 1) is None


def test_a_capture_that_fails_is_said_once_and_not_tried_again(
    packed: PackedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*more: object) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    decoder, shapes = decoder_of(broken, packed)
    for _ in range(2):
        assert decoder([5], [Span(0, 1, 3, [1])]) is None
    assert len(shapes) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Decoding goes on without CUDA graphs: operation not permitted when stream is capturing"
    ]
