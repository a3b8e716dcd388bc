"""Drives a text pipeline row by row without an engine: the smallest loop that batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipelines.chat import ChatJob, ChatResult, Settings
from queueing.work import Advance, Request, Row, Work

_IDS = itertools.count()


def job(prompt: Iterable[int], **changed: object) -> Request:
    """A request for a prompt of token ids; greedy and 16 tokens unless changed."""
    settings: dict[str, object] = {
        "max_tokens": 16, "temperature": 0.0, "top_p": 1.0, "top_k": 0,
        "repetition_penalty": 1.0, "seed": 7, "stop": (),
    }  # fmt: skip
    asked = ChatJob(tuple(prompt), Settings(**(settings | changed)))
    serial = Work("text", 1, asked.settings.max_tokens, serial=True)
    return Request("chat", asked, (Work("text", 1, len(asked.prompt)), serial))


class Driver:
    """Rows, their text and their marks, advanced all together."""

    def __init__(self, pipeline: object) -> None:
        self.pipeline = pipeline
        self.rows: list[Row] = []
        self.text: dict[int, str] = {}
        self.marks: dict[int, tuple[int, ...]] = {}
        self.results: dict[int, ChatResult] = {}
        self.errors: dict[int, Exception] = {}
        self.calls = 0

    def add(
        self, request: Request, mark: tuple[int, ...] | None = None, number: int | None = None
    ) -> int:
        number = len(self.rows) if number is None else number
        request = replace(request, id=f"row {next(_IDS)}")
        row = Row(request, self.pipeline.open(request, mark), number, float("inf"))
        if number < len(self.rows):
            self.rows[number] = row
        else:
            self.rows.append(row)
        self.text.setdefault(number, "")
        self.marks[number] = mark or ()
        if self.pipeline.next(row) is None:
            self.pipeline.close(row)
        return number

    def running(self) -> list[Row]:
        return [
            row
            for row in self.rows
            if row.order not in self.errors | self.results
            and not row.cancelled
            and self.pipeline.next(row) is not None
        ]

    def call(self, chunk: int = 10**9, serial: int = 1) -> Sequence[Advance | Exception]:
        rows = self.running()
        works = [self.pipeline.next(row) for row in rows]
        mixed = not all(work.serial for work in works)
        grants = [
            min(work.most, chunk if not work.serial else 1 if mixed else serial) for work in works
        ]
        grants = [
            self.pipeline.reserve(row, grant) for row, grant in zip(rows, grants, strict=True)
        ]
        advances = self.pipeline.step(rows, grants)
        for row, advance in zip(rows, advances, strict=True):
            self.commit(row, advance)
        self.calls += 1
        return advances

    def commit(self, row: Row, advance: Advance | Exception) -> None:
        if isinstance(advance, Exception):
            self.errors[row.order] = advance
            self.pipeline.close(row)
            return
        row.state = advance.state
        self.marks[row.order] += advance.mark
        if advance.output is not None:
            have = self.text[row.order]
            assert advance.output.at <= len(have)
            self.text[row.order] = have + advance.output.delta[len(have) - advance.output.at :]
            if advance.output.result is not None:
                self.results[row.order] = advance.output.result
        if self.pipeline.next(row) is None:
            self.pipeline.close(row)

    def park(self, number: int) -> None:
        row = self.rows[number]
        mark = self.pipeline.park(row)
        assert mark == self.marks[number]
        self.add(row.request, mark, number)

    def finish(self, chunk: int = 10**9, serial: int = 1) -> Driver:
        while self.running():
            self.call(chunk, serial)
        return self


def alone(pipeline: object, request: Request) -> tuple[str, tuple[int, ...]]:
    """What one request gives when nobody else rides."""
    driver = Driver(pipeline)
    driver.add(request)
    driver.finish()
    return driver.text[0], driver.marks[0]
