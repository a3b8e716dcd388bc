"""One pass in place of several: numbers as of torch, the same bits in any company, and a model
that would then say something else keeps its own way.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernels import native
from kernels.elementwise import gated, rms_norm
from pipelines import loading, shortcuts
from pipelines.packed import PackedModel
from tests.text_models import write_model

pytestmark = pytest.mark.skipif(native.library() is None, reason="There is no C++ compiler here.")
CPU = torch.device("cpu")


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
    multiply = gated(up)
    assert multiply is not None
    torch.set_num_threads(threads)
    try:
        found = multiply(gate, up)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=1e-5, atol=1e-6)


def test_what_is_no_number_stays_none() -> None:
    norm, multiply = rms_norm(torch.ones(8), 1e-5), gated(torch.ones(8))
    assert norm is not None
    assert multiply is not None
    rows = torch.ones(3, 8)
    rows[1, 4] = float("nan")
    for found in (norm(rows), multiply(rows, rows)):
        assert found[[0, 2]].isfinite().all()
        assert found[1].isnan().any()


def test_a_row_gives_the_same_bits_alone_and_in_company() -> None:
    torch.manual_seed(0)
    rows, up = torch.randn(70, 1536), torch.randn(70, 1536)
    norm, multiply = rms_norm(torch.randn(1536), 1e-5), gated(up)
    assert norm is not None
    assert multiply is not None
    for place in (0, 33, 69):
        own = slice(place, place + 1)
        assert torch.equal(norm(rows)[own], norm(rows[own]))
        assert torch.equal(multiply(rows, up)[own], multiply(rows[own], up[own]))


def test_rows_that_are_not_laid_out_are_laid_out_first() -> None:
    torch.manual_seed(0)
    rows = torch.randn(16, 8).transpose(0, 1)
    norm = rms_norm(torch.ones(16), 1e-5)
    assert norm is not None
    torch.testing.assert_close(norm(rows), F.rms_norm(rows, (16,), eps=1e-5))


@pytest.mark.parametrize("bad", [torch.ones(3, 9), torch.ones(3, 8).bfloat16()])
def test_rows_that_do_not_fit_are_refused(bad: torch.Tensor) -> None:
    norm, multiply = rms_norm(torch.ones(8), 1e-5), gated(torch.ones(8))
    assert norm is not None
    assert multiply is not None
    with pytest.raises(ValueError, match="float32 numbers on a host"):
        norm(bad)
    with pytest.raises(ValueError, match=r"float32 numbers on a host|no multiple of 8"):
        multiply(bad, bad)
    with pytest.raises(ValueError, match="does not fit"):
        multiply(torch.ones(2, 8), torch.ones(3, 8))


def test_what_it_does_not_serve_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rms_norm(torch.ones(9), 1e-5) is None
    assert rms_norm(torch.ones(8).bfloat16(), 1e-5) is None
    assert gated(torch.ones(8).bfloat16()) is None
    monkeypatch.setattr(native, "library", lambda: None)
    assert rms_norm(torch.ones(8), 1e-5) is None


def model_of(folder: Path) -> nn.Module:
    loaded = loading.bring(folder, CPU, torch.float32, 4)
    assert isinstance(loaded.body, PackedModel)
    model: nn.Module = loaded.body.model
    return model


def shortened(model: nn.Module) -> set[str]:
    own = [module for module in model.modules() if "forward" in vars(module)]
    return {type(module).__name__ for module in own if type(module) is not nn.Linear}


def test_a_llama_takes_them_and_restored_has_none(tmp_path: Path) -> None:
    model = model_of(write_model(tmp_path, "llama"))
    assert shortened(model) == {"LlamaRMSNorm", "LlamaMLP"}
    shortcuts.restore(shortcuts.shorten(model))
    assert shortened(model) == set()


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
        model = model_of(write_model(tmp_path, "llama"))
    assert shortened(model) == set()
    assert any("shorten is left" in record.message for record in caplog.records)
