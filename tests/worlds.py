"""Virtual worlds for simulations: policies, fake devices, random people, and what must hold
afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipelines.fake import FakeJob, FakePipeline, Kind, expected
from queueing.clock import VirtualClock
from queueing.limits import Limits
from queueing.simulate import Crash, Simulation
from queueing.stream import Stream
from queueing.work import Full, Policy, Priority, Request, Status

POLICIES = {
    "chat": Policy(rows=8, units=256),
    "image": Policy(rows=4),
    "embed": Policy(rows=16),
}
COST = {"forward": 0.02, "row": 0.001, "unit": 0.0005}
UNLIMITED = Limits(total=10**6, waiting=10**6, wait=1e9)


def crash() -> None:
    raise Crash


def world(
    policies: Mapping[str, Policy] | None = None, limits: Limits = UNLIMITED, **knobs: Any
) -> Simulation:
    """One virtual worker of fake pipelines, one for each policy."""
    policies = policies or POLICIES
    workers = knobs.pop("workers", 1)
    knobs = {**COST, **knobs}

    def pipelines(clock: VirtualClock) -> dict[str, FakePipeline]:
        return {task: FakePipeline(spend=clock.advance, crash=crash, **knobs) for task in policies}

    return Simulation(policies, pipelines, limits, workers)


def job(rng: random.Random, task: str) -> FakeJob:
    """A random piece of work for a task."""
    seed = rng.randrange(10**6)
    if task == "chat":
        return FakeJob(Kind.STREAM, rng.randint(1, 300), rng.randint(1, 60), seed)
    if task == "image":
        return FakeJob(
            Kind.STEPPED,
            steps=rng.randint(1, 20),
            seed=seed,
            weight=rng.choice([1.0, 2.0]),
            shape=rng.randint(0, 1),
        )
    return FakeJob(Kind.SINGLE, seed=seed)


def jain(values: list[float]) -> float:
    """Jain's fairness index: 1 is even, 1/n is one for all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def device_seconds(streams: list[Stream]) -> float:
    return sum(stream.times.device for stream in streams)


@dataclass(slots=True)
class Chaos:
    """Random people for whom everything goes wrong at random; checks as it goes."""

    simulation: Simulation
    rng: random.Random
    people: int = 30
    poison: float = 0.02
    crashes: float = 0.002
    jobs: dict[str, FakeJob] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    refused: int = 0
    versions: dict[str, int] = field(default_factory=dict)
    unlucky: set[str] = field(default_factory=set)  # killed from outside while they ran alone
    wholes: dict[str, str] = field(default_factory=dict)  # texts as they must become

    def arrive(self) -> None:
        """Somebody submits something, and may change their mind."""
        rng = self.rng
        task = rng.choice(list(POLICIES))
        work = job(rng, task)
        strike = rng.random()
        if strike < self.crashes:
            work = replace(work, crash_at=rng.randrange(work.steps))
        elif strike < self.crashes + self.poison:
            work = replace(work, poison_at=rng.randrange(work.steps))
        request = self.request(task, work)
        try:
            stream = self.simulation.submit(request, f"p{rng.randrange(self.people)}")
        except Full:
            self.refused += 1
            return
        self.jobs[stream.id], self.streams[stream.id] = work, stream
        self.wholes[stream.id] = expected(work)[0]
        if rng.random() < 0.15:
            self.simulation.at(
                self.simulation.clock.now + rng.expovariate(0.5),
                lambda: self.simulation.cancel(stream.id),
            )

    def request(self, task: str, work: FakeJob) -> Request:
        priority = self.rng.choice(list(Priority))
        memory = work.length + work.steps if work.kind is Kind.STREAM else 0
        return work.request(task=task, priority=priority, bytes=memory)

    def touched(self, id: str) -> None:
        """A request was touched: it never leaves a terminal state and its text is always a
        prefix.
        """
        stream = self.streams.get(id)
        if stream is None:
            return
        if stream.version < self.versions.get(id, 0):
            raise RuntimeError(f"{id} went back in time")
        self.versions[id] = stream.version
        text = self.wholes[id]
        if stream.text != text[: len(stream.text)]:
            raise RuntimeError(f"{id} has text that is not its own")
        if self.simulation.events % 1000 == 0:
            self.simulation.check()

    def verdict(self) -> None:
        """At the end everybody has one end, and nothing is left behind."""
        for id, stream in self.streams.items():
            if not stream.status.terminal:
                raise RuntimeError(f"{id} is {stream.status} for ever")
            if stream.status is Status.FINISHED and (stream.text, stream.result) != expected(
                self.jobs[id]
            ):
                raise RuntimeError(f"{id} finished with what is not its own")
            if stream.status is Status.FAILED and not (
                self.jobs[id].poison_at >= 0 or self.jobs[id].crash_at >= 0 or id in self.unlucky
            ):
                raise RuntimeError(f"{id} failed without fault: {stream.error}")
        if self.simulation.admission.inside() or len(self.simulation.admission.ledger):
            raise RuntimeError("somebody is still inside")
        self.simulation.check()


def chaos(seed: int, events: int) -> Chaos:
    """Arrivals, cancels, deadlines, poison, memory limits and worker deaths until so many
    events.
    """
    policies = {
        "chat": Policy(rows=8, units=256, timeout=60.0),
        "image": Policy(rows=4, timeout=30.0),
        "embed": Policy(rows=16, timeout=5.0),
    }
    limits = Limits(total=200, waiting=20, running=6, wait=60.0)
    simulation = world(policies, limits, memory=1200, out_of_memory_at=14, workers=2)
    made = Chaos(simulation, random.Random(seed))
    simulation.touched = made.touched
    rng = made.rng

    def again() -> None:
        made.arrive()
        simulation.admission.expire()
        if simulation.events < events:
            simulation.at(simulation.clock.now + rng.expovariate(12), again)

    def death() -> None:
        worker = rng.randrange(2)
        tickets = simulation.admission._stations[worker].tickets
        made.unlucky.update(id for id, ticket in tickets.items() if ticket.alone)
        simulation.kill(worker)
        if simulation.events < events:
            simulation.at(simulation.clock.now + rng.expovariate(1 / 20), death)

    def tick() -> None:
        simulation.admission.expire()
        if simulation.admission.inside():
            simulation.at(simulation.clock.now + 1.0, tick)

    simulation.at(0.0, again)
    simulation.at(5.0, death)
    simulation.run(events=events)
    simulation.at(simulation.clock.now, tick)
    simulation.run()
    return made
