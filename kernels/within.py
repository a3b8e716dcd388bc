"""Attention inside each of many packed rows, of which nothing is kept: for encoders, and for
scoring texts.

A row may look back on a beginning that others share, computed once in the same forward.
`reference` says what is right. It does not know pages or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import Shape, Stretch, attend_within

__all__ = ["Stretch", "Within"]


class Within:
    """One forward's rows. Tokens of a stretch see one another, or if `causal` those before them;
    and those of its prefix, if it has one.
    """

    def __init__(self, stretches: Sequence[Stretch], device: torch.device, causal: bool) -> None:
        self.causal = causal
        self.calls = 0  # attention layers that came by
        self.shapes: dict[int, Shape] = {}  # what each layer asked for last
        self._stretches = stretches
        self._device = device

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """A layer's packed queries [tokens, heads, width], to results of the values' width."""
        if not self.causal and (shape.window, shape.softcap, shape.sinks) != (None,) * 3:
            raise NotImplementedError(
                "This model's attention looks ahead with a window, cap or sinks, which packed rows "
                "do not have."
            )
        self.calls += 1
        self.shapes[index] = shape
        if (shape.window, shape.softcap, shape.sinks) != (None,) * 3:
            return attend_within(query, key, value, self._stretches, shape, self.causal)
        return by_torch(query, key, value, self._stretches, shape, self.causal)


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
