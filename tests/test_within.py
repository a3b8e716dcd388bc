"""Attention inside packed rows: as the truth has it, in any company, and as a model alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, BertConfig, BertModel

from kernels import native
from kernels.attention import NAME, attend, attending
from kernels.reference import Shape, attend_within
from kernels.within import Stretch, Within
from pipelines.proof import attend_by

CPU = torch.device("cpu")
SAME = {"by our own": 0.0, "by torch": 1e-6}  # how far apart numbers are that should be the same
GEOMETRIES = [(4, 4, 32, 32), (6, 2, 12, 24), (3, 1, 8, 20)]  # heads, key heads, width, of values


@pytest.fixture(params=["by our own", "by torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As hosts with a compiler do it, and as those without."""
    if request.param == "by torch":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("There is no C++ compiler on this machine.")
    return str(request.param)


def stretches(lengths: list[int], begun: int = 0) -> list[Stretch]:
    """Rows one after the other; the last `begun` look back on the first, if any do."""
    rows, start = [], 0
    for place, length in enumerate(lengths):
        shared = place >= max(len(lengths) - begun, 1)
        rows.append(Stretch(start, length, (0, lengths[0]) if shared else None))
        start += length
    return rows


def ragged(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [1, *(int(min(chance.lognormvariate(2.5, 1.2) + 1, 200)) for _ in range(7)), 400, 1]


def packed(rows: list[Stretch], geometry: tuple[int, int, int, int]) -> list[Tensor]:
    """Queries, keys and values."""
    heads, key_heads, width, value_width = geometry
    tokens = sum(row.count for row in rows)
    shapes = (heads, width), (key_heads, width), (key_heads, value_width)
    return [torch.randn(tokens, *shape) for shape in shapes]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("begun", [0, 4])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.usefixtures("way")
def test_random_rows_equal_the_truth(
    seed: int, causal: bool, begun: int, geometry: tuple[int, int, int, int]
) -> None:
    torch.manual_seed(seed)
    rows = stretches(ragged(seed), begun)
    query, key, value = packed(rows, geometry)
    shape = Shape(0.3)
    within = Within(rows, CPU, causal)
    found = within.attend(0, query, key, value, shape)
    wanted = attend_within(query, key, value, rows, shape, causal)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert within.calls == 1
    assert within.shapes == {0: shape}


@pytest.mark.parametrize("window", [None, 1, 7, 50])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.usefixtures("way")
def test_causal_rows_have_windows_caps_and_sinks(
    window: int | None, more: bool, geometry: tuple[int, int, int, int]
) -> None:
    torch.manual_seed(0)
    rows = stretches([60, 1, 33, 5], 2)
    query, key, value = packed(rows, geometry)
    sinks = torch.randn(geometry[0]) if more else None
    shape = Shape(0.3, window, 2.0 if more else None, sinks)
    found = Within(rows, CPU, True).attend(0, query, key, value, shape)
    wanted = attend_within(query, key, value, rows, shape, True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_truth_is_that_of_torch(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(9, 4, 8) for _ in range(3))
    found = attend_within(query, key, value, [Stretch(0, 9)], Shape(0.3), causal)
    rows = [part.transpose(0, 1)[None] for part in (query, key, value)]
    wanted = F.scaled_dot_product_attention(rows[0], rows[1], rows[2], is_causal=causal, scale=0.3)
    torch.testing.assert_close(found, wanted[0].transpose(0, 1))


@pytest.mark.parametrize("causal", [False, True])
def test_a_row_is_the_same_alone_in_company_and_with_any_threads(causal: bool, way: str) -> None:
    torch.manual_seed(0)
    rows = stretches(ragged(1))
    query, key, value = packed(rows, GEOMETRIES[0])
    shape = Shape(0.2)
    together = Within(rows, CPU, causal).attend(0, query, key, value, shape)
    for row in rows:
        own = slice(row.start, row.start + row.count)
        alone = Within([Stretch(0, row.count)], CPU, causal)
        found = alone.attend(0, query[own], key[own], value[own], shape)
        torch.testing.assert_close(found, together[own], rtol=0, atol=SAME[way])
    torch.set_num_threads(3)
    try:
        found = Within(rows, CPU, causal).attend(0, query, key, value, shape)
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(found, together, rtol=0, atol=SAME[way])


def test_a_shared_beginning_gives_what_each_row_gives_with_its_own(way: str) -> None:
    torch.manual_seed(0)
    rows = stretches([40, 3, 1, 17], 3)
    query, key, value = packed(rows, GEOMETRIES[1])
    found = Within(rows, CPU, True).attend(0, query, key, value, Shape(0.2))
    for row in rows[1:]:
        places = [*range(40), *range(row.start, row.start + row.count)]
        whole = Within([Stretch(0, len(places))], CPU, True)
        wanted = whole.attend(0, query[places], key[places], value[places], Shape(0.2))[40:]
        own = slice(row.start, row.start + row.count)
        torch.testing.assert_close(found[own], wanted, rtol=0, atol=SAME[way])


@pytest.mark.parametrize("shape", [Shape(1.0, window=3), Shape(1.0, softcap=2.0)])
def test_rows_that_look_ahead_have_no_windows_or_caps(shape: Shape) -> None:
    row = torch.zeros(4, 1, 8)
    with pytest.raises(NotImplementedError, match="looks ahead with a window"):
        Within([Stretch(0, 4)], CPU, False).attend(0, row, row, row, shape)


def test_rows_beyond_their_tokens_are_refused() -> None:
    row = torch.zeros(4, 1, 8)
    for rows in ([Stretch(0, 5)], [Stretch(0, 1, (2, 3))]):
        with pytest.raises(ValueError, match="within their tokens"):
            Within(rows, CPU, False).attend(0, row, row, row, Shape(1.0))


@pytest.mark.parametrize("causal", [False, True])
def test_scores_far_apart_stay_numbers_and_bad_ones_stay_in_their_row(causal: bool) -> None:
    torch.manual_seed(0)
    rows = stretches([9, 30, 4])
    query, key, value = packed(rows, GEOMETRIES[0])
    query[:9] *= 1000
    key[10] = float("nan")
    found = Within(rows, CPU, causal).attend(0, query, key, value, Shape(1.0))
    wanted = attend_within(query, key, value, rows, Shape(1.0), causal)
    assert found[20].isnan().any()
    for own in (slice(0, 9), slice(39, 43)):
        torch.testing.assert_close(found[own], wanted[own], rtol=1e-4, atol=1e-5)


class Layer(torch.nn.Module):
    pass


@pytest.mark.parametrize("causal", [False, True])
def test_a_layer_may_say_whether_it_looks_ahead_and_not_which_it_is(causal: bool) -> None:
    row = torch.randn(1, 2, 5, 8)
    within = Within([Stretch(0, 5)], CPU, causal)
    with attending(within):
        out, _ = attend(Layer(), row, row, row, None, is_causal=causal)
        with pytest.raises(NotImplementedError, match="looks ahead where"):
            attend(Layer(), row, row, row, None, is_causal=not causal)
    assert out.shape == (1, 5, 2, 8)
    assert within.calls == 1
    assert list(within.shapes) == [-1]


@torch.inference_mode()
def test_a_packed_encoder_gives_what_it_gives_row_by_row() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=90, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=64, attn_implementation="eager",
        initializer_range=0.3,
    )  # fmt: skip
    model: Any = BertModel(config).eval()
    rows = stretches([1, 50, 7, 64, 1, 13])
    tokens = torch.randint(0, 90, (1, sum(row.count for row in rows)))
    kinds = torch.randint(0, 2, tokens.shape)
    positions = torch.cat([torch.arange(row.count) for row in rows])[None]
    wanted = []
    for row in rows:
        own = slice(row.start, row.start + row.count)
        alone = model(input_ids=tokens[:, own], token_type_ids=kinds[:, own])
        wanted.append(alone.last_hidden_state[0])
    AttentionInterface.register(NAME, attend)
    attend_by(model, NAME)
    within = Within(rows, CPU, False)
    with attending(within):
        found = model(input_ids=tokens, position_ids=positions, token_type_ids=kinds)
    assert within.calls == 2
    assert sorted(within.shapes) == [0, 1]
    torch.testing.assert_close(found.last_hidden_state[0], torch.cat(wanted), rtol=0, atol=1e-5)
