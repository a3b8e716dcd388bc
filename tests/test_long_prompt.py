"""A prompt as long as a context of 32,768 tokens does not freeze those who read beside it.

The model is tiny and real, the seconds are not: each call takes what a slow processor would need
for its rows, its tokens and the history they look back on, under a clock that only calls move.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from text_driver import job
from text_engine import Ticker
from text_models import write_model

from pipelines.text import TextPipeline
from queueing.work import Advance, Policy, Row, Status

CONTEXT = 32_768
TARGET = 0.15  # seconds of a call; three of them is what readers are promised
CALL, ROW, TOKEN = 0.02, 0.002, 0.0005  # seconds
HISTORY = 8 * TOKEN / CONTEXT  # at the end of the context, attention is most of a token


class Slow(TextPipeline):
    """A pipeline whose calls take seconds that are only counted."""

    now = 0.0

    def clock(self) -> float:
        return self.now

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        results = super().step(rows, grants)
        looks = [
            grant * (row.state.computed + grant / 2)
            for row, grant in zip(rows, grants, strict=True)
        ]
        self.now += CALL + ROW * len(rows) + TOKEN * sum(grants) + HISTORY * sum(looks)
        return results


@pytest.fixture
def slow(tmp_path: Path) -> Slow:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_model(tmp_path, "llama", **shape, max_position_embeddings=CONTEXT, eos_token_id=None)
    return Slow(str(tmp_path), device="cpu", dtype="float32", threads=1, memory_bytes=1 << 22)


@pytest.mark.timeout(300)
def test_streams_go_on_beside_a_prompt_as_long_as_the_context(slow: Slow) -> None:
    policy = Policy(rows=16, units=2048)  # the card says the target
    ticker = Ticker(slow, policy, slow.clock)
    for reader in ("one", "two"):
        ticker.start(reader, job(range(20), max_tokens=2000))
    ticker.until(lambda: len(ticker.marks["one"]) > 10)
    ticker.start("long", job([7] * (CONTEXT - 8), max_tokens=8))
    before, spoke = len(ticker.calls), dict.fromkeys(("one", "two"), slow.now)
    gaps = []
    while not ticker.marks["long"]:
        counts = {reader: len(ticker.marks[reader]) for reader in spoke}
        assert ticker.tick() is not None
        for reader, count in counts.items():
            if len(ticker.marks[reader]) > count:
                gaps.append(slow.now - spoke[reader])
                spoke[reader] = slow.now
    calls = [call for call in ticker.calls[before:] if "long" in call.ids]
    assert not ticker.ended, "the readers ended too early to tell"
    assert max(gaps) < 2 * TARGET
    assert max(call.seconds for call in calls) < 2 * TARGET
    assert max(call.units for call in calls) <= policy.units
    assert sum(call.units - 2 for call in calls) == CONTEXT - 8
    assert all({"one", "two"} <= set(call.ids) for call in calls)
    for reader in spoke:
        ticker.engine.flag(reader)
    ticker.finish()
    assert ticker.ended["long"] is Status.FINISHED
    assert slow.pages[1] == 0
