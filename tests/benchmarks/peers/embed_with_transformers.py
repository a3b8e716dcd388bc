"""The model by transformers: texts sorted by length, in padded batches; a batch of one is one by
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from vectors import answer
from wire import serve


class Padded:
    """Mean of the tokens' vectors, of length 1, as the model's own settings say."""

    version = transformers.__version__

    def __init__(self, job: dict[str, Any]) -> None:
        setting = job["setting"]
        torch.set_num_threads(setting["threads"])
        dtype = getattr(torch, setting["dtype"])
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(job["folder"])
        self._model = transformers.AutoModel.from_pretrained(
            job["folder"], dtype=dtype, attn_implementation="sdpa"
        ).eval()
        self.embedding = self._model.get_input_embeddings()

    def prepare(self, setting: Mapping[str, Any]) -> None:
        """Nothing."""

    def vectors(self, texts: Sequence[str], setting: Mapping[str, Any]) -> list[list[float]]:
        rows = setting["rows"]
        tokens = self.tokens(texts)
        order = sorted(range(len(texts)), key=lambda place: len(tokens[place]))
        found: dict[int, list[float]] = {}
        for start in range(0, len(order), rows):
            part = order[start : start + rows]
            found.update(zip(part, self.batch([tokens[place] for place in part]), strict=True))
        return [found[place] for place in range(len(texts))]

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """As the model was taught, cut to what it takes."""
        found = self._tokenizer(list(texts), truncation=True, max_length=512)
        ids: list[list[int]] = found["input_ids"]
        return ids

    @torch.inference_mode()
    def batch(self, tokens: Sequence[Sequence[int]]) -> Any:
        """One forward, padded to the longest: [texts, width]."""
        given = self._tokenizer.pad({"input_ids": list(tokens)}, return_tensors="pt")
        hidden = self._model(**given).last_hidden_state.float()
        mask = given["attention_mask"][..., None]
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=1).numpy()


if __name__ == "__main__":
    serve(Padded, answer)
