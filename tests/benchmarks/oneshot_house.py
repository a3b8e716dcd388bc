"""Single requests through the dispatcher and a worker process, as the application runs them.

Measures when each caller has a result. It does not know the page, nor what it is compared to.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pipelines import Model, encodes
from pipelines.embed import EmbedFront
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.metrics import CallRecord
from queueing.process import ProcessWorker
from queueing.stream import Stream
from queueing.work import Card, Front, Full, Policy, Request, Status

TASK = "task"  # the only one
REGISTERED = encodes("embed")
GRACE = 3.0  # seconds after the last arrival, after which nobody waits any longer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one caller: seconds from arrival to result, or to being refused or giving
    up.
    """

    seconds: float
    status: Status
    result: Any = None

    @property
    def served(self) -> bool:
        return self.status is Status.FINISHED


def seconds(outcomes: Sequence[Outcome]) -> list[float]:
    """Of who was served or gave up, which is no less than the wait would have been."""
    return [each.seconds for each in outcomes if each.status is not Status.REFUSED]


class House:
    """A dispatcher with one worker process; what is not given is the registry's encoder."""

    def __init__(
        self,
        setting: Mapping[str, Any],
        policy: Policy | None = None,
        model: Model = REGISTERED,
        front: Front | None = None,
    ) -> None:
        path, given = model.pipeline if isinstance(model.pipeline, tuple) else (model.pipeline, {})
        policies = {TASK: policy or model.policy}
        worker = partial(ProcessWorker, {TASK: (path, {**given, **setting})}, policies)
        self.dispatcher = Dispatcher(policies, [worker], Limits(total=20_000))
        self.front = front or EmbedFront()
        self._card: Card | None = None
        self._people = 0

    async def start(self) -> None:
        await self.dispatcher.start()
        self.dispatcher.want(TASK)
        while (state := await self.dispatcher.loaded(TASK, 5.0)).card is None:
            if state.error:
                raise RuntimeError(state.error)
        self._card = state.card

    async def close(self) -> None:
        await self.dispatcher.close()

    @property
    def card(self) -> Card:
        if self._card is None:
            raise RuntimeError("a request before the start")
        return self._card

    def request(self, **payload: Any) -> Request:
        """As the front makes it."""
        return replace(self.front.check(payload, self.card), task=TASK)

    def calls(self) -> list[CallRecord]:
        """Device calls since the last time this was asked."""
        kept = self.dispatcher.metrics.calls
        found = list(kept)
        kept.clear()
        return found

    async def replay(
        self, requests: Sequence[Request], moments: Sequence[float], grace: float = GRACE
    ) -> list[Outcome]:
        """Everybody another person, each at a moment in seconds from now."""
        began = time.perf_counter() + 0.05
        end = moments[-1] + grace
        return await asyncio.gather(
            *(
                self._ask(request, began + moment, began + end)
                for request, moment in zip(requests, moments, strict=True)
            )
        )

    async def capacity(self, requests: Sequence[Request]) -> float:
        """Requests a second when all come at once, after some that nobody counts."""
        warm = requests[: len(requests) // 4]
        await self.replay(warm, [0.0] * len(warm), 600.0)
        found = await self.replay(requests, [0.0] * len(requests), 600.0)
        if not all(each.served for each in found):
            raise RuntimeError("of requests at once some were refused")
        return len(requests) / max(each.seconds for each in found)

    async def _ask(self, request: Request, at: float, end: float) -> Outcome:
        await asyncio.sleep(at - time.perf_counter())
        self._people += 1
        try:
            stream = self.dispatcher.submit(request, f"person {self._people}")
        except Full:
            return Outcome(time.perf_counter() - at, Status.REFUSED)
        try:
            async with asyncio.timeout(end - time.perf_counter()):
                await over(stream)
        except TimeoutError:
            stream.cancel()
        if stream.status is Status.FAILED:
            raise RuntimeError(f"a request failed: {stream.error}")
        return Outcome(time.perf_counter() - at, stream.status, stream.result)


async def over(stream: Stream) -> None:
    """Until its end."""
    version = stream.version
    while not stream.status.terminal:
        version = await stream.changed(version, 60.0)
