"""Paged attention by a kernel of our own: one kernel for decoding rows and for chunks of prompts.

A program takes a key head, with all query heads that share it, and a block of one row's queries.
Rows with one query are split along their keys, in pieces of a fixed size, and put together by a
second kernel; how many programs share the pieces changes nothing, so a row's result does not depend
on who else is there. `reference` says what is right. It does not know models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import layout, pages
from kernels.reference import Shape, Span

PIECE = 256  # keys; part of the result, as sums are rounded where pieces end
CHUNK = 64  # queries times heads of a group in one program of a chunk
PROGRAMS = 512  # wanted at least, so that few rows fill a device too
TOGETHER = 16  # pieces put together at a time


class Reader:
    """How a forward's rows are written and read on a device that has our kernels."""

    def __init__(self, slots: Tensor, layouts: Callable[[int], Sequence[layout.Rows]]) -> None:
        self._slots = slots  # [tokens] of int32
        self._layouts = layouts  # for the number of heads that share a key head

    @classmethod
    def of(cls, spans: Sequence[Span], size: int, device: torch.device) -> Reader:
        """From rows, of any mixture."""
        slots = torch.tensor(layout.slots(spans, size), dtype=torch.int32).to(device)
        parts = [part for part in layout.split(spans) if part]

        @cache
        def layouts(group: int) -> Sequence[layout.Rows]:
            return [layout.rows(part, size, queries_of(group), device) for part in parts]

        return cls(slots, layouts)

    def put(self, key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values [tokens, heads, width] of all rows into their pages."""
        pages.write(key_pages, value_pages, key, value, self._slots)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, shape: Shape) -> Tensor:
        """Packed queries [tokens, heads, width] to results [tokens, heads, value width]."""
        out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
        for rows in self._layouts(query.shape[1] // key_pages.shape[2]):
            attend(query, key_pages, value_pages, rows, shape, out)
        return out


def queries_of(group: int) -> int:
    """Queries that a program of a chunk takes where so many heads share a key head."""
    return int(max(CHUNK // triton.next_power_of_2(group), 1))


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: layout.Rows,
    shape: Shape,
    out: Tensor,
    programs: int | None = None,
) -> None:
    """Fill `out` [tokens, heads, value width] where these rows have queries."""
    heads, key_heads = query.shape[1], key_pages.shape[2]
    parts = _Parts.of(query, key_pages, value_pages, rows, shape)
    share = programs or -(-PROGRAMS // (len(rows.blocks) * key_heads))
    split = min(parts.count, share) if rows.single else 1
    padded = triton.next_power_of_2(heads // key_heads)
    queries = max(16 // padded, 1) if rows.single else queries_of(heads // key_heads)
    width = max(triton.next_power_of_2(query.shape[-1]), 16)
    sinks = query if shape.sinks is None else shape.sinks
    query = query if query.stride(-1) == 1 else query.contiguous()
    _attend[(len(rows.blocks), key_heads, split)](
        query, key_pages, value_pages, sinks, out, parts.out, parts.weight,
        rows.spans, rows.table, rows.blocks,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1), rows.table.stride(0),
        shape.scaling, shape.softcap or 1.0, shape.window or 0, parts.count,
        HEADS=heads, KEY_HEADS=key_heads, GROUP=heads // key_heads, PADDED=padded,
        QUERIES=queries, KEYS=keys_of(width, query.element_size()), SIZE=key_pages.shape[1],
        PIECE=PIECE, WIDTH=query.shape[-1], PADDED_WIDTH=width, VALUE=value_pages.shape[-1],
        PADDED_VALUE=max(triton.next_power_of_2(value_pages.shape[-1]), 16),
        SINGLE=rows.single, WINDOW=shape.window is not None, SOFTCAP=shape.softcap is not None,
        SINKS=shape.sinks is not None,
    )  # fmt: skip
    if rows.single:
        parts.combine(rows, sinks, out, shape)


class _Parts:
    """Results of pieces, before they are put together: [rows, heads, pieces, value width]."""

    def __init__(self, out: Tensor, weight: Tensor) -> None:
        self.out = out
        self.weight = weight  # [rows, heads, pieces]: the logarithm of all weight of a piece
        self.count = out.shape[2]

    @classmethod
    def of(
        cls, query: Tensor, key_pages: Tensor, value_pages: Tensor, rows: layout.Rows, shape: Shape
    ) -> _Parts:
        """Room for as many pieces as a row of these may have."""
        count = -(-rows.table.shape[1] * key_pages.shape[1] // PIECE)
        if shape.window is not None:
            count = min(count, -(-shape.window // PIECE) + 1)
        size = (len(rows.spans), query.shape[1], count) if rows.single else (1, 1, 1)
        out = torch.empty(*size, value_pages.shape[-1], dtype=torch.float32, device=query.device)
        return cls(out, torch.empty(size, dtype=torch.float32, device=query.device))

    def combine(self, rows: layout.Rows, sinks: Tensor, out: Tensor, shape: Shape) -> None:
        """Put pieces together, the sink with them."""
        _combine[self.out.shape[:2]](
            self.out, self.weight, sinks, out, rows.spans,
            out.stride(0), out.stride(1), shape.window or 0, self.count,
            HEADS=out.shape[1], PIECE=PIECE, TOGETHER=TOGETHER, VALUE=out.shape[2],
            PADDED_VALUE=max(triton.next_power_of_2(out.shape[2]), 16),
            WINDOW=shape.window is not None, SINKS=shape.sinks is not None,
        )  # fmt: skip


def keys_of(width: int, element: int) -> int:
    """Keys in one tile: fewer where they are wide, so that tiles fit beside each other."""
    return 64 if width * element <= 256 else 32 if width * element <= 512 else 16


@triton.jit
def _span(spans, row):
    """A row's first packed token, its queries and its keys."""
    return tl.load(spans + 3 * row), tl.load(spans + 3 * row + 1), tl.load(spans + 3 * row + 2)


@triton.jit
def _first_key(count, length, first, window, WINDOW: tl.constexpr):
    """The first key that a row's queries from `first` on may see."""
    seen = 0
    if WINDOW:
        seen = tl.maximum(length - count + first + 1 - window, 0)
    return seen


@triton.jit
def look(
    queries, key_pages, value_pages, slot, place, upper, position,
    scaling, softcap, window, largest, weight, total,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Take a tile of keys in: the largest score so far, all weight, and the weighted values."""
    there = place < upper
    wide = tl.arange(0, PADDED_WIDTH)
    keys = tl.load(
        key_pages + slot[None] * WIDTH + wide[:, None],
        mask=there[None] & (wide < WIDTH)[:, None],
        other=0.0,
    )
    scores = tl.dot(queries, keys, input_precision="ieee") * scaling
    if SOFTCAP:
        scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))  # tanh
    visible = there[None] & (place[None] <= position[:, None])
    if WINDOW:
        visible &= place[None] > position[:, None] - window
    scores = tl.where(visible, scores, float("-inf"))
    grown = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(grown == float("-inf"), 0.0, grown)
    fading = tl.exp(largest - shift)
    weights = tl.exp(scores - shift[:, None])
    weight = weight * fading + tl.sum(weights, 1)
    value_wide = tl.arange(0, PADDED_VALUE)
    values = tl.load(
        value_pages + slot[:, None] * VALUE + value_wide[None],
        mask=there[:, None] & (value_wide < VALUE)[None],
        other=0.0,
    )
    total = total * fading[:, None]
    total += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return grown, weight, total


@triton.jit
def sunk(largest, weight, total, sink):
    """With the weight of a sink, which has no value."""
    grown = tl.maximum(largest, sink)
    fading = tl.exp(largest - grown)
    return weight * fading + tl.exp(sink - grown), total * fading[:, None]


@triton.jit(do_not_specialize=["table_row", "window", "pieces"])
def _attend(
    query, key_pages, value_pages, sinks, out, parts, part_weights, spans, table, blocks,
    query_token, query_head, out_token, out_head, table_row, scaling, softcap, window, pieces,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, SINGLE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.load(blocks + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(blocks + 2 * tl.program_id(0) + 1)
    key_head = tl.program_id(1)
    start, count, length = _span(spans, row)
    line = tl.arange(0, QUERIES * PADDED)  # a line is a query of one head
    number = first + line // PADDED
    head = key_head * GROUP + line % PADDED
    asked = (number < count) & (line % PADDED < GROUP)
    position = length - count + number
    token = (start + number).to(tl.int64)
    wide = tl.arange(0, PADDED_WIDTH)
    asking = query + token[:, None] * query_token + head[:, None] * query_head + wide[None]
    queries = tl.load(asking, mask=asked[:, None] & (wide < WIDTH)[None], other=0.0)
    last = tl.minimum(length, length - count + first + QUERIES)  # keys beyond are unseen by all
    seen = _first_key(count, length, first, window, WINDOW)
    begin, end = 0, 1
    if SINGLE:
        begin, end = seen // PIECE, tl.cdiv(last, PIECE)
    value_wide = tl.arange(0, PADDED_VALUE)[None]
    for piece in range(begin + tl.program_id(2), end, tl.num_programs(2)):
        lower, upper = seen // KEYS * KEYS, last
        if SINGLE:
            lower = tl.maximum(lower, piece * PIECE)
            upper = tl.minimum(last, (piece + 1) * PIECE)
        largest = tl.full([QUERIES * PADDED], float("-inf"), tl.float32)
        weight = tl.zeros([QUERIES * PADDED], tl.float32)
        total = tl.zeros([QUERIES * PADDED, PADDED_VALUE], tl.float32)
        for tile in range(lower, upper, KEYS):
            place = tile + tl.arange(0, KEYS)
            page = tl.load(table + row * table_row + place // SIZE, mask=place < upper, other=0)
            slot = (page.to(tl.int64) * SIZE + place % SIZE) * KEY_HEADS + key_head
            largest, weight, total = look(
                queries, key_pages, value_pages, slot, place, upper, position,
                scaling, softcap, window, largest, weight, total,
                WIDTH, PADDED_WIDTH, VALUE, PADDED_VALUE, WINDOW, SOFTCAP,
            )  # fmt: skip
        if SINKS and not SINGLE:
            sink = tl.load(sinks + head, mask=asked, other=0.0).to(tl.float32)
            weight, total = sunk(largest, weight, total, sink)
        weight = tl.where(asked, weight, 1.0)
        result = total / weight[:, None]
        kept = asked[:, None] & (value_wide < VALUE)
        if SINGLE:
            part = (row * HEADS + head) * pieces + piece - begin
            tl.store(parts + part[:, None] * VALUE + value_wide, result, mask=kept)
            tl.store(part_weights + part, largest + tl.log(weight), mask=asked)
        else:
            at = out + token[:, None] * out_token + head[:, None] * out_head + value_wide
            tl.store(at, result.to(out.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["window", "pieces"])
def _combine(
    parts, part_weights, sinks, out, spans, out_token, out_head, window, pieces,
    HEADS: tl.constexpr, PIECE: tl.constexpr, TOGETHER: tl.constexpr, VALUE: tl.constexpr,
    PADDED_VALUE: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start, _, length = _span(spans, row)
    count = tl.cdiv(length, PIECE) - _first_key(1, length, 0, window, WINDOW) // PIECE
    wide = tl.arange(0, PADDED_VALUE)
    largest = float("-inf")
    weight = 0.0
    if SINKS:
        largest = tl.load(sinks + head).to(tl.float32)
        weight = 1.0
    total = tl.zeros([PADDED_VALUE], tl.float32)
    for first in range(0, count, TOGETHER):
        piece = first + tl.arange(0, TOGETHER)
        part = (row * HEADS + head) * pieces + piece
        own = tl.load(part_weights + part, mask=piece < count, other=float("-inf"))
        values = tl.load(
            parts + part[:, None] * VALUE + wide[None],
            mask=(piece < count)[:, None] & (wide < VALUE)[None], other=0.0,
        )  # fmt: skip
        grown = tl.maximum(largest, tl.max(own, 0))
        weights = tl.exp(own - grown)
        fading = tl.exp(largest - grown)
        weight = weight * fading + tl.sum(weights, 0)
        total = total * fading + tl.sum(values * weights[:, None], 0)
        largest = grown
    result = total / tl.where(weight == 0, 1.0, weight)
    at = out + start.to(tl.int64) * out_token + head * out_head + wide
    tl.store(at, result.to(out.dtype.element_ty), mask=wide < VALUE)
