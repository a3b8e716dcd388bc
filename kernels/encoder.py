"""What an encoder's layer does after attention, on hosts by C++ of our own: three products and two
norms in one pass, during which a row stays in a near cache.

A row's result is the same bit for bit whoever rides along. It does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from kernels import native
from kernels.linear import Linear, Weight

After: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_LONG = ctypes.c_int64


class _Norm(ctypes.Structure):
    """`Norm` of encoder.cpp."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
    )


class _After(ctypes.Structure):
    """`After` of encoder.cpp."""

    _fields_ = (
        *((name, Weight) for name in ("out", "up", "down")),
        *((name, _Norm) for name in ("first", "second")),
        *((name, _LONG) for name in ("heads", "width", "inner")),
    )


def after_attention(
    out: Linear, first: nn.Module, up: Linear, down: Linear, second: nn.Module
) -> After | None:
    """Of what attention gave [tokens, heads * width] and the layer was given [tokens, width], what
    the layer gives:

    middle = first(out(attended) + given); second(down(gelu(up(middle))) + middle)

    None where it cannot be had.
    """
    library = native.library()
    width, inner = out.columns, up.columns
    norms = [own for own in (_Own.of(norm, width) for norm in (first, second)) if own is not None]
    sizes = up.depth, down.depth, down.columns
    if library is None or width % native.LANE or len(norms) < 2 or sizes != (width, inner, width):
        return None
    kept = out, up, down, norms  # the memory that is pointed to
    weights = out.one(), up.one(gelu=True), down.one()
    after = _After(*weights, *(norm.pointers for norm in norms), out.depth, width, inner)
    function = library.carpool_after_attention

    def forward(attended: Tensor, given: Tensor, _: object = kept) -> Tensor:
        rows, more = native.rows(attended, out.depth), native.rows(given, width)
        if rows.shape[:-1] != more.shape[:-1]:
            raise ValueError(f"{tuple(rows.shape)} and {tuple(more.shape)} are not the same rows.")
        output = torch.empty_like(more)
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (rows, more, output))
        count = _LONG(more.numel() // width)
        function(ctypes.byref(after), *pointers, count, torch.get_num_threads())
        return output

    return forward


@dataclass(frozen=True, slots=True)
class _Own:
    """A norm's numbers, and where they are."""

    numbers: tuple[Tensor, Tensor]
    pointers: _Norm

    @classmethod
    def of(cls, norm: nn.Module, width: int) -> _Own | None:
        """None where it lacks what ours has."""
        if not isinstance(norm, nn.LayerNorm) or norm.normalized_shape != (width,):
            return None
        parts = [part.detach().clone() for part in (norm.weight, norm.bias) if part is not None]
        if [(part.dtype, part.device.type) for part in parts] != [(torch.float32, "cpu")] * 2:
            return None
        weight, bias = parts
        return cls((weight, bias), _Norm(weight.data_ptr(), bias.data_ptr(), norm.eps))
