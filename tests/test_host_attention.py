"""Attention of our own C++ against the truth, and what it promises beyond: the same bits whoever
rides along.
"""

from __future__ import annotations

import ctypes
import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import attention, grouped, host, layout, native, reference
from kernels.reference import Shape, Span
from tests.test_text_attention import MIXED, SIZE, spans

CPU = torch.device("cpu")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Whatever is compiled here is not kept."""
    native.library.cache_clear()
    yield monkeypatch
    native.library.cache_clear()


def pages(count: int, heads: int, wide: int, value_wide: int) -> tuple[Tensor, Tensor]:
    key = torch.randn(count + 1, SIZE, heads, wide)
    return key, torch.randn(count + 1, SIZE, heads, value_wide)


def attend(
    library: ctypes.CDLL, query: Tensor, key: Tensor, value: Tensor, rows: list[Span], shape: Shape
) -> Tensor:
    laid = layout.rows(rows, SIZE, host.QUERIES, CPU)
    return host.attend(query, key, value, laid, shape, library)


@pytest.mark.parametrize("window", [None, 1, 6, 16, 40])
@pytest.mark.parametrize("extra", ["plain", "both"])
@pytest.mark.parametrize(
    ("heads", "key_heads", "wide", "value_wide"),
    [(6, 2, 8, 8), (3, 3, 8, 16), (9, 3, 64, 64), (8, 1, 24, 40), (4, 4, 192, 128)],
)
def test_host_attention_equals_reference(
    library: ctypes.CDLL,
    window: int | None,
    extra: str,
    heads: int,
    key_heads: int,
    wide: int,
    value_wide: int,
) -> None:
    torch.manual_seed(0)
    rows, count = spans([*MIXED, (29, 29), (17, 100)])
    key, value = pages(count, key_heads, wide, value_wide)
    key[0], value[0] = float("nan"), float("nan")  # nobody's page is not read
    query = torch.randn(sum(span.count for span in rows), heads, wide)
    softcap = 2.0 if extra == "both" else None
    sinks = torch.randn(heads) if extra == "both" else None
    shape = Shape(0.3, window, softcap, sinks)
    found = attend(library, query, key, value, rows, shape)
    wanted = reference.attend(query, key, value, rows, shape)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_scores_far_apart_stay_numbers(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    rows, count = spans([(1, 50), (20, 33)])
    key, value = pages(count, 2, 16, 16)
    query = torch.randn(21, 4, 16) * 1000
    shape = Shape(1.0)
    found = attend(library, query, key, value, rows, shape)
    torch.testing.assert_close(found, reference.attend(query, key, value, rows, shape))


def test_a_result_is_the_same_bits_alone_in_company_and_with_any_threads(
    library: ctypes.CDLL,
) -> None:
    torch.manual_seed(0)
    rows, count = spans([*MIXED, (40, 77), (1, 300)])
    key, value = pages(count, 3, 64, 64)
    query = torch.randn(sum(span.count for span in rows), 9, 64)
    shape = Shape(0.125)
    together = attend(library, query, key, value, rows, shape)
    for span in rows:
        own = slice(span.start, span.start + span.count)
        mine = Span(0, span.count, span.length, span.pages)
        assert torch.equal(attend(library, query[own], key, value, [mine], shape), together[own])
    torch.set_num_threads(3)
    try:
        assert torch.equal(attend(library, query, key, value, rows, shape), together)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("cut", [1, 3, 8, 13, 40])
def test_a_prompt_gives_the_same_bits_however_it_is_cut(library: ctypes.CDLL, cut: int) -> None:
    torch.manual_seed(0)
    length = 61
    rows, count = spans([(length, length)])
    table = rows[0].pages
    key, value = pages(count, 2, 16, 16)
    query = torch.randn(length, 4, 16)
    shape = Shape(0.25, window=37)
    whole = attend(library, query, key, value, rows, shape)
    for first in range(0, length, cut):
        last = min(first + cut, length)
        part = [Span(0, last - first, last, table)]
        found = attend(library, query[first:last], key, value, part, shape)
        assert torch.equal(found, whole[first:last])


def test_layers_that_it_does_not_serve_are_read_as_without_it(library: ctypes.CDLL) -> None:
    torch.manual_seed(0)
    rows, count = spans(MIXED)
    key, value = pages(count, 2, 12, 12)
    key[0], value[0] = 0, 0
    query = torch.randn(sum(span.count for span in rows), 4, 12)
    reader = host.Reader(rows, SIZE, CPU, library)
    fallback = grouped.Reader(rows, SIZE, CPU)
    shape = Shape(0.3)
    assert torch.equal(
        reader.attend(query, key, value, shape), fallback.attend(query, key, value, shape)
    )


@pytest.mark.parametrize("how", ["apart", "heads first", "every second"])
def test_queries_keys_and_values_may_lie_in_other_ways(library: ctypes.CDLL, how: str) -> None:
    torch.manual_seed(0)
    rows, count = spans(MIXED)
    key_pages, value_pages = pages(count, 2, 16, 8)
    tokens = sum(span.count for span in rows)
    shape = Shape(0.3)

    def lying(heads: int, wide: int) -> Tensor:
        if how == "heads first":
            return torch.randn(heads, tokens, wide).transpose(0, 1)
        if how == "every second":
            return torch.randn(tokens, heads, 2 * wide)[:, :, ::2]
        return torch.randn(tokens, heads + 3, wide)[:, :heads]

    query, key, value = lying(4, 16), lying(2, 16), lying(2, 8)
    wanted_keys, wanted_values = key_pages.clone(), value_pages.clone()
    truth = grouped.Reader(rows, SIZE, CPU)
    truth.put(wanted_keys, wanted_values, key, value)
    reader = host.Reader(rows, SIZE, CPU, library)
    reader.put(key_pages, value_pages, key, value)
    for span in rows:
        own, last = list(span.pages), span.length % SIZE or SIZE
        for found, wanted in ((key_pages, wanted_keys), (value_pages, wanted_values)):
            assert torch.equal(found[own[:-1]], wanted[own[:-1]])
            assert torch.equal(found[own[-1], :last], wanted[own[-1], :last])
    found = reader.attend(query, key_pages, value_pages, shape)
    plain = reader.attend(query.contiguous(), key_pages, value_pages, shape)
    assert torch.equal(found, plain)


def test_a_token_whose_slot_is_nowhere_is_not_kept(library: ctypes.CDLL) -> None:
    own = torch.zeros(2, SIZE, 1, 8)
    host.put(own, torch.ones(3, 1, 8), torch.tensor([SIZE, -1, SIZE + 2]), library)
    assert own.sum((2, 3)).nonzero().tolist() == [[1, 0], [1, 2]]


def test_pages_that_do_not_fit_are_refused(library: ctypes.CDLL) -> None:
    rows, count = spans([(4, 4)])
    key, value = pages(count, 2, 8, 8)
    query = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="contiguous"):
        attend(library, query, key.transpose(1, 2), value, rows, Shape(1.0))
    slots = torch.arange(SIZE, SIZE + 4)
    for tokens in (torch.randn(4, 1, 8), torch.randn(4, 2, 16), torch.randn(3, 2, 8)):
        with pytest.raises(ValueError, match="must fit the pages"):
            host.put(key, tokens, slots, library)


def test_without_a_compiler_torch_reads_the_pages_and_the_log_says_so(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.setenv("PATH", "")
    fresh.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        batch = attention.Batch(attention.Pages(1, SIZE), [Span(0, 1, 1, [1])], CPU)
        attention.Batch(attention.Pages(1, SIZE), [Span(0, 1, 1, [1])], CPU)
    assert type(batch.reader) is grouped.Reader
    assert [record.message for record in caplog.records] == [
        "There is no C++ compiler, so models run slower on this host; install g++."
    ]


def test_a_compiler_that_fails_is_named_with_what_it_said(
    fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    fresh.setenv("CXX", str(broken))
    with caplog.at_level(logging.WARNING):
        assert native.library() is None
    assert [record.message for record in caplog.records] == [
        f"{broken} failed, so models run slower on this host: no such flag"
    ]


def test_what_was_compiled_leaves_no_file(
    fresh: pytest.MonkeyPatch, library: ctypes.CDLL, tmp_path: Path
) -> None:
    fresh.setattr("tempfile.tempdir", str(tmp_path))
    assert native.library() is not None
    assert not list(tmp_path.iterdir())
