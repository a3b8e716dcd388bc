"""Our Triton kernels: run against their twins, and compiled for GPUs.

Triton decides when it is imported whether kernels are interpreted, so the tests that run them lie
in `tests/interpreted` and get a process of their own, in which the variable is set; where there is
a GPU it is not, and the same tests run what was compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import layout
from kernels.attention import own_kernels
from kernels.reference import Span

ROOT = Path(__file__).parent.parent
SHARED = 99 << 10  # bytes of shared memory that a program of the smallest of today's GPUs may have
CPU = torch.device("cpu")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", ["attention", "within", "sampling", "decoding"])
def test_kernels_do_what_their_twins_do(file: str) -> None:
    pytest.importorskip("triton")
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", f"tests/interpreted/{file}.py"],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **interpreted},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


POINTERS = {
    "query": "value", "key": "value", "value": "value", "key_pages": "value",
    "value_pages": "value", "sinks": "value", "out": "value", "logits": "value",
    "rows": "i32", "parts": "fp32", "part_weights": "fp32", "temperature": "fp32", "top_k": "fp32",
    "top_p": "fp32", "floors": "fp32", "spans": "i32", "table": "i32", "blocks": "i32",
    "at": "i32", "keys": "i32", "chosen": "i64",
}  # fmt: skip
FLOATS = ("scaling", "softcap")
UNKNOWN = ("table_row", "window", "pieces", "vocabulary")  # numbers that may be odd


def shared_memory(kernel: object, value: str, architecture: int, **constants: object) -> int:
    """Compile for a GPU that need not be there; bytes of shared memory a program takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    types = {name: f"*{kind}".replace("value", value) for name, kind in POINTERS.items()}
    types |= dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(constants, "constexpr")
    even = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): given for name, given in constants.items()},
        {
            (place,): even
            for place, name in enumerate(names)
            if name not in (*constants, *FLOATS, *UNKNOWN)
        },
    )
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
    assert made.asm["cubin"]
    return int(made.metadata.shared)


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing compiled earlier counts."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("architecture", "value", "width", "group", "more"),
    [(80, "bf16", 128, 4, True), (90, "bf16", 64, 8, False), (90, "fp32", 192, 1, True)],
)
def test_attention_compiles_and_fits_a_gpu(
    own_cache: None, single: bool, architecture: int, value: str, width: int, group: int, more: bool
) -> None:
    from kernels import paged_attention

    padded = 1 << (width - 1).bit_length()
    queries = max(16 // group, 1) if single else paged_attention.queries_of(group)
    keys = paged_attention.keys_of(padded, 2 if "b" in value else 4)
    taken = shared_memory(
        paged_attention._attend, value, architecture, HEADS=8 * group, KEY_HEADS=8, GROUP=group,
        PADDED=group, QUERIES=queries, SIZE=16, KEYS=keys,
        PIECE=paged_attention.PIECE, WIDTH=width, PADDED_WIDTH=padded, VALUE=128,
        PADDED_VALUE=128, SINGLE=single, WINDOW=more, SOFTCAP=more, SINKS=more,
    )  # fmt: skip
    assert 0 < taken <= SHARED


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "value", "width", "group", "causal"),
    [(80, "bf16", 64, 1, False), (90, "fp32", 32, 1, False), (90, "bf16", 128, 4, True)],
)
def test_attention_inside_rows_compiles_and_fits_a_gpu(
    own_cache: None, architecture: int, value: str, width: int, group: int, causal: bool
) -> None:
    from kernels import paged_attention, varlen

    taken = shared_memory(
        varlen._attend, value, architecture, KEY_HEADS=4, GROUP=group, PADDED=group,
        QUERIES=paged_attention.queries_of(group), WIDTH=width, PADDED_WIDTH=width,
        KEYS=paged_attention.keys_of(width, 2 if "b" in value else 4), VALUE=width,
        PADDED_VALUE=width, CAUSAL=causal, WINDOW=causal, SOFTCAP=causal, SINKS=causal,
    )  # fmt: skip
    assert 0 < taken <= SHARED


@pytest.mark.timeout(300)
def test_the_other_kernels_compile(own_cache: None) -> None:
    from kernels import paged_attention, pages, sampling

    for more in (True, False):
        shared_memory(
            paged_attention._combine, "bf16", 90, HEADS=32, PIECE=256, TOGETHER=16, VALUE=128,
            PADDED_VALUE=128, WINDOW=more, SINKS=more,
        )  # fmt: skip
    numbers = {"KEY": 1024, "KEY_WIDTH": 128, "VALUE": 1024, "VALUE_WIDTH": 128}
    shared_memory(pages._write, "bf16", 90, BLOCK=pages.BLOCK, **numbers)
    taken = shared_memory(sampling._draw, "bf16", 90, COLDEST=1e-30, BLOCK=1024)
    assert 0 < taken <= SHARED


def test_rows_are_laid_out_for_kernels() -> None:
    spans = [Span(0, 1, 5, [7, 3]), Span(1, 6, 9, [2, 4, 9, 8]), Span(7, 1, 1, [6])]
    single, chunks = layout.split([*spans, Span(8, 0, 4, [5])])
    assert layout.slots(spans[:2], 4) == [12, 11, 16, 17, 18, 19, 36]
    rows = layout.rows(single, 4, 1, CPU)
    assert rows.single
    assert rows.spans.tolist() == [[0, 1, 5], [7, 1, 1]]
    assert rows.table.tolist() == [[7, 3], [6, 0]]
    assert rows.blocks.tolist() == [[0, 0], [1, 0]]
    blocks = layout.rows(chunks, 4, 4, CPU)
    assert not blocks.single
    assert blocks.table.tolist() == [[2, 4, 9]]  # a page without keys is left out
    assert blocks.blocks.tolist() == [[0, 0], [0, 4]]


def test_missing_rows_have_no_keys_and_are_kept_nowhere() -> None:
    padded = layout.padded([Span(0, 1, 2, [1])], 3)
    assert layout.slots(padded, 4) == [5, layout.NOWHERE, layout.NOWHERE]
    assert layout.rows(padded, 4, 1, CPU).spans.tolist() == [[0, 1, 2], [1, 1, 0], [2, 1, 0]]


def test_a_bucket_is_the_smallest_that_holds() -> None:
    assert [layout.bucket(count, (1, 2, 8)) for count in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, None]


def test_hosts_have_no_kernels_of_ours() -> None:
    assert not own_kernels(CPU)
    loaded = "import sys, pipelines.text, pipelines.packed; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="There is a GPU here.")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "There is no GPU here, so there is nothing to measure.\n"
