"""Attention inside packed rows by our kernel, against its twin; see tests/test_kernels.py."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import paged_attention, varlen
from kernels.reference import Shape, Stretch, attend_within

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GEOMETRIES = [(2, 2, 16, 16), (4, 2, 32, 16), (3, 1, 20, 33)]  # heads, key heads, width, of values


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so short that small rows have several."""
    monkeypatch.setattr(paged_attention, "CHUNK", 16)


def stretches(lengths: list[int], begun: int = 0) -> list[Stretch]:
    """Rows with a token that is nobody's between them; the last `begun` look back on the first."""
    rows, start = [], 0
    for place, length in enumerate(lengths):
        shared = place >= max(len(lengths) - begun, 1)
        rows.append(Stretch(start, length, (0, lengths[0]) if shared else None))
        start += length + 1
    return rows


def packed(
    rows: list[Stretch], geometry: tuple[int, int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values; those of nobody's tokens would spoil every result."""
    heads, key_heads, width, value_width = geometry
    tokens = rows[-1].start + rows[-1].count + 1
    shapes = (heads, width), (key_heads, width), (key_heads, value_width)
    made = [torch.randn(tokens, *shape) for shape in shapes]
    own = {place for row in rows for place in range(row.start, row.start + row.count)}
    for part in made:
        part[[place for place in range(tokens) if place not in own]] = float("nan")
    query, key, value = (part.to(DEVICE) for part in made)
    return query, key, value


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_random_rows_equal_the_twin(causal: bool, geometry: tuple[int, int, int, int]) -> None:
    torch.manual_seed(0)
    chance = random.Random(sum(geometry))
    rows = stretches([chance.randrange(1, 60) for _ in range(3)] + [1, 70], 2)
    query, key, value = packed(rows, geometry)
    found = varlen.Rows(rows, DEVICE, causal).attend(query, key, value, Shape(0.3))
    wanted = attend_within(query, key, value, rows, Shape(0.3), causal)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "geometry"), [(1, GEOMETRIES[1]), (70, GEOMETRIES[2])])
def test_causal_rows_have_windows_caps_and_sinks(
    window: int, geometry: tuple[int, int, int, int]
) -> None:
    torch.manual_seed(0)
    rows = stretches([80, 1, 33, 5], 2)
    query, key, value = packed(rows, geometry)
    shape = Shape(0.3, window, 2.0, torch.randn(geometry[0], device=DEVICE))
    found = varlen.Rows(rows, DEVICE, True).attend(query, key, value, shape)
    wanted = attend_within(query, key, value, rows, shape, True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_is_the_same_to_the_bit_alone(causal: bool) -> None:
    torch.manual_seed(1)
    rows = stretches([70, 1, 40])
    query, key, value = packed(rows, GEOMETRIES[1])
    together = varlen.Rows(rows, DEVICE, causal).attend(query, key, value, Shape(0.3))
    for row in rows:
        own = slice(row.start, row.start + row.count)
        alone = varlen.Rows([Stretch(0, row.count)], DEVICE, causal)
        assert torch.equal(
            alone.attend(query[own], key[own], value[own], Shape(0.3)), together[own]
        )


def test_half_precision_is_near_the_twin_in_float32_and_queries_may_lie_apart() -> None:
    torch.manual_seed(0)
    # The interpreter multiplies bfloat16 as if it were whole numbers.
    half = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
    joined = torch.randn(45, 6, 32, device=DEVICE).to(half)
    query, key, value = joined[:, :2], joined[:, 2:4], joined[:, 4:]
    rows = [Stretch(0, 40), Stretch(40, 5)]
    found = varlen.Rows(rows, DEVICE, False).attend(query, key, value, Shape(0.2))
    exact = (query.float(), key.float(), value.float())
    wanted = attend_within(*exact, rows, Shape(0.2), False)
    assert found.dtype == half
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)
