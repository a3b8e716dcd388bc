"""Linear layers on hosts by C++ of our own: as accurate as those of torch, and a row is the same
bit for bit however many rows ride along and with any number of threads.

Weights that a format of 16 bits holds exactly, as those of most checkpoints, take half the memory.
On processors that multiply bfloat16, rows and weights may be rounded to it, for nearly twice the
speed; sums stay float32. The truth is `torch.nn.functional.linear`. It does not know models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import native

COLUMNS = 16  # of a panel, as linear.cpp has it
_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = (_POINTER, _LONG, *(_POINTER,) * 3, _LONG, _LONG, ctypes.c_int)


class Weight(ctypes.Structure):
    """`Weight` of linear.cpp."""

    _fields_ = (
        *(("panels", _POINTER), ("bias", _POINTER)),
        *(("columns", _LONG), ("format", _LONG), ("gelu", _LONG)),
    )


class Linear:
    """Multiplies rows by weights [columns, depth], all of one depth, laid out for linear.cpp.

    It keeps a copy of weights and biases, and gives no gradients.
    """

    def __init__(self, library: ctypes.CDLL, parts: Sequence[tuple[Weight, object]], depth: int):
        self.depth = depth
        self.columns = sum(weight.columns for weight, _ in parts)
        self._parts = parts  # and what keeps their numbers
        self._weights = (Weight * len(parts))(*(weight for weight, _ in parts))
        self._library = library
        self._function = library.carpool_linear
        self._function.argtypes, self._function.restype = _ARGUMENTS, None

    def beside(self, *others: Linear) -> Linear:
        """One that gives what all of them give, side by side; the weights are not copied."""
        parts = [part for each in (self, *others) for part in each._parts]
        if {each.depth for each in others} - {self.depth}:
            raise ValueError("Layers of different depths have no common input.")
        return Linear(self._library, parts, self.depth)

    def one(self, gelu: bool = False) -> Weight:
        """Its only weight, for other C++; it must not outlive this object."""
        ((weight, _),) = self._parts
        return Weight(weight.panels, weight.bias, weight.columns, weight.format, gelu)

    def __call__(self, input: Tensor, more: Tensor | None = None) -> Tensor:
        """Of [..., depth] to [..., columns]; `more` of that shape is added."""
        rows = native.rows(input, self.depth)
        output = rows.new_empty(*input.shape[:-1], self.columns)
        added = None if more is None else native.rows(more, self.columns)
        if added is not None and added.shape != output.shape:
            raise ValueError(f"{tuple(added.shape)} cannot be added to {tuple(output.shape)}.")
        self._function(
            *(self._weights, len(self._weights), rows.data_ptr()),
            *(None if added is None else added.data_ptr(), output.data_ptr()),
            *(input.shape[:-1].numel(), self.depth, torch.get_num_threads()),
        )
        return output


@torch.inference_mode()
def linear(weight: Tensor, bias: Tensor | None, rounded: bool = False) -> Linear | None:
    """What multiplies rows by a weight [columns, depth]; None where it cannot be had. `rounded`: to
    bfloat16, both of them.
    """
    library = native.library_for(weight)
    if library is None:
        return None
    format, panels = laid_out(weight, library, rounded)
    own = None if bias is None else _whole(bias.float()).contiguous()
    columns, depth = weight.shape
    pointer = None if own is None else own.data_ptr()
    part = Weight(panels.data_ptr(), pointer, columns, format), (panels, own)
    return Linear(library, [part], depth)


def rounds() -> bool:
    """Whether products of bfloat16 can be had."""
    library = native.library()
    return library is not None and bool(library.carpool_multiplies_bfloat16())


def laid_out(weight: Tensor, library: ctypes.CDLL, rounded: bool = False) -> tuple[int, Tensor]:
    """A weight in the smallest format that loses nothing, or rounded: the format's number in
    linear.cpp, and panels.
    """
    brain = weight.bfloat16()
    if rounded and library.carpool_multiplies_bfloat16() and weight.shape[1] % 2 == 0:
        return 3, _dots(brain)
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


def _dots(weight: Tensor) -> Tensor:
    """Of each column two depths side by side, as `Dots` has them: [panels, depth / 2, 16, 2]."""
    pairs = _whole(weight).view(-1, COLUMNS, weight.shape[1] // 2, 2)
    return pairs.transpose(1, 2).contiguous()
