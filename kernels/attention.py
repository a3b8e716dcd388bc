"""The seam to Hugging Face models: one attention function, "carpool", for packed rows.

A forward is called on packed tokens [1, tokens] inside `attending(batch)`; the function then
attends as the batch says: from our pages, where it first puts each layer's keys and values, or
within rows, and nothing is kept. A layer's geometry is learned from its first call, never from a
config. It does not know requests, models or sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels import grouped, host, native
from kernels.reference import Shape, Span

NAME = "carpool"

# Said by models to every attention; they ask for nothing.
_HARMLESS = frozenset({"position_ids", "cache_position", "use_cache", "position_embeddings"})


class Pages:
    """Keys and values of every layer: `count` pages of `size` tokens, and page 0 of zeros."""

    def __init__(self, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.shapes: dict[int, Shape] = {}  # what each layer asked for last

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The pages of a layer, made when its first keys and values [tokens, heads, width] come."""
        found = self.layers.get(index)
        if found is None:
            found = (self._like(key), self._like(value))
            self.layers[index] = found
        return found

    def grown(self, count: int) -> Pages:
        """Empty pages of the same geometry, `count` of them."""
        other = Pages(count, self.size)
        for index, (key, value) in self.layers.items():
            other.layer(index, key[0], value[0])
        return other

    @property
    def bytes_per_token(self) -> int:
        """Over all layers; known once a forward has been through."""
        pairs = self.layers.values()
        return sum(pages[0, 0].numel() * pages.element_size() for pair in pairs for pages in pair)

    def _like(self, tokens: Tensor) -> Tensor:
        # Not zeroed: a page is wiped when a row begins it, and a host gives memory when touched.
        pages = tokens.new_empty(self.count + 1, self.size, *tokens.shape[1:])
        pages[0] = 0
        return pages


class Reader(Protocol):
    """How the rows of one forward are written to pages and read from them."""

    def put(self, key_pages: Tensor, value_pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Keys and values [tokens, heads, width] of all rows into a layer's pages."""

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, shape: Shape) -> Tensor:
        """Packed queries [tokens, heads, width] to results [tokens, heads, value width]."""


class Packed(Protocol):
    """How the packed rows of one forward attend."""

    @property
    def causal(self) -> bool:
        """Whether a token sees none that comes after it."""

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """A layer's packed queries [tokens, heads, width], to results of the values' width."""


class Batch:
    """One forward's rows: the pages, and how these rows use them."""

    causal = True

    def __init__(
        self,
        pages: Pages,
        spans: Sequence[Span],
        device: torch.device,
        reader: Reader | None = None,
    ) -> None:
        self.pages = pages
        self.reader = reader or _reader(spans, pages.size, device)
        self.calls = 0  # attention layers that came by

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """A layer's packed queries [tokens, heads, width], to results of the values' width."""
        key_pages, value_pages = self.pages.layer(index, key, value)
        self.pages.shapes[index] = shape
        self.calls += 1
        self.reader.put(key_pages, value_pages, key, value)
        return self.reader.attend(query, key_pages, value_pages, shape)


def own_kernels(device: torch.device) -> bool:
    """Whether the kernels of this room run there, and not only torch's."""
    return device.type == "cuda" and find_spec("triton") is not None


def _reader(spans: Sequence[Span], size: int, device: torch.device) -> Reader:
    if not own_kernels(device):
        library = native.library() if device.type == "cpu" else None
        if library is None:
            return grouped.Reader(spans, size, device)
        return host.Reader(spans, size, device, library)
    from kernels import paged_attention  # only here, as hosts may have no triton

    return paged_attention.Reader.of(spans, size, device)


# Models hand nothing of ours down to their layers, so the batch of the running forward waits here.
_current: ContextVar[Packed] = ContextVar("carpool_batch")


@contextmanager
def attending(batch: Packed) -> Iterator[None]:
    """For the length of a forward, this thread attends as `batch` says."""
    token = _current.set(batch)
    try:
        yield
    finally:
        _current.reset(token)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: Any,
) -> tuple[Tensor, None]:
    """One layer as transformers calls it: query [1, heads, tokens, width], out [1, tokens, ...]."""
    shape = _shape(query, attention_mask, scaling, dropout, asked)
    query, key, value = (tokens[0].transpose(0, 1) for tokens in (query, key, value))
    return through(layer_index(module), query, key, value, shape)[None], None


def layer_index(module: torch.nn.Module) -> int:
    """Which layer's attention it is, or -1 if it does not say."""
    index: Any = getattr(module, "layer_idx", None)
    return -1 if index is None else int(index)


def through(index: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
    """A layer of the running forward: packed queries [tokens, heads, width], to results of the
    values' width.
    """
    return _current.get().attend(index, query, key, value, shape)


def _shape(
    query: Tensor, mask: Tensor | None, scaling: float | None, dropout: float, asked: dict[str, Any]
) -> Shape:
    """What the layer asks for; the unknown is refused, as ignoring it would be wrong quietly."""
    window = asked.pop("sliding_window", None)
    softcap = asked.pop("softcap", None)
    sinks = asked.pop("s_aux", None)
    if asked.pop("is_causal", None) is (not _current.get().causal):
        raise NotImplementedError(
            "This model's attention looks ahead where these rows do not, or the other way round."
        )
    unknown = [name for name, value in asked.items() if name not in _HARMLESS and value is not None]
    unknown = [
        name for name in unknown if asked[name] is not False
    ]  # output_attentions=False and such
    if unknown or mask is not None or dropout:
        names = ", ".join(
            [*unknown, *["attention_mask"] * (mask is not None), *["dropout"] * bool(dropout)]
        )
        raise NotImplementedError(
            f"This model asks its attention for {names}, which packed rows do not have."
        )
    return Shape(scaling or query.shape[-1] ** -0.5, window, softcap, sinks)
