"""Single short texts that come by themselves, at shares of our capacity: our policy beside fixed
windows and no batching; and a promised latency, with who is refused for it.

All policies get the same arrival times. It does not know pipelines.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from queueing.work import Policy, Request, Status
from tests.benchmarks import report
from tests.benchmarks.oneshot_house import REGISTERED, House, Outcome, seconds
from tests.benchmarks.oneshot_texts import Source, arrivals, short
from tests.benchmarks.peers.entrants import Setting
from tests.benchmarks.replay import percentiles

Say: TypeAlias = Callable[[str], None]

LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
OFFERED = (0.3, 0.6, 0.9, 1.0, 1.2, 1.5)
PROMISE = 0.2  # seconds
PROBE, PROBES = 1000, 3  # texts at once that tell the capacity, and how often
OURS = "Carpool"
POLICIES = {
    OURS: REGISTERED.policy,
    "window of 10 ms": replace(REGISTERED.policy, wait=0.01),
    "window of 50 ms": replace(REGISTERED.policy, wait=0.05),
    "no batching": replace(REGISTERED.policy, rows=1),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One policy at one load."""

    name: str
    share: float  # of our capacity
    rate: float  # arrivals a second
    mean: float  # seconds, of who was not refused
    middle: float
    worst: tuple[float, float]  # p95 and p99
    rows: float  # of a call, mean
    refused: float  # share of all
    late: int  # gave up

    @classmethod
    def of(
        cls, name: str, share: float, rate: float, found: Sequence[Outcome], rows: float
    ) -> Point:
        waits = seconds(found)
        middle, *worst = percentiles(waits)
        return cls(
            *(name, share, rate, statistics.mean(waits) if waits else 0.0, middle),
            *((worst[0], worst[1]), rows),
            sum(each.status is Status.REFUSED for each in found) / len(found),
            sum(each.status is Status.CANCELLED for each in found),
        )


class Street:
    """Houses side by side, one a policy, and the texts that everybody sends."""

    def __init__(self, folder: Path, setting: Setting, policies: dict[str, Policy]) -> None:
        self.houses = {name: House(setting, policy) for name, policy in policies.items()}
        self._texts = Source.read(folder).pieces(PROBE, short)

    def requests(self, name: str, count: int) -> list[Request]:
        house = self.houses[name]
        return [house.request(texts=[self._texts[n % PROBE]]) for n in range(count)]

    async def __aenter__(self) -> Street:
        async with AsyncExitStack() as stack:
            for house in self.houses.values():
                stack.push_async_callback(house.close)
                await house.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def capacity(self, name: str) -> float:
        found: float = await self.houses[name].capacity(self.requests(name, PROBE))
        return found

    async def point(
        self, name: str, share: float, rate: float, rounds: Sequence[Sequence[float]]
    ) -> Point:
        """All rounds of arrivals at one rate, one after the other."""
        house, found, rows = self.houses[name], list[Outcome](), list[float]()
        for moments in rounds:
            house.calls()
            found += await house.replay(self.requests(name, len(moments)), moments)
            rows += [record.call.rows for record in house.calls()]
        return Point.of(name, share, rate, found, statistics.mean(rows or [0.0]))


async def load(folder: Path, setting: Setting, length: float, say: Say) -> list[Point]:
    """The part: mean and p99 of each policy at each load."""
    points = list[Point]()
    async with Street(folder, setting, POLICIES) as street:
        capacity = statistics.median([await street.capacity(OURS) for _ in range(PROBES)])
        for name in POLICIES:
            if name != OURS:  # warm, so that costs are known
                warm = street.requests(name, PROBE // 8)
                await street.houses[name].replay(warm, [0.0] * len(warm), 60.0)
        say(
            f"Capacity of ours: {capacity:.0f} texts/s ({PROBE:,} at once); "
            f"{length:.0f} s a load.\n"
        )
        for share in LOADS:
            rate = share * capacity
            rounds = [arrivals(rate, length / 2, seed) for seed in (1, 2)]
            over = {each.name for each in points if each.late}
            for name in POLICIES:
                if name not in over:
                    points.append(await street.point(name, share, rate, rounds))
    say(latencies(points))
    say("\n".join(f"- {line}" for line in compared(points)))
    return points


def latencies(points: Sequence[Point]) -> str:
    """In milliseconds; who gave up waited at least so long."""
    rows = []
    for share in dict.fromkeys(each.share for each in points):
        own = {each.name: each for each in points if each.share == share}
        rate = next(iter(own.values())).rate
        cells = [shown(own.get(name)) for name in POLICIES]
        rows.append([f"{share:.0%}", f"{rate:.0f}", *cells])
    heads = [f"{name}: mean / p99 ms (rows a call)" for name in POLICIES]
    return report.table(["load", "texts/s", *heads], rows)


def shown(each: Point | None) -> str:
    if each is None:
        return "overloaded before"
    late = f", {each.late} gave up" if each.late else ""
    return f"{1000 * each.mean:.1f} / {1000 * each.worst[1]:.1f} ({each.rows:.1f}{late})"


def compared(points: Sequence[Point]) -> list[str]:
    """Ours beside the best of the others at each load."""
    said = []
    for share in dict.fromkeys(each.share for each in points):
        own = {each.name: each for each in points if each.share == share}
        ours = own.pop(OURS, None)
        if ours is None or not own:
            continue
        mean = min(own.values(), key=lambda each: each.mean)
        worst = min(own.values(), key=lambda each: each.worst[1])
        said.append(
            f"{share:.0%}: mean {mean.mean / ours.mean:.2f} times ours ({mean.name}), "
            f"p99 {worst.worst[1] / ours.worst[1]:.2f} times ours ({worst.name}), at best"
        )
    return said


# A promised latency


async def latency(folder: Path, setting: Setting, length: float, say: Say) -> list[Point]:
    """The part: p95 of who is served, and the share that is refused."""
    policies = {OURS: replace(REGISTERED.policy, latency=PROMISE)}
    points = list[Point]()
    async with Street(folder, setting, {**policies, "unpromised": REGISTERED.policy}) as street:
        capacity = statistics.median([await street.capacity("unpromised") for _ in range(PROBES)])
        warm = street.requests(OURS, 64)
        for place in range(8):  # the cost of its calls is learned with a few at once
            await street.houses[OURS].replay(warm[8 * place : 8 * place + 8], [0.0] * 8)
        say(
            f"Capacity without a promise: {capacity:.0f} texts/s; "
            f"promised {1000 * PROMISE:.0f} ms.\n"
        )
        for share in OFFERED:
            rate = share * capacity
            moments = arrivals(rate, length)
            points.append(await street.point(OURS, share, rate, [moments]))
    say(promised(points))
    return points


def promised(points: Sequence[Point]) -> str:
    rows = [
        [
            f"{each.share:.0%}",
            f"{each.rate:.0f}",
            f"{1000 * each.middle:.0f} / {1000 * each.worst[0]:.0f} / {1000 * each.worst[1]:.0f}",
            f"{each.refused:.1%}",
            f"{each.rate * (1 - each.refused):.0f}",
            f"{each.rows:.1f}",
            "met" if each.worst[0] <= PROMISE else "MISSED",
        ]
        for each in points
    ]
    heads = ("load", "texts/s", "served, ms, p50 / p95 / p99", "refused", "served/s")
    return report.table([*heads, "rows a call", f"p95 <= {1000 * PROMISE:.0f} ms"], rows)
