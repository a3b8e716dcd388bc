"""Long lists as background requests: order, bad lines, stops, deaths, full queues, bystanders."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import aclosing
from typing import Any

import pytest

from queueing import bulk
from queueing.bulk import CHARACTERS, CHUNK, FAILURES, FLIGHT, Bulk, Progress, Seats
from queueing.clock import VirtualClock
from queueing.process import ProcessWorker
from queueing.simulate import Simulation
from queueing.stream import Stream
from queueing.work import Full, Policy, Request, Status, WorkerLost
from tests.errands import BAD, Beside, Text, errands, lines, numbered, ran, right
from tests.lists import CRASH, POISON, ListPipeline, asked
from tests.worlds import UNLIMITED


async def test_results_come_in_order_with_two_requests_in_flight_at_most():
    given, seen = numbered(1000), list[Progress]()
    async with errands() as errand:
        last = await ran(Bulk(given, 1000, errand), seen.append)
    assert right(errand.rows, given)
    assert (last.status, last.done, last.failed, last.fraction) == (Status.FINISHED, 1000, 0, 1.0)
    assert errand.sizes == [CHUNK, CHUNK, CHUNK, 232]
    assert errand.most == FLIGHT
    done = [progress.done for progress in seen]
    assert sorted(set(done)) == [0, 256, 512, 768, 1000]
    assert done == sorted(done)


async def test_long_lines_travel_in_smaller_parts():
    given = lines(*(str(i) * 90_000 for i in range(5)), "x" * (CHARACTERS + 1), "short")
    async with errands() as errand:
        assert (await ran(Bulk(given, 7, errand))).status is Status.FINISHED
    assert errand.sizes == [2, 2, 1, 1, 1]
    assert right(errand.rows, given)


async def test_a_bad_line_fails_alone():
    given = numbered(32)
    given[7], given[20] = Text(BAD), Text("", "It is empty.")
    async with errands() as errand:
        last = await ran(Bulk(given, 32, errand))
    assert [(i, error) for i, (_, _, error) in enumerate(errand.rows) if error] == [
        (7, "It is bad."),
        (20, "It is empty."),
    ]
    assert right(errand.rows, [line for i, line in enumerate(given) if i not in (7, 20)])
    assert (last.failed, last.done) == (2, 32)


async def test_a_part_of_nothing_but_bad_lines_is_no_failure_of_ours():
    given = [*lines(*(FAILURES + 1) * CHUNK * [BAD]), *lines(*CHUNK * [""]), *numbered(5)]
    async with errands() as errand:
        last = await ran(Bulk(given, len(given), errand))
    assert (last.status, last.failed) == (Status.FINISHED, len(given) - 5)
    assert errand.sizes == [5]
    assert [row[2] for row in errand.rows[:CHUNK]] == CHUNK * ["It is bad."]


async def test_lines_that_no_single_request_may_hold_travel_in_halves():
    given = numbered(600)
    async with errands() as errand:
        errand.limit = 100
        await ran(Bulk(given, 600, errand))
    assert right(errand.rows, given)
    assert max(errand.sizes) <= 100
    assert errand.most <= FLIGHT


async def test_stopping_ends_requests_at_once_and_keeps_what_came():
    given = numbered(2000)
    async with errands() as errand:
        run = Bulk(given, 2000, errand)

        def stop(progress: Progress) -> None:
            if progress.done == 2 * CHUNK and progress.status is Status.RUNNING:
                run.stop()
                assert all(stream.status.terminal for stream in errand.streams)

        last = await ran(run, stop)
    assert last.status is Status.CANCELLED
    assert len(errand.rows) == last.done < 2000
    assert last.done >= 2 * CHUNK
    assert right(errand.rows, given[: last.done])


async def test_a_reader_that_leaves_ends_requests_at_once():
    async with errands(forward=0.2) as errand:
        news = Bulk(numbered(2000), 2000, errand).run()
        await anext(news)
        await errand.full.wait()
        await news.aclose()
        assert [stream.status for stream in errand.streams] == FLIGHT * [Status.CANCELLED]


async def test_a_run_whose_task_is_cancelled_ends_requests_at_once():
    async with errands(forward=0.2) as errand:
        task = asyncio.create_task(ran(Bulk(numbered(2000), 2000, errand)))
        await errand.full.wait()
        task.cancel()
        await asyncio.wait((task,), timeout=5)
        assert [stream.status for stream in errand.streams] == FLIGHT * [Status.CANCELLED]


async def test_a_worker_that_dies_in_the_middle_costs_nothing():
    given = numbered(1000)
    async with errands(ProcessWorker) as errand:
        left = [1]

        def kill(progress: Progress) -> None:
            if progress.done and left:
                left.pop()
                os.kill(errand.workers[0].pid, signal.SIGKILL)

        last = await ran(Bulk(given, 1000, errand), kill)
    assert (last.status, last.failed) == (Status.FINISHED, 0)
    assert len(errand.workers) == 2
    assert right(errand.rows, given)


async def test_a_line_that_kills_its_worker_costs_its_own_part_only():
    given = numbered(3 * CHUNK)
    given[CHUNK] = Text(CRASH)
    async with errands(ProcessWorker) as errand:
        last = await ran(Bulk(given, len(given), errand))
    assert (last.status, last.failed) == (Status.FINISHED, CHUNK)
    assert {error for _, _, error in errand.rows[CHUNK : 2 * CHUNK]} == {
        str(errand.streams[1].error)
    }
    assert isinstance(errand.streams[1].error, WorkerLost)
    assert right(errand.rows, [*given[:CHUNK], *given[2 * CHUNK :]])


def poisoned(*parts: int) -> list[Text]:
    """Ten parts of lines, of which these fail."""
    given = numbered(10 * CHUNK)
    for part in parts:
        given[part * CHUNK] = Text(POISON)
    return given


async def test_failures_in_a_row_end_a_run_with_what_came():
    async with errands(forward=0.0) as errand:
        last = await ran(Bulk(poisoned(0, 1, 3, 4, 5), 10 * CHUNK, errand))
    assert last.status is Status.FAILED
    assert last.error.startswith("3 parts in a row failed. ")
    assert last.failed >= 5 * CHUNK
    assert last.done in (6 * CHUNK, 7 * CHUNK)  # one more may have come by then
    assert len(errand.rows) == last.done


async def test_failures_that_are_not_in_a_row_end_nothing():
    async with errands(forward=0.0) as errand:
        last = await ran(Bulk(poisoned(0, 1, 3, 4, 6, 7, 9), 10 * CHUNK, errand))
    assert (last.status, last.failed) == (Status.FINISHED, 7 * CHUNK)


async def test_a_full_queue_is_waited_for():
    given = numbered(600)
    async with errands() as errand:
        errand.refusals = bulk.TRIES - 1
        assert (await ran(Bulk(given, 600, errand))).failed == 0
    assert right(errand.rows, given)


async def test_a_queue_that_stays_full_ends_the_run():
    async with errands() as errand:
        errand.refusals = 10**6
        last = await ran(Bulk(numbered(2000), 2000, errand))
    assert last.status is Status.FAILED
    assert last.done in (FAILURES * CHUNK, (FAILURES + 1) * CHUNK)  # one more may have come by then
    assert last.error.endswith("The queue is full.")


async def test_whoever_is_shed_from_a_full_queue_comes_again():
    async with errands() as errand:
        put, shed = errand.put, []

        def submit(request: Request) -> Stream:
            stream = put(request)
            if not shed:
                shed.append(stream)
                errand.dispatcher._admission._leave(
                    stream.id, Status.REFUSED, Full("The queue is full.", 0.001)
                )
            return stream

        errand.put = submit
        last = await ran(Bulk(numbered(300), 300, errand))
    assert shed[0].status is Status.REFUSED
    assert (last.status, last.failed) == (Status.FINISHED, 0)


async def test_a_slow_reader_gets_everything_and_holds_nothing():
    given = numbered(1500)
    async with errands() as errand:
        async with aclosing(Bulk(given, 1500, errand).run()) as news:
            async for progress in news:
                last = progress
                await asyncio.sleep(0.02)
    assert last.status is Status.FINISHED
    assert right(errand.rows, given)
    assert errand.most <= FLIGHT


async def test_results_that_cannot_be_written_end_a_run():
    async with errands() as errand:
        errand.problem = OSError(28, "No space left on device")
        last = await ran(Bulk(numbered(2000), 2000, errand))
    assert last.status is Status.FAILED
    assert last.error == "The results could not be written: No space left on device."
    assert all(stream.status.terminal for stream in errand.streams)


async def test_a_server_that_goes_down_ends_a_run():
    async with errands(forward=0.01) as errand:
        closing = []

        def close(progress: Progress) -> None:
            if progress.done and not closing:
                closing.append(asyncio.create_task(errand.dispatcher.close()))

        last = await ran(Bulk(numbered(9000), 9000, errand), close)
        await closing[0]
    assert last.status is Status.FAILED
    assert "going down" in last.error
    assert len(errand.rows) == last.done


async def test_a_run_is_heard_of_while_nothing_comes(monkeypatch):
    monkeypatch.setattr(bulk, "BEAT", 0.02)
    seen = list[Progress]()
    async with errands(forward=0.3) as errand:
        await ran(Bulk(numbered(3), 3, errand), seen.append)
    assert len(seen) > 5
    assert {progress.rate for progress in seen[:-1]} == {0.0}


def test_speed_and_time_to_go_are_told():
    progress = Progress(Status.RUNNING, 500, 2000, 3, 10.0, rate=50.0)
    assert (progress.fraction, progress.eta) == (0.25, 30.0)
    assert Progress(Status.RUNNING, 0, 2000, 0, 1.0).eta is None


def test_a_person_has_one_run_and_all_together_a_few():
    seats = Seats(most=2)
    with seats.taken("a"):
        with pytest.raises(Full, match="A file of yours is running"), seats.taken("a"):
            pass
        with seats.taken("b"), pytest.raises(Full, match="2 files are running"), seats.taken("c"):
            pass
        with seats.taken("c"):
            pass
    with seats.taken("a"):
        assert len(seats._taken) == 1


def calls(simulation: Simulation) -> list[Any]:
    return [record.call for record in simulation.admission.metrics.calls]


@pytest.mark.parametrize("seed", range(3))
async def test_people_beside_a_long_file_wait_for_one_call_at_most(seed):
    policies = {"lists": Policy(rows=8, units=2000, target=0.1)}

    def pipelines(clock: VirtualClock) -> dict[str, ListPipeline]:
        return {"lists": ListPipeline(0.02, 0.0001, spend=clock.advance)}

    simulation, rng = Simulation(policies, pipelines, UNLIMITED), random.Random(seed)
    people: list[Stream] = []

    def come() -> None:
        people.append(
            simulation.submit(asked("hello", f"p{len(people) % 5}"), f"p{len(people) % 5}")
        )
        simulation.at(simulation.clock.now + rng.expovariate(4), come)

    simulation.at(1.0, come)
    given = numbered(30 * CHUNK)
    errand = Beside(simulation)
    playing = asyncio.create_task(errand.play(30))
    last = await ran(Bulk(given, len(given), errand))
    await playing
    assert last.status is Status.FINISHED
    assert right(errand.rows, given)
    latencies = sorted(s.times.ended - s.times.submitted for s in people if s.times.ended)
    own, longest = 0.0205, max(call.seconds for call in calls(simulation))
    assert len(latencies) > 20
    assert latencies[-1] <= longest + 2 * own  # its own call, and one of somebody who came before
    assert longest <= policies["lists"].target * 1.1
