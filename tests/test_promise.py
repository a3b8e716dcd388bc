"""A promised latency: kept for whoever is let in, by refusing early those who would wait longer.

In virtual worlds whose capacity is known exactly.
"""

from __future__ import annotations

import random

import pytest

from pipelines.fake import FakeJob, Kind
from queueing.metrics import percentiles
from queueing.simulate import Simulation
from queueing.work import Full, Policy, Priority, Status
from tests.worlds import COST, job, world

PROMISED = 0.2
CALL = PROMISED / 4
CAPACITY = (CALL - COST["forward"]) / (COST["row"] + COST["unit"]) / CALL  # requests a second
SECONDS = 10.0
LIVELY = Policy(rows=64, latency=PROMISED)


def arrive(simulation: Simulation, load: float, seed: int) -> tuple[list[float], list[Full], int]:
    """Strangers with one request each, at a share of capacity: times of those served, refusals."""
    rng, time, count = random.Random(seed), 0.0, 0
    streams, refused = [], []

    def come(person: str) -> None:
        try:
            streams.append(simulation.submit(FakeJob(Kind.SINGLE).request(task="embed"), person))
        except Full as error:
            refused.append(error)

    while time < SECONDS:
        time += rng.expovariate(load * CAPACITY)
        count += 1
        simulation.at(time, lambda person=f"person {count}": come(person))  # type: ignore[misc]
    simulation.run()
    simulation.check()
    times = [each.times for each in streams if each.status is Status.FINISHED]
    return [t.ended - t.submitted for t in times if t.ended], refused, count


@pytest.mark.parametrize("load", [0.3, 0.9, 1.0, 1.2, 1.5, 3.0])
def test_whoever_is_let_in_has_the_answer_in_time_at_any_load(load):
    times, refused, count = arrive(world({"embed": LIVELY}), load, seed=1)
    assert len(times) + len(refused) == count
    assert percentiles(times)[1] <= PROMISED
    assert all(error.retry_after and "promises" in str(error) for error in refused)


@pytest.mark.parametrize("load", [0.5, 0.7])
def test_nobody_is_refused_while_there_is_room(load):
    assert not arrive(world({"embed": LIVELY}), load, seed=2)[1]


@pytest.mark.parametrize("load", [1.2, 3.0])
def test_under_overload_the_device_stays_full(load):
    times, _, _ = arrive(world({"embed": LIVELY}), load, seed=3)
    assert len(times) / SECONDS >= 0.9 * CAPACITY


def test_without_a_promise_the_same_load_queues_for_longer_and_longer():
    times, refused, _ = arrive(world({"embed": Policy(rows=64, target=CALL)}), 1.5, seed=4)
    assert not refused and percentiles(times)[1] > 2.0


def test_background_is_never_refused_for_a_promise():
    simulation = world({"embed": LIVELY})
    arrive(simulation, 0.5, seed=5)
    long = FakeJob(Kind.SINGLE).request(task="embed", priority=Priority.BACKGROUND)
    streams = [simulation.submit(long, "file") for _ in range(300)]
    simulation.run()
    assert {stream.status for stream in streams} == {Status.FINISHED}


def test_calls_of_another_model_count_as_time_that_passes():
    rng = random.Random(6)
    simulation = world({"embed": LIVELY, "chat": Policy(rows=8, units=256, target=0.15)})
    arrive(simulation, 0.3, seed=6)
    for n in range(4):
        simulation.submit(job(rng, "chat").request(task="chat"), f"talker {n}")
    with pytest.raises(Full, match="promises"):
        simulation.submit(FakeJob(Kind.SINGLE).request(task="embed"), "late")
