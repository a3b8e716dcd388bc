"""Attention inside each of many packed rows, of which nothing is kept: for encoders, and for
scoring texts.

A row may look back on a beginning that others share, computed once in the same forward. On CUDA it
is a kernel of our own, on hosts C++, for which a row's result is the same bit for bit whoever rides
along, and torch where there is no compiler. `reference` says what is right. It does not know pages
or models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import layout, native
from kernels.attention import own_kernels
from kernels.host import side_by_side
from kernels.reference import Shape, Stretch, attend_within

__all__ = ["Stretch", "Within"]

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Shape], Tensor]

_LONG = ctypes.c_int64


class _Packed(ctypes.Structure):
    """`Packed` of within.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, _LONG) for name in ("query_step", "key_step", "value_step")),
        *((name, ctypes.c_void_p) for name in ("sinks", "out")),
        *((name, _LONG) for name in ("heads", "key_heads", "width", "value_width")),
        *((name, _LONG) for name in ("window", "causal")),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


class Within:
    """One forward's rows. Tokens of a stretch see one another, or if `causal` those before them;
    and those of its prefix, if it has one.
    """

    def __init__(self, stretches: Sequence[Stretch], device: torch.device, causal: bool) -> None:
        self.causal = causal
        self.calls = 0  # attention layers that came by
        self.shapes: dict[int, Shape] = {}  # what each layer asked for last
        self._end = max((sum(part) for row in stretches for part in _parts(row)), default=0)
        self._attend = _way(stretches, device, causal)

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """A layer's packed queries [tokens, heads, width], to results of the values' width."""
        more = (shape.window, shape.softcap, shape.sinks) != (None,) * 3
        if more and not self.causal:
            raise NotImplementedError(
                "This model's attention looks ahead with a window, cap or sinks, which packed rows "
                "do not have."
            )
        if not len(query) == len(key) == len(value) >= self._end:
            raise ValueError("Rows must lie within their tokens. This is a bug.")
        self.calls += 1
        self.shapes[index] = shape
        return self._attend(query, key, value, shape)


def _parts(row: Stretch) -> list[tuple[int, int]]:
    """Start and count of its own tokens, and of its prefix."""
    return [(row.start, row.count), row.prefix or (0, 0)]


def _way(stretches: Sequence[Stretch], device: torch.device, causal: bool) -> Attend:
    """The quickest there is."""
    if own_kernels(device):
        from kernels import varlen  # only here, as hosts may have no triton

        return varlen.Rows(stretches, device, causal).attend
    library = native.library() if device.type == "cpu" else None
    rows = layout.stretches(stretches, torch.device("cpu"))

    def attend(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        if library is not None and _suits(query, key, value):
            return by_own(query, key, value, rows, shape, causal, library)
        if (shape.window, shape.softcap, shape.sinks) == (None,) * 3:
            return by_torch(query, key, value, stretches, shape, causal)
        return attend_within(query, key, value, stretches, shape, causal)

    return attend


def _suits(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return {query.dtype, key.dtype, value.dtype} == {torch.float32} and not (
        value.shape[-1] % native.LANE
    )


def by_own(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    shape: Shape,
    causal: bool,
    library: ctypes.CDLL,
) -> Tensor:
    """Our C++, for rows [rows, 4] as `layout.stretches` has them."""
    query, key, value = (side_by_side(packed) for packed in (query, key, value))
    sinks = None if shape.sinks is None else shape.sinks.float().contiguous()
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    packed = _Packed(
        *(each.data_ptr() for each in (query, key, value)),
        *(each.stride(0) for each in (query, key, value)),
        *(None if sinks is None else sinks.data_ptr(), out.data_ptr()),
        *(query.shape[1], key.shape[1], query.shape[2], value.shape[2]),
        *(shape.window or 0, causal, shape.scaling, shape.softcap or 0.0),
    )
    pointer = ctypes.c_void_p(rows.data_ptr())
    threads = torch.get_num_threads()
    library.carpool_attend_within(ctypes.byref(packed), pointer, _LONG(len(rows)), threads)
    return out


def by_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stretches: Sequence[Stretch],
    shape: Shape,
    causal: bool,
) -> Tensor:
    """One call of torch's fused attention a stretch; it knows no windows, caps or sinks."""
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for stretch in stretches:
        first, before = stretch.prefix or (0, 0)
        own = slice(stretch.start, stretch.start + stretch.count)
        keys, values = (
            torch.cat((packed[first : first + before], packed[own])) if before else packed[own]
            for packed in (key, value)
        )
        mask = None
        if causal and before:
            full = torch.ones(stretch.count, before + stretch.count, dtype=torch.bool)
            mask = full.tril(before).to(query.device)
        rows = [packed.transpose(0, 1)[None] for packed in (query[own], keys, values)]
        found = F.scaled_dot_product_attention(
            rows[0],
            rows[1],
            rows[2],
            attn_mask=mask,
            is_causal=causal and not before,
            scale=shape.scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out[own] = found[0].transpose(0, 1)
    return out
