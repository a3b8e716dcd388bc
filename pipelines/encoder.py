"""A Hugging Face encoder called on many items at once: packed, without padding, where its attention
goes through transformers' interface, else padded in buckets of like lengths.

It proves on a few ragged items that they give together what the model gives for each alone, and
takes the padded path, or refuses, where that is not so. It does not know requests or text.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from kernels.attention import NAME, attend, attending
from kernels.reference import Shape
from kernels.within import Stretch, Within
from pipelines import proof
from pipelines.oneshot import Item

log = logging.getLogger("carpool.encoder")

Way: TypeAlias = "tuple[Callable[[Packed], Any], Callable[[Any], None]]"  # taken, and left again

WASTE = 1.1  # tokens of a padded call over real ones, at most


class Reading(Protocol):
    """What a task reads off a model: which tokens of an item, and what is made of them."""

    per_item: bool  # one row of numbers for an item, not one for each of these tokens

    def places(self, item: Item) -> Sequence[int]:
        """Of the tokens of an item, those that matter."""
        ...

    def output(self, found: Any) -> Tensor:
        """The numbers in what the model returns."""
        ...


class Encoder(Protocol):
    """Either path."""

    model: Any

    def run(self, items: Sequence[Item]) -> list[Tensor]:
        """For each item [places, numbers], or [1, numbers]; call it in inference mode."""
        ...


class Packed:
    """All items as one long row, each attending to itself."""

    def __init__(self, model: Any, reading: Reading) -> None:
        self.model = model
        self._reading = reading
        self._first = first_position(model)
        self.shapes: Mapping[int, Shape] = {}  # what each layer was seen to ask of attention
        self._base: Any = model.base_model
        self._types = _typed(self._base)
        self._layers = model.config.get_text_config().num_hidden_layers

    def run(self, items: Sequence[Item]) -> list[Tensor]:
        hidden = self._hidden(items)
        reading, kept, counts, start = self._reading, list[int](), list[int](), 0
        for item in items:
            places = reading.places(item)
            kept += [start + place for place in places]
            counts.append(1 if reading.per_item else len(places))
            start += len(item.tokens)
        if len(kept) < start:
            hidden = hidden[torch.tensor(kept, device=hidden.device)]
        return list(torch.split(self._head(hidden), counts))

    def _hidden(self, items: Sequence[Item]) -> Tensor:
        """What the model makes of every token: [tokens, width]."""
        device = self.model.device
        tokens, types, positions = list[int](), list[int](), list[int]()
        stretches = []
        for item in items:
            count = len(item.tokens)
            stretches.append(Stretch(len(tokens), count))
            tokens += item.tokens
            types += [0] * (count - item.second) + [1] * item.second
            positions += range(self._first, self._first + count)
        given = {"input_ids": tokens, "position_ids": positions}
        given |= {"token_type_ids": types} if self._types else {}
        batch = Within(stretches, device, causal=False)
        self.shapes = batch.shapes
        with attending(batch):
            found = self._base(
                **{name: torch.tensor([row], device=device) for name, row in given.items()}
            )
        if batch.calls != self._layers:
            raise NotImplementedError(
                f"its {self._layers} layers attend {batch.calls} times through transformers' "
                "attention interface"
            )
        hidden: Tensor = found[0][0]
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        """What the rest of the model makes of these tokens [tokens, width]."""
        if self.model is self._base:
            return hidden
        # As rows of one token for what reads the first of each row, else as one row.
        rows = hidden[:, None] if self._reading.per_item else hidden[None]
        with _instead(self._base, rows):
            found = self.model(input_ids=rows.new_zeros(rows.shape[:2], dtype=torch.long))
        numbers = self._reading.output(found)
        return numbers if self._reading.per_item else numbers[0]


@contextmanager
def _instead(base: Any, rows: Tensor) -> Iterator[None]:
    """Within it the base model gives these rows, already computed."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    pooler = getattr(base, "pooler", None)
    pooled = None if pooler is None else pooler(rows)
    base.forward = lambda *_, **__: BaseModelOutputWithPooling(
        last_hidden_state=rows, pooler_output=pooled
    )
    try:
        yield
    finally:
        del base.forward


class Padded:
    """Items of like lengths filled up to the longest of them, and masked."""

    def __init__(self, model: Any, reading: Reading, pad: int) -> None:
        self.model = model
        self._reading = reading
        self._pad = pad
        self._types = _typed(model)

    def run(self, items: Sequence[Item]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for bucket in buckets([len(item.tokens) for item in items]):
            numbers = self._bucket([items[place] for place in bucket])
            found |= dict(zip(bucket, numbers, strict=True))
        return [found[place] for place in range(len(items))]

    def _bucket(self, items: Sequence[Item]) -> list[Tensor]:
        longest = max(len(item.tokens) for item in items)
        rows = [(*item.tokens, *[self._pad] * (longest - len(item.tokens))) for item in items]
        given = {
            "input_ids": rows,
            "attention_mask": [
                [1] * len(item.tokens) + [0] * (longest - len(item.tokens)) for item in items
            ],
        }
        if self._types:
            given["token_type_ids"] = [_types(item, longest) for item in items]
        device = self.model.device
        found = self.model(
            **{name: torch.tensor(value, device=device) for name, value in given.items()}
        )
        reading, numbers = self._reading, self._reading.output(found)
        if reading.per_item:
            return list(numbers[:, None])
        return [row[list(reading.places(item))] for row, item in zip(numbers, items, strict=True)]


def first_position(model: Any) -> int:
    """Where a model looks up an item's first token in its table of positions.

    RoBERTa, and all that were made after it, begin behind the row of padding; rows that BART leaves
    free are not counted in its config.
    """
    for name, table in model.named_modules():
        pad = getattr(table, "padding_idx", None)
        if name.endswith("position_embeddings") and pad is not None:
            return int(pad) + 1
    return 0


def _typed(model: Any) -> bool:
    """Whether a model tells first texts from second ones; else a second is out of its range."""
    known = "token_type_ids" in inspect.signature(model.forward).parameters
    return known and getattr(model.config, "type_vocab_size", 2) > 1


def _types(item: Item, longest: int) -> list[int]:
    first = len(item.tokens) - item.second
    return [0] * first + [1] * item.second + [0] * (longest - len(item.tokens))


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """Places in order of length, parted where filling up would waste too much."""
    parts: list[list[int]] = []
    real = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        real += lengths[place]
        if not parts or lengths[place] * (len(parts[-1]) + 1) > WASTE * real:
            parts.append([])
            real = lengths[place]
        parts[-1].append(place)
    return parts


@torch.inference_mode()
def prove(
    model: Any,
    reading: Reading,
    items: Sequence[Item],
    ways: Sequence[Way],
    rounded: bool = False,  # by quicker ways, to 16 bits
) -> tuple[Encoder, str]:
    """The best path on which these items, of the lengths of `proof`, give together what each gives
    alone, and why it is not the packed one.

    Of quicker ways through the packed model, pairs of functions that take them and leave them
    again, those are kept that change nothing, or no more than rounding does.
    """
    proof.attend_by(model, "eager")
    padded = Padded(model, reading, model.config.pad_token_id or 0)
    wanted = [padded.run([item])[0] for item in items]
    try:
        packed = _packed(model, reading, items, wanted)
        return _quickened(packed, items, wanted, ways, rounded), ""
    except proof.REFUSALS as error:
        proof.unless_memory(error)
        why = proof.reason(error)
    proof.own_attention(model)
    proof.must_agree(wanted, padded.run(items), "padded")
    return padded, why


def _packed(
    model: Any,
    reading: Reading,
    items: Sequence[Item],
    wanted: Sequence[Tensor],
) -> Packed:
    """The packed path; raises what refuses it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    proof.attend_by(model, NAME)
    packed = Packed(model, reading)
    proof.must_agree(wanted, packed.run(items), "packed")
    return packed


def _quickened(
    packed: Packed,
    items: Sequence[Item],
    wanted: Sequence[Tensor],
    ways: Sequence[Way],
    rounded: bool,
) -> Packed:
    """With those ways taken that give the same."""
    for take, leave in ways:
        taken = take(packed)
        try:
            proof.must_agree(wanted, packed.run(items), "packed", rounded=rounded)
        except proof.REFUSALS as error:
            proof.unless_memory(error)
            log.info("What %s undoes is left: %s", leave.__name__, proof.reason(error))
            leave(taken)
    return packed


def unload(encoder: Encoder) -> None:
    """Let go of the model."""
    encoder.model = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
