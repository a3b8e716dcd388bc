"""One forward's rows as our own kernels read them: small integer tensors, made on the host.

Rows with one query and rows with more are kept apart, because a kernel reads them in other tiles.
Padded rows are known by their length 0: they have no keys, no pages and slot -1, so that they read
nothing and write nothing. It needs no triton; it does not know layers or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.reference import Span, Stretch

NOWHERE = -1  # the slot of a token that is not kept


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a forward; all tensors are int32."""

    spans: Tensor  # [rows, 3]: first packed token, queries, keys
    table: Tensor  # [rows, pages], padded with page 0
    blocks: Tensor  # [blocks, 2]: a row, and the first of the queries that a program takes
    single: bool  # every row has one query


def slots(spans: Sequence[Span], size: int) -> list[int]:
    """Where each packed token's key goes: page times size plus offset; padding goes nowhere."""
    return [
        span.pages[position // size] * size + position % size if position >= 0 else NOWHERE
        for span in spans
        for position in range(span.length - span.count, span.length)
    ]


def split(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Rows with one query, and rows with more; rows with none have nothing to ask."""
    return [s for s in spans if s.count == 1], [s for s in spans if s.count > 1]


def rows(spans: Sequence[Span], size: int, queries: int, device: torch.device) -> Rows:
    """Lay out rows whose programs take up to `queries` queries each."""
    numbers = [[span.start, span.count, span.length] for span in spans]
    pages = [list(span.pages[: -(-span.length // size)]) for span in spans]
    width = max([1, *map(len, pages)])
    table = [own + [0] * (width - len(own)) for own in pages]
    laid = blocks([span.count for span in spans], queries, device)
    single = all(span.count == 1 for span in spans)
    return Rows(_whole(numbers, device), _whole(table, device), laid, single)


def blocks(counts: Sequence[int], queries: int, device: torch.device) -> Tensor:
    """Rows of so many queries in programs of at most `queries`: a row, and its first of them."""
    found = [
        [place, first] for place, count in enumerate(counts) for first in range(0, count, queries)
    ]
    return _whole(found, device)


def stretches(rows: Sequence[Stretch], device: torch.device) -> Tensor:
    """First packed token and tokens of each, and the same of its prefix: [rows, 4]."""
    numbers = [[row.start, row.count, *(row.prefix or (0, 0))] for row in rows]
    return _whole(numbers, device).view(-1, 4)


def bucket(count: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the sizes that holds `count` rows; None when none does."""
    return next((size for size in sizes if size >= count), None)


def padded(spans: Sequence[Span], count: int) -> list[Span]:
    """Rows with one query, filled up to `count` with rows that have no keys."""
    return [*spans, *(Span(place, 1, 0, ()) for place in range(len(spans), count))]


def _whole(values: list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)
