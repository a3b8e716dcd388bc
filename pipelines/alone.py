"""A Hugging Face causal model called on one row at a time, on the cache that it makes itself.

For models that cannot be packed: recurrent and hybrid ones, and those outside the attention
interface. A row's memory is a value: a forward leaves it as it is and returns another, so whatever
failed can be repeated. It does not know requests, sampling or text.
"""

from __future__ import annotations

import copy
import gc
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelines.device import short_of_memory
from pipelines.proof import LENGTHS, REFUSALS, must_agree

_NAMES = ("cache", "past_key_values", "cache_params", "state")  # of what a model hands on
_FINEST = 1024  # tokens that memory of constant size counts for at most


@dataclass(frozen=True, slots=True)
class Memory:
    """What a row's tokens left in the model: its cache, never written to, and how many they are."""

    cache: Any = None
    length: int = 0


class AloneModel:
    """The model and how it may be called."""

    def __init__(self, model: Any) -> None:
        from transformers import cache_utils

        self.model = model
        self.whole = False  # a prompt must be computed in one forward
        self.bytes_per_token = 0
        self.fixed = 0  # tokens that count for the memory a row has whatever its length
        taken = inspect.signature(model.forward).parameters
        self._name = next((name for name in _NAMES if name in taken), "")
        self._positions = "position_ids" in taken
        self._keep: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        self._growing = (  # layers that grow by concatenation: their tensors are never written to
            cache_utils.DynamicLayer,
            cache_utils.DynamicSlidingWindowLayer,
            cache_utils.LinearAttentionAndFullAttentionLayer,
        )

    def forward(self, tokens: Sequence[int], memory: Memory) -> tuple[Tensor, Memory]:
        """Logits [vocabulary] after the last token, and the memory with these tokens; call it in
        inference mode.
        """
        device, length = self.model.device, memory.length + len(tokens)
        asked: dict[str, Any] = dict(self._keep)
        if memory.cache is not None:
            asked[self._name] = self._fork(memory.cache)
        if self._positions:
            asked["position_ids"] = torch.arange(memory.length, length, device=device)[None]
        ids = torch.tensor([tokens], device=device)
        out = self.model(input_ids=ids, use_cache=True, **asked)
        cache = getattr(out, self._name, None)
        if cache is None:
            raise NotImplementedError("it returns no cache from which a row could be continued")
        return out.logits[0, -1], Memory(cache, length)

    @torch.inference_mode()
    def check(self, rows: list[list[int]], wanted: list[Tensor]) -> None:
        """Compare rows in chunks, else prompts at once, with the truth; learn what memory takes."""
        if not self._name:
            raise NotImplementedError("it takes no cache from which a row could be continued")
        try:
            self._compare(rows, wanted)
        except REFUSALS as error:
            if short_of_memory(error):
                raise
            self.whole = True
            self._compare(rows, wanted)

    def unload(self) -> None:
        """Let go of the model."""
        self.model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _compare(self, rows: list[list[int]], wanted: list[Tensor]) -> None:
        """Every row up to its last token, then that token, twice, from the same memory."""
        found, sizes = [], []
        for tokens in rows:
            memory = Memory()
            half, last = len(tokens) // 2, len(tokens) - 1
            for chunk in [tokens[:last]] if self.whole else [tokens[:half], tokens[half:last]]:
                _, memory = self.forward(chunk, memory)
            first, _ = self.forward(tokens[last:], memory)
            again, memory = self.forward(tokens[last:], memory)
            if not torch.equal(first, again):
                raise NotImplementedError("a forward repeated from the same cache gives another")
            found.append(again)
            sizes.append(_size(memory.cache))
        way = "with its own cache" if self.whole else "in chunks with its own cache"
        must_agree(wanted, found, way)
        self._learn(sizes)

    def _learn(self, sizes: list[int]) -> None:
        """Bytes of a token and of a row, twice: during a call its old and its new cache are there.

        What does not grow counts as tokens, so that a row's memory is a number of tokens.
        """
        pairs = list(zip(LENGTHS, sizes, strict=True))
        slopes = [
            (after - before) / (longer - shorter)
            for (shorter, before), (longer, after) in zip(pairs, pairs[1:], strict=False)
        ]
        growth = max(*slopes, 0.0)
        constant = max(*(size - growth * length for length, size in pairs), 0.0)
        self.bytes_per_token = max(math.ceil(2 * growth), math.ceil(2 * constant / _FINEST), 1)
        self.fixed = math.ceil(2 * constant / self.bytes_per_token)

    def _fork(self, cache: Any) -> Any:
        """A copy to write to. Tensors that models replace and never change are shared, which takes
        a thirtieth of the time; states that they overwrite are copied.
        """
        layers = [item for item in getattr(cache, "layers", ()) if type(item) in self._growing]
        shared = [tensor for item in layers for tensor in (item.keys, item.values)]
        return copy.deepcopy(cache, {id(tensor): tensor for tensor in shared if tensor is not None})


def _size(cache: Any) -> int:
    """Bytes of all tensors in a cache."""
    storages = [tensor.untyped_storage() for tensor in _tensors(cache, set())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors anywhere in a thing, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from _tensors(value, seen)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from _tensors(value, seen)
    elif hasattr(thing, "__dict__"):
        yield from _tensors(vars(thing), seen)
