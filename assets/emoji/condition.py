"""What the network is told of a caption: the token states of all-MiniLM-L6-v2, and their mean.

Always sixteen rows, those past the text zero and masked. An empty text is the unconditional half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelines import models

TOKENS = 16
_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class Condition:
    """Captions as the network takes them, a row each."""

    states: Tensor  # [rows, tokens, width]
    mask: Tensor  # [rows, tokens], one where there is text

    def rows(self, which: Tensor) -> Condition:
        return Condition(self.states[which], self.mask[which])

    def mean(self) -> Tensor:
        """What a caption says as a whole: [rows, width]."""
        weights = self.mask[..., None].float()
        return (self.states.float() * weights).sum(1) / weights.sum(1)


class Encoder:
    """The text encoder, the same that the application embeds texts with."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = models.prepare(models.default("embed"), lambda _fraction, _text: None)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> Condition:
        states, masks = [], []
        for start in range(0, len(texts), _TOGETHER):
            batch = self._tokenizer(
                list(texts[start : start + _TOGETHER]),
                padding="max_length",
                truncation=True,
                max_length=TOKENS,
                return_tensors="pt",
            )
            mask = batch["attention_mask"]
            hidden = self._model(**batch).last_hidden_state
            states.append((hidden * mask[..., None]).half())
            masks.append(mask.to(torch.uint8))
        return Condition(torch.cat(states), torch.cat(masks))
