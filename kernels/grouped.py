"""Paged attention where no kernel of our own serves: few calls of torch's fused attention.

Rows with one query ride in groups: their pages are gathered side by side, padded to the longest,
because one call over 16 short rows takes a quarter of the time of 16 calls (measured: 0.38 against
1.64 ms at 64 keys). Rows with more queries go one by one over exactly their keys. `reference` says
what is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import layout
from kernels.reference import Shape, Span, visible, weighted, write

WASTE = 512  # padded keys that cost as much as one more call


@dataclass(frozen=True, slots=True)
class Group:
    """Rows with one query each, gathered together; shapes are the same for every layer."""

    tokens: Tensor  # [rows] where their queries are in the packed tokens
    pages: Tensor  # [rows * longest] page numbers, row after row
    mask: Tensor  # [rows, 1, 1, keys] of booleans


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with several queries."""

    tokens: slice
    pages: Tensor
    keys: slice  # what it may see at all, within its gathered pages
    mask: Tensor | None  # [count, keys] of booleans; None means plainly causal


@dataclass(frozen=True, slots=True)
class Plan:
    """How one forward's rows are read from pages, for one sliding window."""

    groups: tuple[Group, ...]
    chunks: tuple[Chunk, ...]


class Reader:
    """How a forward's rows are written and read on a host; a plan per sliding window."""

    def __init__(self, spans: Sequence[Span], size: int, device: torch.device) -> None:
        self._spans = spans
        self._size = size
        self._device = device
        places = layout.slots(spans, size)
        fresh = [place // size for place in places if place % size == 0]  # pages begun now
        self._slots = torch.tensor(places, dtype=torch.long, device=device)  # [tokens]
        self._fresh = torch.tensor(fresh, dtype=torch.long, device=device)
        self._plans: dict[int | None, Plan] = {}

    def put(self, key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values [tokens, heads, width] of all rows into a layer's pages."""
        write(key_pages, value_pages, key, value, self._slots, self._fresh)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, shape: Shape) -> Tensor:
        """Packed queries [tokens, heads, width] to results [tokens, heads, value width]."""
        found = self._plans.get(shape.window)
        if found is None:
            found = plan(self._spans, shape.window, self._size, self._device)
            self._plans[shape.window] = found
        return attend(query.contiguous(), key_pages, value_pages, found, shape)


def plan(spans: Sequence[Span], window: int | None, size: int, device: torch.device) -> Plan:
    """Decide once per forward what every layer then does."""
    single = sorted((span for span in spans if span.count == 1), key=lambda span: span.length)
    groups = tuple(_group(rows, window, size, device) for rows in _gather(single, window, size))
    chunks = tuple(_chunk(span, window, size, device) for span in spans if span.count > 1)
    return Plan(groups, chunks)


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, plan: Plan, shape: Shape
) -> Tensor:
    """Attention of packed queries [tokens, heads, width] by the plan."""
    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    for group in plan.groups:
        out[group.tokens] = _attend_group(query[group.tokens], key_pages, value_pages, group, shape)
    for chunk in plan.chunks:
        out[chunk.tokens] = _attend_chunk(query[chunk.tokens], key_pages, value_pages, chunk, shape)
    return out


def _first_page(length: int, count: int, window: int | None, size: int) -> int:
    """The first page of a row that any of its queries still sees."""
    return 0 if window is None else max(length - count + 1 - window, 0) // size


def _gather(spans: Sequence[Span], window: int | None, size: int) -> list[list[Span]]:
    """Split rows, shortest first, wherever padding would cost more than another call."""
    groups: list[list[Span]] = []
    waste = longest = 0
    for span in spans:
        keys = span.length - _first_page(span.length, 1, window, size) * size
        if groups:
            grown = (keys - longest) * len(groups[-1])
            if waste + grown <= WASTE:
                groups[-1].append(span)
                waste, longest = waste + grown, keys
                continue
        groups.append([span])
        waste, longest = 0, keys
    return groups


def _group(spans: Sequence[Span], window: int | None, size: int, device: torch.device) -> Group:
    first = [_first_page(span.length, 1, window, size) for span in spans]
    taken = [
        list(span.pages[begin : -(-span.length // size)])
        for span, begin in zip(spans, first, strict=True)
    ]
    longest = max(len(pages) for pages in taken)
    padded = [
        pages + [0] * (longest - len(pages)) for pages in taken
    ]  # page 0 is nobody's and zero
    keys = torch.arange(longest * size)[None] + torch.tensor(first)[:, None] * size
    queries = torch.tensor([span.length - 1 for span in spans])[:, None]
    mask = visible(queries, keys, window)[:, None, None]
    return Group(
        torch.tensor([span.start for span in spans], device=device),
        torch.tensor(padded, device=device).flatten(),
        mask.to(device),
    )


def _chunk(span: Span, window: int | None, size: int, device: torch.device) -> Chunk:
    first = _first_page(span.length, span.count, window, size)
    pages = torch.tensor(list(span.pages[first : -(-span.length // size)]), device=device)
    mask = None
    if window is not None or span.count != span.length:
        positions = torch.arange(first * size, span.length)
        queries = torch.arange(span.length - span.count, span.length)
        mask = visible(queries[:, None], positions[None], window).to(device)
    keys = slice(0, span.length - first * size)
    return Chunk(slice(span.start, span.start + span.count), pages, keys, mask)


def _attend_group(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, group: Group, shape: Shape
) -> Tensor:
    rows, heads, _ = query.shape
    key = (
        key_pages.index_select(0, group.pages).view(rows, -1, *key_pages.shape[2:]).transpose(1, 2)
    )
    value = (
        value_pages.index_select(0, group.pages)
        .view(rows, -1, *value_pages.shape[2:])
        .transpose(1, 2)
    )
    grouped = query.view(rows, key.shape[1], -1, query.shape[-1])  # heads of a group as queries
    out = _softmax(grouped, key, value, group.mask, shape)
    return out.reshape(rows, heads, -1)


def _attend_chunk(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, chunk: Chunk, shape: Shape
) -> Tensor:
    key = key_pages.index_select(0, chunk.pages).flatten(0, 1)[chunk.keys].transpose(0, 1)[None]
    value = value_pages.index_select(0, chunk.pages).flatten(0, 1)[chunk.keys].transpose(0, 1)[None]
    if shape.softcap is None and shape.sinks is None:
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key,
            value,
            attn_mask=None if chunk.mask is None else chunk.mask[None, None],
            is_causal=chunk.mask is None,
            scale=shape.scaling,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)
    count, heads, _ = query.shape
    mask = chunk.mask
    if mask is None:
        mask = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
    groups = heads // key.shape[1]
    grouped = query.reshape(count, key.shape[1], groups, -1).permute(1, 2, 0, 3).flatten(1, 2)[None]
    out = weighted(grouped, key, value, mask.repeat(groups, 1), shape)[0]
    return out.reshape(key.shape[1], groups, count, -1).permute(2, 0, 1, 3).flatten(1, 2)


def _softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    if shape.softcap is None and shape.sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=shape.scaling
        )
    return weighted(query, key, value, mask, shape)
