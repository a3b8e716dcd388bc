"""The sampler: what a row draws depends on its own logits, settings, seed and position, and on
nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from kernels.drawing import gumbel
from pipelines.chat import Settings
from pipelines.sampling import Draw, choose, key

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
    {"min_p": 0.02},
    {"min_p": 0.1, "top_k": 40, "top_p": 0.8, "temperature": 1.4},
    {"temperature": 30.0},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3},
    {"presence_penalty": -2.0, "temperature": 0.0},
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [3, 50, 5000])
def test_batch_mates_do_not_matter_where_scores_tie(vocabulary: int, dtype: torch.dtype) -> None:
    scores = logits(len(KINDS) * 4, 0.5, vocabulary).mul(2).round().div(2).to(dtype)
    seen = (1, 2, 2)
    draws = [draw(3, seen, seed=place, **KINDS[place % len(KINDS)]) for place in range(len(scores))]
    together = choose(scores, draws)
    assert together == [choose(scores[place, None], [own])[0] for place, own in enumerate(draws)]
    greedy = [place for place, own in enumerate(draws) if own.settings == draw(temperature=0.0)]
    assert all(together[place] == int(scores[place].float().argmax()) for place in greedy)


def by_the_book(scores: torch.Tensor, noise: torch.Tensor, own: Settings) -> int:
    """One row's token, everything sorted and summed: what the quick way must give."""
    warm = (scores.double() - scores.max()) / own.temperature
    order = warm.argsort(descending=True)
    kept = warm >= (warm[order[own.top_k - 1]] if 0 < own.top_k < len(scores) else -math.inf)
    weight = warm.exp() * kept
    above = torch.stack([weight[warm > value].sum() for value in warm])
    kept &= (above < own.top_p * weight.sum()) & (warm >= math.log(max(own.min_p, 1e-300)))
    return int(torch.where(kept, warm + noise, -math.inf).argmax())


def test_tokens_are_those_of_the_book() -> None:
    chance = random.Random(5)
    for number in range(60):
        scores = logits(1, chance.choice([0.3, 2.0, 6.0]), chance.choice([2, 17, 200, 400]))
        scores = scores.mul(4).round().div(4) if number % 3 == 0 else scores  # with equals
        wanted = draw(
            number,
            temperature=chance.choice([0.3, 1.0, 1.9]),
            top_k=chance.choice([0, 0, 1, 5, 50, 399]),
            top_p=chance.choice([1.0, 0.95, 0.6, 0.01]),
            min_p=chance.choice([0.0, 0.0, 0.05, 0.5]),
        )
        keys = torch.tensor([key(1, number)], dtype=torch.int32)
        noise = gumbel(keys, torch.arange(scores.shape[-1])[None])[0]
        assert choose(scores, [wanted]) == [by_the_book(scores[0], noise, wanted.settings)], wanted


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


def test_presence_and_frequency_count_what_the_answer_said_and_not_the_prompt() -> None:
    chance = random.Random(2)
    rows = 20
    scores = logits(rows, 0.3, 12)
    draws, wanted = [], []
    for own in scores:
        prompt = [chance.randrange(12) for _ in range(5)]
        answer = [chance.randrange(12) for _ in range(chance.randrange(9))]
        presence, frequency = chance.choice([0.0, 0.4, -0.4]), chance.choice([0.0, 0.2, -0.1])
        fields = {"presence_penalty": presence, "frequency_penalty": frequency}
        draws.append(draw(len(answer), prompt + answer, temperature=0.0, **fields))
        times = torch.tensor([answer.count(token) for token in range(12)])
        wanted.append(int((own - presence * (times > 0) - frequency * times).argmax()))
    given = scores.clone()
    assert choose(given, draws) == wanted
    assert torch.equal(given, scores)
    assert wanted != scores.argmax(dim=-1).tolist()


def test_min_p_is_that_of_transformers() -> None:
    from transformers import MinPLogitsWarper

    scores = logits(1)
    allowed = set(MinPLogitsWarper(0.1)(None, scores)[0].isfinite().nonzero()[:, 0].tolist())
    draws = [draw(place, min_p=0.1) for place in range(400)]
    chosen = choose(scores.repeat(400, 1), draws)
    assert set(chosen) == allowed


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
