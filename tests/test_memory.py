"""Memory of pages is taken before it is needed, keeps what is written meanwhile, and is let go."""

from __future__ import annotations

import gc
import resource
import sys
import weakref

import pytest
import torch

from kernels import memory
from kernels.attention import Pages

COUNT, SIZE = 2000, 16


def pages() -> Pages:
    made = Pages(COUNT, SIZE)
    for index in range(2):
        made.layer(index, torch.empty(1, 3, 64), torch.empty(1, 3, 32))
    return made


def faults() -> int:
    """Small pages that were not there when this process touched them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux takes this advice.")
def test_pages_that_were_taken_are_there_when_written() -> None:
    own = pages()
    thread = memory.settle(own)
    assert thread is not None
    thread.join()
    before = faults()
    for pair in own.layers.values():
        for tensor in pair:
            tensor.fill_(1.0)
    small = sum(tensor.nbytes for pair in own.layers.values() for tensor in pair) // 4096
    assert faults() - before < small / 50


def test_what_is_written_meanwhile_stays() -> None:
    own = pages()
    written = [tensor for pair in own.layers.values() for tensor in pair]
    thread = memory.settle(own)
    for number in range(1, COUNT + 1):
        for tensor in written:
            tensor[number] = float(number)
    if thread is not None:
        thread.join()
    wanted = torch.arange(COUNT + 1.0)
    for tensor in written:
        assert torch.equal(tensor.amin((1, 2, 3)), wanted)
        assert torch.equal(tensor.amax((1, 2, 3)), wanted)


def test_it_ends_when_the_pages_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = pages()
    gone = weakref.ref(own)
    asked: list[int] = []

    def endless(tensor: torch.Tensor, number: int) -> bool:
        asked.append(number)
        return True

    monkeypatch.setattr(memory, "_part", endless)
    thread = memory.settle(own)
    if thread is None:
        pytest.skip("Only Linux takes this advice.")
    del own
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
    assert gone() is None


def test_where_it_cannot_be_done_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.settle(pages()) is None
    monkeypatch.undo()
    elsewhere = Pages(4, SIZE)
    elsewhere.layer(0, torch.empty(1, 3, 8, device="meta"), torch.empty(1, 3, 8, device="meta"))
    assert memory.settle(elsewhere) is None


@pytest.mark.skipif(sys.platform != "linux", reason="Only Linux takes this advice.")
def test_advice_that_is_refused_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_POPULATE_WRITE", 12345)
    thread = memory.settle(pages())
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
