"""One request's output, read by offset."""

from __future__ import annotations

import asyncio
import random

import pytest

from queueing.stream import Stream
from queueing.work import Cancelled, Output, Status


def nothing() -> None:
    return


def stream() -> Stream:
    return Stream("id", 0.0, nothing)


def test_text_that_the_stream_has_is_skipped():
    one = stream()
    for at, delta in [(0, "Hello"), (0, "Hello"), (3, "lo, world"), (12, "!")]:
        one.put(Output(at, delta), 1.0)
    assert one.text == "Hello, world!"
    assert one.read(7) == "world!"


def test_mere_progress_is_not_yet_an_output():
    one = stream()
    one.put(Output(progress=0.5), 1.0)
    assert (one.progress, one.times.first) == (0.5, None)
    one.put(Output(0, "Hello"), 2.0)
    assert one.times.first == 2.0


def test_a_gap_is_a_bug_and_not_a_hole_in_somebodys_text():
    one = stream()
    with pytest.raises(RuntimeError, match="gap"):
        one.put(Output(3, "lo"), 1.0)


def test_any_overlapping_cuts_of_a_text_give_the_whole():
    rng, whole = random.Random(4), "".join(map(chr, range(200, 900)))
    one, known = stream(), 0
    while known < len(whole):
        at = rng.randint(max(known - 30, 0), known)
        end = rng.randint(at, min(at + 50, len(whole)))
        one.put(Output(at, whole[at:end]), 1.0)
        known = max(known, end)
    assert one.text == whole


def test_preview_progress_and_result_replace():
    one = stream()
    one.put(Output(preview="a", progress=0.1), 1.0)
    one.put(Output(preview="b", progress=0.2), 2.0)
    one.put(Output(result="picture"), 3.0)
    assert (one.preview, one.progress, one.result) == ("b", 0.2, "picture")
    assert one.times.first == 1.0


def test_a_terminal_state_is_entered_once_and_ends_all_output():
    one = stream()
    one.move(Status.RUNNING, None, 1.0)
    one.move(Status.CANCELLED, Cancelled("gone"), 2.0)
    one.put(Output(0, "late"), 3.0)
    assert one.text == ""
    with pytest.raises(RuntimeError, match="ended twice"):
        one.move(Status.FINISHED, None, 3.0)
    assert (one.times.started, one.times.ended) == (1.0, 2.0)


async def test_every_reader_is_woken_by_a_change():
    one = stream()
    readers = [asyncio.create_task(one.changed(0, 30.0)) for _ in range(5)]
    await asyncio.sleep(0)
    one.put(Output(0, "x"), 1.0)
    assert await asyncio.gather(*readers) == [1] * 5


async def test_a_reader_that_missed_changes_does_not_wait():
    one = stream()
    one.put(Output(0, "x"), 1.0)
    one.put(Output(1, "y"), 1.0)
    assert await one.changed(0, 30.0) == 2


async def test_a_reader_gets_the_current_version_after_its_timeout_and_leaves_no_trace():
    one = stream()
    assert await one.changed(0, 0.01) == 0
    assert not one._waiters


async def test_nobody_waits_on_what_is_over():
    one = stream()
    one.move(Status.FINISHED, None, 1.0)
    assert await one.changed(1, 30.0) == 1
