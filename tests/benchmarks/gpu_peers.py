"""What our kernels are measured by on a GPU: one table, one clock, and how torch does the same.

It does not know our kernels; `gpu` does, and is what is run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

LIMIT = 190.0  # seconds, after which nothing more is begun


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of one attention call: so many, each with queries and keys."""

    rows: int
    queries: int
    keys: int
    heads: int = 32
    key_heads: int = 8
    width: int = 128
    value_width: int = 128
    window: int | None = None
    more: bool = False  # softcap and sinks


class Bench:
    """One device, one table."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.began = time.perf_counter()
        self.failed = 0

    def tell(self, *cells: str) -> None:
        """A line of the table."""
        sys.stdout.write(f"| {' | '.join(cells)} |\n")
        sys.stdout.flush()

    def check(self, name: str, error: float, limit: float) -> None:
        """A line about a twin; what is no number fails."""
        fine = error <= limit
        self.failed += not fine
        self.tell(name, f"error {error:.1e}", "equals its twin" if fine else f"WRONG, over {limit}")

    def seconds(self, call: Callable[..., object], *given: object) -> float:
        """Of one call, the median of some, in the time of the device."""
        import triton

        found: float = triton.testing.do_bench(
            lambda: call(*given), warmup=20, rep=80, return_mode="median"
        )
        return found / 1e3

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.perf_counter() - self.began > LIMIT

    @cache  # noqa: B019
    def copied(self) -> float:
        """Bytes a second that a large copy reads and writes."""
        source = torch.randn(1 << 28, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(target.copy_, source)


def against(bench: Bench, case: Case) -> str:
    """Torch's attentions on the same rows, whose keys and values lie side by side for them."""
    shapes = [(case.heads, case.queries), *[(case.key_heads, case.keys)] * 2]
    query, key, value = (
        torch.randn(case.rows, heads, tokens, case.width, device=bench.device).bfloat16()
        for heads, tokens in shapes
    )
    before = case.keys - case.queries
    places = torch.arange(case.keys, device=bench.device)
    mask = None if case.queries == 1 else places[None] <= places[before:, None]
    causal = before == 0 and case.queries > 1

    def fused() -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, None if causal else mask, is_causal=causal, enable_gqa=True
        )

    words = f"scaled_dot_product_attention {bench.seconds(fused) * 1e6:.0f} us"
    return f"{words}, FlexAttention {flexible(bench, query, key, value, before)}"


def flexible(bench: Bench, query: Tensor, key: Tensor, value: Tensor, before: int) -> str:
    """Microseconds of FlexAttention, or why there are none."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(row: Tensor, head: Tensor, asked: Tensor, place: Tensor) -> Tensor:
        return place <= asked + before

    if bench.over:
        return "left out, the time was up"
    lengths = query.shape[2], key.shape[2]
    mask = None
    if lengths[0] > 1:
        mask = create_block_mask(visible, None, None, *lengths, device=str(bench.device))
    flex = torch.compile(flex_attention, dynamic=False)
    try:
        took = bench.seconds(lambda: flex(query, key, value, block_mask=mask, enable_gqa=True))
    except (RuntimeError, ImportError) as error:  # no compiler, or not for this shape
        return f"failed ({type(error).__name__})"
    return f"{took * 1e6:.0f} us"


def by_sorting(
    scores: Tensor, temperature: float, top_k: float, top_p: float, min_p: float
) -> Tensor:
    """As most do it, without seeds."""
    if temperature == 0:
        return scores.argmax(dim=-1)
    ordered, tokens = (scores.float() / temperature).sort(dim=-1, descending=True)
    if top_k:
        ordered[:, int(top_k) :] = -torch.inf
    weights = ordered.softmax(dim=-1)
    weights[weights.cumsum(dim=-1) - weights >= top_p] = 0
    return tokens.gather(1, weights.multinomial(1))
