"""The next token of every row, chosen in one batch: penalty, temperature, top-k, top-p, seeded
noise.

Noise is a hash of (seed, position, token) and nothing else, so what a row draws depends on neither
its batch-mates, nor parking, nor retries. Gumbel's trick (the largest of score plus noise) rather
than an inverse distribution, because rounding then flips a choice only at a near-tie. It does not
know text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelines.chat import Settings

WIDTHS = (256, 4096)  # likeliest tokens looked at before a whole vocabulary is sorted
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's choice: its settings, how many tokens it has chosen before, and all its tokens."""

    settings: Settings
    position: int
    seen: Sequence[int]  # prompt and output; read only for a repetition penalty


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """A token per row of logits [rows, vocabulary]; None where the logits are no numbers."""
    scores = logits.float()
    scores = _penalised(scores, draws)
    best, chosen = scores.max(dim=-1)
    sampled = [row for row, draw in enumerate(draws) if draw.settings.temperature > 0]
    if sampled:
        picked = [draws[row] for row in sampled]
        heat = _column(scores, [draw.settings.temperature for draw in picked])
        rows = torch.tensor(sampled, device=scores.device)
        # The likeliest is 0 before heat is applied, so that no temperature is too small.
        warm = scores.index_select(0, rows).sub_(best[rows, None]).div_(heat)
        chosen[rows] = _sample(warm, picked)
    numbers: list[bool] = torch.isfinite(best).tolist()
    tokens: list[int] = chosen.tolist()
    return [token if fine else None for token, fine in zip(tokens, numbers, strict=True)]


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise for tokens [rows, n] under keys [rows, 2] of int32, the same whenever it is asked."""
    mixed = _mix_(tokens.int() ^ keys[:, :1])
    mixed = _mix_(mixed.bitwise_xor_(keys[:, 1:]))
    # 23 bits and a half: never 0, never 1.
    uniform = (mixed >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(1 / (1 << 23))
    return uniform.log_().neg_().log_().neg_()


def key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit numbers from a seed and a position, by splitmix64."""
    state = (_splitmix(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK
    mixed = _splitmix(state)
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def _penalised(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Every token a row has seen is made less likely, by the rule of transformers."""
    rows = [row for row, draw in enumerate(draws) if draw.settings.repetition_penalty != 1]
    if not rows:
        return scores
    scores = scores.clone()
    for row in rows:
        seen = torch.tensor(draws[row].seen, device=scores.device)
        found = scores[row, seen]
        penalty = draws[row].settings.repetition_penalty
        scores[row, seen] = torch.where(found < 0, found * penalty, found / penalty)
    return scores


def _sample(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens for rows of scores [rows, vocabulary] whose likeliest is 0."""
    vocabulary = scores.shape[-1]
    chosen = torch.empty(len(draws), dtype=torch.long, device=scores.device)
    drawn = [key(draw.settings.seed, draw.position) for draw in draws]
    keys = torch.tensor(drawn, dtype=torch.int32, device=scores.device)
    limits = [draw.settings.top_p < 1 or 0 < draw.settings.top_k < vocabulary for draw in draws]
    free = [row for row, limit in enumerate(limits) if not limit]
    if free:
        rows = torch.tensor(free, device=scores.device)
        every = torch.arange(vocabulary, device=scores.device, dtype=torch.int32)[None]
        chosen[rows] = gumbel(keys[rows], every).add_(scores[rows]).argmax(dim=-1)
    limited = [row for row, limit in enumerate(limits) if limit]
    for width in sorted({min(width, vocabulary) for width in (*WIDTHS, vocabulary)}):
        if limited:
            limited = _sample_limited(scores, draws, keys, chosen, limited, width)
    return chosen


def _sample_limited(
    scores: Tensor,
    draws: Sequence[Draw],
    keys: Tensor,
    chosen: Tensor,
    limited: list[int],
    width: int,
) -> list[int]:
    """Choose for rows whose allowed tokens are among the `width` likeliest; returns the others."""
    rows = torch.tensor(limited, device=scores.device)
    own = scores[rows]
    values, tokens = own.topk(width)  # [rows, width], sorted
    most = _column(scores, [draws[row].settings.top_k or own.shape[-1] for row in limited])
    share = _column(scores, [draws[row].settings.top_p for row in limited])
    inside = torch.arange(width, device=scores.device)[None] < most
    weights = values.exp() * inside
    total = torch.where(
        most <= width, weights.sum(-1, keepdim=True), own.exp().sum(-1, keepdim=True)
    )
    reached = weights.cumsum(dim=-1)
    kept = inside & (reached - weights < share * total)
    kept[:, 0] = True
    noisy = (values + gumbel(keys[rows], tokens)).masked_fill(~kept, float("-inf"))
    picked = tokens.gather(1, noisy.argmax(dim=-1, keepdim=True))[:, 0]
    done = ((most <= width) | (reached[:, -1:] >= share * total))[:, 0] | (width == own.shape[-1])
    chosen[rows[done]] = picked[done]
    settled: list[bool] = done.tolist()
    return [row for row, ended in zip(limited, settled, strict=True) if not ended]


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


def _mix_(value: Tensor) -> Tensor:
    """A 32-bit mixer (lowbias32), in place; torch's shift keeps the sign, hence the masks."""
    value ^= (value >> 16).bitwise_and_(0xFFFF)
    value *= 0x7FEB352D
    value ^= (value >> 15).bitwise_and_(0x1FFFF)
    value *= _signed(0x846CA68B)
    value ^= (value >> 16).bitwise_and_(0xFFFF)
    return value


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
