"""Our sampling kernel against its twin; see tests/test_kernels.py for how it runs."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import drawing, sampling
from kernels.drawing import Rules

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EVERY = 1.0  # of top_p


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so short that a row has several."""
    monkeypatch.setattr(sampling, "BLOCK", 256)


def rules(limits: list[tuple[float, float, float, float]], seed: int = 0) -> Rules:
    chance = random.Random(seed)
    low, high = -(1 << 31), (1 << 31) - 1
    keys = [(chance.randint(low, high), chance.randint(low, high)) for _ in limits]
    return Rules.of(keys, limits, DEVICE)


def scores(rows: int, vocabulary: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * spread
    return made.to(DEVICE, dtype)


def same(logits: torch.Tensor, own: Rules) -> list[int]:
    found: list[int] = sampling.draw(logits, own).tolist()
    assert found == drawing.draw(logits, own).tolist()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocabulary", "spread"), [(1, 1.0), (7, 1.0), (256, 0.3), (700, 0.1), (600, 6.0)]
)
def test_tokens_are_those_of_the_twin(vocabulary: int, spread: float, dtype: torch.dtype) -> None:
    chance = random.Random(vocabulary)
    limits = [
        (
            chance.choice([0.0, 0.5, 1.0, 1.9]),
            chance.choice([0, 0, 1, 3, 40, 650]),
            chance.choice([EVERY, 0.95, 0.3]),
            chance.choice([0.0, 0.0, 0.2]),
        )
        for _ in range(10)
    ]
    same(scores(10, vocabulary, spread, dtype), rules(limits))


def test_equals_are_kept_or_left_together() -> None:
    logits = scores(8, 300, 0.6, torch.float32).mul(2).round().div(2)
    chosen = same(logits, rules([(1.0, 5, EVERY, 0.0), (0.7, 0, 0.5, 0.0)] * 4))
    assert len(set(chosen)) > 4
    flat = torch.zeros(1, 600, device=DEVICE)
    assert same(flat, rules([(0.0, 0, EVERY, 0.0)])) == [0]  # the first of equals


def test_a_row_that_is_no_number_is_told() -> None:
    logits = scores(5, 300, 1.0, torch.float32)
    logits[1, 7], logits[2], logits[3, 299] = float("nan"), -torch.inf, torch.inf
    assert same(logits, rules([(1.0, 9, 0.9, 0.0)] * 5))[1:4] == [-1, -1, -1]


def test_rows_are_drawn_alone_and_from_views() -> None:
    wide = scores(4, 640, 2.0, torch.float32)
    own = rules(
        [(0.0, 0, EVERY, 0.0), (1.0, 0, EVERY, 0.0), (1.0, 4, 0.9, 0.0), (2.0, 0, 0.6, 0.1)]
    )
    together = same(wide[:, :320], own)
    for row in range(4):
        picked = own.pick(torch.tensor([row], device=DEVICE))
        assert sampling.draw(wide[row : row + 1, :320], picked).tolist() == [together[row]]
    assert sampling.draw(wide[:0], own.pick(torch.tensor([], dtype=torch.long))).tolist() == []
