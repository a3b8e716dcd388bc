"""Linear layers laid out anew give what they gave, and hold no second copy of their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipelines.linears import prepack, undo


class Small(nn.Module):
    """An embedding that shares its weight with the last layer, as small language models do."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.middle = nn.Linear(24, 24, bias=bias)
        self.last = nn.Linear(24, 50, bias=False)
        self.last.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.relu(self.middle(self.words(tokens))))
        return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 7, 32, 300])
@torch.inference_mode()
def test_results_stay_the_same(bias: bool, count: int) -> None:
    torch.manual_seed(0)
    model = Small(bias).eval()
    tokens = torch.randint(50, (1, count))
    wanted = model(tokens)
    assert set(prepack(model)) == {model.middle, model.last}
    torch.testing.assert_close(model(tokens), wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_row_does_not_depend_on_how_many_are_with_it_beyond_rounding() -> None:
    model = Small(True).eval()
    prepack(model)
    tokens = torch.randint(50, (1, 40))
    whole = model(tokens)[0]
    for place in range(40):
        torch.testing.assert_close(model(tokens[:, place : place + 1])[0, 0], whole[place])


def test_weights_are_not_kept_twice_and_the_shared_one_stays() -> None:
    model = Small(False).eval()
    shared = model.words.weight
    prepack(model)
    assert model.middle.weight.numel() == model.last.weight.numel() == 0
    assert model.words.weight is shared
    assert shared.shape == (50, 24)


@torch.inference_mode()
def test_undone_it_is_as_it_was() -> None:
    model = Small(True).eval()
    weight, tokens = model.middle.weight, torch.randint(50, (1, 9))
    wanted = model(tokens)
    undo(prepack(model))
    assert model.middle.weight is weight
    assert torch.equal(model(tokens), wanted)


def test_other_layers_and_formats_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleList([Special(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Conv1d(4, 4, 1)])
    assert prepack(model) == {}
    assert model[0].weight.numel() == 16
