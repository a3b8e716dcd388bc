"""Attention in plain torch, one row at a time: the truth that quicker code is tested against.

Keys and values lie in pages [pages, size, heads, width], where a row's table of pages says, or are
packed as the queries are. It knows grouped queries, sliding windows, soft caps, sinks and values of
another width than keys; it does not know whose rows they are or why they are together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One row's stretch of the packed tokens."""

    start: int  # its first token in the packed tokens
    count: int  # its tokens in this forward
    length: int  # its keys in pages once these tokens are written
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Packed tokens that attend to one another, and to those of a beginning that others share."""

    start: int
    count: int
    prefix: tuple[int, int] | None = None  # start and count of earlier tokens


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer asks of attention beyond keys and values."""

    scaling: float
    window: int | None = None  # a query sees itself and the `window - 1` keys before it
    softcap: float | None = None
    sinks: Tensor | None = None  # [heads]: a score that takes weight and gives no value


def write(
    key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor, slots: Tensor, fresh: Tensor
) -> None:
    """Put keys and values [tokens, heads, width] at flat `slots` [tokens].

    Pages that this forward begins (`fresh`) are wiped first: a padded read meets what their last
    owner left, and if that was not a number, weight zero would not hide it.
    """
    if fresh.numel():
        key_pages.index_fill_(0, fresh, 0)
        value_pages.index_fill_(0, fresh, 0)
    key_pages.flatten(0, 1).index_copy_(0, slots, key)
    value_pages.flatten(0, 1).index_copy_(0, slots, value)


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Which key positions each query position may see, as booleans of the broadcast shape."""
    seen = keys <= queries
    return seen if window is None else seen & (keys > queries - window)


def weighted(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """Softmax attention spelt out, in float32: [..., queries, width] over [..., keys, width]."""
    scores = torch.matmul(query, key.transpose(-1, -2)).float() * shape.scaling
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if shape.sinks is not None:
        heads = shape.sinks.float().reshape(
            scores.shape[-3], -1
        )  # [key heads, queries of the group]
        repeat = scores.shape[-2] // heads.shape[-1]
        sink = heads.repeat_interleave(repeat, -1).unsqueeze(-1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return torch.matmul(weights.to(value.dtype), value)


def attend_span(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, span: Span, shape: Shape
) -> Tensor:
    """Attention of one row: its packed queries [count, heads, width] over its own pages."""
    pages = torch.as_tensor(list(span.pages), dtype=torch.long, device=query.device)
    key = (
        key_pages[pages].flatten(0, 1)[: span.length].transpose(0, 1)
    )  # [key heads, length, width]
    value = value_pages[pages].flatten(0, 1)[: span.length].transpose(0, 1)
    positions = torch.arange(span.length, device=query.device)
    asked = torch.arange(span.length - span.count, span.length, device=query.device)
    mask = visible(asked[:, None], positions[None], shape.window)  # [count, length]
    return _by_heads(query, key, value, mask, shape)


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, spans: Sequence[Span], shape: Shape
) -> Tensor:
    """Attention of packed queries [tokens, heads, width]; every span reads its own pages only."""
    out = query.new_zeros(*query.shape[:2], value_pages.shape[-1])
    for span in (span for span in spans if span.count):
        own = slice(span.start, span.start + span.count)
        out[own] = attend_span(query[own], key_pages, value_pages, span, shape)
    return out


def attend_within(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stretches: Sequence[Stretch],
    shape: Shape,
    causal: bool,
) -> Tensor:
    """Attention of packed queries, keys and values [tokens, heads, width] inside each stretch."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for stretch in stretches:
        first, before = stretch.prefix or (0, 0)
        own = slice(stretch.start, stretch.start + stretch.count)
        keys, values = (  # [key heads, before + count, width]
            torch.cat((packed[first : first + before], packed[own])).transpose(0, 1)
            for packed in (key, value)
        )
        places = torch.arange(before + stretch.count, device=query.device)
        mask = visible(places[before:, None], places[None], shape.window)
        mask = mask if causal else torch.ones_like(mask)
        out[own] = _by_heads(query[own], keys, values, mask, shape)
    return out


def _by_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """Queries [count, heads, width] over keys and values [key heads, keys, width] that heads share,
    as the mask [count, keys] lets them.
    """
    count, groups = len(query), query.shape[1] // key.shape[0]
    grouped = query.reshape(count, key.shape[0], groups, -1).permute(1, 2, 0, 3)
    rows = grouped.flatten(1, 2)  # [key heads, groups * count, width]
    out = weighted(rows, key, value, mask.repeat(groups, 1), shape)
    return out.reshape(key.shape[0], groups, count, -1).permute(2, 0, 1, 3).flatten(1, 2)
