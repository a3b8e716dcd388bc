"""Random low-rank adapters for tiny models in the formats that people share, and models with
them merged into their weights, as the truth.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Change:
    """To one layer, as it is multiplied out."""

    down: Tensor
    up: Tensor
    alpha: float

    def whole(self) -> Tensor:
        scale = self.alpha / len(self.down)
        return scale * torch.einsum(
            "or,r...->o...", self.up.flatten(1).double(), self.down.double()
        )


Changes = dict[str, Change]


def layers(model: nn.Module, *endings: str) -> dict[str, Any]:
    """Its linear layers and convolutions, those whose names end so."""
    kinds = nn.Linear, nn.Conv2d
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, kinds) and name.endswith(endings or ("",))
    }


def drawn(
    model: nn.Module, seed: int, *endings: str, rank: int = 2, alpha: float | None = None
) -> Changes:
    """Changes as large as the weights they are to."""
    source = torch.Generator().manual_seed(seed)
    made = {}
    for name, layer in layers(model, *endings).items():
        wide, *narrow = layer.weight.shape
        down = torch.randn(rank, *narrow, generator=source) / layer.weight[0].numel() ** 0.5
        up = torch.randn(wide, rank, *[1] * (len(narrow) - 1), generator=source)
        made[name] = Change(down, up, rank if alpha is None else alpha)
    return made


def merged(model: nn.Module, changes: Mapping[str, Change], weight: float = 1.0) -> Any:
    """A copy of a model that is changed for good."""
    twin = copy.deepcopy(model)
    for name, change in changes.items():
        twin.get_submodule(name).weight.data += weight * change.whole()
    return twin


def peft(changes: Changes, prefix: str = "unet.", said: bool = False) -> dict[str, Tensor]:
    """As diffusers writes it now; alphas beside, or scaled in."""
    made = {}
    for name, change in changes.items():
        scale = 1.0 if said else change.alpha / len(change.down)
        made[f"{prefix}{name}.lora_A.weight"] = change.down
        made[f"{prefix}{name}.lora_B.weight"] = change.up * scale
    return made


def kohya(
    changes: Changes, prefix: str = "lora_unet_", names: Mapping[str, str] | None = None
) -> dict[str, Tensor]:
    """As Kohya's scripts write it, in half precision where nothing is lost by it."""
    made = {}
    for name, change in changes.items():
        key = prefix + (names or {}).get(name, name.replace(".", "_"))
        made[f"{key}.lora_down.weight"] = change.down
        made[f"{key}.lora_up.weight"] = change.up
        made[f"{key}.alpha"] = torch.tensor(change.alpha)
    return made


def processors(changes: Changes, prefix: str = "unet.") -> dict[str, Tensor]:
    """As diffusers once wrote it, for attention only."""
    made = {}
    for name, change in changes.items():
        parent, last = name.removesuffix(".0").rsplit(".", 1)
        key = f"{prefix}{parent}.processor.{last}_lora"
        made[f"{key}.down.weight"] = change.down
        made[f"{key}.up.weight"] = change.up * (change.alpha / len(change.down))
    return made


def linears(changes: Changes, prefix: str) -> dict[str, Tensor]:
    """As diffusers once wrote it for text encoders."""
    made = {}
    for name, change in changes.items():
        made[f"{prefix}{name}.lora_linear_layer.down.weight"] = change.down
        made[f"{prefix}{name}.lora_linear_layer.up.weight"] = change.up * (
            change.alpha / len(change.down)
        )
    return made


def saved(path: Path, *parts: Mapping[str, Tensor], said: Mapping[str, Any] | None = None) -> Path:
    """A file of all these keys."""
    tensors = {key: tensor.contiguous() for part in parts for key, tensor in part.items()}
    metadata = {"lora_adapter_metadata": json.dumps(said)} if said else None
    save_file(tensors, path, metadata)
    return path


def only(tensors: Mapping[str, Tensor], words: Iterable[str]) -> dict[str, Tensor]:
    """The keys with one of these words in them."""
    chosen = tuple(words)
    return {key: each for key, each in tensors.items() if any(word in key for word in chosen)}
