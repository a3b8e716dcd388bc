"""Linear layers of a model on a host, their weights laid out once for whatever reads them quickest.

In float32 that is our own C++ where there is a compiler, else oneDNN. MKL, to which torch gives
them otherwise, lays them out anew at every call: 16 rows of SmolLM2's layers without the vocabulary
took it 83 ms of a core with AVX2, oneDNN 73, our own 38. It does not know what the layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.linear import linear

ROWS = 32  # oneDNN's layout is chosen for calls of about so many tokens; others use it as well


def prepack(model: nn.Module, rounded: bool = False) -> dict[Any, nn.Parameter]:
    """Lay out all plain linear layers that lie on a host; returns them with their own weights.
    `rounded`: they multiply in bfloat16, where the processor does.

    When these are let go, so is their memory; whoever shares one, such as an embedding, keeps it.
    """
    weights: dict[Any, nn.Parameter] = {}
    layers: list[Any] = [module for module in model.modules() if _suits(module)]
    for layer in layers:
        forward = linear(layer.weight, layer.bias, rounded) or _by_onednn(layer)
        if forward is not None:
            weights[layer] = layer.weight
            layer.forward = forward
            layer.weight = nn.Parameter(layer.weight.detach()[:0].clone(), requires_grad=False)
    return weights


def undo(weights: dict[Any, nn.Parameter]) -> None:
    """For a model that reads the weights of its layers itself."""
    for layer, weight in weights.items():
        del layer.forward
        layer.weight = weight


def _suits(module: Any) -> bool:
    """A linear layer as torch makes it; a subclass may do something else."""
    return type(module) is nn.Linear and module.weight.device.type == "cpu"


@torch.inference_mode()
def _by_onednn(layer: Any) -> Callable[[Tensor], Tensor] | None:
    if not _onednn_takes(layer.weight.dtype):
        return None
    operator = torch.ops.mkldnn._linear_pointwise  # what torch.compile freezes linear layers to
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), ROWS)
    bias = layer.bias

    def forward(input: Tensor) -> Tensor:
        output: Tensor = operator(input, weight, bias, "none", [], "")
        return output

    return forward


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Numbers of 16 bits want a processor that computes in them."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
