"""How the decoder of a sequence-to-sequence model attends for many rows in one call: to what each
row has written so far, and to its own source, all in our pages.

A call packs the rows' tokens into one, as for chat; what a layer asks for is learned from how it
calls. Learned biases for distances (T5) are added row by row. It does not know models or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import EncoderDecoderCache

from kernels import grouped
from kernels.attention import Batch, Pages
from kernels.reference import Shape, Span

NAME = "carpool_seq2seq"
_NOTHING = (None, False)  # that a layer may ask for


@dataclass(frozen=True, slots=True)
class Part:
    """One row in one call."""

    source: int  # tokens of its source
    tokens: Sequence[int]  # for its decoder, which has had `before` others
    before: int
    source_pages: Sequence[int]
    pages: Sequence[int]

    @property
    def length(self) -> int:
        """What its decoder has had once these tokens are in."""
        return self.before + len(self.tokens)


class Call:
    """The rows of one forward of the decoder; `begins`: their sources' keys come with it."""

    def __init__(
        self, pages: Pages, parts: Sequence[Part], begins: bool, device: torch.device
    ) -> None:
        spans, sources, reads = list[Span](), list[Span](), list[Span]()
        start = read = 0
        for part in parts:
            count, known = len(part.tokens), part.source
            spans.append(Span(start, count, part.length, part.pages))
            sources.append(Span(read, known, known, part.source_pages))
            # Every token sees the whole source, as the last token of a row sees all of its row.
            own = range(start, start + count)
            reads += [Span(place, 1, known, part.source_pages) for place in own]
            start, read = start + count, read + known
        self.pages = pages
        self.calls = 0  # attention layers that came by
        self._spans = spans
        self._device = device
        self._own = Batch(pages, spans, device)
        self._sources = Batch(pages, sources, device) if begins else None
        self._reads = Batch(pages, reads, device)
        self._biased: Biased | None = None

    def written(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, biased: bool
    ) -> Tensor:
        """A layer's attention to what rows have written: packed queries [tokens, heads, width]."""
        self.calls += 1
        if not biased:
            return self._own.attend(module.layer_idx, query, key, value, Shape(scaling))
        if self._biased is None:
            self._biased = Biased(self._spans, self.pages.size, self._device)
        pages = self.pages.layer(module.layer_idx, key, value)
        return self._biased.attend(module, query, key, value, pages, scaling)

    def source(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """A layer's attention to the sources."""
        self.calls += 1
        if self._sources is not None:
            pages = self.pages.layer(module.layer_idx, key, value)
            self._sources.reader.put(*pages, key, value)
        return self._reads.reader.attend(
            query, *self.pages.layers[module.layer_idx], Shape(scaling)
        )


# Not all models hand words of ours down to their layers, so the running call waits here.
_current: ContextVar[Call] = ContextVar("carpool_seq2seq_call")


@contextmanager
def attending(call: Call) -> Iterator[None]:
    """For the length of a forward, this thread's decoder attends as `call` says."""
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """One layer as transformers calls it: query [1, heads, tokens, width], out [1, tokens, ...]."""
    unknown = sorted(n for n, what in asked.items() if n != "use_cache" and what not in _NOTHING)
    if unknown or dropout:
        asks = ", ".join(unknown) or "dropout"
        raise NotImplementedError(f"its decoder asks its attention for {asks}")
    call = _current.get()
    query, key, value = (tokens[0].transpose(0, 1) for tokens in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if module.is_causal:
        biased = position_bias is not None
        return call.written(module, query, key, value, scale, biased)[None], None
    return call.source(module, query, key, value, scale)[None], None


class Biased:
    """Attention with a learned number for every distance, added to the scores.

    Rows with one query ride together, padded to the longest; a row with more goes by itself.
    """

    def __init__(self, spans: Sequence[Span], size: int, device: torch.device) -> None:
        self._writer = grouped.Reader(spans, size, device)  # wipes pages, which padding may read
        singles = [span for span in spans if span.count == 1]
        several = [[span] for span in spans if span.count > 1]
        groups = [singles, *several] if singles else several
        self._groups = [_Group.of(group, size, device) for group in groups]
        self._masks: list[Tensor] = []  # of the last layer with biases, which others share

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: tuple[Tensor, Tensor],
        scaling: float,
    ) -> Tensor:
        """A layer's packed queries [tokens, heads, width]."""
        self._writer.put(*pages, key, value)
        if module.has_relative_attention_bias:
            self._masks = [group.mask(_biases(module, group.distances)) for group in self._groups]
        out = torch.empty_like(query)
        for group, mask in zip(self._groups, self._masks, strict=True):
            rows = len(group.distances)
            keys, values = (
                part.index_select(0, group.pages).view(rows, -1, *part.shape[2:]).transpose(1, 2)
                for part in pages
            )
            own = query[group.tokens].view(rows, -1, *query.shape[1:]).transpose(1, 2)
            found = F.scaled_dot_product_attention(own, keys, values, mask, scale=scaling)
            out[group.tokens] = found.transpose(1, 2).flatten(0, 1)
        return out


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows with as many queries each; shapes are the same for every layer."""

    tokens: Tensor  # [rows * queries] where their queries are in the packed tokens
    pages: Tensor  # [rows * longest] page numbers, row after row
    distances: Tensor  # [rows, queries, keys] from a query back to a key; negative is ahead

    @classmethod
    def of(cls, spans: Sequence[Span], size: int, device: torch.device) -> _Group:
        longest = max(-(-span.length // size) for span in spans)
        pages = [list(span.pages[: -(-span.length // size)]) for span in spans]
        padded = [own + [0] * (longest - len(own)) for own in pages]
        tokens = [range(span.start, span.start + span.count) for span in spans]
        queries = [range(span.length - span.count, span.length) for span in spans]
        distances = torch.tensor([list(own) for own in queries])[:, :, None]
        return cls(
            torch.tensor([list(own) for own in tokens], device=device).flatten(),
            torch.tensor(padded, device=device).flatten(),
            (distances - torch.arange(longest * size)).to(device),
        )

    def mask(self, biases: Tensor) -> Tensor:
        """What is added to scores [rows, heads, queries, keys]."""
        ahead = (self.distances < 0)[:, None]
        return biases.permute(0, 3, 1, 2).masked_fill(ahead, float("-inf"))


def _biases(module: Any, distances: Tensor) -> Tensor:
    """The layer's own numbers for distances [rows, queries, keys], in the last dimension heads."""
    buckets = module._relative_position_bucket(
        -distances,
        bidirectional=False,
        num_buckets=module.relative_attention_num_buckets,
        max_distance=module.relative_attention_max_distance,
    )
    found: Tensor = module.relative_attention_bias(buckets)
    return found


class Passing(EncoderDecoderCache):
    """What a decoder takes for its cache: it keeps nothing, since keys and values go to pages."""

    def __init__(self, positions: Tensor, begins: bool, layers: int) -> None:
        nothing: Any = _Nothing(layers)
        self.self_attention_cache = self.cross_attention_cache = nothing
        self.is_updated = dict.fromkeys(range(layers), not begins)
        self._positions = positions

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """The position of each packed token, less its place: places are added by the decoder."""
        return self._positions


class _Nothing:
    """One kind of attention; a layer's keys of old are never read, only measured."""

    def __init__(self, layers: int) -> None:
        empty = torch.zeros(1, 1, 1, 1)
        self.layers = [_Layer(empty, empty)] * layers
        self.is_sliding = self.is_linear = self.is_dummy = [False] * layers

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


@dataclass(frozen=True, slots=True)
class _Layer:
    keys: Tensor
    values: Tensor
