"""Tokens a second of the default chat model: one row alone, then 8 and 16 rows in one batch.

Run: python -m tests.benchmarks.text
"""

from __future__ import annotations

import sys
import time

from pipelines.fronts import ChatFront
from pipelines.text import TextPipeline
from queueing.work import Card, Request, Row

TOKENS = 48
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8, top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
}


def main() -> None:
    pipeline = TextPipeline()
    card = pipeline.load(lambda fraction, text: None)
    for name, settings in SETTINGS.items():
        alone = 0.0
        for rows in (1, 8, 16):
            rate = measure(pipeline, [ask(card, number, settings) for number in range(rows)])
            alone = alone or rate
            sys.stdout.write(
                f"{name}: {rows} rows, {rate:.1f} tokens a second, {rate / alone:.1f} x\n"
            )


def ask(card: Card, number: int, settings: dict[str, float]) -> Request:
    messages = [{"role": "user", "content": f"Tell me {number + 3} stories about the sea."}]
    fields = {"messages": messages, "max_tokens": TOKENS, "seed": number, **settings}
    return ChatFront().check(fields, card)


def measure(pipeline: TextPipeline, requests: list[Request]) -> float:
    """Tokens a second while all of them decode, the call that computes their prompts left out."""
    rows = [
        Row(request, pipeline.open(request), order, float("inf"))
        for order, request in enumerate(requests)
    ]
    tokens, began = 0, 0.0
    while running := [row for row in rows if pipeline.next(row) is not None]:
        works = [pipeline.next(row) for row in running]
        grants = [1 if work.serial else work.most for work in works if work is not None]
        for row, grant in zip(running, grants, strict=True):
            pipeline.reserve(row, grant)
        for row, advance in zip(running, pipeline.step(running, grants), strict=True):
            if isinstance(advance, Exception):
                raise advance
            row.state = advance.state
            tokens += len(advance.mark) if began else 0
        began = began or time.perf_counter()
    for row in rows:
        pipeline.close(row)
    return tokens / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
