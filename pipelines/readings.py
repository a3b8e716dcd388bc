"""What one-shot tasks read off an encoder: vectors, labels, words for blanks, spans.

Each knows which class of transformers has its head, which tokens matter, and what an item's numbers
become on the host. It does not know paths, requests or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from pipelines.oneshot import Blank, Item, Pool


class Vectors:
    """A vector for each item."""

    head = "AutoModel"
    per_item = False

    def example(self, tokens: tuple[int, ...]) -> Item:
        """An item of these tokens."""
        return Item(tokens, ask=Pool("mean", False))

    def places(self, item: Item) -> Sequence[int]:
        pooling = item.ask.pooling
        count = len(item.tokens)
        return range(count) if pooling == "mean" else [0 if pooling == "cls" else count - 1]

    def output(self, found: Any) -> Tensor:
        numbers: Tensor = found[0]
        return numbers

    def result(self, item: Item, numbers: Tensor) -> Any:
        """float32 [width]."""
        vector = numbers.float().mean(0)
        if item.ask.normalise:
            vector = vector / vector.norm().clamp_min(1e-12)
        return vector.cpu().numpy()


class Labels:
    """A score for each of the model's labels, for items of one or two texts."""

    head = "AutoModelForSequenceClassification"
    per_item = True

    def example(self, tokens: tuple[int, ...]) -> Item:
        return Item(tokens)

    def places(self, item: Item) -> Sequence[int]:
        return [0]

    def output(self, found: Any) -> Tensor:
        numbers: Tensor = found.logits
        return numbers

    def result(self, item: Item, numbers: Tensor) -> Any:
        """float32 [labels], not yet shares."""
        return numbers[0].float().cpu().numpy()


class Words:
    """Tokens that may stand at an item's blanks."""

    head = "AutoModelForMaskedLM"
    per_item = False

    def example(self, tokens: tuple[int, ...]) -> Item:
        return Item(tokens, ask=Blank((len(tokens) // 2,), 1))

    def places(self, item: Item) -> Sequence[int]:
        places: Sequence[int] = item.ask.places
        return places

    def output(self, found: Any) -> Tensor:
        numbers: Tensor = found.logits
        return numbers

    def result(self, item: Item, numbers: Tensor) -> Any:
        """For each blank: token ids [top] and their shares of all tokens [top], likeliest first."""
        shares = numbers.float().softmax(-1)  # [blanks, vocabulary]
        ask: Blank = item.ask
        if ask.targets:
            targets = torch.tensor(ask.targets, device=shares.device)
            best, order = shares[:, targets].sort(descending=True, stable=True)
            ids = targets[order]
        else:
            best, ids = shares.topk(min(ask.top, shares.shape[-1]))
        return list(zip(ids.cpu().numpy(), best.cpu().numpy(), strict=True))


class Spans:
    """How likely an answer begins and ends at each token."""

    head = "AutoModelForQuestionAnswering"
    per_item = False

    def example(self, tokens: tuple[int, ...]) -> Item:
        return Item(tokens)

    def places(self, item: Item) -> Sequence[int]:
        return range(len(item.tokens))

    def output(self, found: Any) -> Tensor:
        return torch.stack((found.start_logits, found.end_logits), -1)

    def result(self, item: Item, numbers: Tensor) -> Any:
        """float32 [tokens, 2]: scores of beginning and of ending there."""
        return numbers.float().cpu().numpy()


def finite(result: Any) -> bool:
    """Whether an item's numbers are numbers."""
    parts = [share for _, share in result] if isinstance(result, list) else [result]
    return all(bool(numpy.isfinite(part).all()) for part in parts)


READINGS = {"embed": Vectors, "classify": Labels, "fill": Words, "answer": Spans}
