"""Two models, room for one: what switching costs, and whether memory stays flat.

The chat model and the encoder are asked in turns, in a worker process whose budget holds the larger
of them. Run: python -m tests.benchmarks.residency [turns]
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from pipelines import Model, factory, served
from queueing.desk import Service
from queueing.dispatcher import Dispatcher
from queueing.process import ProcessWorker
from queueing.work import Reason, Request, Status

Payload = Mapping[str, Any]
TURNS = 50
ASKED: Mapping[str, Payload] = {
    "chat": {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0.0,
    },
    "embed": {"texts": ["A cat sleeps on the sofa.", "Shares fell in early trading."]},
}


@dataclass(slots=True)
class Switches:
    """What was seen, turn by turn: the worker's bytes, seconds to an answer, loads, answers."""

    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    loads: int = 0
    wrong: int = 0


class Narrow:
    """Models in a worker process with room for the larger one, and the services that ask them."""

    def __init__(self, models: Mapping[str, Model], fronts: Mapping[str, str]) -> None:
        self._models = models
        self._fronts: dict[str, Service] = {name: factory(path)() for name, path in fronts.items()}

    async def alternate(self, asked: Mapping[str, Payload], turns: int) -> Switches:
        """Ask in turns; answers must stay what they were when the model was asked first."""
        policies = {
            name: replace(model.policy, preload=False) for name, model in self._models.items()
        }
        paths = {name: model.pipeline for name, model in self._models.items()}
        worker = ProcessWorker(paths, policies, 1)  # byte: whatever comes, others must go
        dispatcher = Dispatcher(policies, [lambda: worker])
        await dispatcher.start()
        seen, first = Switches(), dict[str, Any]()
        try:
            for turn in range(turns):
                name = list(asked)[turn % len(asked)]
                began = time.perf_counter()
                answer = await self._ask(dispatcher, name, asked[name])
                seen.seconds.append(time.perf_counter() - began)
                seen.wrong += _unlike(first.setdefault(name, answer), answer)
                seen.bytes.append(psutil.Process(worker.pid).memory_info().rss)
        finally:
            await dispatcher.close()
        seen.loads = sum(
            record.call.reason is Reason.LOAD and not record.call.error
            for record in dispatcher.metrics.calls
        )
        return seen

    async def _ask(self, dispatcher: Dispatcher, name: str, payload: Payload) -> Any:
        front = self._fronts[name]
        dispatcher.want(front.task)
        while (state := await dispatcher.loaded(front.task, 5.0)).card is None:
            if state.error:
                raise RuntimeError(state.error)
        request: Request = front.check(payload, state.card)
        stream = dispatcher.submit(request, "somebody")
        version = stream.version
        while not stream.status.terminal:
            version = await stream.changed(version, 60.0)
        if stream.status is not Status.FINISHED:
            raise RuntimeError(f"a request ended as {stream.status}: {stream.error}")
        return stream.text or front.finish(request, stream.result)


def _unlike(one: Any, other: Any) -> bool:
    return str(one) != str(other)


def growth(bytes: Sequence[int]) -> float:
    """The last fifth over the second one, less 1; the first warms up."""
    fifth = max(len(bytes) // 5, 1)
    return statistics.median(bytes[-fifth:]) / statistics.median(bytes[fifth : 2 * fifth]) - 1


def main() -> None:
    turns = int(sys.argv[1]) if len(sys.argv) > 1 else TURNS
    made = served({})
    narrow = Narrow(made.models, {name: made.fronts[name] for name in ASKED})
    seen = asyncio.run(narrow.alternate(ASKED, turns))
    shown = [seen.bytes[place] for place in range(0, turns, max(turns // 10, 1))]
    sys.stdout.write(
        f"{turns} turns, {seen.loads} loads, {seen.wrong} answers unlike the first of their model\n"
        f"seconds to an answer, loading included: median {statistics.median(seen.seconds):.1f}, "
        f"most {max(seen.seconds):.1f}\n"
        f"MB of the worker: {', '.join(f'{each / 1e6:.0f}' for each in shown)}; growth "
        f"{100 * growth(seen.bytes):.1f} %\n"
    )


if __name__ == "__main__":
    main()
