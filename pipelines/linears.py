"""Linear layers of a model on a host, their weights laid out once as oneDNN reads them quickest.

Without it every call lays them out anew or reads them badly: measured on two cores with AVX2, 16
rows of SmolLM2's vocabulary took 54 ms so and 100 ms as they came. It does not know what the layers
are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Forward: TypeAlias = Callable[[Tensor], Tensor]

ROWS = 32  # the layout is chosen for calls of about so many tokens; others use it as well
_FORMATS = (torch.float32, torch.bfloat16, torch.float16)


def prepack(model: nn.Module) -> dict[Any, nn.Parameter]:
    """Lay out all plain linear layers that lie on a host; returns them with their own weights.

    When these are let go, so is their memory; whoever shares one, such as an embedding, keeps it.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return {}
    layers: list[Any] = [module for module in model.modules() if _suits(module)]
    weights = {layer: layer.weight for layer in layers}
    for layer, weight in weights.items():
        layer.forward = _packed(layer)
        layer.weight = nn.Parameter(weight.detach()[:0].clone(), requires_grad=False)
    return weights


def undo(weights: dict[Any, nn.Parameter]) -> None:
    """For a model that reads the weights of its layers itself."""
    for layer, weight in weights.items():
        del layer.forward
        layer.weight = weight


def _suits(module: Any) -> bool:
    """A linear layer as torch makes it; a subclass may do something else."""
    if type(module) is not nn.Linear:
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype in _FORMATS


@torch.inference_mode()
def _packed(layer: Any) -> Forward:
    operator = torch.ops.mkldnn._linear_pointwise  # what torch.compile freezes linear layers to
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
    bias = layer.bias

    def forward(input: Tensor) -> Tensor:
        output: Tensor = operator(input, weight, bias, "none", [], "")
        return output

    return forward
