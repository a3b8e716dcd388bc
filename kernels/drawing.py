"""A token for every row of logits, drawn with seeded noise, in plain torch: what hosts run, and the
truth that `sampling` is tested against.

Noise is a hash of (key, token), every limit is a bound on a row's own scores: a row's token depends
on nothing else. The largest of score plus noise is drawn (Gumbel's trick), so nothing is sorted:
whoever wins among more tokens than are allowed, and is allowed, wins. It does not know requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LOUDEST = -math.log(-math.log(1 - 2**-24))  # no noise is larger
SLACK = 0.01  # far more than rounding takes from a bound
COLDEST = 1e-30  # colder, and some hardware divides by zero
SLOTS = 16  # tokens whose largest score stands for all of them


@dataclass(frozen=True, slots=True)
class Rules:
    """How tokens are drawn, an entry per row."""

    keys: Tensor  # [rows, 2] of int32, what the noise depends on
    temperature: Tensor  # [rows]; 0 takes the likeliest
    top_k: Tensor  # [rows] of float32; 0 means all
    top_p: Tensor  # [rows]; 1 means all
    min_p: Tensor  # [rows]; of the likeliest's probability; 0 means all

    @classmethod
    def of(
        cls,
        keys: Sequence[tuple[int, int]],
        limits: Sequence[tuple[float, float, float, float]],
        device: torch.device,
    ) -> Rules:
        """From keys and from (temperature, top_k, top_p, min_p) of each row."""
        columns = torch.tensor(limits, dtype=torch.float32).to(device).unbind(1)
        return cls(torch.tensor(keys, dtype=torch.int32).to(device), *columns)

    def pick(self, rows: Tensor) -> Rules:
        """Those of some rows."""
        columns = (self.keys, self.temperature, self.top_k, self.top_p, self.min_p)
        return Rules(*(column[rows] for column in columns))


def draw(logits: Tensor, rules: Rules) -> Tensor:
    """A token per row of logits [rows, vocabulary]; -1 where the logits are no numbers."""
    scores = F.pad(logits.float(), (0, -logits.shape[-1] % SLOTS), value=-torch.inf)
    grid = scores.view(len(scores), SLOTS, -1)  # token = slot * groups + group
    peaks = grid.amax(dim=1)  # [rows, groups]
    best = peaks.amax(dim=-1)
    chosen = _likeliest(grid, peaks, best)
    rows = (rules.temperature > 0).nonzero()[:, 0]
    if len(rows) == len(scores):
        chosen = _sample(grid, peaks, best, chosen, rules)
    elif len(rows):
        some = (grid[rows], peaks[rows], best[rows], chosen[rows])
        chosen[rows] = _sample(*some, rules.pick(rows))
    return chosen.masked_fill_(~best.isfinite(), -1)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Noise for tokens [..., n] under keys [..., 2] of int32, the same whenever it is asked."""
    mixed = _mix_(tokens.int().clone()) ^ keys[..., :1]  # once, when all rows have all tokens
    mixed = _mix_(mixed.mul_(keys[..., 1:] | 1))
    # 23 bits and a half: never 0, never 1.
    uniform = (mixed >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(1 / (1 << 23))
    return uniform.log_().neg_().log_().neg_()


def _mix_(value: Tensor) -> Tensor:
    """A 32-bit mixer (lowbias32), in place; torch's shift keeps the sign, hence the masks."""
    value ^= (value >> 16).bitwise_and_(0xFFFF)
    value *= 0x7FEB352D
    value ^= (value >> 15).bitwise_and_(0x1FFFF)
    value *= 0x846CA68B - (1 << 32)
    value ^= (value >> 16).bitwise_and_(0xFFFF)
    return value


def _likeliest(grid: Tensor, peaks: Tensor, best: Tensor) -> Tensor:
    """The token of every row's best score, the first of equals; quicker than torch's argmax."""
    count, slots, groups = grid.shape
    rows, group = (peaks == best[:, None]).nonzero(as_tuple=True)
    tokens = torch.arange(slots, device=grid.device) * groups + group[:, None]
    tokens.masked_fill_(grid[rows, :, group] != best[rows, None], slots * groups - 1)
    found = tokens.new_full((count,), slots * groups - 1)
    return found.scatter_reduce_(0, rows, tokens.amin(dim=1), "amin")


def _sample(grid: Tensor, peaks: Tensor, best: Tensor, likeliest: Tensor, rules: Rules) -> Tensor:
    """Tokens for rows whose temperature is above 0.

    Few tokens can win at all, and only those are given noise: the loudest noise does not lift a
    token far below the likeliest one above it, and a token of the nucleus outweighs the average of
    all that may be left out.
    """
    vocabulary, heat = grid[0].numel(), rules.temperature.clamp(min=COLDEST)
    limited, ranked = rules.top_p < 1, (rules.top_k > 0) & (rules.top_k < vocabulary)
    total = torch.full_like(best, torch.inf, dtype=torch.float64)
    if (rows := (limited & ~ranked).nonzero()[:, 0]).numel():
        total[rows] = _total(grid.flatten(1), best, heat, rows)
    average = torch.log((1 - rules.top_p) * total.where(limited & ~ranked, 1) / vocabulary).float()
    audible = gumbel(rules.keys, likeliest[:, None])[:, 0] - LOUDEST
    cut = torch.maximum(torch.maximum(average, audible), rules.min_p.log()) - SLACK
    least = best + cut * heat - best.abs() * 1e-6
    if (rows := ranked.nonzero()[:, 0]).numel():
        least[rows] = _ranked(peaks[rows], rules.top_k[rows].long())  # of all it is no smaller
    value, tokens, noise = _candidates(grid, peaks, least, rules.keys)
    if len(rows):
        lowest = torch.full_like(best, -torch.inf)
        lowest[rows] = _ranked(value[rows], rules.top_k[rows].long())
        value = value.masked_fill(value < lowest[:, None], -torch.inf)
    warm = (value - best[:, None]).div_(heat[:, None])
    noisy = noise.add_(warm).masked_fill_(warm < rules.min_p.log()[:, None], -torch.inf)
    weight = warm.double().exp_() if limited.any() else warm
    total = total.where(~(ranked & limited), weight.sum(dim=-1))
    return _contest(value, tokens, weight, noisy, best, rules.top_p * total)


def _total(scores: Tensor, best: Tensor, heat: Tensor, rows: Tensor) -> Tensor:
    """All weight of some rows, added in an order that does not depend on how many they are."""
    scores = scores if len(rows) == len(scores) else scores[rows]
    weights = (scores - best[rows, None]).div_(heat[rows, None]).exp_()
    parts = weights.view(len(rows), SLOTS, -1).sum(dim=1)
    return parts.sum(dim=-1, dtype=torch.float64)


def _ranked(scores: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest score of every row; -inf where there are not so many."""
    place = top_k.clamp(max=scores.shape[-1])
    found = scores.topk(int(place.max())).values.gather(1, place[:, None] - 1)[:, 0]
    return found.masked_fill_(top_k > scores.shape[-1], -torch.inf)


def _candidates(
    grid: Tensor, peaks: Tensor, least: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores from `least` up, their tokens and noise, [rows, most of a row], padded with -inf."""
    count, vocabulary = len(grid), grid[0].numel()
    flat = _places(grid, peaks, least)
    if flat is None:
        every = torch.arange(vocabulary, dtype=torch.int32, device=grid.device)[None]
        return grid.flatten(1), every.expand(count, -1), gumbel(keys, every)
    rows = flat // vocabulary
    tokens = flat - rows * vocabulary
    counts = rows.bincount(minlength=count)
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    width = max(int(counts.max()), 1)
    at = rows * width + columns
    noise = gumbel(keys.index_select(0, rows), tokens[:, None])[:, 0]
    padded = (
        grid.new_full((count, width), -torch.inf),
        flat.new_zeros(count, width),
        noise.new_zeros(count, width),
    )
    for into, values in zip(
        padded, (grid.view(-1).index_select(0, flat), tokens, noise), strict=True
    ):
        into.view(-1).index_copy_(0, at, values)
    return padded


def _places(grid: Tensor, peaks: Tensor, least: Tensor) -> Tensor | None:
    """Where in all scores those from `least` up are, row after row; None if they are too many.

    Then to pack them would take longer than it saves.
    """
    count, slots, groups = grid.shape
    hopeful = (peaks >= least[:, None]).view(-1).nonzero()[:, 0]
    if len(hopeful) * 4 > peaks.numel() * 3:
        return None
    if len(hopeful) * 16 > peaks.numel():
        found = (grid >= least[:, None, None]).view(-1).nonzero()[:, 0]
        return found if len(found) * 6 < grid.numel() else None
    rows = hopeful // groups
    found = hopeful + rows * (slots - 1) * groups  # the first slot of each
    places = found[:, None] + torch.arange(slots, device=found.device) * groups
    return places[grid.view(-1)[places] >= least[rows, None]].sort().values


def _contest(
    value: Tensor, tokens: Tensor, weight: Tensor, noisy: Tensor, best: Tensor, share: Tensor
) -> Tensor:
    """The loudest token of each row that has less than its share of weight above it.

    A token that has more above it stands outside, and so does all below it: they go, and the next
    loudest is asked. A few rounds will do.
    """
    rows = torch.arange(len(value), device=value.device)
    chosen = torch.zeros_like(rows)
    while True:
        place = noisy.max(dim=-1, keepdim=True).indices
        won = value.gather(1, place)
        chosen[rows] = tokens.gather(1, place)[:, 0].long()
        if share.isinf().all():
            return chosen
        above = value > won
        outside = ((weight * above).sum(dim=-1) >= share) & (won[:, 0] < best)
        if not outside.any():
            return chosen
        noisy = noisy.masked_fill_(~above, -torch.inf)
        rows, value, tokens, weight, noisy, best, share = (
            column[outside] for column in (rows, value, tokens, weight, noisy, best, share)
        )
