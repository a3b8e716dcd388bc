"""A Hugging Face encoder with a decoder, called on many rows: sources padded in buckets of like
lengths, decoders packed with our pages for their memory.

A row's source is encoded once, and its keys go to pages before those of what it writes. It does
not know requests, choosing or text.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from kernels.attention import Pages
from pipelines import proof
from pipelines.encoder import buckets
from pipelines.seq2seq_attention import NAME, Call, Part, Passing, attend, attending


class Seq2SeqModel:
    """The model and its pages; call `begin` and `go_on` in inference mode."""

    def __init__(self, model: Any, size: int) -> None:
        self.model = model
        self.size = size
        self.pages = Pages(0, size)
        self._encoder: Any = model.get_encoder()
        self._decoder: Any = model.get_decoder()
        self._layers = sum(bool(getattr(m, "is_causal", False)) for m in self._decoder.modules())
        self._pad: int = model.config.pad_token_id or 0

    @property
    def bytes_per_token(self) -> int:
        """Over all layers of the decoder, for a token of a source or of what is written."""
        return self.pages.bytes_per_token

    def ride(self) -> None:
        """From now on its decoder attends for many rows, each half by a configuration of its own,
        because that says how to attend.
        """
        from transformers import AttentionInterface

        if not self._layers:
            raise NotImplementedError("no layer of its decoder says that it is causal")
        AttentionInterface.register(NAME, attend)
        _separate(self._encoder)
        _separate(self._decoder)
        proof.own_attention(self._encoder)
        proof.attend_by(self._decoder, NAME)

    def make_pages(self, count: int) -> None:
        """Empty pages; their geometry is learned from the first call."""
        self.pages = self.pages.grown(count)

    def begin(self, sources: Sequence[Sequence[int]], parts: Sequence[Part]) -> Tensor:
        """Encode sources and compute their first tokens: logits [rows, vocabulary]."""
        return self._decode(self._encode(sources), parts, begins=True)

    def go_on(self, parts: Sequence[Part]) -> Tensor:
        """Compute tokens of rows that have begun: logits [rows, vocabulary] after the last."""
        nothing = torch.zeros(1, 1, 1, device=self.model.device)  # keys of sources are in pages
        return self._decode(nothing, parts, begins=False)

    def unload(self) -> None:
        """Let go of the model and its pages."""
        self.model = self._encoder = self._decoder = None
        self.pages = Pages(0, self.size)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _encode(self, sources: Sequence[Sequence[int]]) -> Tensor:
        """All sources as one long row: [1, tokens, width]."""
        found: dict[int, Tensor] = {}
        for bucket in buckets([len(source) for source in sources]):
            hidden = self._bucket([sources[place] for place in bucket])
            found |= dict(zip(bucket, hidden, strict=True))
        return torch.cat([found[place] for place in range(len(sources))])[None]

    def _bucket(self, sources: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sources filled up to the longest of them, and masked: [tokens, width] of each."""
        longest, device = max(map(len, sources)), self.model.device
        filled = [[*source, *[self._pad] * (longest - len(source))] for source in sources]
        real = [[1] * len(source) + [0] * (longest - len(source)) for source in sources]
        hidden = self._encoder(
            input_ids=torch.tensor(filled, device=device),
            attention_mask=torch.tensor(real, device=device),
        ).last_hidden_state
        return [row[: len(source)] for row, source in zip(hidden, sources, strict=True)]

    def _decode(self, hidden: Tensor, parts: Sequence[Part], begins: bool) -> Tensor:
        device = self.model.device
        tokens = [token for part in parts for token in part.tokens]
        positions = [place for part in parts for place in range(part.before, part.length)]
        ends = torch.tensor([len(part.tokens) for part in parts], device=device).cumsum(0) - 1
        ids = torch.tensor([tokens], device=device)
        places = torch.arange(len(tokens), device=device)
        call = Call(self.pages, parts, begins, device)
        cache = Passing(torch.tensor(positions, device=device) - places, begins, self._layers)
        with attending(call):
            logits: Tensor = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                decoder_input_ids=ids,
                decoder_attention_mask=torch.ones_like(ids),
                cache=cache,
                use_cache=True,
            ).logits[0]
        if call.calls != 2 * self._layers:
            raise NotImplementedError(
                f"the {self._layers} layers of its decoder attend {call.calls} times through "
                "transformers' attention interface"
            )
        return logits[ends]


def _separate(half: Any) -> None:
    """Give an encoder or a decoder a configuration of its own."""
    shared, own = half.config, copy.deepcopy(half.config)
    for module in half.modules():
        if getattr(module, "config", None) is shared:
            module.config = own
