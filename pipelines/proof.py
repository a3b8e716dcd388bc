"""A few short rows that a model must answer alike on every path, and how far apart two answers are.

The truth is the model's own eager forward over the whole row, without any cache. It does not know
the paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipelines.device import short_of_memory

LENGTHS = (3, 21, 34)  # none of them a multiple of a page
REFUSALS = (  # what a model raises that cannot be called in some way; memory is another matter
    NotImplementedError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_TOLERANCE = {torch.float32: 1e-3}  # of the largest logit; 2e-6 is usual
_COARSE = 8e-2


def rows(vocabulary: int) -> list[list[int]]:
    """Tokens all over the vocabulary, the same each time."""
    return [[(7919 * (place + n)) % vocabulary for place in range(n)] for n in LENGTHS]


@torch.inference_mode()
def truth(model: Any, own: list[list[int]]) -> list[Tensor]:
    """What the model itself gives after each row: logits [vocabulary]."""
    found = []
    for tokens in own:
        ids = torch.tensor([tokens], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
        found.append(logits)
    return found


def must_agree(
    wanted: Sequence[Tensor],
    found: Sequence[Tensor],
    way: str,
    lengths: Sequence[int] = LENGTHS,
    rounded: bool = False,  # on the way, to 16 bits
) -> None:
    """Raise NotImplementedError where an answer is another one, or no number."""
    for length, one, other in zip(lengths, wanted, found, strict=True):
        allowed = _COARSE if rounded else _TOLERANCE.get(one.dtype, _COARSE)
        limit = allowed * one.abs().max().item()
        error = (one.float() - other.float()).abs().max().item()
        if not error <= limit:  # also when it is no number
            raise NotImplementedError(
                f"a row of {length} tokens gives other results {way} than at once "
                f"(off by {error:.2g}, allowed is {limit:.2g})"
            )


def attend_by(model: Any, name: str) -> None:
    """Set how a model attends; that it cannot is found out by its results, not read in the log."""
    import transformers

    logging: Any = transformers.utils.logging
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model.set_attn_implementation(name)
    finally:
        logging.set_verbosity(level)


def own_attention(model: Any) -> None:
    """torch's fused attention where the model knows it, else its own."""
    attend_by(model, "eager")
    try:
        attend_by(model, "sdpa")
    except (ValueError, ImportError):
        return


def unless_memory(error: Exception) -> None:
    """Memory that ran out says nothing about a model."""
    if short_of_memory(error):
        raise error


def reason(error: Exception) -> str:
    """A model's refusal in one line, without a full stop."""
    line = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, NotImplementedError) and line:
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
