"""Attention over pages: the quick way against the truth, and the truth against torch."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from kernels import grouped, reference
from kernels.attention import Batch, Pages, attend, attending
from kernels.reference import Shape, Span

SIZE = 4


def spans(counts: list[tuple[int, int]], seed: int = 0) -> tuple[list[Span], int]:
    """Rows of (tokens now, keys in all) on scattered pages; also how many pages there are."""
    chance = random.Random(seed)
    needed = [-(-length // SIZE) for _, length in counts]
    numbers = list(range(1, sum(needed) + 1))
    chance.shuffle(numbers)
    rows, start = [], 0
    for (count, length), pages in zip(counts, needed, strict=True):
        rows.append(Span(start, count, length, [numbers.pop() for _ in range(pages)]))
        start += count
    return rows, sum(needed)


MIXED = [(1, 1), (1, 9), (6, 6), (1, 30), (5, 17), (1, 8), (1, 700), (4, 4)]


@pytest.mark.parametrize("window", [None, 1, 6, 16])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "wide", "value_wide"), [(6, 2, 8, 8), (3, 3, 8, 12)]
)
def test_grouped_equals_reference(
    window: int | None, extra: str, heads: int, key_heads: int, wide: int, value_wide: int
) -> None:
    torch.manual_seed(0)
    rows, pages = spans(MIXED)
    tokens = sum(span.count for span in rows)
    key = torch.randn(pages + 1, SIZE, key_heads, wide)
    value = torch.randn(pages + 1, SIZE, key_heads, value_wide)
    key[0], value[0] = 0, 0
    query = torch.randn(tokens, heads, wide)
    shape = Shape(
        0.3,
        window,
        softcap=2.0 if extra == "softcap" else None,
        sinks=torch.randn(heads) if extra == "sinks" else None,
    )
    plan = grouped.plan(rows, window, SIZE, torch.device("cpu"))
    assert len(plan.groups) > 1 or window in (1, 6, 16)
    found = grouped.attend(query, key, value, plan, shape)
    wanted = reference.attend(query, key, value, rows, shape)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_reference_equals_torch(window: int | None) -> None:
    torch.manual_seed(1)
    rows, pages = spans([(9, 9)])
    own = rows[0]
    key, value = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    key_pages, value_pages = torch.zeros(pages + 1, SIZE, 2, 8), torch.zeros(pages + 1, SIZE, 2, 8)
    slots = torch.tensor([own.pages[place // SIZE] * SIZE + place % SIZE for place in range(9)])
    reference.write(key_pages, value_pages, key, value, slots, torch.tensor(list(own.pages)))
    query = torch.randn(9, 4, 8)
    found = reference.attend(query, key_pages, value_pages, rows, Shape(8**-0.5, window))
    mask = torch.ones(9, 9).tril().bool()
    if window is not None:
        mask &= torch.ones(9, 9).triu(1 - window).bool()
    wanted = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_sinks_take_weight() -> None:
    rows, pages = spans([(1, 4)])
    key, value = torch.zeros(pages + 1, SIZE, 1, 8), torch.ones(pages + 1, SIZE, 1, 8)
    found = reference.attend(
        torch.randn(1, 1, 8), key, value, rows, Shape(1.0, sinks=torch.zeros(1))
    )
    torch.testing.assert_close(found, torch.full((1, 1, 8), 0.8))  # four keys and a sink, all equal


class Layer(torch.nn.Module):
    layer_idx = 0


def test_the_seam_writes_reads_and_counts() -> None:
    pages = Pages(3, SIZE)
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    batch = Batch(pages, [Span(0, 5, 5, [3, 1])], torch.device("cpu"))
    with attending(batch):
        out, weights = attend(
            Layer(), query, key, key, None, scaling=0.5, position_ids=None, output_x=False
        )
    assert weights is None
    assert batch.calls == 1
    wanted = F.scaled_dot_product_attention(query, key, key, is_causal=True, scale=0.5)
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert pages.bytes_per_token == 2 * 2 * 8 * 4
    assert pages.grown(7).layers[0][0].shape == (8, SIZE, 2, 8)
    with pytest.raises(LookupError):  # outside a batch nobody says where keys belong
        attend(Layer(), query, key, key, None)


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "ahead"),
        ({"attention_mask": torch.ones(1)}, "attention_mask"),
    ],
)
def test_what_is_unknown_is_refused(asked: dict[str, object], word: str) -> None:
    batch = Batch(Pages(1, SIZE), [Span(0, 1, 1, [1])], torch.device("cpu"))
    token = torch.zeros(1, 1, 1, 8)
    with attending(batch), pytest.raises(NotImplementedError, match=word):
        attend(Layer(), token, token, token, **({"attention_mask": None} | asked))
