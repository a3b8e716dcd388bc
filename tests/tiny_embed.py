"""A tiny random BERT that turns lists of texts into lists of vectors: one unit, one call.

Test material, built from a configuration. Texts are padded to the longest of the call and masked,
so that nobody's length shows in another's vector. It knows no words, only token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertModel

from pipelines.device import guarded
from queueing.work import Advance, Card, Key, Mark, Output, Request, Row, Tell, Work

WORDS, LENGTH = 100, 64


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """Texts as token ids; as many vectors come back."""

    texts: tuple[tuple[int, ...], ...]

    def request(self, **fields: Any) -> Request:
        """A checked request for this job; every text is a row of the forward."""
        return Request("embed", self, (Work("embed", weight=len(self.texts)),), **fields)


class TinyEmbedPipeline:
    """A row's state is only whether it is done."""

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        return None

    def load(self, tell: Tell) -> Card:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            intermediate_size=37, max_position_embeddings=LENGTH, initializer_range=0.3,
        )  # fmt: skip
        self._bert = BertModel(config).eval()
        return Card(limits={"context": LENGTH})

    def unload(self) -> None:
        del self._bert

    def open(self, request: Request, mark: Mark | None = None) -> bool:
        return False

    def next(self, row: Row) -> Work | None:
        return None if row.state else row.request.plan[0]

    def reserve(self, row: Row, units: int) -> int:
        return units

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        jobs: list[EmbedJob] = [row.request.payload for row in rows]
        vectors = guarded(lambda: self._embed([text for job in jobs for text in job.texts]))
        parts = vectors.split([len(job.texts) for job in jobs])
        return [Advance(True, 1, Output(progress=1.0, result=part.numpy())) for part in parts]

    def park(self, row: Row) -> Mark:
        return ()

    def close(self, row: Row) -> None:
        """Nothing is held."""

    @torch.inference_mode()
    def _embed(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Means over each text's own places: [texts, 32]."""
        tokens = pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        mask = pad_sequence([torch.ones(len(text)) for text in texts], batch_first=True)
        hidden = self._bert(tokens, attention_mask=mask).last_hidden_state
        return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
