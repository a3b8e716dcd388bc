"""CPU time of choosing tokens, one thread: 32 rows of a vocabulary of 49,152, against one argmax
and one sort of it. Scores are as peaked as those of a small chat model.

Run: python -m tests.benchmarks.sampling
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from pipelines.chat import Settings
from pipelines.sampling import Draw, choose

ROWS, VOCABULARY, ROUNDS = 32, 49_152, 15
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "greedy, all penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "temperature 1": {},
    "temperature 2": {"temperature": 2.0},
    "top_p 0.9, temperature 0.8": {"top_p": 0.9, "temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p 0.95, temperature 0.6": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "min_p 0.05": {"min_p": 0.05},
}


def main() -> None:
    torch.set_num_threads(1)
    scores = peaked(torch.Generator().manual_seed(0))
    one = least(lambda: scores.argmax(dim=-1))
    sys.stdout.write(f"| {ROWS} rows of {VOCABULARY:,} | CPU ms | argmaxes |\n|---|---|---|\n")
    show("one argmax", one, one)
    show("one sort", least(lambda: scores.sort(dim=-1)), one)
    for name, changed in SETTINGS.items():
        draws = [draw(row, changed) for row in range(ROWS)]
        show(name, least(lambda draws=draws: choose(scores, draws)), one)


def peaked(source: torch.Generator) -> torch.Tensor:
    """Some 5 % of the vocabulary within 16 of the likeliest, 1 to 2 nats of choice."""
    scores = torch.randn(ROWS, VOCABULARY, generator=source) * 3
    tokens = torch.randint(VOCABULARY, (ROWS, 30), generator=source)
    return scores.scatter(1, tokens, 21 - torch.arange(30) * 0.4 * torch.ones(ROWS, 1))


def draw(row: int, changed: dict[str, float]) -> Draw:
    fields = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0} | changed
    seen = [(row * 997 + place * 31) % VOCABULARY for place in range(500)]
    return Draw(Settings(max_tokens=1, seed=row, stop=(), **fields), 200, seen)


def least(call: Callable[[], object]) -> float:
    """Milliseconds of this thread, of the best round."""
    call()
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found) * 1e3


def show(name: str, milliseconds: float, one: float) -> None:
    sys.stdout.write(f"| {name} | {milliseconds:.2f} | {milliseconds / one:.1f} |\n")


if __name__ == "__main__":
    main()
