"""Our attention and page kernels against their twins; see tests/test_kernels.py for how it runs."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import layout, paged_attention, pages, reference
from kernels.attention import Batch, Pages, attend, attending
from kernels.reference import Shape, Span

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces and blocks so short that small rows have several."""
    monkeypatch.setattr(paged_attention, "PIECE", 64)
    monkeypatch.setattr(paged_attention, "CHUNK", 16)
    monkeypatch.setattr(paged_attention, "TOGETHER", 2)


def spans(counts: list[tuple[int, int]], size: int, seed: int = 0) -> tuple[list[Span], int]:
    """Rows of (tokens now, keys in all) on scattered pages; also how many pages there are."""
    needed = [-(-length // size) for _, length in counts]
    numbers = random.Random(seed).sample(range(1, sum(needed) + 1), sum(needed))
    rows, start = [], 0
    for (count, length), many in zip(counts, needed, strict=True):
        rows.append(Span(start, count, length, [numbers.pop() for _ in range(many)]))
        start += count
    return rows, sum(needed)


def filled(count: int, size: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Pages of which page 0, nobody's, would spoil every result."""
    made = torch.randn(count + 1, size, heads, width, dtype=dtype)
    made[0] = float("nan")
    return made.to(DEVICE)


def found(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: list[Span], shape: Shape
) -> torch.Tensor:
    reader = paged_attention.Reader.of(rows, key.shape[1], DEVICE)
    return reader.attend(query, key, value, shape)


MIXED = [(1, 1), (5, 17), (0, 7), (1, 150), (3, 3), (2, 70), (1, 64)]
SHAPES = {  # heads, key heads, width, value width, size of a page, window, more
    "heads share keys": (4, 2, 16, 16, 16, None, False),
    "values of another width": (2, 2, 24, 8, 4, None, False),
    "an odd group and odd widths": (3, 1, 20, 33, 8, None, True),
    "a window smaller than a page": (4, 2, 16, 16, 16, 5, False),
    "a window of several pages and pieces": (2, 1, 16, 16, 8, 100, True),
    "a window of one key": (2, 1, 16, 16, 4, 1, True),
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_is_that_of_the_twin(name: str) -> None:
    heads, key_heads, width, value_width, size, window, more = SHAPES[name]
    torch.manual_seed(0)
    rows, count = spans(MIXED, size)
    key = filled(count, size, key_heads, width, torch.float32)
    value = filled(count, size, key_heads, value_width, torch.float32)
    query = torch.randn(sum(row.count for row in rows), heads, width, device=DEVICE)
    sinks = torch.randn(heads, device=DEVICE) if more else None
    shape = Shape(0.3, window, softcap=2.0 if more else None, sinks=sinks)
    wanted = reference.attend(query, key, value, rows, shape)
    torch.testing.assert_close(found(query, key, value, rows, shape), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_weight_may_grow_or_fade_along_the_pieces(sign: int) -> None:
    torch.manual_seed(7)
    rows, count = spans([(1, 330), (3, 140)], 16)
    key, value = (filled(count, 16, 1, 16, torch.float32) for _ in range(2))
    for row in rows:
        for place, page in enumerate(row.pages):
            key[page] = sign * place / 4
    query = torch.rand(4, 2, 16, device=DEVICE)
    wanted = reference.attend(query, key, value, rows, Shape(0.25))
    result = found(query, key, value, rows, Shape(0.25))
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_attention_of_random_rows(seed: int) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    size = chance.choice([1, 2, 16, 32])
    lengths = [chance.randrange(1, 100) for _ in range(4)]
    rows, count = spans(
        [(chance.choice([1, chance.randint(1, n)]), n) for n in lengths], size, seed
    )
    key_heads = chance.choice([1, 2])
    width, value_width = chance.randrange(4, 40), chance.randrange(4, 40)
    key = filled(count, size, key_heads, width, torch.float32)
    value = filled(count, size, key_heads, value_width, torch.float32)
    heads = key_heads * chance.choice([1, 2, 3])
    query = torch.randn(sum(row.count for row in rows), heads, width, device=DEVICE)
    shape = Shape(width**-0.5, chance.choice([None, 1, 16, 60]))
    wanted = reference.attend(query, key, value, rows, shape)
    torch.testing.assert_close(found(query, key, value, rows, shape), wanted, rtol=1e-4, atol=1e-5)


def test_attention_in_half_precision_is_near_the_twin_in_float32() -> None:
    torch.manual_seed(0)
    # The interpreter multiplies bfloat16 as if it were whole numbers.
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    rows, count = spans([(1, 90), (4, 20)], 16)
    key = filled(count, 16, 1, 32, half)
    value = filled(count, 16, 1, 32, half)
    query = torch.randn(5, 2, 32, device=DEVICE).to(half)
    shape = Shape(32**-0.5)
    wanted = reference.attend(query.float(), key.float(), value.float(), rows, shape)
    result = found(query, key, value, rows, shape)
    assert result.dtype == half
    torch.testing.assert_close(result.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("window", [None, 70])
def test_a_row_is_the_same_to_the_bit_whoever_is_there(window: int | None) -> None:
    torch.manual_seed(2)
    rows, count = spans([(1, 200), (1, 3), (9, 40), (1, 130)], 16)
    key = filled(count, 16, 2, 16, torch.float32)
    value = filled(count, 16, 2, 16, torch.float32)
    query = torch.randn(12, 4, 16, device=DEVICE)
    shape = Shape(0.25, window, sinks=torch.randn(4, device=DEVICE))
    together = found(query, key, value, rows, shape)
    for row in rows:
        own = slice(row.start, row.start + row.count)
        alone = found(query[own], key, value, [Span(0, row.count, row.length, row.pages)], shape)
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("programs", [1, 2, 100])
def test_how_many_programs_share_the_pieces_changes_nothing(programs: int) -> None:
    torch.manual_seed(3)
    single, count = spans([(1, 200), (1, 129)], 16)
    key, value = (filled(count, 16, 1, 16, torch.float32) for _ in range(2))
    query = torch.randn(2, 2, 16, device=DEVICE)
    rows = layout.rows(single, 16, 1, DEVICE)
    out = torch.full((2, 2, 16), float("nan"), device=DEVICE)
    paged_attention.attend(query, key, value, rows, Shape(0.25), out, programs)
    assert torch.equal(out, found(query, key, value, single, Shape(0.25)))


def test_padded_rows_are_zero_and_disturb_nobody() -> None:
    torch.manual_seed(4)
    single, count = spans([(1, 30), (1, 70)], 16)
    key, value = (filled(count, 16, 1, 16, torch.float32) for _ in range(2))
    query = torch.randn(4, 2, 16, device=DEVICE)
    wanted = found(query[:2], key, value, single, Shape(0.25, 40))
    result = found(query, key, value, layout.padded(single, 4), Shape(0.25, 40))
    assert torch.equal(result[:2], wanted)
    assert not result[2:].any()


@pytest.mark.parametrize(
    ("heads", "width", "value_width"), [(2, 16, 16), (3, 24, 8), (1, 5, 37), (40, 32, 32)]
)
def test_writing_is_that_of_the_twin(heads: int, width: int, value_width: int) -> None:
    torch.manual_seed(5)
    size, count = 4, 6
    key_pages = filled(count, size, heads, width, torch.float32)
    value_pages = filled(count, size, heads, value_width, torch.float32)
    # As models give them: heads before tokens, and not side by side.
    key = torch.randn(heads, 5, width, device=DEVICE).transpose(0, 1)
    value = torch.randn(heads, 5, value_width, device=DEVICE).transpose(0, 1)
    slots = torch.tensor([9, 8, 27, 4, 15], dtype=torch.int32, device=DEVICE)
    wanted = key_pages.clone(), value_pages.clone()
    reference.write(*wanted, key, value, slots.long(), slots[:0].long())
    pages.write(key_pages, value_pages, key, value, slots)
    for result, right in zip((key_pages, value_pages), wanted, strict=True):
        torch.testing.assert_close(result, right, rtol=0, atol=0, equal_nan=True)


def test_nothing_is_written_nowhere_nor_for_no_tokens() -> None:
    key_pages, value_pages = (filled(2, 4, 1, 16, torch.float32) for _ in range(2))
    before = key_pages.clone()
    token = torch.ones(2, 1, 16, device=DEVICE)
    slots = torch.tensor([layout.NOWHERE, 5], dtype=torch.int32, device=DEVICE)
    pages.write(key_pages, value_pages, token, token, slots)
    pages.write(key_pages, value_pages, token[:0], token[:0], slots[:0])
    assert (key_pages.flatten(0, 1)[5] == 1).all()
    before.flatten(0, 1)[5] = 1
    torch.testing.assert_close(key_pages, before, rtol=0, atol=0, equal_nan=True)


class Layer(torch.nn.Module):
    layer_idx = 0


def test_the_seam_gives_the_same_by_either_reader() -> None:
    torch.manual_seed(6)
    results = []
    query, key = torch.randn(1, 2, 6, 8, device=DEVICE), torch.randn(1, 1, 6, 8, device=DEVICE)
    rows = [Span(0, 5, 5, [3, 1]), Span(5, 1, 1, [2])]
    for reader in (paged_attention.Reader.of(rows, 4, DEVICE), None):
        batch = Batch(Pages(3, 4), rows, DEVICE, reader)
        with attending(batch):
            results.append(attend(Layer(), query, key, key, None)[0])
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
