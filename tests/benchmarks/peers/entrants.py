"""Who is compared, and the few settings of each of which the best counts.

A first setting is the one expected to win; others are given up as soon as they are clearly slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from queueing.process import CALM
from tests.benchmarks.peers.homes import openvino, plain, quantised, root, unquantised

Setting: TypeAlias = Mapping[str, Any]
CORES = os.cpu_count() or 1
FEWER = max(CORES - 1, 1)
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """One row of the table."""

    key: str  # for --only
    name: str
    home: str  # its environment, '' for ours
    script: str
    settings: tuple[Setting, ...]
    model: Callable[[Path], Path] = plain
    note: str = ""
    once: bool = False  # too slow to be asked again and again
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """After the interpreter; ours is a module of this repository."""
        if self.key == "ours":
            return ("-m", f"tests.benchmarks.peers.{self.script}")
        return (str(HERE / f"{self.script}.py"),)


def entrants(threads: int | None, rows: int | None) -> list[Entrant]:
    """All of them; `threads` and `rows` change ours from what `make run` takes."""
    given = {name: value for name, value in (("threads", threads), ("rows", rows)) if value}
    return [
        ours("Carpool, as `make run`", given),
        *transformers(),
        *openvinos(),
        *llamas(),
        vllm(),
    ]


def ours(name: str, *settings: Setting) -> Entrant:
    """Threads wait as those of a worker process do."""
    return Entrant("ours", name, "", "with_carpool", settings, environment=CALM)


def transformers() -> list[Entrant]:
    def setting(dtype: str = "float32", threads: int = CORES, **more: int) -> Setting:
        return {"dtype": dtype, "threads": threads, **more}

    script = "with_transformers"
    static = (
        setting(rows=32),
        setting(rows=16),
        setting(rows=8),
        setting("bfloat16", rows=32),
        setting(threads=FEWER, rows=32),
    )
    continuous = (
        setting(batch_tokens=512),
        setting(batch_tokens=2048),
        setting("bfloat16", batch_tokens=512),
        setting(threads=FEWER, batch_tokens=512),
    )
    alone = (setting(rows=1),)
    return [
        Entrant("single", "transformers, one by one", "", script, alone, once=True),
        Entrant("static", "transformers, static batches", "", script, static),
        Entrant("continuous", "transformers, continuous batching", "", script, continuous),
    ]


def openvinos() -> list[Entrant]:
    def setting(threads: int = CORES, tokens: int = 256, **more: Any) -> Setting:
        return {"INFERENCE_NUM_THREADS": threads, "batched_tokens": tokens, **more}

    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    shared: dict[str, Any] = {"home": "openvino", "script": "with_openvino", "model": openvino}
    own = (setting(), setting(tokens=2048), setting(FEWER))
    full = (setting(**exact), setting(tokens=2048, **exact), setting(FEWER, **exact))
    return [
        Entrant(
            *("openvino", "OpenVINO GenAI, its own precision"),
            settings=own,
            note="keys and values in 8 bits",
            **shared,
        ),
        Entrant("openvino", "OpenVINO GenAI, fp32", settings=full, **shared),
    ]


def llamas() -> list[Entrant]:
    settings = ({"threads": CORES}, {"threads": FEWER})
    shared: dict[str, Any] = {"home": "llama", "script": "with_llama", "settings": settings}
    return [
        Entrant("llama", "llama.cpp, fp32", model=unquantised("F32"), **shared),
        Entrant("llama", "llama.cpp, fp16 weights", model=unquantised("F16"), **shared),
        Entrant(
            *("llama", "llama.cpp, as packaged"),
            model=quantised,
            note="weights in 4 bits: not the same model",
            **shared,
        ),
    ]


def vllm() -> Entrant:
    cores, fewer = f"0-{CORES - 1}", f"0-{FEWER - 1}"
    return Entrant(
        *("vllm", "vLLM on the CPU", "vllm", "with_vllm"),
        settings=(
            {"cores": cores, "dtype": "float32"},
            {"cores": cores, "dtype": "bfloat16"},
            {"cores": fewer, "dtype": "float32"},
        ),
        environment={
            "VLLM_CACHE_ROOT": str(root() / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_DO_NOT_TRACK": "1",
        },
    )
