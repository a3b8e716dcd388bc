"""The next token of every row, chosen in one batch: penalties, temperature, top-k, top-p, min-p,
seeded noise.

Noise is a hash of (seed, position, token) and nothing else, so what a row draws depends on neither
its batch-mates, nor parking, nor retries. How a token is drawn by given rules is the business of
kernels; here rules are made of settings, and what a row has said is held against it. It does not
know text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import drawing
from kernels.attention import own_kernels
from kernels.drawing import Rules
from pipelines.chat import Settings

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """One row's choice: its settings, how many tokens it has chosen before, and all its tokens."""

    settings: Settings
    position: int
    seen: Sequence[int]  # prompt, then the `position` tokens of the answer; read only for penalties


def choose(logits: Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """A token per row of logits [rows, vocabulary]; None where the logits are no numbers."""
    limits = [(own.temperature, own.top_k, own.top_p, own.min_p) for own in _settings(draws)]
    keys = [
        key(own.seed, one.position) if own.temperature > 0 else (0, 0)
        for own, one in zip(_settings(draws), draws, strict=True)
    ]
    rules = Rules.of(keys, limits, logits.device)
    tokens: list[int] = _draw(_penalised(logits, draws), rules).tolist()
    return [token if token >= 0 else None for token in tokens]


def key(seed: int, position: int) -> tuple[int, int]:
    """Two signed 32-bit numbers from a seed and a position, by splitmix64."""
    state = (_splitmix(seed & _MASK) + position * 0x9E3779B97F4A7C15) & _MASK
    mixed = _splitmix(state)
    return _signed(mixed & 0xFFFFFFFF), _signed(mixed >> 32)


def _draw(logits: Tensor, rules: Rules) -> Tensor:
    if not own_kernels(logits.device):
        return drawing.draw(logits, rules)
    from kernels import sampling  # only here, as hosts may have no triton

    return sampling.draw(logits, rules)


def _settings(draws: Sequence[Draw]) -> list[Settings]:
    return [one.settings for one in draws]


def _penalised(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """First what a row has read or said is scaled down, then what it has said is lowered."""
    if not any(own.penalises for own in _settings(draws)):
        return logits
    scores = logits.float().clone()
    repeated = [one.seen if one.settings.repetition_penalty != 1 else () for one in draws]
    if any(repeated):
        _repeat(scores, repeated, [own.repetition_penalty for own in _settings(draws)])
    said = [
        one.seen[len(one.seen) - one.position :]
        if one.settings.presence_penalty or one.settings.frequency_penalty
        else ()
        for one in draws
    ]
    if any(said):
        _lower(scores, said, _settings(draws))
    return scores


def _repeat(scores: Tensor, tokens: Sequence[Sequence[int]], penalties: Sequence[float]) -> None:
    """By the rule of transformers: scores below zero are multiplied, others divided."""
    rows, places = _places(tokens, scores.device)
    found = scores[rows, places]  # a token that is there twice gives the same twice
    penalty = _column(penalties, scores.device)[rows]
    scores[rows, places] = torch.where(found < 0, found * penalty, found / penalty)


def _lower(scores: Tensor, tokens: Sequence[Sequence[int]], settings: Sequence[Settings]) -> None:
    """By the rule of OpenAI's API: once for having been said, and once for each time."""
    rows, places = _places(tokens, scores.device)
    each, times = torch.unique(rows * scores.shape[-1] + places, return_counts=True)
    rows = each // scores.shape[-1]
    presence = _column([own.presence_penalty for own in settings], scores.device)[rows]
    frequency = _column([own.frequency_penalty for own in settings], scores.device)[rows]
    scores.view(-1)[each] -= presence + frequency * times


def _places(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and tokens of a ragged list, each [sum of lengths]."""
    lengths = torch.tensor([len(own) for own in tokens])
    flat = torch.tensor([token for own in tokens for token in own])
    rows = torch.arange(len(tokens)).repeat_interleave(lengths)
    return rows.to(device), flat.to(device)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
