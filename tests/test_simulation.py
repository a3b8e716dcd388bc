"""Policy proved in virtual worlds: fairness, classes, no thrash, and chaos that leaves nothing
behind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from pipelines.fake import FakeJob, Kind
from queueing.metrics import percentiles
from queueing.simulate import Simulation
from queueing.stream import Stream
from queueing.work import Policy, Priority, Status
from tests.worlds import POLICIES, chaos, device_seconds, jain, job, world


def keep_waiting(
    simulation: Simulation,
    backlogs: Mapping[str, int],
    tasks: list[str],
    until: float,
    weights: Mapping[str, float] | None = None,
) -> dict[str, list[Stream]]:
    """Each session always has so many requests waiting; returns what each submitted."""
    streams: dict[str, list[Stream]] = {session: [] for session in backlogs}
    rngs = {session: random.Random(session) for session in backlogs}

    def top_up() -> None:
        for session, count in backlogs.items():
            rng = rngs[session]
            while simulation.admission.queue.waiting(session) < count:
                task = rng.choice(tasks)
                request = job(rng, task).request(
                    task=task, weight=(weights or {}).get(session, 1.0)
                )
                streams[session].append(simulation.submit(request, session))
        if simulation.clock.now < until:
            simulation.at(simulation.clock.now + 0.01, top_up)

    simulation.at(0.0, top_up)
    simulation.run(until=until)
    return streams


@pytest.mark.parametrize("tasks", [list(POLICIES), ["chat"], ["image"], ["embed"]])
def test_a_backlog_of_32_times_as_much_buys_no_more_device_seconds(tasks):
    streams = keep_waiting(world(), {"many": 256, "few": 8}, tasks, until=100.0)
    assert jain([device_seconds(each) for each in streams.values()]) >= 0.99


def test_a_weight_of_two_gets_twice_the_device_seconds():
    streams = keep_waiting(
        world(), {"one": 64, "two": 64}, list(POLICIES), until=200.0, weights={"two": 2.0}
    )
    shares = device_seconds(streams["two"]) / device_seconds(streams["one"])
    assert 1.8 <= shares <= 2.2


def test_many_sessions_of_unequal_appetite_get_equal_shares():
    backlogs = {f"p{i}": 2 + 6 * i for i in range(8)}
    streams = keep_waiting(world(), backlogs, list(POLICIES), until=200.0)
    assert jain([device_seconds(each) for each in streams.values()]) >= 0.99


def open_loop(fair: bool, seed: int, load: float = 0.9, count: int = 3000) -> list[float]:
    """Times of interactive requests among standard ones that come in handfuls."""
    simulation = world({"embed": Policy(rows=8)})
    rng, time = random.Random(seed), 0.0
    interactive: list[Stream] = []
    capacity = 8 / (0.02 + 8 * 0.001 + 8 * 0.0005)

    def arrive(session: str, priority: Priority, handful: int) -> None:
        for _ in range(handful):
            request = FakeJob(Kind.SINGLE).request(task="embed", priority=priority)
            stream = simulation.submit(request, session if fair else "everybody")
            if session.startswith("i"):
                interactive.append(stream)

    for _ in range(count):
        time += rng.expovariate(load * capacity / 3.4)  # requests an arrival, on average
        if rng.random() < 0.2:
            session, priority, handful = f"i{rng.randrange(100)}", Priority.INTERACTIVE, 1
        else:
            session, priority, handful = f"s{rng.randrange(20)}", Priority.STANDARD, 4
        priority = priority if fair else Priority.STANDARD
        simulation.at(time, lambda a=session, b=priority, c=handful: arrive(a, b, c))  # type: ignore[misc]
    simulation.run()
    return [each.times.ended - each.times.submitted for each in interactive if each.times.ended]


@pytest.mark.parametrize("seed", range(3))
def test_at_load_nine_tenths_interactive_p99_is_half_of_first_come_first_served(seed):
    fair, first_come = open_loop(True, seed), open_loop(False, seed)
    assert len(fair) == len(first_come) > 500
    assert percentiles(fair)[2] <= percentiles(first_come)[2] / 2


def test_a_hundred_sessions_on_eight_rows_do_not_thrash():
    simulation = world({"chat": POLICIES["chat"]})
    rng = random.Random(3)
    jobs: list[FakeJob] = []
    streams: list[Stream] = []

    def ask(session: str, left: int) -> None:
        jobs.append(FakeJob(Kind.STREAM, rng.randint(10, 200), rng.randint(10, 100)))
        streams.append(simulation.submit(jobs[-1].request(task="chat"), session))
        if left:
            again = simulation.clock.now + rng.expovariate(0.2)
            simulation.at(again, lambda: ask(session, left - 1))

    units = 0.0
    called = simulation.admission.metrics.called

    def count(at: float, worker: int, call: object) -> None:
        nonlocal units
        units += call.units  # type: ignore[attr-defined]
        called(at, worker, call)  # type: ignore[arg-type]

    simulation.admission.metrics.called = count  # type: ignore[method-assign]
    for person in range(100):
        for _ in range(rng.choice([1, 1, 2, 4])):
            simulation.at(5 * rng.random(), lambda person=person: ask(f"p{person}", 4))  # type: ignore[misc]
    simulation.run()
    needed = sum(work.length + work.steps for work in jobs)
    assert all(stream.status is Status.FINISHED for stream in streams)
    assert needed <= units <= 1.05 * needed


def flood_then_one(displace: bool) -> tuple[float, float]:
    """(seconds to the first token of the one who comes late, seconds until all is done)."""
    simulation = world({"chat": Policy(rows=8, units=256)})
    late: list[Stream] = []
    if not displace:
        simulation.admission._starter._displace = lambda station: None  # type: ignore[method-assign]
    long = FakeJob(Kind.STREAM, 20, 400)
    for _ in range(40):
        simulation.at(0.0, lambda: simulation.submit(long.request(task="chat"), "many"))
    one = FakeJob(Kind.STREAM, 20, 20).request(task="chat")
    simulation.at(3.0, lambda: late.append(simulation.submit(one, "one")))
    simulation.run()
    times = late[0].times
    return (times.first or 0.0) - times.submitted, simulation.clock.now


def test_whoever_comes_late_displaces_a_row_and_gets_a_first_token_at_once():
    first, total = flood_then_one(displace=True)
    assert first < 0.2
    slow, total_without = flood_then_one(displace=False)
    assert slow > 20 * first
    assert total < 1.03 * total_without


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(300)
def test_chaos_ends_every_request_once_with_its_own_output_and_leaves_nothing(seed):
    made = chaos(seed, events=8_000)
    made.verdict()
    ended = made.simulation.admission.metrics.ended
    assert {Status.FINISHED, Status.FAILED, Status.CANCELLED, Status.EXPIRED} <= set(ended)


@pytest.mark.timeout(300)
def test_two_runs_of_the_same_chaos_are_identical():
    one, two = chaos(11, events=6_000), chaos(11, events=6_000)
    assert one.simulation.digest() == two.simulation.digest()
    assert one.simulation.digest() != chaos(12, events=6_000).simulation.digest()


def crowd(size: int, submit: Callable[[FakeJob, str], Stream]) -> list[Stream]:
    return [submit(FakeJob(Kind.STREAM, 4, 200, seed=i), f"p{i}") for i in range(size)]


def test_a_worker_that_dies_costs_nobody_anything_but_time():
    simulation = world({"chat": POLICIES["chat"]})
    streams: list[Stream] = []

    def come() -> None:
        streams.extend(
            crowd(20, lambda work, who: simulation.submit(work.request(task="chat"), who))
        )

    simulation.at(0.0, come)
    for moment in (0.1, 4.0, 8.0, 12.0):
        simulation.at(moment, lambda: simulation.kill(0))
    simulation.run()
    assert {stream.status for stream in streams} == {Status.FINISHED}
    assert simulation.admission.metrics.restarts == 4


def test_a_request_that_kills_workers_is_refused_alone():
    simulation = world({"chat": POLICIES["chat"]})
    streams: list[Stream] = []

    def come() -> None:
        killer = replace(FakeJob(Kind.STREAM, 4, 9), crash_at=5)
        streams.append(simulation.submit(killer.request(task="chat"), "killer"))
        streams.extend(
            crowd(12, lambda work, who: simulation.submit(work.request(task="chat"), who))
        )

    simulation.at(0.0, come)
    simulation.run()
    assert streams[0].status is Status.FAILED
    assert "alone" in str(streams[0].error)
    assert {stream.status for stream in streams[1:]} == {Status.FINISHED}
    assert simulation.admission.metrics.restarts == 2


def test_work_without_marks_is_proved_by_the_calls_it_survives():
    simulation = world({"image": Policy(rows=4)})
    streams: list[Stream] = []

    def come() -> None:
        for i in range(4):
            work = FakeJob(Kind.STEPPED, steps=60, seed=i)
            streams.append(simulation.submit(work.request(task="image"), f"p{i}"))

    simulation.at(0.0, come)
    simulation.at(0.2, lambda: simulation.kill(0))
    simulation.run()
    assert {stream.status for stream in streams} == {Status.FINISHED}
    calls = [record.call for record in simulation.admission.metrics.calls]
    assert sum(call.rows == 1 for call in calls) <= 4 * 12  # the tests alone, no more
    assert sum(call.rows == 4 for call in calls) >= 40
