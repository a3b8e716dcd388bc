"""The tensors of a low-rank adapter, read from its file, for the layers of a model that they fit.

What does not fit is refused in a sentence with the file and the key. It does not know rows or
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipelines import proof
from pipelines.fetch import Unprepared
from pipelines.lora_files import Said, meaning
from pipelines.lora_names import Index

Keys: TypeAlias = "dict[str, str]"  # down, up and perhaps alpha
Tensors: TypeAlias = "Mapping[str, Tensor]"


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """A change to a layer: down [rank, in, ...] and up [out, rank, ...]; scale is alpha by rank."""

    down: Tensor
    up: Tensor
    scale: float


class Part:
    """A denoiser or a text encoder: its layers that can be changed, and how others call them."""

    def __init__(self, model: nn.Module, index: Callable[[Collection[str]], Index]) -> None:
        self.kind = type(model).__name__
        self.layers: dict[str, nn.Linear | nn.Conv2d] = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, (nn.Linear, nn.Conv2d))
        }
        self._index = index(self.layers)

    def named(self, flat: str) -> tuple[str, ...]:
        """Its layers that go by this name; none, where there are none."""
        names = self._index.get(flat, ())
        return names if all(name in self.layers for name in names) else ()


@dataclass(slots=True)
class Fitted:
    """An adapter's changes by the layers they are to, and what these are called."""

    changes: dict[nn.Module, LowRank] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    bytes: int = 0
    reads: bool = False  # some are to a text encoder


def read(path: Path, parts: Sequence[Part]) -> Fitted:
    """An adapter's changes, on the devices of their layers; raises Unprepared."""
    tensors, metadata = _opened(path)
    said = Said(path.name, metadata)
    fitted = Fitted()
    for (number, flat), keys in _sorted(path.name, tensors).items():
        some = next(iter(keys.values()))
        part = parts[number] if number < len(parts) else None
        names = part.named(flat) if part else ()
        if part is None or not names:
            whose = part.kind if part else "a text encoder, as there is no such one"
            raise Unprepared(
                f"{path.name} has {some}, which fits no layer of {whose}; it was made for another "
                "model."
            )
        if lacks := {"down", "up"} - keys.keys():
            raise Unprepared(
                f"{path.name} has {some} and no {lacks.pop()} beside it; fetch it again."
            )
        alpha = said.alpha(number, names[0])
        fitted.reads |= number > 0
        _fit(path.name, tensors, keys, [(n, part.layers[n]) for n in names], alpha, fitted)
    return fitted


def _opened(path: Path) -> tuple[Tensors, Mapping[str, str]]:
    try:
        with safe_open(path, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise Unprepared(
            f"{path.name} cannot be read as safetensors ({proof.reason(error)}); fetch it again."
        ) from None
    if not tensors:
        raise Unprepared(f"{path.name} is empty; choose another file.")
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor.float()).all():
            raise Unprepared(
                f"{path.name} has numbers in {key} that are not finite; choose another file."
            )
    return tensors, metadata


def _sorted(file: str, tensors: Tensors) -> dict[tuple[int, str], Keys]:
    """The keys by the layers that they are of."""
    found: dict[tuple[int, str], Keys] = {}
    for key in tensors:
        meant = meaning(file, key)
        keys = found.setdefault((meant.part, meant.layer), {})
        if meant.kind in keys:
            raise Unprepared(
                f"{file} has {key} and {keys[meant.kind]}, which mean the same; choose another "
                "file."
            )
        keys[meant.kind] = key
    return found


def _fit(
    file: str,
    tensors: Tensors,
    keys: Keys,
    layers: Sequence[tuple[str, nn.Linear | nn.Conv2d]],
    alpha: float | None,
    fitted: Fitted,
) -> None:
    """One change, to a layer or to several that were one where it was made."""
    name, first = layers[0]
    down, up = tensors[keys["down"]], tensors[keys["up"]]
    wide = [layer.weight.shape[0] for _, layer in layers]
    narrow = _shaped(down, first)
    rank = 0 if narrow is None else len(narrow)
    whole = up.shape[:2] == (sum(wide), rank) and up.numel() == sum(wide) * rank
    if narrow is None or not whole:
        raise Unprepared(
            f"{file} has {keys['down']} of {list(down.shape)} and {keys['up']} of "
            f"{list(up.shape)}, which do not fit {name} of {list(first.weight.shape)}; it was made "
            "for another model."
        )
    if "alpha" in keys:
        alpha = _number(file, keys["alpha"], tensors[keys["alpha"]])
    scale = 1.0 if alpha is None else alpha / rank
    narrow = narrow.to(first.weight, copy=True)
    upper = up.reshape(*up.shape[:2], *(1,) * (first.weight.dim() - 2)).to(first.weight, copy=True)
    fitted.bytes += narrow.nbytes + upper.nbytes
    for (name, layer), part in zip(layers, torch.split(upper, wide), strict=True):
        if layer in fitted.changes:
            raise Unprepared(f"{file} has {keys['down']}, a second change to {name}.")
        fitted.changes[layer] = LowRank(narrow, part, scale)
        fitted.names[layer] = name


def _shaped(down: Tensor, layer: nn.Linear | nn.Conv2d) -> Tensor | None:
    """As its layer takes it, [rank, in] or [rank, in, height, width]; None where it cannot.

    Some models have a linear layer where their elders had a convolution of one pixel.
    """
    wanted = layer.weight.shape[1:]
    if isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding_mode != "zeros"):
        return None
    if down.dim() not in (2, 4) or not len(down) or down[0].numel() != wanted.numel():
        return None
    if down.shape[1] != wanted[0] or (down.dim() == len(wanted) + 1 and down.shape[1:] != wanted):
        return None
    return down.reshape(len(down), *wanted)


def _number(file: str, key: str, tensor: Tensor) -> float:
    if tensor.numel() != 1:
        raise Unprepared(f"{file} has {key} of {tensor.numel()} numbers; it must be one.")
    return float(tensor.item())
