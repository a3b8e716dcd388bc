"""Encoders for tests: each loaded once, and its rows run in any parts and any company.

It knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiny_encoders import write_encoder

from pipelines.encode import EncodePipeline
from pipelines.oneshot import ItemsJob
from queueing.work import Advance, Card, Row, Tell


class Loaded:
    """A pipeline that is loaded already."""

    def __init__(self, pipeline: EncodePipeline, card: Card) -> None:
        self.pipeline, self.card = pipeline, card

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipeline, name)

    def load(self, tell: Tell) -> Card:
        return self.card

    def unload(self) -> None:
        """It stays for the next test."""


class Bench:
    """Models as they are asked for, each loaded once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.made: dict[tuple[str, str, str], Loaded] = {}

    def folder(self, family: str, task: str) -> Path:
        folder = self.root / f"{family}-{task}"
        return folder if folder.exists() else write_encoder(folder, family, task)

    def get(self, family: str, task: str, dtype: str = "float32") -> Loaded:
        name = family, task, dtype
        if name not in self.made:
            folder = str(self.folder(family, task))
            pipeline = EncodePipeline(task, folder, device="cpu", dtype=dtype, threads=1)
            self.made[name] = Loaded(pipeline, pipeline.load(lambda fraction, text: None))
        return self.made[name]


def row(loaded: Loaded, job: ItemsJob, mark: tuple[Any, ...] = ()) -> Row:
    request = job.request("embed", "encode")
    return Row(request, loaded.open(request, mark), 0, float("inf"))


def run(loaded: Loaded, rows: Sequence[Row], chance: random.Random) -> list[tuple[Any, ...]]:
    """Calls of any rows that are left, each with any grant it may get."""
    results = dict[int, tuple[Any, ...]]()
    while left := [each for each in rows if loaded.next(each) is not None]:
        riding = chance.sample(left, chance.randrange(1, len(left) + 1))
        works = [loaded.next(each) for each in riding]
        grants = [chance.randrange(work.least, work.most + 1) for work in works]
        for each, advance, grant in zip(riding, loaded.step(riding, grants), grants, strict=True):
            assert isinstance(advance, Advance)
            assert 1 <= advance.units <= grant
            each.state = advance.state
            if advance.output.result is not None:
                results[id(each)] = advance.output.result
    return [results[id(each)] for each in rows]
