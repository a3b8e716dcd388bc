"""Linear layers on hosts by C++ of our own: as accurate as those of torch, and a row is the same
bit for bit however many rows ride along and with any number of threads.

Weights that a format of 16 bits holds exactly, as those of most checkpoints, take half the memory.
The truth is `torch.nn.functional.linear`. It does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from kernels import native

Forward: TypeAlias = Callable[[Tensor], Tensor]

COLUMNS = 16  # of a panel, as linear.cpp has it
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (*(_POINTER,) * 4, *(_LONG,) * 3, ctypes.c_int, ctypes.c_int)


@torch.inference_mode()
def linear(weight: Tensor, bias: Tensor | None) -> Forward | None:
    """What multiplies rows by a weight [columns, depth]; None where it cannot be had.

    It keeps a copy of both, and gives no gradients.
    """
    library = native.library_for(weight)
    if library is None:
        return None
    function = library.carpool_linear
    function.argtypes, function.restype = _ARGUMENTS, None
    format, panels = laid_out(weight, library)
    own = None if bias is None else _whole(bias.float()).contiguous()
    columns, depth = weight.shape

    def forward(input: Tensor) -> Tensor:
        rows = native.rows(input, depth)
        output = input.new_empty(*input.shape[:-1], columns)
        function(
            *(rows.data_ptr(), panels.data_ptr(), None if own is None else own.data_ptr()),
            *(output.data_ptr(), input.shape[:-1].numel(), depth, columns),
            *(format, torch.get_num_threads()),
        )
        return output

    return forward


def laid_out(weight: Tensor, library: ctypes.CDLL) -> tuple[int, Tensor]:
    """A weight in the smallest format that loses nothing: its number in linear.cpp, and panels."""
    brain = weight.bfloat16()
    if torch.equal(brain.float(), weight):
        return 1, _pairs(brain)
    half = weight.half()
    if library.carpool_reads_float16() and torch.equal(half.float(), weight):
        return 2, _panels(half)
    return 0, _panels(weight)


def _whole(tensor: Tensor) -> Tensor:
    """With zeros up to a whole number of panels: [panels * 16, ...]."""
    missing = -len(tensor) % COLUMNS
    return torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))


def _panels(weight: Tensor) -> Tensor:
    """Column beside column: [panels, depth, 16]."""
    return _whole(weight).view(-1, COLUMNS, weight.shape[1]).transpose(1, 2).contiguous()


def _pairs(weight: Tensor) -> Tensor:
    """Each column beside the one 8 further, as `Brain` of linear.cpp: [panels, depth, 8, 2]."""
    halves = _whole(weight).view(-1, 2, COLUMNS // 2, weight.shape[1])
    return halves.permute(0, 3, 2, 1).contiguous()
