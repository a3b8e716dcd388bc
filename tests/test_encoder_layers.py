"""What an encoder's layer does after attention, in one pass, and models that take it: numbers as of
torch, the same bits in any company, and what is of another kind keeps its own way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModel

from kernels import native
from kernels.attention import NAME, attend, attending
from kernels.encoder import After, after_attention
from kernels.linear import linear
from kernels.within import Stretch, Within
from pipelines.linears import prepack, undo
from pipelines.proof import attend_by
from pipelines.shortcuts import restore, shorten

pytestmark = pytest.mark.skipif(native.library() is None, reason="There is no C++ compiler here.")
CPU = torch.device("cpu")
LENGTHS = (1, 23, 5, 64, 1)
SHAPED = {
    "vocab_size": 90, "max_position_embeddings": 80, "hidden_size": 32, "embedding_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "initializer_range": 0.3, "attn_implementation": "eager", "hidden_dim": 64,
}  # fmt: skip
LAYERS = {
    "bert": "BertLayer", "roberta": "RobertaLayer", "electra": "ElectraLayer",
    "distilbert": "TransformerBlock",
}  # fmt: skip


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


class Parts:
    """The parts of a layer, and what it makes of them."""

    def __init__(self, heads: int, width: int, inner: int) -> None:
        torch.manual_seed(0)
        self.out, self.up = nn.Linear(heads, width), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.first, self.second = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-3)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def taken(self) -> After | None:
        rows = [linear(part.weight, part.bias) for part in (self.out, self.up, self.down)]
        out, up, down = (part for part in rows if part is not None)
        return after_attention(out, self.first, up, down, self.second)

    @torch.inference_mode()
    def exact(self, attended: Tensor, given: Tensor) -> Tensor:
        for part in vars(self).values():
            part.double()
        middle = self.first(self.out(attended.double()) + given.double())
        found: Tensor = self.second(self.down(F.gelu(self.up(middle))) + middle)
        for part in vars(self).values():
            part.float()
        return found.float()


@pytest.mark.parametrize("rows", [0, 1, 7, 35, 130])
@pytest.mark.parametrize(("heads", "width", "inner"), [(8, 8, 8), (24, 40, 72), (64, 384, 400)])
@pytest.mark.usefixtures("threads")
def test_it_equals_torch(rows: int, heads: int, width: int, inner: int) -> None:
    parts = Parts(heads, width, inner)
    after = parts.taken()
    assert after is not None
    attended, given = torch.randn(rows, heads), torch.randn(rows, width) * 3
    wanted = parts.exact(attended, given)
    torch.testing.assert_close(after(attended, given), wanted, rtol=1e-5, atol=2e-5)


def test_gelu_is_the_exact_one() -> None:
    """Through a layer whose products and norms keep what they are given."""
    parts = Parts(8, 8, 8)
    for product in (parts.out, parts.up, parts.down):
        nn.init.eye_(product.weight)
    nn.init.zeros_(parts.out.bias)
    nn.init.ones_(parts.first.weight)
    nn.init.zeros_(parts.first.bias)
    parts.up.weight.data *= 4
    nn.init.zeros_(parts.up.bias)
    after = parts.taken()
    assert after is not None
    attended = torch.randn(500, 8)
    wanted = parts.exact(attended, torch.zeros(500, 8))
    found = after(attended, torch.zeros(500, 8))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=5e-6)


def test_a_row_is_the_same_bits_alone_in_company_and_with_any_threads() -> None:
    after = Parts(24, 48, 80).taken()
    assert after is not None
    attended, given = torch.randn(130, 24), torch.randn(130, 48)
    together = after(attended, given)
    for count in (1, 2, 20, 47, 90):
        part = slice(130 - count, 130)
        assert torch.equal(after(attended[part], given[part]), together[part])
    torch.set_num_threads(3)
    try:
        assert torch.equal(after(attended, given), together)
        assert torch.equal(after(attended[:20], given[:20]), together[:20])
    finally:
        torch.set_num_threads(1)


def test_what_does_not_fit_is_left_to_torch_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Parts(8, 12, 8).taken() is None  # a width that is no multiple of 8
    parts = Parts(8, 16, 8)
    parts.second = nn.LayerNorm(16, bias=False)
    assert parts.taken() is None
    parts = Parts(8, 16, 8)
    parts.down = nn.Linear(9, 16)
    assert parts.taken() is None
    after = Parts(8, 16, 8).taken()
    assert after is not None
    with pytest.raises(ValueError, match="not the same rows"):
        after(torch.ones(3, 8), torch.ones(2, 16))
    with pytest.raises(ValueError, match="float32 numbers on a host"):
        after(torch.ones(3, 9), torch.ones(3, 16))
    parts = Parts(8, 16, 8)
    rows = [linear(part.weight, part.bias) for part in (parts.out, parts.up, parts.down)]
    monkeypatch.setattr(native, "library", lambda: None)
    out, up, down = (part for part in rows if part is not None)
    assert after_attention(out, parts.first, up, down, parts.second) is None


def model_of(family: str, **changed: object) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPED | changed))
    return AutoModel.from_config(config).eval()


def packed(model: Any) -> tuple[Tensor, Within]:
    """What it gives for rows of all lengths, packed; and how it attended."""
    starts = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    within = Within([Stretch(*row) for row in zip(starts, LENGTHS, strict=True)], CPU, causal=False)
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    first = 2 if model.config.model_type == "roberta" else 0
    with attending(within):
        found = model(input_ids=tokens(), position_ids=places[None] + first)
    return found.last_hidden_state[0], within


def tokens() -> Tensor:
    return torch.arange(sum(LENGTHS))[None] * 31 % 87 + 3


def shortened(model: Any) -> set[str]:
    own = [part for part in model.modules() if "forward" in vars(part)]
    return {type(part).__name__ for part in own if type(part) is not nn.Linear}


@torch.inference_mode()
@pytest.mark.parametrize("family", LAYERS)
def test_a_model_made_of_such_layers_takes_them_and_says_the_same(family: str) -> None:
    model = model_of(family)
    rows = torch.split(tokens(), LENGTHS, 1)
    wanted = torch.cat([model(input_ids=row).last_hidden_state[0] for row in rows])
    AttentionInterface.register(NAME, attend)
    attend_by(model, NAME)
    found, within = packed(model)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    weights = prepack(model)
    taken = shorten(model, within.shapes)
    assert shortened(model) == {LAYERS[family]}
    found, again = packed(model)
    assert again.calls == within.calls == 2
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    restore(taken)
    undo(weights)
    assert shortened(model) == set()
    torch.testing.assert_close(packed(model)[0], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changed",
    [{"hidden_act": "gelu_new"}, {"hidden_act": "relu"}, {"hidden_size": 36, "embedding_size": 36}],
)
def test_layers_of_another_kind_keep_their_own_way(changed: dict[str, object]) -> None:
    model = model_of("bert", **changed)
    AttentionInterface.register(NAME, attend)
    attend_by(model, NAME)
    with torch.inference_mode():
        _, within = packed(model)
    prepack(model)
    assert shorten(model, within.shapes) == []


def test_without_our_own_linears_or_shapes_no_layer_is_taken() -> None:
    model = model_of("bert")
    AttentionInterface.register(NAME, attend)
    attend_by(model, NAME)
    with torch.inference_mode():
        _, within = packed(model)
    assert shorten(model, within.shapes) == []
    prepack(model)
    assert shorten(model, {}) == []
