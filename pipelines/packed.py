"""A Hugging Face causal model, called on the packed tokens of many rows with our pages for its
memory.

It proves on a short ragged batch that packed rows give what the model itself gives alone, refuses
models for which that is not so or would not stay so, and learns how many bytes a token takes. It
does not know requests, sampling or text.
"""

from __future__ import annotations

import gc
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import memory
from kernels.attention import NAME, Batch, Packed, Pages, attend, attending, own_kernels
from kernels.reference import Span
from pipelines.proof import LENGTHS, attend_by, must_agree, rows, truth

_WATCHED = f"{NAME}_watched"  # the same attention, looked at during the check
_KINDS = {"full_attention", "sliding_attention"}  # of layers that pages can serve


class Counted(Packed, Protocol):
    """How packed rows attend, and how many layers came by."""

    calls: int


class PackedModel:
    """The model and its pages. `forward` is the only thing that runs on the device."""

    def __init__(self, model: Any, size: int) -> None:
        self.model = model
        self.size = size
        self.pages = Pages(0, size)
        self.decoder: Callable[[Sequence[int], Sequence[Span]], Tensor | None] | None = None
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def bytes_per_token(self) -> int:
        """Over all layers, learned by the check."""
        return self.pages.bytes_per_token

    def make_pages(self, count: int) -> None:
        """Pages for rows, by the geometry that the check learned."""
        self.pages = self.pages.grown(count)
        memory.settle(self.pages)
        if own_kernels(self.model.device):
            from kernels.graphs import Decoder  # only here, as hosts may have no triton

            self.decoder = Decoder(self.run, self.pages, self.model.device)

    def forward(
        self, tokens: Sequence[int], spans: Sequence[Span], keep: Sequence[int], later: int = 0
    ) -> Tensor:
        """Logits [kept, vocabulary] at places `keep` of the tokens; call it in inference mode.

        Rows begin at position `later`.
        """
        if self.decoder is not None and len(keep) == len(spans) == len(tokens):
            decoded = self.decoder(tokens, spans)
            if decoded is not None:
                return decoded
        device = self.model.device
        positions = [
            later + position
            for span in spans
            for position in range(span.length - span.count, span.length)
        ]
        return self.run(
            torch.tensor([tokens], device=device),
            torch.tensor([positions], device=device),
            torch.tensor(keep, dtype=torch.long, device=device),
            Batch(self.pages, spans, device),
        )

    def run(self, tokens: Tensor, positions: Tensor, kept: Tensor, batch: Counted) -> Tensor:
        """The same of tensors: tokens and positions [1, tokens], places to keep [kept]."""
        select = {"logits_to_keep": kept} if self._selects else {}
        with attending(batch):
            logits: Tensor = self.model(
                input_ids=tokens, position_ids=positions, use_cache=False, **select
            ).logits[0]
        layers = self.model.config.get_text_config().num_hidden_layers
        if batch.calls != layers:
            raise NotImplementedError(
                f"its {layers} layers attend {batch.calls} times through transformers' attention "
                "interface"
            )
        return logits if self._selects else logits[kept]

    @torch.inference_mode()
    def check(self, own: list[list[int]], wanted: list[Tensor], rounded: bool = False) -> None:
        """Compare rows packed in ragged chunks with the truth; learn the geometry. `rounded`: the
        model rounds to 16 bits what the truth does not.
        """
        from transformers import AttentionInterface

        config = self.model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
        if kinds:
            raise NotImplementedError(f"it has layers of {', '.join(sorted(kinds))}")
        windows: set[int | None] = set()

        def watched(*arguments: Any, **asked: Any) -> tuple[Tensor, None]:
            windows.add(asked.get("sliding_window"))
            return attend(*arguments, **asked)

        AttentionInterface.register(NAME, attend)
        AttentionInterface.register(_WATCHED, watched)
        attend_by(self.model, _WATCHED)
        must_agree(wanted, self._in_chunks(own), "packed in chunks", rounded=rounded)
        if windows == {None}:
            _must_see_all(self.model)
        attend_by(self.model, NAME)

    def unload(self) -> None:
        """Let go of the model and its pages."""
        self.model = self.decoder = None
        self.pages = Pages(0, self.size)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def far(self, rows: list[list[int]], later: int) -> list[Tensor]:
        """What it gives after each row, packed at once, if rows begin at position `later`."""
        return list(self._packed(rows, [0] * len(rows), self._own_pages(), later))

    def _own_pages(self) -> list[range]:
        """New pages for the rows of a check, and which of them each has."""
        needed = [-(-length // self.size) for length in LENGTHS]
        self.pages = Pages(sum(needed), self.size)
        firsts = itertools.accumulate(needed, initial=1)
        return [range(first, first + count) for first, count in zip(firsts, needed, strict=False)]

    def _in_chunks(self, rows: list[list[int]]) -> list[Tensor]:
        """Two packed forwards: most of the first row and half of the others, then the rest."""
        pages = self._own_pages()
        splits = [len(rows[0]) - 1, *(len(row) // 2 for row in rows[1:])]
        self._packed(
            [row[:split] for row, split in zip(rows, splits, strict=True)], [0] * len(rows), pages
        )
        rest = [row[split:] for row, split in zip(rows, splits, strict=True)]
        return list(self._packed(rest, splits, pages))

    def _packed(
        self,
        rows: list[list[int]],
        before: list[int],
        pages: Sequence[Sequence[int]],
        later: int = 0,
    ) -> Tensor:
        spans: list[Span] = []
        start = 0
        for tokens, done, own in zip(rows, before, pages, strict=True):
            spans.append(Span(start, len(tokens), done + len(tokens), own))
            start += len(tokens)
        ends = [span.start + span.count - 1 for span in spans]
        return self.forward(sum(rows, []), spans, ends, later)


def _must_see_all(model: Any) -> None:
    """Refuse what rows shorter than a window cannot show: that there is one nobody is told of."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int):
        return
    attend_by(model, "eager")
    row = rows(config.vocab_size)[-1:]
    whole = truth(model, row)[0]
    config.sliding_window = 2
    near = truth(model, row)[0]
    config.sliding_window = window
    if not torch.equal(whole, near):
        raise NotImplementedError(
            f"its layers see a window of {window} tokens and do not tell their attention"
        )
