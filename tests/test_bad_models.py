"""What cannot be served is refused in one sentence that says what to do, and a model's limits that
would change answers are kept.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from text_models import write_model, write_words
from tiny_encoders import write_encoder
from transformers.models.llama.modeling_llama import LlamaAttention

from pipelines import judge
from pipelines.encode import EncodePipeline
from pipelines.text import TextPipeline
from queueing.work import Card, CarpoolError


def load(folder: Path, **settings: object) -> Card:
    pipeline = TextPipeline(
        str(folder), device="cpu", dtype="float32", threads=1, page=4, memory_bytes=1 << 20,
        **settings,
    )  # fmt: skip
    return pipeline.load(lambda fraction, text: None)


def change(folder: Path, **fields: object) -> Path:
    """Rewrite fields of a model's configuration; None takes one out."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: it for name, it in config.items() if it is not None}))
    return folder


def without(folder: Path, name: str) -> Path:
    (folder / name).unlink()
    return folder


def poorer(folder: Path) -> Path:
    """A model that lost some of its weights."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    left = {name: it for name, it in weights.items() if "layers.1.mlp" not in name}
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cut(folder: Path) -> Path:
    """A download that broke off."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])
    return folder


def bart(folder: Path) -> Path:
    from transformers import BartConfig

    BartConfig(d_model=16).save_pretrained(write_words(folder))
    return folder


def with_state_inside(folder: Path) -> Path:
    """A recurrent model that keeps its state in its layers, where rows would mix."""
    fields = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "lru_width": 32,
        "intermediate_size": 64, "num_key_value_heads": 1, "attention_window_size": 12,
        "max_position_embeddings": 256,
    }  # fmt: skip
    return write_model(folder, "recurrent_gemma", **fields)


def llama(spoil: Callable[[Path], Path]) -> Callable[[Path], Path]:
    return lambda folder: spoil(write_model(folder, "llama"))


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no model": (lambda folder: folder, "has no config.json; name a folder"),
    "no weights": (llama(lambda f: without(f, "model.safetensors")), "no weights; put its"),
    "no tokenizer": (llama(lambda f: without(f, "tokenizer.json")), "no tokenizer.json; write it"),
    "no context": (
        lambda folder: write_model(folder, "mamba", max_position_embeddings=None),
        "add max_position_embeddings to its config.json",
    ),
    "lost weights": (llama(poorer), "lacks 3 of its weights, such as .*; fetch its files again"),
    "cut weights": (llama(cut), "check its files"),
    "wrong sizes": (llama(lambda f: change(f, hidden_size=64)), "check its files"),
    "encoder-decoder": (bart, r"\(bart\).*choose a decoder-only"),
    "unknown type": (
        llama(lambda f: change(f, model_type="nobody_knows")),
        "cannot be read .*choose a model that this version",
    ),
    "foreign code": (
        llama(lambda f: change(f, model_type="own", auto_map={"AutoConfig": "own.Config"})),
        "choose a model that this version",
    ),
    "no state to carry": (with_state_inside, "neither packed .* nor one row at a time .*; choose"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_model_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    make, words = BAD[name]
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(CarpoolError, match=words) as refusal:
        load(make(folder))
    text = str(refusal.value)
    assert "\n" not in text
    assert text.endswith(".")


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What transformers says while it loads."""
    said: list[str] = []
    logger, handler = logging.getLogger("transformers.modeling_utils"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


def encode(folder: Path, task: str) -> Card:
    pipeline = EncodePipeline(task, str(folder), device="cpu", dtype="float32", threads=1)
    return pipeline.load(lambda fraction, text: None)


def test_weights_that_a_task_does_not_use_are_not_worth_a_word(
    tmp_path: Path, told: list[str]
) -> None:
    folder = write_encoder(tmp_path, "bert", "fill")  # has no pooler, and has a head
    assert encode(folder, "embed").details["path"] == "packed"
    with pytest.raises(CarpoolError, match="lacks 2 weights of .*QuestionAnswering, such as qa_"):
        encode(folder, "answer")
    assert told == []


def test_where_weights_do_not_fit_transformers_says_which(tmp_path: Path, told: list[str]) -> None:
    folder = change(write_encoder(tmp_path, "bert", "embed"), intermediate_size=48)
    with pytest.raises(CarpoolError, match="cannot be loaded as AutoModel "):
        encode(folder, "embed")
    (table,) = told
    assert "intermediate.dense.weight" in table


def test_too_little_memory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write_model(tmp_path, "llama")
    pipeline = TextPipeline(str(tmp_path), device="cpu", dtype="float32", memory_bytes=10)
    with pytest.raises(CarpoolError, match="memory_bytes is 10; .* Give it more"):
        pipeline.load(lambda fraction, text: None)


def test_what_attention_is_asked_and_cannot_do_leads_to_the_other_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LlamaAttention.forward

    def biased(self: LlamaAttention, *arguments: object, **asked: object) -> object:
        return real(self, *arguments, odd_bias=torch.zeros(1), **asked)

    monkeypatch.setattr(LlamaAttention, "forward", biased)
    card = load(write_model(tmp_path, "llama"))
    assert card.details["path"] == "one row at a time"
    assert "asks its attention for odd_bias" in card.details["why"]


def test_a_window_that_attention_is_not_told_of_leads_to_the_other_path(tmp_path: Path) -> None:
    fields = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 2,
        "max_position_embeddings": 256,
    }  # fmt: skip
    wide = write_model(tmp_path / "wide", "phimoe", **fields, sliding_window=None)
    assert load(wide).details["path"] == "packed"
    windowed = write_model(tmp_path / "windowed", "phimoe", **fields, sliding_window=64)
    assert "a window of 64 tokens" in load(windowed).details["why"]
    idle = write_model(tmp_path / "idle", "llama", sliding_window=64)  # which llama does not read
    assert load(idle).details["path"] == "packed"


def test_the_context_ends_where_rows_would_change_each_others_positions(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4, "original_max_position_embeddings": 64,
    }  # fmt: skip
    folder = write_model(
        tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64
    )
    assert load(folder).limits["context"] == 64


def test_judge_says_the_path_and_refuses_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARPOOL_DTYPE", "float32")
    write_model(tmp_path / "falcon", "falcon")
    assert judge.main([str(tmp_path / "falcon")]) == 0
    said = capsys.readouterr().out
    assert "path:        one row at a time" in said
    assert "because:     its 2 layers attend 0 times" in said
    assert judge.main([str(tmp_path)]) == 1
    assert "no config.json" in capsys.readouterr().out
