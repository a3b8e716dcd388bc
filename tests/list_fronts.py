"""Fronts of list tasks for the pretended model of lists: what is asked is judged as by real ones,
and what comes back follows from each text. They need no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipelines import blanks, classify, embed
from pipelines.checks import texts
from queueing.work import Card, Request
from tests.lists import ListJob

LONG = 100  # characters, of which more are said to be cut


def asked(good: Sequence[tuple[int, str]], bad: Sequence[tuple[int, str]], notes: Any) -> Request:
    cut = tuple((place, len(text) - LONG) for place, text in good if len(text) > LONG)
    return ListJob(tuple(text for _, text in good), tuple(bad), cut, notes=notes).request()


class EmbedFront(embed.EmbedFront):
    """Vectors are the length of a text, and a number as small as that is large."""

    task = "lists"

    def check(self, payload: Any, card: Card) -> Request:
        self.judge(payload)
        good, bad = texts("texts", payload["texts"], embed.TEXTS, embed.CHARACTERS)
        return asked(good, bad, None)

    def finish(self, request: Request, result: Sequence[str]) -> dict[str, Any]:
        job, vectors = request.payload, [[float(len(text)), -1 / len(text)] for text in result]
        told = {"embeddings": embed.merged(job, vectors), "dimensions": 2, "tokens": 0}
        return {**told, **embed.remarks(job)}


class ClassifyFront(classify.ClassifyFront):
    """The label is the one whose turn it is by the length of a text."""

    task = "lists"

    def check(self, payload: Any, card: Card) -> Request:
        good, bad, labels, *_ = classify.checked(payload)
        return asked(good, bad, labels)

    def finish(self, request: Request, result: Sequence[str]) -> dict[str, Any]:
        job = request.payload
        found = []
        for text in result:
            label = job.notes[len(text) % len(job.notes)]
            scores = {label: 1.0} | {other: 0.0 for other in job.notes if other != label}
            found.append({"label": label, "score": 1.0, "scores": scores})
        return {"results": embed.merged(job, found), **embed.remarks(job)}


class FillFront:
    """Every blank is a dog, or else a cat."""

    task = "lists"

    def judge(self, payload: Any) -> object:
        return blanks.checked(payload)

    def check(self, payload: Any, card: Card) -> Request:
        good, bad, *_ = blanks.checked(payload)
        return asked(good, bad, None)

    def finish(self, request: Request, result: Sequence[str]) -> dict[str, Any]:
        job, words = request.payload, [("dog", 0.75), ("cat", 0.25)]
        places = [blanks.blanks(text) for text in job.items]
        pairs = zip(job.items, places, strict=True)
        found = [blanks.told(text, gaps, [words] * len(gaps)) for text, gaps in pairs]
        return {"results": embed.merged(job, found), **embed.remarks(job)}

    def summary(self, result: Any, took: float, ran: float) -> str:
        return "Done"
