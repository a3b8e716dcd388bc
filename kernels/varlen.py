"""Attention inside packed rows of any lengths by a kernel of our own, with nothing kept.

A program takes a key head, with all query heads that share it, and a block of one row's queries; it
walks that row's keys, and before them those of a beginning that the row shares, in tiles that begin
at fixed places: a row's result does not depend on who else is there. `reference` says what is
right. It does not know models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import layout
from kernels.paged_attention import keys_of, look, queries_of, sunk
from kernels.reference import Shape, Stretch


class Rows:
    """How a forward's rows attend on a device that has our kernels."""

    def __init__(self, stretches: Sequence[Stretch], device: torch.device, causal: bool) -> None:
        self._stretches = stretches
        self._device = device
        self._causal = causal
        self._blocks: dict[int, Tensor] = {}  # by the queries of a program

    @cached_property
    def _numbers(self) -> Tensor:
        return layout.stretches(self._stretches, self._device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """Packed queries [tokens, heads, width] to results [tokens, heads, value width]."""
        heads, key_heads = query.shape[1], key.shape[1]
        queries = queries_of(heads // key_heads)
        if queries not in self._blocks:
            counts = [row.count for row in self._stretches]
            self._blocks[queries] = layout.blocks(counts, queries, self._device)
        out = query.new_zeros(*query.shape[:2], value.shape[-1])
        width = max(triton.next_power_of_2(query.shape[-1]), 16)
        query = query if query.stride(-1) == 1 else query.contiguous()
        _attend[(len(self._blocks[queries]), key_heads)](
            query, key.contiguous(), value.contiguous(),
            query if shape.sinks is None else shape.sinks, out, self._numbers,
            self._blocks[queries],
            query.stride(0), query.stride(1), out.stride(0), out.stride(1),
            shape.scaling, shape.softcap or 1.0, shape.window or 0,
            KEY_HEADS=key_heads, GROUP=heads // key_heads,
            PADDED=triton.next_power_of_2(heads // key_heads), QUERIES=queries,
            KEYS=keys_of(width, query.element_size()), WIDTH=query.shape[-1],
            PADDED_WIDTH=width, VALUE=value.shape[-1],
            PADDED_VALUE=max(triton.next_power_of_2(value.shape[-1]), 16), CAUSAL=self._causal,
            WINDOW=shape.window is not None, SOFTCAP=shape.softcap is not None,
            SINKS=shape.sinks is not None,
        )  # fmt: skip
        return out


@triton.jit(do_not_specialize=["window"])
def _attend(
    query, key, value, sinks, out, rows, blocks,
    query_token, query_head, out_token, out_head, scaling, softcap, window,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row = rows + 4 * tl.load(blocks + 2 * tl.program_id(0))
    first = tl.load(blocks + 2 * tl.program_id(0) + 1)
    start, count = tl.load(row), tl.load(row + 1)
    begun, before = tl.load(row + 2), tl.load(row + 3)  # the beginning's tokens
    key_head = tl.program_id(1)
    line = tl.arange(0, QUERIES * PADDED)  # a line is a query of one head
    number = first + line // PADDED
    head = key_head * GROUP + line % PADDED
    asked = (number < count) & (line % PADDED < GROUP)
    token = (start + number).to(tl.int64)
    wide = tl.arange(0, PADDED_WIDTH)
    asking = query + token[:, None] * query_token + head[:, None] * query_head + wide[None]
    queries = tl.load(asking, mask=asked[:, None] & (wide < WIDTH)[None], other=0.0)
    length = before + count
    position, last, seen = number * 0 + length, length, 0
    if CAUSAL:
        position = before + number
        last = tl.minimum(length, before + first + QUERIES)  # keys beyond are unseen by all
    if WINDOW:
        seen = tl.maximum(before + first + 1 - window, 0)
    largest = tl.full([QUERIES * PADDED], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES * PADDED], tl.float32)
    total = tl.zeros([QUERIES * PADDED, PADDED_VALUE], tl.float32)
    # More stages would take more shared memory than small GPUs have.
    for tile in tl.range(seen // KEYS * KEYS, last, KEYS, num_stages=2):
        place = tile + tl.arange(0, KEYS)
        at = tl.where(place < before, begun + place, start + place - before)
        slot = at.to(tl.int64) * KEY_HEADS + key_head
        largest, weight, total = look(
            queries, key, value, slot, place, last, position,
            scaling, softcap, window, largest, weight, total,
            WIDTH, PADDED_WIDTH, VALUE, PADDED_VALUE, WINDOW, SOFTCAP,
        )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + head, mask=asked, other=0.0).to(tl.float32)
        weight, total = sunk(largest, weight, total, sink)
    result = total / tl.where(asked, weight, 1.0)[:, None]
    value_wide = tl.arange(0, PADDED_VALUE)[None]
    to = out + token[:, None] * out_token + head[:, None] * out_head + value_wide
    tl.store(to, result.to(out.dtype.element_ty), mask=asked[:, None] & (value_wide < VALUE))
