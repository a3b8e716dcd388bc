"""Models that share a device too small for all: loaded when asked for, put away when others are,
never while they run, and nobody waits for ever. Under a virtual clock, each loading checked.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from pipelines.fake import FakeJob, FakePipeline, Kind, expected
from queueing.clock import VirtualClock
from queueing.residency import PATIENCE
from queueing.simulate import Simulation
from queueing.stream import Stream
from queueing.work import Card, OutOfMemory, Pipeline, Policy, Priority, Row, Status, Tell

SIZE, LOAD = 10, 3.0  # bytes and seconds of each model


class Device:
    """What lies on it, checked at every change."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[str, int] = {}
        self.most = 0
        self.loads: list[str] = []

    def take(self, task: str, size: int) -> None:
        assert task not in self.held, f"{task} was loaded twice"
        self.held[task] = size
        self.loads.append(task)
        self.most = max(self.most, sum(self.held.values()))


class Watched(FakePipeline):
    """A pretended model that takes room on a device, and notes when it is put away in use."""

    def __init__(self, task: str, device: Device, clock: VirtualClock, size: int = SIZE) -> None:
        super().__init__(spend=clock.advance, load=LOAD)
        self._task, self._device, self._size = task, device, size
        self.rows: set[str] = set()
        self.fails = 0  # loads that run out of memory

    def load(self, tell: Tell) -> Card:
        card = super().load(tell)
        if self.fails:
            self.fails -= 1
            raise OutOfMemory("The pretended device is full.")
        self._device.take(self._task, self._size)
        return Card(card.limits, details=card.details, held=self._size)

    def unload(self) -> None:
        assert not self.rows, f"{self._task} was put away while {self.rows} ran"
        del self._device.held[self._task]

    def open(self, request, mark=None):
        assert self._task in self._device.held, f"a row was opened without {self._task}"
        self.rows.add(request.id)
        return super().open(request, mark)

    def close(self, row: Row) -> None:
        self.rows.discard(row.request.id)
        super().close(row)


class World:
    """Some models behind one worker with room for some of them."""

    def __init__(
        self, tasks: str, room: int | None, sizes: Mapping[str, int] | None = None, **policy
    ):
        policies = {task: Policy(rows=4, preload=False, **policy) for task in tasks}
        self.device = Device(0 if room is None else room)
        self.pipelines: dict[str, Watched] = {}

        def made(clock: VirtualClock) -> Mapping[str, Pipeline]:
            for task in tasks:
                size = (sizes or {}).get(task, SIZE)
                self.pipelines[task] = Watched(task, self.device, clock, size)
            return self.pipelines

        self.simulation = Simulation(policies, made, budget=room)
        self.jobs: dict[str, FakeJob] = {}

    def ask(self, task: str, at: float, session: str = "me", steps: int = 5, **job) -> list[Stream]:
        """Ask at a time; the stream is in the list once that has come."""
        found: list[Stream] = []

        def submit() -> None:
            asked = FakeJob(Kind.STREAM, steps=steps, seed=len(self.jobs), **job)
            stream = self.simulation.submit(asked.request(task=task), session)
            self.jobs[stream.id] = asked
            found.append(stream)

        self.simulation.at(at, submit)
        return found

    def right(self, streams: list[Stream]) -> bool:
        return all(
            stream.status is Status.FINISHED and stream.text == expected(self.jobs[stream.id])[0]
            for stream in streams
        )


@pytest.mark.parametrize("turns", [50, 500])
def test_alternating_between_two_models_with_room_for_one(turns: int) -> None:
    world = World("ab", room=SIZE)
    asked = [world.ask("ab"[turn % 2], at=20.0 * turn) for turn in range(turns)]
    world.simulation.run()
    assert world.right([stream for (stream,) in asked])
    assert world.device.most == SIZE
    assert world.device.loads == ["ab"[turn % 2] for turn in range(turns)]


def test_with_room_for_all_each_is_loaded_once() -> None:
    world = World("abc", room=3 * SIZE)
    asked = [world.ask("abc"[turn % 3], at=5.0 * turn) for turn in range(30)]
    world.simulation.run()
    assert world.right([stream for (stream,) in asked])
    assert sorted(world.device.loads) == ["a", "b", "c"]


def test_the_one_that_has_rested_longest_goes() -> None:
    world = World("abc", room=2 * SIZE)
    for turn, task in enumerate("abac"):
        world.ask(task, at=20.0 * turn)
    world.simulation.run()
    assert world.device.loads == ["a", "b", "c"]
    assert sorted(world.device.held) == ["a", "c"]


@pytest.mark.parametrize("seed", range(5))
def test_steady_use_of_one_does_not_keep_another_out(seed: int) -> None:
    """Two floods at once: both are served all along, and neither is swapped at every turn."""
    world, chance = World("ab", room=SIZE), random.Random(seed)
    asked = [
        world.ask(task, at=chance.uniform(0, 120), session=f"{task}{n % 7}", steps=20)
        for task in "ab"
        for n in range(300)
    ]
    world.simulation.run()
    streams = [stream for (stream,) in asked]
    assert world.right(streams)
    assert world.device.most == SIZE
    ends = {
        task: [s.times.ended for s in streams[n : n + 300]] for task, n in (("a", 0), ("b", 300))
    }
    took = world.simulation.clock.now
    assert all(min(times) < took / 4 and max(times) > took / 2 for times in ends.values())
    assert len(world.device.loads) < took / (LOAD + PATIENCE / 2)


def test_a_long_row_is_finished_before_its_model_makes_way() -> None:
    world = World("ab", room=SIZE)
    asked = world.ask("a", at=0.0, steps=2000), world.ask("b", at=10.0)
    world.simulation.run()
    (long,), (short,) = asked
    assert world.right([long, short])
    assert long.times.ended < short.times.first


def test_those_who_made_way_go_on_when_whoever_waited_has_left() -> None:
    world = World("ab", room=SIZE)
    first = world.ask("a", at=0.0, steps=2000)
    waits = world.ask("b", at=5.0)
    later = world.ask("a", at=9.0, session="you")
    world.simulation.at(10.0, lambda: waits[0].cancel())
    world.simulation.run()
    assert waits[0].status is Status.CANCELLED
    assert world.right([*first, *later])
    assert world.device.loads == ["a"]


def test_an_idle_model_leaves_after_a_while_and_comes_back() -> None:
    world = World("a", room=None, keep=30.0)
    first, second = world.ask("a", at=0.0), world.ask("a", at=100.0)
    world.simulation.run(until=20.0)
    assert world.device.held == {"a": SIZE}
    world.simulation.run(until=60.0)
    assert world.device.held == {}
    world.simulation.run()
    assert world.right([*first, *second])
    assert world.device.loads == ["a", "a"]


def test_a_model_that_is_larger_than_thought_makes_others_go() -> None:
    world = World("abc", room=3 * SIZE, sizes={"c": 2 * SIZE})
    for turn, task in enumerate("abc"):
        world.ask(task, at=20.0 * turn)
    world.simulation.run()
    assert sorted(world.device.held) == ["b", "c"]


def test_a_model_larger_than_all_room_comes_alone() -> None:
    world = World("ab", room=SIZE, sizes={"b": 5 * SIZE})
    asked = [world.ask(task, at=20.0 * turn) for turn, task in enumerate("abab")]
    world.simulation.run()
    assert world.right([stream for (stream,) in asked])
    assert world.device.loads == ["a", "b", "a", "b"]


def test_a_loading_that_runs_out_of_memory_makes_others_go_and_is_tried_again() -> None:
    world = World("ab", room=None)
    first = world.ask("a", at=0.0)
    world.simulation.run(until=20.0)
    world.pipelines["b"].fails = 1
    second = world.ask("b", at=21.0)
    world.simulation.run()
    assert world.right([*first, *second])
    assert sorted(world.device.held) == ["b"]


def test_a_loading_that_fails_ends_its_own_requests_only() -> None:
    world = World("ab", room=None)
    world.simulation.run(until=1.0)
    world.pipelines["b"].fails = 99
    good, bad = world.ask("a", at=2.0, steps=400), world.ask("b", at=8.0)
    world.simulation.run()
    assert world.right(good)
    assert bad[0].status is Status.FAILED
    assert "full" in str(bad[0].error)


def test_while_a_model_comes_a_request_for_it_can_be_stopped_or_expire() -> None:
    world = World("a", room=None, timeout=LOAD / 2)
    late, stopped = world.ask("a", at=0.0), world.ask("a", at=0.1, session="you")
    world.simulation.at(1.0, lambda: stopped[0].cancel())
    world.simulation.run()
    assert stopped[0].status is Status.CANCELLED
    assert late[0].status is Status.EXPIRED
    assert not world.pipelines["a"].rows


def test_background_does_not_keep_a_model_from_people() -> None:
    world = World("ab", room=SIZE)
    flood: list[Stream] = []

    def submit() -> None:
        for n in range(200):
            job = FakeJob(Kind.STREAM, steps=30, seed=n)
            request = job.request(task="a", priority=Priority.BACKGROUND)
            flood.append(world.simulation.submit(request, "file", capped=False))

    world.simulation.at(0.0, submit)
    person = world.ask("b", at=10.0)
    world.simulation.run()
    assert world.right(person)
    assert all(stream.status is Status.FINISHED for stream in flood)
    assert person[0].times.ended < max(stream.times.ended for stream in flood)
