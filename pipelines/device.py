"""Which device and number format to use, how much memory rows may take, and what running out looks
like.

The one place where torch's many out-of-memory errors become the house's own. It does not know
models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pipelines import host
from queueing.work import OutOfMemory

T = TypeVar("T")

_WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
_HOST_SHARE = 1 / 8  # of all memory of a host; kernels/memory.py really takes it
_HOST_MOST = 2 << 30
_DEVICE_SHARE = 0.8  # of what a model leaves free on its own device


def settle(device: str, dtype: str, threads: int | None) -> tuple[torch.device, torch.dtype]:
    """Both by their names; on a host torch gets so many threads, else one a core."""
    chosen = _device(device)
    format = _dtype(chosen, dtype)
    if chosen.type == "cpu":
        # Those of our own kernels wait for nobody whose core is taken (kernels/pool.h), so the page
        # beside them costs no more than the time it needs.
        torch.set_num_threads(threads or host.cores())
    return chosen, format


def _device(wanted: str) -> torch.device:
    """The device named, or the best there is."""
    if wanted != "auto":
        return torch.device(wanted)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(device: torch.device, wanted: str) -> torch.dtype:
    """The format named, or bfloat16 where hardware computes in it, float32 where it converts."""
    formats = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if wanted in formats:
        return formats[wanted]
    if wanted != "auto":
        raise ValueError(f"dtype is {wanted!r}; choose auto, {', '.join(formats)}.")
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float16
        )
    capable = torch.cpu.get_capabilities()
    quick = capable.get("avx512_bf16", False) or capable.get("amx_bf16", False)
    return torch.bfloat16 if quick else torch.float32


def step_seconds(device: torch.device) -> float:
    """What one call should take where people watch words appear: beside a prompt as long as the
    context they still see several a second.
    """
    return 0.05 if device.type == "cuda" else 0.15


def memory_for_rows(device: torch.device) -> int:
    """Bytes that rows may take when nobody says; asked once the model is there."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    return min(int(host.memory() * _HOST_SHARE), _HOST_MOST)


def short_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, or of Python, means that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def guarded(call: Callable[[], T]) -> T:
    """Run one device call; out of memory leaves as OutOfMemory, raised where no tensor is held.

    An exception keeps the frames it came through alive, and they their tensors: raising anew, after
    the old one is gone, lets the memory go before the call is tried again in halves.
    """
    try:
        return call()
    except (RuntimeError, MemoryError) as error:
        if not short_of_memory(error):
            raise
        message = str(error).partition("\n")[0]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemory(f"The device has no memory for this call: {message}")
