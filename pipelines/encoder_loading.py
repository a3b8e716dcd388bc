"""An encoder from a folder onto a device, on the quickest path that its self-check allows.

What is no such model is refused in a sentence that says what to do. It does not know requests or
text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from kernels.linear import rounds
from pipelines import encoder, proof
from pipelines.encoder import Encoder, Reading, Way
from pipelines.fetch import Unprepared
from pipelines.linears import prepack, undo
from pipelines.oneshot import Item
from pipelines.shortcuts import restore, shorten
from pipelines.weights import must_be_whole, opened

log = logging.getLogger("carpool.loading")

PACKED, PADDED = "packed", "padded in buckets of like lengths"
_SANE = 1 << 20  # tokens; tokenizers say 10 to the 30th for "no limit"
_POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


class Head(Reading, Protocol):
    """A reading that knows its class and what an item of it looks like."""

    head: str

    def example(self, tokens: tuple[int, ...]) -> Item: ...


@dataclass(slots=True)
class Loaded:
    """A model on its path, and what others must know of it."""

    encoder: Encoder
    context: int
    vocabulary: int
    held: int  # bytes
    details: Mapping[str, str]
    why: str = ""  # it is not packed

    @property
    def path(self) -> str:
        """In words, for people."""
        return PADDED if self.why else PACKED

    def let_go(self) -> None:
        encoder.unload(self.encoder)


def bring(folder: Path, head: Head, device: torch.device, dtype: torch.dtype) -> Loaded:
    """Load, prove and choose the path.

    Where a host's processor multiplies bfloat16, that is all that is rounded: the rest is float32.
    """
    rounded = dtype == torch.bfloat16 and device.type == "cpu" and rounds()
    model = _model(folder, head.head, torch.float32 if rounded else dtype).to(device).eval()
    held = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    ways: tuple[Way, ...] = (
        (lambda packed: prepack(packed.model, rounded), undo),
        (lambda packed: shorten(packed.model, packed.shapes), restore),
    )
    try:
        items = _items(model.config, head)
        found, why = encoder.prove(model, head, items, ways, rounded)
        if why and rounded:
            found, why = encoder.prove(_halved(model), head, items, ways)
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        raise Unprepared(
            f"{folder.name} cannot be run ({proof.reason(error)}); choose another model."
        ) from None
    if why:
        log.warning("%s runs padded, slower than packed: %s.", folder.name, why)
    names = getattr(model.config, "id2label", None) or {}
    details = {
        "labels": json.dumps([names[place] for place in sorted(names)]),
        "pooling": _pooling(folder),
    }
    context = _context(folder, model)
    return Loaded(found, context, model.config.vocab_size, held, details, why)


def _halved(model: nn.Module) -> nn.Module:
    """Its weights in bfloat16, as if it had been loaded so; tables of positions stay exact."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16)
    return model


def _items(config: Any, head: Head) -> Sequence[Item]:
    """Items of several lengths without padding; some models read off where an item ends."""
    pad, end = config.pad_token_id, getattr(config, "eos_token_id", None)
    odd = {pad, end, None}
    spare = next(token for token in range(3, config.vocab_size) if token not in odd)
    items = []
    for row in proof.rows(config.vocab_size):
        tokens = [spare if token in odd else token for token in row]
        tokens = [*tokens[:-1], tokens[-1] if end is None else end]
        items.append(head.example(tuple(tokens)))
    return items


def _model(folder: Path, head: str, dtype: torch.dtype) -> Any:
    """The whole model; a pooler is not used."""
    model, missing = opened(folder, head, dtype, head)
    needed = [name for name in missing if head != "AutoModel" or "pooler" not in name]
    instead = "choose a model that was trained for this task"
    must_be_whole(folder, needed, f"weights of {head}", instead)
    return model


def _context(folder: Path, model: Any) -> int:
    """Most tokens of an item, by the model and by its tokenizer."""
    names = "max_position_embeddings", "n_positions"
    named = (getattr(model.config, name, None) for name in names)
    first = encoder.first_position(model)
    limits = [most - first for most in named if isinstance(most, int) and most > 0]
    file = folder / "tokenizer_config.json"
    most = json.loads(file.read_text()).get("model_max_length") if file.exists() else None
    if isinstance(most, int) and 0 < most < _SANE:
        limits.append(most)
    return min(limits, default=512)


def _pooling(folder: Path) -> str:
    """As sentence-transformers keeps it, else the mean."""
    file = folder / "1_Pooling" / "config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    return next((word for name, word in _POOLINGS.items() if settings.get(name)), "mean")
