"""Tokens drawn by a kernel of our own: a program takes a row, from logits to token.

`drawing` says what is right, and how: nothing is sorted, the loudest token is asked whether it
stands in its nucleus. Triton is imported here, so import this where it is. It does not know
requests or text.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.drawing import COLDEST, Rules

BLOCK = 4096  # logits looked at together


def draw(logits: Tensor, rules: Rules) -> Tensor:
    """A token per row of logits [rows, vocabulary]; -1 where the logits are no numbers."""
    chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    if not len(logits):
        return chosen
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    block = min(BLOCK, max(triton.next_power_of_2(logits.shape[-1]), 16))
    _draw[(len(logits),)](
        logits, chosen, rules.keys.contiguous(), rules.temperature.contiguous(),
        rules.top_k.contiguous(), rules.top_p.contiguous(), rules.min_p.log(),
        logits.stride(0), logits.shape[-1], COLDEST=COLDEST, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return chosen


@triton.jit
def _mix(value):
    """lowbias32, of unsigned 32 bits."""
    value ^= value >> 16
    value *= 0x7FEB352D
    value ^= value >> 15
    value *= 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _gumbel(token, one, other):
    """Noise, a hash of a row's two keys and a token."""
    mixed = _mix((_mix(token.to(tl.uint32)) ^ one) * (other | 1))
    uniform = ((mixed >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton.jit
def _scores(logits, begin, vocabulary, BLOCK: tl.constexpr):
    """Tokens from `begin` on, and their scores; -inf beyond the last."""
    tokens = begin + tl.arange(0, BLOCK)
    scores = tl.load(logits + tokens, mask=tokens < vocabulary, other=float("-inf"))
    return tokens, scores.to(tl.float32)


@triton.jit
def _best(logits, vocabulary, BLOCK: tl.constexpr):
    """The largest score, its first token, and whether any score is no number."""
    best = float("-inf")
    first = 0
    bad = 0
    for begin in range(0, vocabulary, BLOCK):
        tokens, scores = _scores(logits, begin, vocabulary, BLOCK)
        bad = tl.maximum(bad, tl.max((scores != scores).to(tl.int32), 0))
        top = tl.max(scores, 0)
        place = tl.min(tl.where(scores == top, tokens, vocabulary), 0)
        first = tl.where(top > best, place, first)
        best = tl.maximum(best, top)
    return best, first, bad


@triton.jit
def _ranked(logits, vocabulary, rank, BLOCK: tl.constexpr):
    """The score of a rank, found digit by digit: 8 bits of ordered numbers at a time."""
    found = tl.zeros([1], tl.uint32)
    left = rank
    digits = tl.arange(0, 256)
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for begin in range(0, vocabulary, BLOCK):
            tokens, scores = _scores(logits, begin, vocabulary, BLOCK)
            bits = scores.to(tl.uint32, bitcast=True)
            ordered = tl.where((bits >> 31) > 0, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> (
                24 - 8 * step
            )
            same = (tokens < vocabulary) & ((ordered >> 8) == found)
            counts += tl.histogram((ordered & 255).to(tl.int32), 256, mask=same)
        reached = tl.cumsum(counts, 0, reverse=True)
        digit = tl.max(tl.where(reached >= left, digits, 0), 0)
        left -= tl.sum(tl.where(digits > digit, counts, 0), 0)
        found = (found << 8) | digit.to(tl.uint32)
    bits = tl.where((found >> 31) > 0, found & 0x7FFFFFFF, found ^ 0xFFFFFFFF)
    return tl.max(bits.to(tl.float32, bitcast=True), 0)


@triton.jit
def _weight(logits, vocabulary, best, heat, above, lowest, BLOCK: tl.constexpr):
    """All weight of scores over `above` and from `lowest` up."""
    total = tl.zeros([1], tl.float64)
    for begin in range(0, vocabulary, BLOCK):
        tokens, scores = _scores(logits, begin, vocabulary, BLOCK)
        weights = tl.exp(tl.div_rn(scores - best, heat))
        kept = (scores > above) & (scores >= lowest)
        total += tl.sum(tl.where(kept, weights, 0.0), 0).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _loudest(logits, vocabulary, best, heat, above, lowest, floor, one, other, BLOCK: tl.constexpr):
    """The token of the largest score plus noise, of those that are allowed."""
    loudest = float("-inf")
    token = 0
    for begin in range(0, vocabulary, BLOCK):
        tokens, scores = _scores(logits, begin, vocabulary, BLOCK)
        warm = tl.div_rn(scores - best, heat)
        kept = (scores > above) & (scores >= lowest) & (warm >= floor)
        noisy = tl.where(kept, warm + _gumbel(tokens, one, other), float("-inf"))
        top = tl.max(noisy, 0)
        place = tl.min(tl.where(noisy == top, tokens, vocabulary), 0)
        token = tl.where(top > loudest, place, token)
        loudest = tl.maximum(loudest, top)
    return token


@triton.jit
def _draw(
    logits, chosen, keys, temperature, top_k, top_p, floors, stride, vocabulary,
    COLDEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    best, token, bad = _best(logits, vocabulary, BLOCK)
    fine = (bad == 0) & (best > float("-inf")) & (best < float("inf"))
    heat = tl.load(temperature + row)
    if fine & (heat > 0):
        heat = tl.maximum(heat, COLDEST)
        rank = tl.load(top_k + row).to(tl.int32)
        share = tl.load(top_p + row)
        floor = tl.load(floors + row)
        one = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        other = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        lowest = float("-inf")
        if (rank > 0) & (rank < vocabulary):
            lowest = _ranked(logits, vocabulary, rank, BLOCK)
        enough = tl.full([], float("inf"), tl.float64)
        if share < 1:
            total = _weight(logits, vocabulary, best, heat, float("-inf"), lowest, BLOCK)
            enough = share * total
        above = float("-inf")
        looking = 1
        while looking > 0:
            token = _loudest(
                logits, vocabulary, best, heat, above, lowest, floor, one, other, BLOCK
            )
            won = tl.load(logits + token).to(tl.float32)
            looking = 0
            if (share < 1) & (won < best):
                mass = _weight(logits, vocabulary, best, heat, won, lowest, BLOCK)
                looking = (mass >= enough).to(tl.int32)
            above = won
    tl.store(chosen + row, tl.where(fine, token, -1).to(tl.int64))
