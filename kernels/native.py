"""The C++ of this room, compiled while a model loads (about three seconds), for hosts that have
a compiler, and what its functions ask of tensors.

Where there is none the log says so once, and torch's own operators do the work. It does not know
what the functions do.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

log = logging.getLogger("carpool.native")

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0
LANE = 8  # numbers that the C++ takes at once


@functools.cache
def library() -> ctypes.CDLL | None:
    """All functions of this room's C++, or None where they cannot be had; the same every time."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        log.warning("There is no C++ compiler, so models run slower on this host; install g++.")
        return None
    with tempfile.TemporaryDirectory(prefix="carpool-") as folder:
        target = str(Path(folder) / "native.so")
        try:
            _compile(compiler, target)
            return ctypes.CDLL(target)  # stays loaded when its file is gone
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            log.warning("%s failed, so models run slower on this host: %s", compiler, said.strip())
            return None


def library_for(weight: Tensor) -> ctypes.CDLL | None:
    """The library, where it computes with such a weight: float32, on a host."""
    suits = weight.device.type == "cpu" and weight.dtype == torch.float32
    return library() if suits else None


def rows(input: Tensor, width: int) -> Tensor:
    """Numbers [..., width] as the functions read them; raises ValueError where they cannot."""
    if input.dtype != torch.float32 or input.device.type != "cpu" or input.shape[-1] != width:
        raise ValueError(
            f"Rows of {width} float32 numbers on a host are wanted, not {tuple(input.shape)} of "
            f"{input.dtype} on {input.device}."
        )
    return input.contiguous()


def _compile(compiler: str, target: str) -> None:
    """All sources as one, since what they all include takes as long as they do."""
    sources = [part for source in SOURCES for part in ("-include", str(source))]
    command = [compiler, *FLAGS, *sources, "-x", "c++", os.devnull, "-o", target]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
