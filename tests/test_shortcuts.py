"""One pass in place of several: numbers as of torch, the same bits in any company, and a model
that would then say something else keeps its own way.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kernels import native
from kernels.attention import Pages
from kernels.elementwise import gated, rms_norm, rotation
from kernels.reference import Span
from pipelines import loading, shortcuts
from pipelines.packed import PackedModel
from tests.text_models import write_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="There is no C++ compiler here.")
CPU = torch.device("cpu")
PREFIXES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral"}
SHAPED = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize("shape", [(8,), (0, 16), (1, 5, 64), (2, 3, 4, 24), (230, 576)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_norm_equals_torch(shape: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    rows, weight = torch.randn(shape) * scale, torch.randn(shape[-1])
    norm = rms_norm(weight, 1e-5)
    assert norm is not None
    wanted = F.rms_norm(rows, shape[-1:], weight, 1e-5)
    torch.testing.assert_close(norm(rows), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8,), (0, 16), (1, 5, 64), (90, 1536)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_gate_equals_torch(shape: tuple[int, ...], threads: int) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(shape) * 30, torch.randn(shape)
    multiply = gated(up, shape[-1])
    assert multiply is not None
    torch.set_num_threads(threads)
    try:
        found = multiply(torch.cat((gate, up), -1))
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_none() -> None:
    norm, multiply = rms_norm(torch.ones(8), 1e-5), gated(torch.ones(8), 8)
    assert norm is not None
    assert multiply is not None
    rows = torch.ones(3, 8)
    rows[1, 4] = float("nan")
    for found in (norm(rows), multiply(rows.repeat(1, 2))):
        assert found[[0, 2]].isfinite().all()
        assert found[1].isnan().any()


def test_a_row_gives_the_same_bits_alone_and_in_company() -> None:
    torch.manual_seed(0)
    rows, both = torch.randn(70, 1536), torch.randn(70, 3072)
    norm, multiply = rms_norm(torch.randn(1536), 1e-5), gated(both, 1536)
    assert norm is not None
    assert multiply is not None
    for place in (0, 33, 69):
        own = slice(place, place + 1)
        assert torch.equal(norm(rows)[own], norm(rows[own]))
        assert torch.equal(multiply(both)[own], multiply(both[own]))


def test_rows_that_are_not_laid_out_are_laid_out_first() -> None:
    torch.manual_seed(0)
    rows = torch.randn(16, 8).transpose(0, 1)
    norm = rms_norm(torch.ones(16), 1e-5)
    assert norm is not None
    torch.testing.assert_close(norm(rows), F.rms_norm(rows, (16,), eps=1e-5))


@pytest.mark.parametrize("bad", [torch.ones(3, 9), torch.ones(3, 8).bfloat16()])
def test_rows_that_do_not_fit_are_refused(bad: torch.Tensor) -> None:
    norm, multiply = rms_norm(torch.ones(8), 1e-5), gated(torch.ones(8), 8)
    assert norm is not None
    assert multiply is not None
    with pytest.raises(ValueError, match="float32 numbers on a host"):
        norm(bad)
    with pytest.raises(ValueError, match="float32 numbers on a host"):
        multiply(bad)


def test_what_it_does_not_serve_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rms_norm(torch.ones(9), 1e-5) is None
    assert rms_norm(torch.ones(8).bfloat16(), 1e-5) is None
    assert gated(torch.ones(8).bfloat16(), 8) is None
    assert gated(torch.ones(8), 9) is None
    monkeypatch.setattr(native, "library", lambda: None)
    assert rms_norm(torch.ones(8), 1e-5) is None


def model_of(folder: Path) -> tuple[nn.Module, PackedModel]:
    loaded = loading.bring(folder, CPU, torch.float32, 4)
    assert isinstance(loaded.body, PackedModel)
    model: nn.Module = loaded.body.model
    return model, loaded.body


def shortened(model: nn.Module) -> set[str]:
    own = [module for module in model.modules() if "forward" in vars(module)]
    return {type(module).__name__ for module in own if type(module) is not nn.Linear}


@pytest.mark.parametrize(
    ("width", "count", "apart"), [(64, 3, 0), (8, 2, 5), (6, 1, 1), (16, 4, 16)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_rotation_equals_transformers(width: int, count: int, apart: int, threads: int) -> None:
    torch.manual_seed(0)
    joined = torch.randn(190, count * width + apart)
    heads = joined[:, : count * width].view(190, count, width)
    turns = torch.randn(1, 190, width), torch.randn(1, 190, width)
    whole = heads.transpose(0, 1)[None]
    wanted, _ = apply_rotary_pos_emb(whole, whole, *turns)
    beyond = joined[:, count * width :].clone()
    rotate = rotation(joined, width)
    assert rotate is not None
    torch.set_num_threads(threads)
    try:
        rotate(heads, *turns)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(heads, wanted[0].transpose(0, 1))
    assert torch.equal(joined[:, count * width :], beyond)


def test_rotation_refuses_what_does_not_fit() -> None:
    assert rotation(torch.ones(1), 7) is None
    rotate = rotation(torch.ones(1), 8)
    assert rotate is not None
    turn = torch.ones(3, 8)
    with pytest.raises(ValueError, match="side by side are wanted"):
        rotate(torch.ones(2, 3, 8).transpose(0, 1), turn, turn)
    with pytest.raises(ValueError, match="side by side are wanted"):
        rotate(torch.ones(3, 2, 16)[:, :, ::2], turn, turn)
    with pytest.raises(ValueError, match="it takes one each"):
        rotate(torch.ones(4, 2, 8), turn, turn)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_made_of_such_layers_takes_them_and_says_the_same(
    tmp_path: Path, family: str
) -> None:
    model, packed = model_of(write_model(tmp_path, family, **SHAPED))
    assert shortened(model) == {
        f"{PREFIXES[family]}{part}" for part in ("RMSNorm", "MLP", "DecoderLayer")
    }
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    row = torch.randint(0, 256, (1, 90), generator=torch.Generator().manual_seed(0))
    packed.pages = Pages(23, 4)
    span = Span(0, 90, 90, range(1, 24))
    with torch.inference_mode():
        wanted = plain(row).logits[0, [3, 40, 89]]
        found = packed.forward(row[0].tolist(), [span], [3, 40, 89])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_restored_it_has_none(tmp_path: Path) -> None:
    model, packed = model_of(write_model(tmp_path, "llama"))
    shortcuts.restore(shortcuts.shorten(model, packed.pages.shapes))
    assert shortened(model) == set()


@pytest.mark.parametrize("family", ["gemma3_text", "gemma2", "phi3", "deepseek_v3", "gpt2"])
def test_layers_of_another_kind_keep_their_own_way(tmp_path: Path, family: str) -> None:
    model, _ = model_of(write_model(tmp_path, family))
    assert not any(name.endswith(("Layer", "Block")) for name in shortened(model))


def test_layers_that_do_something_else_far_into_the_context_keep_their_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = modeling_llama.apply_rotary_pos_emb

    def louder(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As if queries grew from position 200 on, where cosines of the slowest turn are less."""
        query, key = own(query, key, cos, sin)
        far = cos[0, :, 3] < math.cos(0.199)
        return torch.where(far[None, None, :, None], 3 * query, query), key

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", louder)
    model, _ = model_of(write_model(tmp_path, "llama"))
    assert "LlamaDecoderLayer" not in shortened(model)


class Louder(nn.Module):
    """Has all that a norm has, and does something else."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return 2 * F.rms_norm(rows, self.weight.shape, self.weight, 1e-5)


def test_a_model_that_would_say_something_else_keeps_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind = type("LouderRMSNorm", (Louder,), {})
    plain = loading._model

    def changed(folder: Path, dtype: torch.dtype) -> nn.Module:
        model: nn.Module = plain(folder, dtype)
        model.model.norm = kind(model.model.norm)  # type: ignore[union-attr]
        return model

    monkeypatch.setattr(loading, "_model", changed)
    with caplog.at_level(logging.INFO, "carpool.loading"):
        model, _ = model_of(write_model(tmp_path, "llama"))
    assert shortened(model) == set()
    assert any("restore undoes is left" in record.message for record in caplog.records)
