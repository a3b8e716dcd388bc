"""Parts of a model that lie between its linear layers, done in one pass each by kernels of our own.

They are known by what they have, never by the model's name; whoever takes them checks that the
model still says the same. It does not know requests or text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.elementwise import gated, rms_norm
from kernels.native import LANE

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@torch.inference_mode()
def shorten(model: nn.Module) -> list[Any]:
    """Give parts that have one a shorter way; returns them."""
    taken: list[Any] = []
    modules: list[Any] = list(model.modules())
    for module in modules:
        forward = _norm(module) or _gate(module)
        if forward is not None:
            module.forward = forward
            taken.append(module)
    return taken


def restore(taken: list[Any]) -> None:
    """Let them go their own way again."""
    for module in taken:
        del module.forward


def _norm(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Root mean square norms as Llama has them."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(weight, Tensor):
        return None
    return rms_norm(weight, epsilon) if isinstance(epsilon, float) else None


def _gate(module: Any) -> Callable[[Tensor], Tensor] | None:
    """Gated layers with SiLU, as Llama has them."""
    if {name for name, _ in module.named_children()} != _GATED:
        return None
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if not type(module.act_fn).__name__.startswith("SiLU") or gate.out_features % LANE:
        return None
    multiply = gated(gate.weight)
    if multiply is None:
        return None
    return lambda input: down(multiply(gate(input), up(input)))
