"""What this machine grants us: cores and memory, by the machine itself and by the control groups in
which containers live. A container of two cores sees all of its host's otherwise, and is ended when
it takes more memory than its own.

See https://docs.kernel.org/admin-guide/cgroup-v2.html. It does not know what they are for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def cores() -> int:
    """How many may compute at once, at least one."""
    able = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [able or 1]
    for folder in _folders():
        quota, period = _numbers(folder / "cpu.max") or (0, 0)
        if quota and period:
            limits.append(-(-quota // period))
    old = [_numbers(GROUPS / f"cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    if old[0] and old[1]:
        limits.append(-(-old[0][0] // old[1][0]))
    return max(min(limits), 1)


def memory() -> int:
    """Bytes that we may have in all."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    files = [folder / "memory.max" for folder in _folders()]
    for file in (*files, GROUPS / "memory/memory.limit_in_bytes"):
        limits += _numbers(file)[:1]
    return min(limits)


def _folders() -> Iterator[Path]:
    """Of our group and of those it lies in; each may set limits."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        lines = []
    own = next((line[4:] for line in lines if line.startswith("0::/")), "")
    folder = GROUPS / own
    yield folder
    yield from (above for above in folder.parents if GROUPS in (above, *above.parents))


def _numbers(file: Path) -> list[int]:
    """Those in a file; none where there is no such file, or where it says there is no limit."""
    try:
        words = file.read_text().split()
    except OSError:
        return []
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else []
