"""Paged attention on hosts by C++ of our own, which reads keys and values where they lie.

A query's result is the same bit for bit however many rows ride along, however its prompt was cut
and with any number of threads. Layers that it does not serve go to `grouped`, as do all where there
is no compiler; `reference` says what is right. It does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import grouped, layout
from kernels.native import LANE
from kernels.reference import Shape, Span

QUERIES = 8  # of a row, taken together: with their heads they share what is read of keys and values


class _Layer(ctypes.Structure):
    """`Layer` of attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "sinks", "out")),
        *((name, ctypes.c_int64) for name in ("heads", "key_heads", "width", "value_width")),
        *((name, ctypes.c_int64) for name in ("size", "stride", "window")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class Reader(grouped.Reader):
    """How a forward's rows are written and read on a host that has a compiler."""

    def __init__(
        self, spans: Sequence[Span], size: int, device: torch.device, library: ctypes.CDLL
    ) -> None:
        super().__init__(spans, size, device)
        self._rows = layout.rows(spans, size, QUERIES, device)
        self._library = library

    def put(self, key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values [tokens, heads, width] of all rows into a layer's pages."""
        if not _suits(key, key_pages, value_pages):
            return super().put(key_pages, value_pages, key, value)
        # No page need be wiped that is never read beyond its keys.
        put(key_pages, key, self._slots, self._library)
        return put(value_pages, value, self._slots, self._library)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, shape: Shape) -> Tensor:
        """Packed queries [tokens, heads, width] to results [tokens, heads, value width]."""
        if not _suits(query, key_pages, value_pages):
            return super().attend(query, key_pages, value_pages, shape)
        return attend(query, key_pages, value_pages, self._rows, shape, self._library)


def _suits(query: Tensor, key_pages: Tensor, value_pages: Tensor) -> bool:
    kinds = {query.dtype, key_pages.dtype, value_pages.dtype}
    return kinds == {torch.float32} and not (query.shape[-1] % LANE or value_pages.shape[-1] % LANE)


def put(pages: Tensor, tokens: Tensor, slots: Tensor, library: ctypes.CDLL) -> None:
    """Tokens [tokens, heads, width] into pages [pages, size, heads, width], at slots [tokens]."""
    own = side_by_side(tokens)
    if not pages.is_contiguous() or own.shape[1:] != pages.shape[2:] or len(own) != len(slots):
        raise ValueError("Tokens and their slots must fit the pages. This is a bug.")
    library.carpool_put(
        *(ctypes.c_void_p(each.data_ptr()) for each in (pages, own, slots)),
        *(ctypes.c_int64(number) for number in (len(own), own[0].numel(), own.stride(0))),
    )


def side_by_side(tokens: Tensor) -> Tensor:
    """The same [tokens, heads, width], a token's heads one after the other."""
    apart = tokens.stride()[1:] != (tokens.shape[2], 1)
    return tokens.contiguous() if apart else tokens


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    rows: layout.Rows,
    shape: Shape,
    library: ctypes.CDLL,
) -> Tensor:
    """Attention of packed queries [tokens, heads, width], as `reference.attend` has it."""
    if not (key_pages.is_contiguous() and value_pages.is_contiguous()):
        raise ValueError("Pages must be contiguous. This is a bug.")
    query = side_by_side(query)
    sinks = None if shape.sinks is None else shape.sinks.float().contiguous()
    out = query.new_empty(*query.shape[:2], value_pages.shape[-1])
    layer = _Layer(
        *(query.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr()),
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *(query.shape[1], key_pages.shape[2], query.shape[2], value_pages.shape[3]),
        *(key_pages.shape[1], query.stride(0), shape.window or 0),
        *(shape.scaling, shape.softcap or 0.0),
    )
    library.carpool_attend(
        ctypes.byref(layer),
        *(ctypes.c_void_p(part.data_ptr()) for part in (rows.spans, rows.blocks, rows.table)),
        *(ctypes.c_int64(number) for number in (len(rows.blocks), rows.table.shape[1], QUERIES)),
        torch.get_num_threads(),
    )
    return out
