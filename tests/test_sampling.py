"""The sampler: what a row draws depends on its own logits, settings, seed and position, and on
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from pipelines.chat import Settings
from pipelines.sampling import Draw, choose, gumbel, key

VOCABULARY = 5000


def draw(position: int = 0, seen: Sequence[int] = (), **changed: object) -> Draw:
    fields: dict[str, object] = {
        "max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
        "repetition_penalty": 1.0, "seed": 1, "stop": (),
    }  # fmt: skip
    return Draw(Settings(**(fields | changed)), position, seen)


def logits(rows: int, spread: float = 3.0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(4)) * spread


KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.97, "temperature": 1.8},
    {"top_k": 1000, "top_p": 0.99},
    {"repetition_penalty": 1.3},
    {"temperature": 0.01, "top_p": 0.9},
]


def test_batch_mates_do_not_matter() -> None:
    scores = logits(len(KINDS) * 4)
    draws = [
        draw(place, (1, 2, place), seed=place * 11, **KINDS[place % len(KINDS)])
        for place in range(len(scores))
    ]
    together = choose(scores.clone(), draws)
    alone = [
        choose(scores[place : place + 1].clone(), [draws[place]])[0] for place in range(len(scores))
    ]
    assert together == alone
    order = list(reversed(range(len(scores))))
    assert choose(scores[order].clone(), [draws[place] for place in order]) == together[::-1]


def test_seed_and_position_decide() -> None:
    scores = logits(1, 0.5)
    by_seed = {choose(scores, [draw(seed=seed)])[0] for seed in range(40)}
    by_position = {choose(scores, [draw(position)])[0] for position in range(40)}
    assert len(by_seed) > 30
    assert len(by_position) > 30
    assert key(1, 2) != key(2, 1)
    assert key(-1, 0) == key((1 << 64) - 1, 0)  # a seed is 64 bits, signed or not


def test_follows_the_distribution() -> None:
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05])
    scores = wanted.log().repeat(4000, 1)
    chosen = choose(scores, [draw(place, seed=9) for place in range(4000)])
    shares = torch.bincount(torch.tensor(chosen), minlength=4) / 4000
    torch.testing.assert_close(shares, wanted, rtol=0, atol=4 * math.sqrt(0.25 / 4000))


@pytest.mark.parametrize("width", [256, 4096, VOCABULARY])
def test_top_k_and_top_p_are_those_of_transformers(width: int) -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    spread = {256: 3.0, 4096: 1.0, VOCABULARY: 0.1}[width]  # how far the nucleus reaches
    scores = logits(1, spread)
    warped = TemperatureLogitsWarper(0.8)(None, scores)
    warped = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(4800)(None, warped))
    allowed = set(warped[0].isfinite().nonzero()[:, 0].tolist())
    chosen = choose(
        scores.repeat(400, 1),
        [draw(place, temperature=0.8, top_k=4800, top_p=0.9) for place in range(400)],
    )
    assert set(chosen) <= allowed
    free = choose(scores.repeat(400, 1), [draw(place, temperature=0.8) for place in range(400)])
    # The same noise decides among fewer: whoever won among all and is allowed still wins.
    assert all(one == other for one, other in zip(chosen, free, strict=True) if other in allowed)


def test_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = logits(1)
    seen = [3, 3, 77, int(scores.argmax()), 1200]
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), scores.clone())
    given = scores.clone()
    chosen = choose(given, [draw(seen=seen, repetition_penalty=1.7, temperature=0.0)])
    assert chosen == [int(wanted.argmax())]
    assert torch.equal(given, scores)


def test_greedy_takes_the_likeliest_and_cold_is_greedy() -> None:
    scores = logits(3)
    best = scores.argmax(dim=-1).tolist()
    assert choose(scores, [draw(temperature=0.0)] * 3) == best
    assert choose(scores, [draw(temperature=1e-30)] * 3) == best
    assert choose(scores, [draw(top_k=1)] * 3) == best
    assert choose(scores, [draw(top_p=1e-9)] * 3) == best


def test_a_row_that_is_no_number_is_told_and_spares_the_others() -> None:
    scores = logits(4)
    wanted = choose(scores.clone(), [draw(seed=place) for place in range(4)])
    scores[1] = float("nan")
    scores[2] = float("-inf")
    found = choose(scores, [draw(seed=place) for place in range(4)])
    assert found == [wanted[0], None, None, wanted[3]]


def test_noise_is_finite_and_spread() -> None:
    keys = torch.tensor([key(seed, 0) for seed in range(8)], dtype=torch.int32)
    noise = gumbel(keys, torch.arange(50_000, dtype=torch.int32)[None])
    assert noise.isfinite().all()
    assert abs(noise.mean().item() - 0.5772) < 0.01  # Gumbel's own mean
    assert abs(noise.std().item() - math.pi / math.sqrt(6)) < 0.01
    assert abs(torch.corrcoef(noise)[0, 1].item()) < 0.02
    some = torch.tensor([[7, 49_999, 12]])
    assert torch.equal(gumbel(keys, some), noise[:, some[0]])
