"""What lies between linear layers, on hosts by C++ of our own: one pass for a norm, one for a gate.

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

Norm: TypeAlias = Callable[[Tensor], Tensor]
Gated: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64


def rms_norm(weight: Tensor, epsilon: float) -> Norm | None:
    """Rows [..., width] over their root mean square, times the weight [width]; None where it cannot
    be had.
    """
    library = native.library_for(weight)
    if library is None or weight.dim() != 1 or len(weight) % LANE:
        return None
    function = library.carpool_rms_norm
    function.argtypes = (*(_POINTER,) * 3, _LONG, _LONG, ctypes.c_float)
    function.restype = None
    own = weight.detach().contiguous()
    width = len(own)

    def norm(input: Tensor) -> Tensor:
        rows = native.rows(input, width)
        output = torch.empty_like(rows)
        count = rows.numel() // width
        function(rows.data_ptr(), own.data_ptr(), output.data_ptr(), count, width, epsilon)
        return output

    return norm


def gated(like: Tensor) -> Gated | None:
    """silu(gate) * up of equal shapes [..., width], for a model whose weights are `like` this one;
    None where it cannot be had.
    """
    library = native.library_for(like)
    if library is None:
        return None
    function = library.carpool_gated
    function.argtypes, function.restype = (*(_POINTER,) * 3, _LONG, ctypes.c_int), None

    def multiply(gate: Tensor, up: Tensor) -> Tensor:
        width = gate.shape[-1]
        gates, ups = native.rows(gate, width), native.rows(up, width)
        if gates.shape != ups.shape or width % LANE:
            raise ValueError(
                f"A gate of {tuple(gates.shape)} does not fit {tuple(ups.shape)}, or is no "
                f"multiple of {LANE} wide."
            )
        output = torch.empty_like(gates)
        threads = torch.get_num_threads()
        pointers = gates.data_ptr(), ups.data_ptr(), output.data_ptr()
        function(*pointers, gates.numel(), threads)
        return output

    return multiply
