"""Eight chat while twenty draw, on the default models in fp32; then 200 pictures, and whether the
memory of the worker stays flat.

Run: python -m tests.benchmarks.image_people [--threads 2] [--pictures 200]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from pipelines import factory, served
from queueing.desk import Service
from queueing.dispatcher import Dispatcher
from queueing.process import ProcessWorker
from queueing.stream import Stream
from queueing.work import Card, Status
from tests.benchmarks import report
from tests.benchmarks.replay import percentiles
from tests.benchmarks.residency import growth

CHATS, DRAWINGS, TOKENS = 8, 20, 80
WORDS = ("red apple", "blue heart", "yellow duck", "smiling face", "old house")
LEAD = 2.0  # seconds that chats run before anybody draws
TASKS = ("chat", "image")


@dataclass(slots=True)
class Answer:
    """What became of a request, and the moments at which its text grew."""

    stream: Stream
    result: Any = None
    moments: list[float] = field(default_factory=list)

    @property
    def gaps(self) -> list[float]:
        return [later - one for one, later in zip(self.moments, self.moments[1:], strict=False)]


class Home:
    """Both default models in one worker process, as the application has them."""

    def __init__(self, threads: int | None) -> None:
        made = served({})
        given = {"dtype": "float32", "threads": threads}
        paths = {name: _with(made.models[name].pipeline, given) for name in TASKS}
        policies = {name: made.models[name].policy for name in TASKS}
        self.fronts: dict[str, Service] = {n: factory(made.fronts[n])() for n in TASKS}
        self.worker = ProcessWorker(paths, policies)
        self.dispatcher = Dispatcher(policies, [lambda: self.worker])
        self.cards: dict[str, Card] = {}

    async def start(self) -> None:
        await self.dispatcher.start()
        for task in TASKS:
            self.dispatcher.want(task)
            while (state := await self.dispatcher.loaded(task, 5.0)).card is None:
                if state.error:
                    raise RuntimeError(state.error)
            self.cards[task] = state.card

    async def ask(self, task: str, payload: Mapping[str, Any], person: str) -> Answer:
        request = self.fronts[task].check(payload, self.cards[task])
        stream = self.dispatcher.submit(request, person)
        answer, version, length = Answer(stream), stream.version, 0
        while not stream.status.terminal:
            version = await stream.changed(version, 60.0)
            if len(stream.text) > length:
                length = len(stream.text)
                answer.moments.append(time.perf_counter())
        if stream.status is not Status.FINISHED:
            raise RuntimeError(f"a request ended as {stream.status}: {stream.error}")
        answer.result = stream.result
        return answer

    def longest(self, kind: str) -> float:
        """Seconds of the longest call of a kind."""
        calls = [record.call for record in self.dispatcher.metrics.calls]
        own = [each.seconds for each in calls if each.task == "image" and each.key[0] == kind]
        return max(own, default=0.0)


def _with(pipeline: Any, given: Mapping[str, Any]) -> Any:
    path, own = pipeline if isinstance(pipeline, tuple) else (pipeline, {})
    return path, {**own, **given}


def chats() -> list[dict[str, Any]]:
    asked = (f"Tell me {n + 2} things about {word}." for n, word in enumerate(WORDS * 2))
    messages = [[{"role": "user", "content": each}] for each in asked]
    given = {"max_tokens": TOKENS, "temperature": 0.0}
    return [{"messages": each, **given} for each in messages[:CHATS]]


def drawings() -> list[dict[str, Any]]:
    return [
        {
            "prompt": WORDS[n % len(WORDS)],
            "steps": (8, 12, 25)[n % 3],
            "guidance": (1.0, 3.0, 5.0)[n % 3],
            "seed": n,
        }
        for n in range(DRAWINGS)
    ]


async def together(home: Home) -> None:
    """Chats alone, then chats and drawings, then every drawing alone."""
    talks, wishes = chats(), drawings()
    await asyncio.gather(*(home.ask("image", w, f"w{n}") for n, w in enumerate(wishes)))  # warm
    alone = [await home.ask("chat", each, "a") for each in talks]
    home.dispatcher.metrics.calls.clear()
    idle = await asyncio.gather(*(home.ask("chat", t, f"t{n}") for n, t in enumerate(talks)))
    talking = [
        asyncio.create_task(home.ask("chat", {**each, "max_tokens": 4 * TOKENS}, f"t{n}"))
        for n, each in enumerate(talks)
    ]
    await asyncio.sleep(LEAD)
    began = time.perf_counter()
    drawn = await asyncio.gather(*(home.ask("image", w, f"d{n}") for n, w in enumerate(wishes)))
    ended = time.perf_counter()
    answers = await asyncio.gather(*talking)
    longest = home.longest("denoise")
    gaps = [
        later - one
        for each in answers
        for one, later in zip(each.moments, each.moments[1:], strict=False)
        if one >= began and later <= ended
    ]
    solo = [await home.ask("image", wish, "a") for wish in wishes]
    off = max(_apart(one, other) for one, other in zip(drawn, solo, strict=True))
    same = sum(
        one.stream.text == other.stream.text and long.stream.text.startswith(one.stream.text)
        for one, other, long in zip(alone, idle, answers, strict=True)
    )
    target = home.cards["chat"].target or 0.0
    bound = 3 * target + longest
    _say(
        report.table(
            ("figure", "value"),
            [
                ["gaps between tokens, 8 chats alone, ms, p50 / p95 / most", _ms(_all(idle))],
                [f"the same while {DRAWINGS} draw", _ms(gaps)],
                ["gaps measured while they draw", f"{len(gaps)}"],
                ["seconds until all pictures were there", f"{ended - began:.1f}"],
                ["longest denoise call, ms", f"{1000 * longest:.0f}"],
                ["chats equal to those alone", f"{same} of {CHATS}"],
                ["largest difference of a picture to its own alone, of 255", f"{off}"],
            ],
        )
    )
    word = "met" if gaps and max(gaps) <= bound else "MISSED"
    _say(
        f"- longest gap {1000 * max(gaps, default=0.0):.0f} ms, bound {1000 * bound:.0f} ms "
        f"(3 × target of {1000 * target:.0f} + one denoise call): {word}\n"
    )


async def soak(home: Home, pictures: int) -> None:
    """Twenty at a time, and the worker's memory after each twenty."""
    bytes = []
    for _ in range(0, pictures, DRAWINGS):
        wishes = [{**wish, "steps": 4} for wish in drawings()]
        await asyncio.gather(*(home.ask("image", w, f"d{n}") for n, w in enumerate(wishes)))
        bytes.append(psutil.Process(home.worker.pid).memory_info().rss)
    shown = ", ".join(f"{each / 1e6:.0f}" for each in bytes)
    _say(f"- {pictures} pictures; MB of the worker: {shown}; growth {100 * growth(bytes):.1f} %")


def _apart(one: Answer, other: Answer) -> int:
    pairs = zip(one.result.images, other.result.images, strict=True)
    return max(int(np.abs(a.astype(int) - b.astype(int)).max()) for a, b in pairs)


def _all(answers: Sequence[Answer]) -> list[float]:
    return [gap for each in answers for gap in each.gaps]


def _ms(values: Sequence[float]) -> str:
    if not values:
        return "none"
    middle, high, _ = percentiles(values)
    return f"{1000 * middle:.0f} / {1000 * high:.0f} / {1000 * max(values):.0f}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def run(threads: int | None, pictures: int) -> None:
    home = Home(threads)
    await home.start()
    try:
        await together(home)
        await soak(home, pictures)
    finally:
        await home.dispatcher.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="People chat while others draw.")
    parser.add_argument("--threads", type=int, help="of torch; else one a core")
    parser.add_argument("--pictures", type=int, default=200)
    options = parser.parse_args()
    _say(f"`python -m tests.benchmarks.image_people {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    _say(f"\n{report.machine()}\n")
    asyncio.run(run(options.threads, options.pictures))


if __name__ == "__main__":
    main()
