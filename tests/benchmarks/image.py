"""Pictures of different steps and guidance as they arrive: diffusers one by one and in static
batches, and ours, joined at any step. The model is a tiny SDXL with random weights.

Run: python -m tests.benchmarks.image [--rates 3 5 8 12] [--rounds 3] [--plot]
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks import image_plot, report
from tests.benchmarks.image_ways import ALIKE, OURS, Asked, Carpool, Point, Static, asked, write
from tests.benchmarks.workload import ROOT

PLOT = ROOT / "assets/image.png"
GOAL = 0.5  # of the mean of the better static batches, at GOAL_RATE
GOAL_RATE = 8.0


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Pictures under load.")
    parser.add_argument("--rates", type=float, nargs="+", default=[3.0, 5.0, 8.0, 12.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="of each round")
    parser.add_argument("--threads", type=int, default=1, help="of everybody's torch")
    parser.add_argument("--plot", action="store_true", help="draw assets/image.png")
    return parser.parse_args()


async def measured(options: argparse.Namespace, folder: Path) -> list[Point]:
    """Everybody at each rate, in turns, with the same arrivals."""
    statics = {name: Static(folder, alike) for name, alike in ALIKE.items()}
    ours = Carpool(folder, options.threads)
    await ours.start()
    points = []
    try:
        warm = asked(8, 100.0, 99)
        truth = await ours.replay(warm)
        for static in statics.values():
            check(warm, truth.pictures, static.replay(warm).pictures)
        for rate in options.rates:
            waits: dict[str, list[list[float]]] = {}
            for turn in range(options.rounds):
                people = asked(options.requests, rate, turn)
                for name, static in statics.items():
                    waits.setdefault(name, []).append(static.replay(people).seconds)
                waits.setdefault(OURS, []).append((await ours.replay(people)).seconds)
            points += [Point.of(name, rate, rounds) for name, rounds in waits.items()]
            say(image_plot.table(points[-len(waits) :]))
    finally:
        await ours.close()
    return points


def check(people: list[Asked], ours: list, theirs: list) -> None:
    """Raises for a picture of ours that is not diffusers' own."""
    for person, one, other in zip(people, ours, theirs, strict=True):
        off = abs(one.astype(int) - other.astype(int)).max()
        if off > 2:
            raise RuntimeError(f"{person} drew two pictures that differ by {off} of 255.")


def verdict(points: list[Point]) -> str:
    """At the rate of the goal."""
    there = {each.name: each for each in points if each.rate == GOAL_RATE}
    if not there:
        return ""
    static = min(each.mean for name, each in there.items() if "static" in name)
    share = there[OURS].mean / static
    word = "met" if share <= GOAL else "MISSED"
    return f"- mean at {GOAL_RATE:g}/s {share:.2f} of the better static one's, goal {GOAL}: {word}"


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    torch.set_num_threads(options.threads)
    say(f"`python -m tests.benchmarks.image {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    say(f"\n{report.machine()}\nfloat32, {options.threads} threads for everybody's torch.\n")
    with tempfile.TemporaryDirectory() as folder:
        model = write(Path(folder) / "sdxl")
        points = asyncio.run(measured(options, model))
    say(verdict(points))
    if options.plot:
        image_plot.draw(points, PLOT)
        say(f"Plot: {PLOT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
