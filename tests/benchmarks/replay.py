"""Requests in real time through the dispatcher and a worker process, as the application runs them.

Measures when each reader has which token. It does not know the page, nor what it is compared to.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipelines import CHAT
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.process import ProcessWorker
from queueing.settings import Settings
from queueing.work import Request, Status
from tests.benchmarks.peers.wire import Ask
from tests.benchmarks.workload import Greedy

ENDLESS = "tests.benchmarks.peers.with_carpool:Endless"


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds: to the first token, and between two of one answer."""

    first: Sequence[float]
    gaps: Sequence[float]

    @classmethod
    def of(cls, times: Sequence[Sequence[float]]) -> Latency:
        """From the moments at which each answer's tokens were there."""
        gaps = [b - a for own in times for a, b in zip(own, own[1:], strict=False)]
        return cls([own[0] for own in times if own], gaps)


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p95, p99."""
    if len(values) < 2:
        return (values[0],) * 3 if values else (0.0,) * 3
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[94], cuts[98]


class House:
    """A dispatcher with one worker process; policy and pipeline are the registry's."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        arguments = dict(setting)
        rows = arguments.pop("rows", Settings().rows)
        policies = {"chat": replace(CHAT.policy, rows=rows)}
        worker = partial(ProcessWorker, {"chat": (ENDLESS, arguments)}, policies)
        self._dispatcher = Dispatcher(policies, [worker], Limits(total=10_000))
        self._greedy: Greedy | None = None
        self._people = 0

    async def start(self) -> None:
        await self._dispatcher.start()
        while (state := await self._dispatcher.loaded("chat", 5.0)).card is None:
            if state.error:
                raise RuntimeError(state.error)
        self._greedy = Greedy(state.card)

    async def close(self) -> None:
        await self._dispatcher.close()

    async def replay(self, asks: Sequence[Ask]) -> list[list[float]]:
        """For each request, when each of its tokens was there, in seconds since it came."""
        if self._greedy is None:
            raise RuntimeError("a replay before the start")
        requests = [self._greedy.request(ask) for ask in asks]
        began = time.perf_counter()
        return await asyncio.gather(
            *(self._ask(each, began + ask.at) for each, ask in zip(requests, asks, strict=True))
        )

    async def _ask(self, request: Request, at: float) -> list[float]:
        """One person asks one thing. Tokens that arrive together are there at once."""
        await asyncio.sleep(at - time.perf_counter())
        self._people += 1
        stream = self._dispatcher.submit(request, f"person {self._people}")
        version, length, moments = stream.version, 0, list[float]()
        while not stream.status.terminal:
            version = await stream.changed(version, 60.0)
            if len(stream.text) > length:
                length = len(stream.text)
                moments.append(time.perf_counter() - at)
        if stream.status is not Status.FINISHED:
            raise RuntimeError(f"a request ended as {stream.status}: {stream.error}")
        return moments
