"""How often a greedy token is another one because others rode along: each request alone, then all
at once, compared up to the first difference.

Run: python -m tests.benchmarks.flips [float32 bfloat16]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipelines import models
from tests.benchmarks.peers.wire import Ask
from tests.benchmarks.peers.with_carpool import Carpool
from tests.benchmarks.workload import Text, at_once

REQUESTS = 16


def main() -> None:
    formats = sys.argv[1:] or ["float32", "bfloat16"]
    found = models.find(None, "chat", lambda fraction, words: None)
    asks = at_once(Text.read(found.folder))[:REQUESTS]
    sys.stdout.write(f"| format | answers that differ, of {REQUESTS} | flips of positions |\n")
    sys.stdout.write("|---|---|---|\n")
    for name in formats:
        flips, positions = compared(asks, name)
        sys.stdout.write(f"| {name} | {flips} | {flips} of {positions} |\n")
        sys.stdout.flush()


def compared(asks: Sequence[Ask], dtype: str) -> tuple[int, int]:
    """First differences, and positions until then."""
    ours = Carpool({"setting": {"dtype": dtype}})
    alone = [ours.answer([ask])[0] for ask in asks]
    together = ours.answer(asks)
    flips = positions = 0
    for one, other in zip(alone, together, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        flips += same is not None
        positions += len(one) if same is None else same + 1
    return flips, positions


if __name__ == "__main__":
    main()
