"""The C++ of this room, compiled while a model loads (about two seconds), for hosts that have a
compiler.

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

log = logging.getLogger("carpool.native")

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
FLAGS = ("-std=c++20", "-O3", "-march=native", "-pthread", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 120.0


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
            _compile([compiler, *FLAGS, *map(str, SOURCES), "-o", target])
            return ctypes.CDLL(target)  # stays loaded when its file is gone
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            log.warning("%s failed, so models run slower on this host: %s", compiler, said.strip())
            return None


def _compile(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
