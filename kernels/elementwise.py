"""What lies between linear layers, on hosts by C++ of our own: one pass for a norm, one for a gate,
one for rotation by position.

Torch takes six for a norm, each with its own call. A row's result is the same bit for bit whoever
rides along. It does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from kernels import native
from kernels.native import LANE

Rows: TypeAlias = Callable[[Tensor], Tensor]
Rotate: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


def rms_norm(weight: Tensor, epsilon: float) -> Rows | None:
    """Rows [..., width] over their root mean square, times the weight [width]; None where it cannot
    be had.
    """
    library = native.library_for(weight)
    if library is None or weight.dim() != 1 or len(weight) % LANE:
        return None
    function = library.carpool_rms_norm
    function.argtypes = (*(_POINTER,) * 3, _LONG, _LONG, ctypes.c_float, ctypes.c_int)
    function.restype = None
    own = weight.detach().contiguous()
    width = len(own)

    def norm(input: Tensor) -> Tensor:
        rows = native.rows(input, width)
        output = torch.empty_like(rows)
        pointers = rows.data_ptr(), own.data_ptr(), output.data_ptr()
        function(*pointers, rows.numel() // width, width, epsilon, torch.get_num_threads())
        return output

    return norm


def gated(like: Tensor, width: int) -> Rows | None:
    """silu(gate) * up of rows [..., 2 * width], which hold the one and then the other, for a model
    whose weights are `like` this one; None where it cannot be had.
    """
    library = native.library_for(like)
    if library is None or width % LANE:
        return None
    function = library.carpool_gated
    function.argtypes, function.restype = (_POINTER, _POINTER, _LONG, _LONG, ctypes.c_int), None

    def multiply(both: Tensor) -> Tensor:
        rows = native.rows(both, 2 * width)
        output = rows.new_empty(*rows.shape[:-1], width)
        count = output.numel() // width
        function(rows.data_ptr(), output.data_ptr(), count, width, torch.get_num_threads())
        return output

    return multiply


def rotation(like: Tensor, width: int) -> Rotate | None:
    """Turns heads [tokens, heads, width] in place by cosines and sines [tokens, width], as Llama
    does: x * cos + (-second half, first half) * sin. None where it cannot be had.
    """
    library = native.library_for(like)
    if library is None or width % 2:
        return None
    function = library.carpool_rotate
    function.argtypes = (*(_POINTER,) * 3, *(_LONG,) * 4, ctypes.c_int)
    function.restype = None

    def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> None:
        turns = native.rows(cosines, width), native.rows(sines, width)
        tokens, count, _ = heads.shape
        if heads.dtype != torch.float32 or heads.stride()[1:] != (width, 1):
            raise ValueError(f"Heads of {width} float32 numbers side by side are wanted.")
        if {turn.numel() for turn in turns} != {tokens * width}:
            raise ValueError(f"{tokens} tokens turn by {tuple(cosines.shape)}; it takes one each.")
        pointers = heads.data_ptr(), *(turn.data_ptr() for turn in turns)
        threads = torch.get_num_threads()
        function(*pointers, tokens, count, width, heads.stride(0), threads)

    return rotate
