"""Linear layers laid out anew give what they gave, by our own C++ and by oneDNN, and hold no second
copy of their weights; by our own a row has the same bits whoever rides along.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import native
from kernels.linear import Linear, laid_out, linear
from pipelines.linears import prepack, undo

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [(16, 8), (1, 1), (17, 5), (192, 576), (50, 24), (31, 129), (40, 1536)]


class Small(nn.Module):
    """An embedding that shares its weight with the last layer, as small language models do."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 24)
        self.middle = nn.Linear(24, 24, bias=bias)
        self.last = nn.Linear(24, 50, bias=False)
        self.last.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.middle(self.words(tokens))))
        return found


@pytest.fixture(params=["by our own", "by oneDNN"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As hosts with a compiler do it, and as those without."""
    if request.param == "by oneDNN":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip("There is no C++ compiler on this machine.")
    return str(request.param)


def weights(columns: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Some that a format holds exactly, very small ones among them."""
    torch.manual_seed(columns * depth)
    found = torch.randn(columns, depth) * 10 ** torch.randint(-7, 1, (columns, depth))
    return found.to(dtype).float()


def layer(columns: int, depth: int, dtype: torch.dtype, bias: Tensor | None = None) -> Linear:
    forward = linear(weights(columns, depth, dtype), bias)
    assert forward is not None
    return forward


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("columns", "depth"), WIDTHS)
@pytest.mark.usefixtures("library")
def test_our_own_layer_equals_that_of_torch(
    columns: int, depth: int, biased: bool, dtype: torch.dtype
) -> None:
    weight = weights(columns, depth, dtype)
    bias = torch.randn(columns) if biased else None
    forward = layer(columns, depth, dtype, bias)
    for count in (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 31, 70):
        input = torch.randn(1, count, depth)
        exact = F.linear(input.double(), weight.double(), None if bias is None else bias.double())
        found = forward(input)
        assert found.shape == (1, count, columns)
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("columns", "depth"), WIDTHS)
@pytest.mark.usefixtures("library")
def test_a_row_is_the_same_bits_alone_in_company_and_with_any_threads(
    columns: int, depth: int, dtype: torch.dtype
) -> None:
    forward = layer(columns, depth, dtype, torch.randn(columns))
    rows = torch.randn(70, depth)
    together = forward(rows)
    for count in range(1, 71):
        for first in (0, 70 - count):
            part = slice(first, first + count)
            assert torch.equal(forward(rows[part]), together[part])
    torch.set_num_threads(3)
    try:
        assert torch.equal(forward(rows), together)
        assert torch.equal(forward(rows[:1]), together[:1])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("columns", "depth"), WIDTHS)
def test_a_rounded_layer_rounds_rows_and_weights_where_the_processor_multiplies_so(
    library: ctypes.CDLL, columns: int, depth: int, biased: bool
) -> None:
    torch.manual_seed(columns + depth)
    weight, bias = torch.randn(columns, depth), torch.randn(columns) if biased else None
    forward = linear(weight, bias, rounded=True)
    assert forward is not None
    rows = torch.randn(70, depth)
    together = forward(rows)
    able = bool(library.carpool_multiplies_bfloat16()) and depth % 2 == 0
    parts = [part.bfloat16().double() if able else part.double() for part in (rows, weight)]
    exact = F.linear(*parts, None if bias is None else bias.double())
    torch.testing.assert_close(together, exact.float(), rtol=1e-4, atol=1e-4)
    for count in (1, 2, 5, 11, 12, 13, 24, 37):
        assert torch.equal(forward(rows[:count]), together[:count])
        assert torch.equal(forward(rows[-count:]), together[-count:])


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_weight_takes_two_bytes_if_nothing_is_lost_by_it(
    library: ctypes.CDLL, dtype: torch.dtype
) -> None:
    weight = weights(32, 64, dtype)
    format, panels = laid_out(weight, library)
    able = dtype != torch.float16 or library.carpool_reads_float16()
    assert panels.dtype == (dtype if able else torch.float32)
    assert format == FORMATS.index(panels.dtype)
    assert torch.equal(panels.float().flatten().sort()[0], weight.flatten().sort()[0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.usefixtures("library")
def test_layers_beside_each_other_give_what_each_gives_and_what_is_added(threads: int) -> None:
    torch.manual_seed(0)
    layers = [
        layer(columns, 24, dtype, torch.randn(columns) if biased else None)
        for columns, dtype, biased in zip((17, 3, 48), FORMATS, (True, False, True), strict=True)
    ]
    rows, more = torch.randn(9, 24), torch.randn(9, 68)
    each = torch.cat([own(rows) for own in layers], -1)
    torch.set_num_threads(threads)
    try:
        joined = layers[0].beside(*layers[1:])
        assert torch.equal(joined(rows), each)
        assert torch.equal(joined(rows, more), each + more)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rounded", list(itertools.product((False, True), repeat=3)))
@pytest.mark.usefixtures("library")
def test_rounded_layers_and_others_stand_beside_each_other_in_any_order(
    rounded: tuple[bool, ...],
) -> None:
    torch.manual_seed(0)
    layers = [
        linear(torch.randn(columns, 24), None, own)
        for columns, own in zip((17, 3, 48), rounded, strict=True)
    ]
    known = [own for own in layers if own is not None]
    rows = torch.randn(9, 24)
    joined = known[0].beside(*known[1:])
    assert torch.equal(joined(rows), torch.cat([own(rows) for own in known], -1))


@pytest.mark.usefixtures("library")
def test_layers_that_do_not_fit_together_are_refused() -> None:
    one, deeper = layer(4, 8, torch.float16), layer(4, 9, torch.float16)
    with pytest.raises(ValueError, match="different depths"):
        one.beside(deeper)
    with pytest.raises(ValueError, match=r"\(2, 4\) cannot be added to \(3, 4\)"):
        one(torch.ones(3, 8), torch.ones(2, 4))


@pytest.mark.usefixtures("library")
def test_a_neighbour_that_is_no_number_changes_nobody() -> None:
    forward = layer(20, 33, torch.float16)
    rows = torch.randn(7, 33)
    wanted = forward(rows)
    rows[3] = float("nan")
    found = forward(rows)
    assert found[3].isnan().all()
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(found[kept], wanted[kept])


@pytest.mark.usefixtures("library")
def test_it_takes_any_shape_and_any_layout() -> None:
    weight, forward = weights(20, 33, torch.float16), layer(20, 33, torch.float16)
    for input in (torch.randn(33), torch.randn(2, 3, 33), torch.randn(33, 5).T, torch.randn(0, 33)):
        torch.testing.assert_close(forward(input), F.linear(input, weight))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("input", [torch.ones(2, 32), torch.ones(2, 33, dtype=torch.bfloat16)])
def test_what_it_cannot_take_is_refused(input: Tensor) -> None:
    forward = layer(20, 33, torch.float16)
    with pytest.raises(ValueError, match="Rows of 33 float32 numbers on a host are wanted"):
        forward(input)


def test_there_is_none_for_other_formats_nor_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert linear(torch.ones(4, 4, dtype=torch.bfloat16), None) is None
    monkeypatch.setattr(native, "library", lambda: None)
    assert linear(torch.ones(4, 4), None) is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 7, 32, 300])
@torch.inference_mode()
def test_results_stay_the_same(way: str, bias: bool, count: int) -> None:
    torch.manual_seed(0)
    model = Small(bias).eval()
    tokens = torch.randint(50, (1, count))
    wanted = model(tokens)
    assert set(prepack(model)) == {model.middle, model.last}
    torch.testing.assert_close(model(tokens), wanted, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_a_row_does_not_depend_on_how_many_are_with_it_beyond_rounding(way: str) -> None:
    model = Small(True).eval()
    prepack(model)
    tokens = torch.randint(50, (1, 40))
    whole = model(tokens)[0]
    for place in range(40):
        torch.testing.assert_close(model(tokens[:, place : place + 1])[0, 0], whole[place])


@torch.inference_mode()
def test_a_model_in_bfloat16_is_laid_out_where_the_processor_computes_in_it() -> None:
    model = Small(True).eval().bfloat16()
    tokens = torch.randint(50, (1, 9))
    wanted = model(tokens)
    able = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert set(prepack(model)) == ({model.middle, model.last} if able else set())
    torch.testing.assert_close(model(tokens), wanted, atol=1e-2, rtol=1e-2)


def test_weights_are_not_kept_twice_and_the_shared_one_stays(way: str) -> None:
    model = Small(False).eval()
    shared, own = model.words.weight, weakref.ref(model.middle.weight)
    weights = prepack(model)
    assert own() is weights[model.middle]
    del weights
    assert own() is None
    assert model.middle.weight.numel() == model.last.weight.numel() == 0
    assert model.words.weight is shared
    assert shared.shape == (50, 24)


@torch.inference_mode()
def test_undone_it_is_as_it_was(way: str) -> None:
    model = Small(True).eval()
    weight, tokens = model.middle.weight, torch.randint(50, (1, 9))
    wanted = model(tokens)
    undo(prepack(model))
    assert model.middle.weight is weight
    assert torch.equal(model(tokens), wanted)


def test_other_layers_and_formats_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleList([Special(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Conv1d(4, 4, 1)])
    assert prepack(model) == {}
    assert model[0].weight.numel() == 16


def test_callers_at_once_each_get_their_own() -> None:
    torch.manual_seed(0)
    layers = [linear(torch.randn(96, 64), None) for _ in range(4)]
    inputs = [torch.randn(9, 64) for _ in layers]
    if None in layers:
        pytest.skip("There is no C++ compiler on this machine.")
    wanted = [layer(input) for layer, input in zip(layers, inputs, strict=True) if layer]
    torch.set_num_threads(2)
    right: list[bool] = []

    def ask(place: int) -> None:
        layer = layers[place]
        if layer is not None:
            found = [layer(inputs[place]) for _ in range(300)]
            right.append(all(torch.equal(each, wanted[place]) for each in found))

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert right == [True] * 4
