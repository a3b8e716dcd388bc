"""Decoding as CUDA graphs: one for each number of rows, rounded up, captured when first needed.

A graph repeats a forward without Python, on the tensors it was captured with; a step is copied into
them, and rows that are missing are padded with rows that have no keys. The capture itself has not
run on hardware yet; everything around it is tested on hosts, with a capture that only calls again.
It does not know models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kernels import layout
from kernels.attention import Batch, Pages
from kernels.paged_attention import Reader
from kernels.reference import Span

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REACH = 16384  # keys; rows that are longer go without a graph, whose memory grows with them

# Tokens [1, n], positions [1, n], places to keep [n], rows; gives logits [n, vocabulary].
Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Batch], Tensor]
Call: TypeAlias = Callable[[], Tensor]
Capture: TypeAlias = Callable[[Call], Call]

log = logging.getLogger(__name__)


class Decoder:
    """Forwards of rows with one token each; what it cannot do it leaves to others."""

    def __init__(
        self, forward: Forward, pages: Pages, device: torch.device, capture: Capture | None = None
    ) -> None:
        self._forward = forward
        self._pages = pages
        self._device = device
        self._capture = capture or Captures()
        self._steps: dict[int, Step] = {}
        self._works = True

    def __call__(self, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor | None:
        """Logits [rows, vocabulary], good until the next call; None where no graph fits."""
        size = layout.bucket(len(spans), SIZES)
        fits = all(span.count == 1 and span.length <= REACH for span in spans)
        if size is None or not fits or not self._works:
            return None
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = Step(size, self._pages, self._device)
        step.fill(tokens, spans)
        try:
            return step.run(self._forward, self._capture)[: len(spans)]
        except RuntimeError as error:
            log.warning("Decoding goes on without CUDA graphs: %s", str(error).partition("\n")[0])
            self._works = False
            self._steps.clear()
            return None


class Step:
    """The tensors that one graph reads, and the graph once it is there."""

    def __init__(self, size: int, pages: Pages, device: torch.device) -> None:
        self._size = size
        self._pages = pages
        self._device = device
        self._tokens = torch.zeros(1, size, dtype=torch.long, device=device)
        self._positions = torch.zeros(1, size, dtype=torch.long, device=device)
        self._slots = torch.full((size,), layout.NOWHERE, dtype=torch.int32, device=device)
        empty = layout.rows(layout.padded((), size), pages.size, 1, device)
        width = min(-(-REACH // pages.size), pages.count)
        table = torch.zeros(size, width, dtype=torch.int32, device=device)
        self._rows = layout.Rows(empty.spans, table, empty.blocks, single=True)
        self._replay: Call | None = None

    def fill(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Copy a step's rows in."""
        spans = layout.padded(spans, self._size)
        size, none = self._pages.size, [0] * (self._size - len(tokens))
        rows = layout.rows(spans, size, 1, self._device)
        self._rows.spans.copy_(rows.spans)
        self._rows.table[:, : rows.table.shape[1]].copy_(rows.table)
        self._slots.copy_(torch.tensor(layout.slots(spans, size), dtype=torch.int32))
        self._tokens.copy_(torch.tensor([[*tokens, *none]]))
        self._positions.copy_(torch.tensor([[max(span.length - 1, 0) for span in spans]]))

    def run(self, forward: Forward, capture: Capture) -> Tensor:
        """Logits [size, vocabulary] of what was filled in."""
        if self._replay is None:
            keep = torch.arange(self._size, device=self._device)

            def call() -> Tensor:
                reader = Reader(self._slots, lambda group: (self._rows,))
                batch = Batch(self._pages, (), self._device, reader)
                return forward(self._tokens, self._positions, keep, batch)

            self._replay = capture(call)
        return self._replay()


class Captures:
    """Captures with CUDA, all graphs from one pool of memory, as only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Call) -> Call:
        """A graph of a call; the calls before it compile, and write what the graph will write."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = call()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay
