"""An encoder with a decoder from a folder onto a device, proven on a few rows before anybody rides.

What is no such model, or gives together what it does not give alone, is refused in a sentence that
says what to do. It does not know requests or text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention import Pages
from pipelines import proof
from pipelines.fetch import Unprepared
from pipelines.linears import prepack, undo
from pipelines.seq2seq_attention import Part
from pipelines.seq2seq_model import Seq2SeqModel
from pipelines.weights import configuration, must_be_whole, opened

log = logging.getLogger("carpool.seq2seq")

ANSWER = 512  # tokens that it writes at most, whatever the model
SOURCE = 512  # tokens that it reads, where nothing says how many
_SANE = 1 << 20  # tokens; tokenizers say 10 to the 30th for "no limit"
_WRITTEN = (2, 5, 19)  # tokens of the decoder in the rows of the check
_ELSE = "name one such as T5 or BART, or leave CARPOOL_SUMMARISE_MODEL out"


@dataclass(frozen=True, slots=True)
class Manner:
    """How a model wants to begin and to end, and what it was taught to read."""

    opening: tuple[int, ...]  # tokens that its decoder begins with
    ends: frozenset[int]
    repeats: int  # tokens in a row that it must not write twice; 0 for no such rule
    prefix: str  # words before a text


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model, and what others must know of it."""

    body: Seq2SeqModel
    manner: Manner
    source: int  # most tokens that it reads
    answer: int  # most tokens that it writes after its opening
    vocabulary: int
    weights: int  # bytes


def bring(folder: Path, device: torch.device, dtype: torch.dtype, page: int) -> Loaded:
    """Load and prove; pages are still to be made."""
    config = _config(folder)
    model = _model(folder, dtype).to(device).eval()
    weights = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    manner = _manner(folder, model)
    limits = _limits(folder, config)
    source = min(limits, default=SOURCE)
    answer = min([ANSWER, *limits]) - len(manner.opening)
    body = Seq2SeqModel(model, page)
    try:
        _prove(body)
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        raise Unprepared(
            f"{folder.name} cannot be run many rows at once ({proof.reason(error)}); {_ELSE}."
        ) from None
    return Loaded(body, manner, source, answer, config.vocab_size, weights)


def _config(folder: Path) -> Any:
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).exists():
            raise Unprepared(
                f"{folder.name} has no {name}; name a folder with config.json, tokenizer.json and "
                "*.safetensors, or a model of the Hub."
            )
    config = configuration(folder)
    if not getattr(config, "is_encoder_decoder", False):
        raise Unprepared(
            f"{folder.name} ({config.model_type}) is no encoder with a decoder; {_ELSE}."
        )
    return config


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """The whole model."""
    kind = "an encoder with a decoder"
    model, missing = opened(folder, "AutoModelForSeq2SeqLM", dtype, kind, _ELSE)
    must_be_whole(folder, missing)
    return model


def _manner(folder: Path, model: Any) -> Manner:
    """By its generation settings, and by what its configuration says of summaries.

    A forced end needs nothing: what is written ends there anyway, and ends are not shown.
    """
    settings, config = model.generation_config, model.config
    told: Any = (getattr(config, "task_specific_params", None) or {}).get("summarization") or {}
    start = settings.decoder_start_token_id
    start = settings.bos_token_id if start is None else start
    if start is None:
        raise Unprepared(
            f"{folder.name} does not say how its answers begin; add decoder_start_token_id to its "
            "generation_config.json."
        )
    forced = settings.forced_bos_token_id
    repeats = told.get("no_repeat_ngram_size", settings.no_repeat_ngram_size)
    return Manner(
        opening=(start,) if forced is None else (start, forced),
        ends=frozenset(_each(settings.eos_token_id)),
        repeats=repeats or 0,
        prefix=told.get("prefix") or "",
    )


def _each(tokens: Any) -> Iterable[int]:
    if isinstance(tokens, (list, tuple)):
        return tokens
    return () if tokens is None else (tokens,)


def _limits(folder: Path, config: Any) -> list[int]:
    """Most tokens of an item, by the model and by its tokenizer, as far as they say."""
    named = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
    file = folder / "tokenizer_config.json"
    most = json.loads(file.read_text("utf-8")).get("model_max_length") if file.exists() else None
    return [n for n in (*named, most) if isinstance(n, int) and 0 < n < _SANE]


@torch.inference_mode()
def _prove(body: Seq2SeqModel) -> None:
    """Three rows together give what each gives alone, token by token; quicker linear layers are
    kept if that stays so.
    """
    short, _, long = proof.rows(body.model.config.vocab_size)
    sources = [short, long[2:], long]  # the last two are encoded side by side, one filled up
    lengths = [len(source) for source in sources]
    written = [(long[row:] + short)[:count] for row, count in enumerate(_WRITTEN)]
    wanted = [_alone(body.model, *pair) for pair in zip(sources, written, strict=True)]
    body.ride()
    proof.must_agree(wanted, _together(body, sources, written), "together", lengths)
    weights = prepack(body.model)
    try:
        proof.must_agree(wanted, _together(body, sources, written), "together", lengths)
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        log.info("What %s undoes is left: %s", undo.__name__, proof.reason(error))
        undo(weights)


def _alone(model: Any, source: list[int], written: list[int]) -> Tensor:
    """The truth: the model itself, eager, without any cache; logits [vocabulary]."""
    ids, device = torch.tensor([source], device=model.device), model.device
    logits: Tensor = model(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        decoder_input_ids=torch.tensor([written], device=device),
        use_cache=False,
    ).logits
    return logits[0, -1]


def _together(
    body: Seq2SeqModel, sources: Sequence[list[int]], written: Sequence[list[int]]
) -> list[Tensor]:
    """All rows begin in one call, with half of what they write, and go on until each has all."""
    most = max(map(len, (*sources, *written))) // body.size + 1  # pages of either kind
    body.pages = Pages(2 * most * len(sources), body.size)
    found: dict[int, Tensor] = {}
    before = [0] * len(sources)
    counts = [len(row) // 2 for row in written]
    left = list(range(len(sources)))
    while left:
        parts = []
        for row in left:
            own = range(1 + 2 * most * row, 1 + 2 * most * (row + 1))
            tokens = written[row][before[row] : before[row] + counts[row]]
            parts.append(Part(len(sources[row]), tokens, before[row], own[:most], own[most:]))
        begins = not any(before)
        logits = body.begin([sources[row] for row in left], parts) if begins else body.go_on(parts)
        found |= dict(zip(left, logits, strict=True))
        before = [b + c for b, c in zip(before, counts, strict=True)]
        counts = [1] * len(sources)
        left = [row for row in left if before[row] < len(written[row])]
    return [found[row] for row in range(len(sources))]
