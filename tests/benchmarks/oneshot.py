"""One-shot text tasks: embeddings by the default encoder, ours and others on the same texts in the
same run; waits under load; single texts beside a file; a promised latency.

Run: python -m tests.benchmarks.oneshot [throughput load file latency] [--mix uniform] [--plot]
The first run makes an environment for each peer in the cache folder, which takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

from pipelines import models
from tests.benchmarks import oneshot_draw, oneshot_file, oneshot_load, oneshot_ways, report
from tests.benchmarks.peers.entrants import CORES
from tests.benchmarks.workload import ROOT

PARTS = ("throughput", "load", "file", "latency")
PLOT = ROOT / "assets/oneshot.png"


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One-shot text tasks.")
    parser.add_argument("parts", nargs="*", metavar="part", help="of: " + ", ".join(PARTS))
    parser.add_argument("--mix", default="", help="only: " + ", ".join(oneshot_ways.MIXES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=CORES, help="of everybody's torch")
    parser.add_argument("--dtype", default="float32", help="everybody's")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    parser.add_argument("--rate", type=float, default=8.0, help="single texts a second in `file`")
    parser.add_argument("--plot", action="store_true", help="draw assets/oneshot.png")
    options = parser.parse_args()
    strangers = [part for part in options.parts if part not in PARTS]
    if strangers:
        parser.error(f"there is no part {', '.join(strangers)}; choose of {', '.join(PARTS)}.")
    if options.mix and options.mix not in oneshot_ways.MIXES:
        parser.error(f"--mix is {options.mix}; choose of {', '.join(oneshot_ways.MIXES)}.")
    return options


def main() -> None:
    options = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that peers are ended
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
    parts = options.parts or PARTS
    write(f"`python -m tests.benchmarks.oneshot {' '.join(sys.argv[1:])}`".replace(" `", "`"))
    write(f"\n{report.machine()}")
    write(f"Everybody computes in {options.dtype} with {options.threads} threads.\n")
    folder = models.find(None, "embed", lambda fraction, words: None).folder
    setting = {"dtype": options.dtype, "threads": options.threads}
    results, points = [], []
    if "throughput" in parts:
        write("## Throughput\n")
        results = oneshot_ways.throughput(folder, setting, options.rounds, options.mix, write)
    if "load" in parts:
        write(
            "\n## Waits under load\n\nSingle texts of 8 to 32 tokens, Poisson arrivals, from "
            "arrival to vector; windows are Policy.wait, counted from the oldest text's arrival, "
            "with batches as large as ours.\n"
        )
        points = asyncio.run(oneshot_load.load(folder, setting, options.seconds, write))
    if "file" in parts:
        write(f"\n## Beside a file of {oneshot_file.LINES:,} lines\n")
        asyncio.run(oneshot_file.file(folder, setting, options.seconds, options.rate, write))
    if "latency" in parts:
        write("\n## A promised latency\n")
        asyncio.run(oneshot_load.latency(folder, setting, options.seconds, write))
    if options.plot:
        oneshot_draw.draw(results, points, PLOT)
        write(f"Plot: {PLOT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
