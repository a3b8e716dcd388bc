"""Memory of a host for pages: in large pages of the machine, and taken before rows ask for it.

A host gives memory when it is first touched. On a virtual machine that took a third of the time of
32 chats at once, and large pages, whose addresses a processor finds sooner, another sixth. It is
done in the background, which changes no number, so rows may come meanwhile; where it cannot be
done, nothing is lost but time. It does not know what lies in pages.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterator

from torch import Tensor

from kernels.attention import Pages

LARGE = 2 << 20  # bytes, as most machines have them
_POPULATE_WRITE = 23  # of madvise since Linux 5.14; Python has no name for it yet

log = logging.getLogger("carpool.memory")


def settle(pages: Pages) -> threading.Thread | None:
    """Begin to take the memory of all layers, the lowest pages first; it ends when they are gone.

    None where this cannot be done.
    """
    if sys.platform != "linux" or any(tensor.device.type != "cpu" for tensor in _tensors(pages)):
        return None
    for tensor in _tensors(pages):
        begin, end = _bounds(tensor)
        _advise(begin, end, mmap.MADV_HUGEPAGE)
    thread = threading.Thread(target=_take, args=(weakref.ref(pages),), daemon=True)
    thread.start()
    return thread


def _take(pages: weakref.ref[Pages]) -> None:
    number = 0
    while _round(pages, number):
        number += 1


def _round(pages: weakref.ref[Pages], number: int) -> bool:
    """Take one large page of every tensor; whether there are more. It holds the pages meanwhile,
    and nobody between two rounds, so that a model can be let go.
    """
    own = pages()
    if own is None:
        return False
    left = [_part(tensor, number) for tensor in _tensors(own)]
    return any(left)


def _part(tensor: Tensor, number: int) -> bool:
    """Take one large page of it; whether there are more."""
    begin, end = _bounds(tensor)
    first = begin - begin % LARGE + number * LARGE
    done = _advise(max(begin, first), min(end, first + LARGE), _POPULATE_WRITE)
    return done and first + LARGE < end


def _tensors(pages: Pages) -> Iterator[Tensor]:
    for pair in pages.layers.values():
        yield from pair


def _bounds(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first and after the last small page that are its own alone."""
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    return -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE


def _advise(begin: int, end: int, advice: int) -> bool:
    """Whether the machine took the advice."""
    if begin >= end:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    if libc.madvise(begin, end - begin, advice) == 0:
        return True
    log.debug("madvise %d: %s", advice, os.strerror(ctypes.get_errno()))
    return False
