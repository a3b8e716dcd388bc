"""Text engines on the same requests in the same run: ours, transformers, and three that are known
to be quick on a processor; then ours and static batches under a public trace in real time.

Run: python -m tests.benchmarks.text [--only ours,openvino] [--rounds 3] [--no-replay]
The first run makes an environment for each peer in the cache folder, which takes a while.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

from pipelines import models
from tests.benchmarks import report
from tests.benchmarks.peers.entrants import CORES, Entrant, Setting, entrants
from tests.benchmarks.peers.homes import Missing
from tests.benchmarks.peers.running import Round, Running, tune
from tests.benchmarks.peers.wire import Ask
from tests.benchmarks.replay import House, Latency, percentiles
from tests.benchmarks.report import Load, Result
from tests.benchmarks.workload import REQUESTS, ROOT, SCALE, Text, at_once, paced, trace

LOADS = (0.3, 0.5, 0.7, 0.9)
PATIENCE = 100.0  # seconds of rounds an entrant gets, the first not counted
PROBE = 48  # requests at once that tell our capacity
Found: TypeAlias = dict[Entrant, Running | Missing]
PLOT = ROOT / "build/text.png"


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Text engines on the same requests.")
    parser.add_argument("--only", default="", help="of: " + ",".join(keys(entrants(None, None))))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="ours; without it what `make run` takes")
    parser.add_argument("--rows", type=int, help="ours; without it what `make run` takes")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each load of the replay")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--no-replay", action="store_true")
    parts.add_argument("--only-replay", action="store_true")
    return parser.parse_args()


def keys(all: Sequence[Entrant]) -> list[str]:
    return list(dict.fromkeys(entrant.key for entrant in all))


def chosen(options: argparse.Namespace) -> list[Entrant]:
    """Those of --only, or all."""
    known = entrants(options.threads, options.rows)
    wanted = options.only.split(",") if options.only else keys(known)
    strangers = set(wanted) - set(keys(known))
    if strangers:
        raise SystemExit(f"--only knows {', '.join(keys(known))}, not {', '.join(strangers)}.")
    return [entrant for entrant in known if entrant.key in wanted]


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers are ended
    write(f"`python -m tests.benchmarks.text {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    write(f"\n{report.machine()}\n")
    found = models.find(None, "chat", lambda fraction, words: None)
    text = Text.read(found.folder)
    results = [] if options.only_replay else at_once_all(options, found.folder, at_once(text))
    loads = [] if options.no_replay else replays(options, found.folder, trace(text))
    report.draw(results, loads, PLOT)
    write(f"Plot: {PLOT.relative_to(ROOT)}")


# 32 requests at once


def at_once_all(options: argparse.Namespace, folder: Path, asks: list[Ask]) -> list[Result]:
    prompts, outputs = sum(len(ask.prompt) for ask in asks), sum(ask.tokens for ask in asks)
    write(f"{REQUESTS} requests at once: {prompts} prompt and {outputs} output tokens, greedy.\n")
    write("Settings tried, output tokens/s on every second request:\n")
    with ExitStack() as stack:
        found = {entrant: tuned(entrant, folder, asks, stack) for entrant in chosen(options)}
        rounds = measured(found, asks, options.rounds)
    truth = reference(found, rounds)
    results = [summed(entrant, each, rounds, truth) for entrant, each in found.items()]
    write("\n" + report.compared(results))
    return results


def tuned(
    entrant: Entrant, folder: Path, asks: Sequence[Ask], stack: ExitStack
) -> Running | Missing:
    """The entrant with its best setting, ready, and ended with the stack; or why not."""

    def say(entrant: Entrant, setting: Setting, found: str) -> None:
        write(f"- {entrant.name}, {shown(setting)}: {found}")

    try:
        running = tune(entrant, folder, asks, say)
        stack.callback(running.stop)
        return running
    except Missing as error:
        write(f"- {entrant.name} does not run: {error}")
        return error


def measured(found: Found, asks: Sequence[Ask], turns: int) -> dict[Entrant, list[Round]]:
    """Everybody's rounds, in turns so that a slow minute is shared; who is slow has fewer, and who
    fails has no more.
    """
    rounds: dict[Entrant, list[Round]] = {entrant: [] for entrant in found}
    for turn in range(turns):
        for entrant, own in rounds.items():
            running, spent = found[entrant], sum(one.seconds for one in own)
            late = turn and (entrant.once or spent + own[-1].seconds > PATIENCE)
            if isinstance(running, Missing) or late:
                continue
            try:
                own.append(running.round(asks))
            except Missing as error:
                found[entrant] = error
    return rounds


def reference(found: Found, rounds: dict[Entrant, list[Round]]) -> Sequence[Sequence[int]] | None:
    """The tokens of transformers' own generate in fp32, alone if it was asked, else in batches."""
    for key in ("single", "static"):
        for entrant, each in found.items():
            if entrant.key == key and isinstance(each, Running):
                if each.setting["dtype"] == "float32":
                    return rounds[entrant][0].tokens
    return None


def summed(
    entrant: Entrant,
    each: Running | Missing,
    rounds: dict[Entrant, list[Round]],
    truth: Sequence[Sequence[int]] | None,
) -> Result:
    if isinstance(each, Missing):
        return Result(entrant.name, reason=str(each))
    own = rounds[entrant]
    return Result(
        entrant.name,
        shown(each.setting),
        each.version,
        [one.rate for one in own],
        statistics.median(one.processor for one in own),
        None if truth is None else equal(own[0].tokens, truth),
        entrant.note,
    )


def equal(tokens: Sequence[Sequence[int]], truth: Sequence[Sequence[int]]) -> float:
    """Share of positions with the same token; after a first difference few are."""
    same = sum(
        mine == theirs
        for own, other in zip(tokens, truth, strict=True)
        for mine, theirs in zip(own, other, strict=False)
    )
    return same / sum(map(len, truth))


def shown(setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items()) or "none given"


# The trace


def replays(options: argparse.Namespace, folder: Path, asks: list[Ask]) -> list[Load]:
    """Ours as `make run` has it, and static batches with all cores, at the same rates."""
    given = {
        name: value
        for name, value in (("threads", options.threads), ("rows", options.rows))
        if value is not None
    }
    ours = asyncio.run(ours_all(given, asks, options.seconds))
    static = next(each for each in entrants(None, None) if each.key == "static")
    setting = {"dtype": "float32", "threads": CORES, "rows": 16}
    running = Running(static, setting, folder, asks)
    loads = []
    try:
        for load in ours:
            loads.append(load)
            own = paced(asks, load.rate, options.seconds)
            loads.append(summary("static batches", load.share, load.rate, running.replay(own)))
    finally:
        running.stop()
    prompts = statistics.mean(len(ask.prompt) for ask in asks)
    outputs = statistics.mean(ask.tokens for ask in asks)
    write(
        f"Azure's conversation trace, prompts and answers divided by {SCALE} (mean {prompts:.0f} "
        f"and {outputs:.0f} tokens), arrivals in real time, stretched to each rate, "
        f"{options.seconds:.0f} s a load; static batches of up to 16, streamed:\n"
    )
    write(report.latencies(loads))
    return loads


async def ours_all(given: Setting, asks: list[Ask], seconds: float) -> list[Load]:
    """Capacity first, then each load."""
    house = House(given)
    try:
        await house.start()
        probe = [Ask(ask.prompt, ask.tokens) for ask in asks[:PROBE]]
        await house.replay(probe[:16])  # the cost model learns this machine
        times = await house.replay(probe)
        capacity = len(probe) / max(own[-1] for own in times if own)
        write(f"Capacity of ours: {capacity:.2f} requests/s ({PROBE} of the trace at once).\n")
        loads = []
        for share in LOADS:
            own = paced(asks, share * capacity, seconds)
            loads.append(summary("Carpool", share, share * capacity, await house.replay(own)))
        return loads
    finally:
        await house.close()


def summary(name: str, share: float, rate: float, times: Sequence[Sequence[float]]) -> Load:
    found = Latency.of(times)
    return Load(name, share, rate, len(times), percentiles(found.first), percentiles(found.gaps))


if __name__ == "__main__":
    main()
