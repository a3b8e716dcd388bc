"""A Hugging Face causal model, called on the packed tokens of many rows with our pages for its
memory.

It loads a folder, proves on a short ragged batch that packed rows give what the model itself gives
alone, and learns from that how many bytes a token takes. It does not know requests, sampling or
text.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention import NAME, Batch, Pages, attend, attending
from kernels.reference import Span
from pipelines.fetch import quiet

_CHECKED = (3, 21, 34)  # lengths of the rows of the self-check, none of them a multiple of a page
_TOLERANCE = {torch.float32: 1e-3}  # of the largest logit; 2e-6 is usual
_COARSE = 8e-2


class PackedModel:
    """The model and its pages. `forward` is the only thing that runs on the device."""

    def __init__(self, model: Any, size: int) -> None:
        self.model = model
        self.size = size
        self.pages = Pages(0, size)
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype, size: int) -> PackedModel:
        """Bring a model from a folder to the device, checked; its pages are still to be made."""
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, attend)
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="eager"
            )
        packed = cls(model.to(device).eval(), size)
        packed.check()
        return packed

    @property
    def config(self) -> Any:
        """The configuration of the part that handles text."""
        return self.model.config.get_text_config()

    @property
    def context(self) -> int:
        """Most tokens a row may have, by the model."""
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            most = getattr(self.config, name, None)
            if isinstance(most, int) and most > 0:
                return most
        raise ValueError("This model does not say how long its context is; choose another.")

    @property
    def ends(self) -> frozenset[int]:
        """Tokens with which the model ends an answer."""
        found: set[int] = set()
        for config in (getattr(self.model, "generation_config", None), self.config):
            token = getattr(config, "eos_token_id", None)
            found.update(
                token if isinstance(token, (list, tuple)) else () if token is None else (token,)
            )
        return frozenset(found)

    def make_pages(self, count: int) -> None:
        """Pages for rows, by the geometry that the check learned."""
        self.pages = self.pages.grown(count)

    def forward(self, tokens: Sequence[int], spans: Sequence[Span], keep: Sequence[int]) -> Tensor:
        """Logits [kept, vocabulary] at places `keep` of the tokens; call it in inference mode."""
        device = self.model.device
        positions = [
            position for span in spans for position in range(span.length - span.count, span.length)
        ]
        kept = torch.tensor(keep, dtype=torch.long, device=device)
        select = {"logits_to_keep": kept} if self._selects else {}
        batch = Batch(self.pages, spans, device)
        with attending(batch):
            logits: Tensor = self.model(
                input_ids=torch.tensor([tokens], device=device),
                position_ids=torch.tensor([positions], device=device),
                use_cache=False,
                **select,
            ).logits[0]
        if batch.calls != self.config.num_hidden_layers:
            raise NotImplementedError(
                f"Only {batch.calls} of this model's {self.config.num_hidden_layers} layers attend "
                "through transformers' attention interface; such models cannot be packed yet."
            )
        return logits if self._selects else logits[kept]

    @torch.inference_mode()
    def check(self) -> None:
        """Compare rows packed in ragged chunks with the same rows alone; learn the geometry."""
        rows = [_some_tokens(length, self.config.vocab_size) for length in _CHECKED]
        self.model.set_attn_implementation("eager")
        wanted = [self._alone(tokens) for tokens in rows]
        self.model.set_attn_implementation(NAME)
        needed = [-(-length // self.size) for length in _CHECKED]
        self.pages = Pages(sum(needed), self.size)
        found = self._in_chunks(rows, needed)
        for length, one, other in zip(_CHECKED, wanted, found, strict=True):
            limit = _TOLERANCE.get(one.dtype, _COARSE) * one.abs().max().item()
            error = (one - other).abs().max().item()
            if not error <= limit:  # also when it is no number
                raise NotImplementedError(
                    f"{type(self.model).__name__} gives other results packed than alone (a row of "
                    f"{length} tokens is off by {error:.2g}, allowed is {limit:.2g}); such models "
                    "cannot be packed yet."
                )

    def unload(self) -> None:
        """Let go of the model and its pages."""
        self.model = None
        self.pages = Pages(0, self.size)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _alone(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0, -1]
        return logits

    def _in_chunks(self, rows: list[list[int]], needed: list[int]) -> list[Tensor]:
        """Two packed forwards: most of the first row and half of the others, then the rest."""
        firsts = [0, *torch.tensor(needed).cumsum(0).tolist()]
        pages = [
            range(first + 1, first + 1 + count)
            for first, count in zip(firsts, needed, strict=False)
        ]
        splits = [len(rows[0]) - 1, *(len(row) // 2 for row in rows[1:])]
        self._packed(
            [row[:split] for row, split in zip(rows, splits, strict=True)], [0] * len(rows), pages
        )
        rest = [row[split:] for row, split in zip(rows, splits, strict=True)]
        return list(self._packed(rest, splits, pages))

    def _packed(
        self, rows: list[list[int]], before: list[int], pages: Sequence[Sequence[int]]
    ) -> Tensor:
        spans: list[Span] = []
        start = 0
        for tokens, done, own in zip(rows, before, pages, strict=True):
            spans.append(Span(start, len(tokens), done + len(tokens), own))
            start += len(tokens)
        return self.forward(sum(rows, []), spans, [span.start + span.count - 1 for span in spans])


def _some_tokens(length: int, vocabulary: int) -> list[int]:
    """Tokens all over the vocabulary, the same each time."""
    return [(7919 * (place + length)) % vocabulary for place in range(length)]
