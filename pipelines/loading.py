"""A causal model from a folder onto a device, on the quickest path that its self-check allows.

Packed with others first; else one row at a time on its own cache, which the log says once. What is
no such model is refused in a sentence that says what to do. It does not know requests or text.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.linear import rounds
from pipelines import proof
from pipelines.alone import AloneModel
from pipelines.fetch import Unprepared
from pipelines.linears import prepack, undo
from pipelines.packed import PackedModel
from pipelines.shortcuts import restore, shorten
from pipelines.weights import configuration, must_be_whole, opened

log = logging.getLogger("carpool.loading")

PACKED, ALONE = "packed", "one row at a time"
_CONTEXTS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length",
    "seq_length",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model on its path, and what others must know of it."""

    body: PackedModel | AloneModel
    context: int  # most tokens a row may have, by the model
    vocabulary: int
    ends: frozenset[int]  # tokens with which the model ends an answer
    weights: int  # bytes
    why: str = ""  # it is not packed

    @property
    def path(self) -> str:
        """In words, for people."""
        return ALONE if self.why else PACKED


def bring(folder: Path, device: torch.device, dtype: torch.dtype, page: int) -> Loaded:
    """Load, prove and choose the path; packed pages are still to be made.

    Where a host's processor multiplies bfloat16, that is all that packed rows round: the rest is
    float32.
    """
    loaded = None
    if dtype == torch.bfloat16 and device.type == "cpu" and rounds():
        loaded = _bring(folder, device, torch.float32, page, rounded=True)
    if loaded is None or loaded.why:
        loaded = _bring(folder, device, dtype, page)
    if loaded.why:
        log.warning("%s runs one row at a time, slower than packed: %s.", folder.name, loaded.why)
    return loaded


def _bring(
    folder: Path, device: torch.device, dtype: torch.dtype, page: int, rounded: bool = False
) -> Loaded:
    config = _config(folder)
    limit = _context(config, folder)
    model = _model(folder, dtype).to(device).eval()
    weights = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    rows = proof.rows(config.vocab_size)
    try:
        wanted = proof.truth(model, rows)
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        raise Unprepared(
            f"{folder.name} cannot be run ({proof.reason(error)}); choose another model."
        ) from None
    body, why = _path(folder.name, model, page, limit, rows, wanted, rounded)
    return Loaded(body, limit, config.vocab_size, _ends(model, config), weights, why)


def _path(
    name: str,
    model: Any,
    page: int,
    context: int,
    rows: list[list[int]],
    wanted: list[Tensor],
    rounded: bool,
) -> tuple[PackedModel | AloneModel, str]:
    """The first path whose check passes, and why it is not the packed one."""
    packed = PackedModel(model, page)
    try:
        packed.check(rows, wanted)
        _quicken(packed, rows, wanted, context, rounded)
        return packed, ""
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        why = proof.reason(error)
    proof.own_attention(model)
    alone = AloneModel(model)
    try:
        alone.check(rows, wanted)
        return alone, why
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        last = proof.reason(error)
    raise Unprepared(
        f"{name} can be run neither packed ({why}) nor one row at a time ({last}); choose another "
        "model."
    )


def _quicken(
    packed: PackedModel,
    rows: list[list[int]],
    wanted: list[Tensor],
    context: int,
    rounded: bool,
) -> None:
    """Quicker ways through a host, each kept if the model still says the same, also far into its
    context.
    """
    later = max(context - max(proof.LENGTHS), 0)
    far = packed.far(rows, later)
    ways: tuple[tuple[Any, Any], ...] = (
        (lambda model: prepack(model, rounded), undo),
        (lambda model: shorten(model, packed.pages.shapes), restore),
    )
    for take, leave in ways:
        taken = take(packed.model)
        try:
            if taken:
                found = packed.far(rows, later)
                proof.must_agree(far, found, f"from position {later:,} on", rounded=rounded)
                packed.check(rows, wanted, rounded)
        except proof.REFUSALS as error:
            proof.unless_memory(error)
            log.info("What %s undoes is left: %s", leave.__name__, proof.reason(error))
            leave(taken)
            packed.check(rows, wanted, rounded)


def _config(folder: Path) -> Any:
    """The configuration of the part that handles text; refuses what cannot be a chat model here."""
    if not (folder / "config.json").exists():
        raise Unprepared(
            f"{folder} is no model, since it has no config.json; name a folder with config.json, "
            "tokenizer.json and *.safetensors, or a model of the Hub."
        )
    whole = configuration(folder)
    if getattr(whole, "is_encoder_decoder", False):
        raise Unprepared(
            f"{folder.name} is an encoder with a decoder ({whole.model_type}), which cannot "
            "continue a chat; choose a decoder-only (causal) model."
        )
    if not (folder / "tokenizer.json").exists():
        raise Unprepared(
            f"{folder.name} has no tokenizer.json; write it there with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)."
        )
    return whole.get_text_config()


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """The whole model."""
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise Unprepared(
            f"{folder.name} has a configuration and no weights; put its *.safetensors there too."
        )
    model, missing = opened(folder, "AutoModelForCausalLM", dtype, "a causal language model")
    must_be_whole(folder, missing)
    return model


def _context(config: Any, folder: Path) -> int:
    """Most tokens of a row, by the model."""
    stated = (getattr(config, name, None) for name in _CONTEXTS)
    limits = [most for most in stated if isinstance(most, int) and most > 0][:1]
    if not limits:
        raise Unprepared(
            f"{folder.name} does not say how long its context is; add max_position_embeddings to "
            "its config.json."
        )
    # Beyond this, frequencies of all rows would depend on the longest that rides along.
    ropes = getattr(config, "rope_parameters", None) or {}
    kinds = [ropes, *(kind for kind in ropes.values() if isinstance(kind, dict))]
    limits += [
        kind["original_max_position_embeddings"]
        for kind in kinds
        if kind.get("rope_type") == "longrope"
    ]
    return min(limits)


def _ends(model: Any, config: Any) -> frozenset[int]:
    """By its generation settings and its configuration."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), config):
        token = getattr(source, "eos_token_id", None)
        found.update(
            token if isinstance(token, (list, tuple)) else () if token is None else (token,)
        )
    return frozenset(found)
