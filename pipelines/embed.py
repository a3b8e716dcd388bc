"""Texts to vectors: what a caller sends becomes items, and vectors become what a caller gets.

Texts that are none fail alone, with a sentence; what is too long is cut and said to be. It does not
know the model, people or queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.chat import counted
from pipelines.checks import choice, fields, texts, truth
from pipelines.oneshot import Item, ItemsJob, Kept, Pool, Pooling
from pipelines.texts import Text
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Request

KEY = "encode"  # of all that wants vectors: they share calls
TEXTS = 10_000
CHARACTERS = 2_000_000  # of all texts together
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")
FIELDS = ("texts", "pooling", "normalise")


class EmbedFront:
    """Checks lists of texts; gives their vectors."""

    task = "embed"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        fields("An embedding", payload, FIELDS)
        choice("pooling", payload, "mean", POOLINGS)
        truth("normalise", payload, True)
        return texts("texts", payload.get("texts"), TEXTS, CHARACTERS)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        self.judge(payload)
        good, bad = texts("texts", payload.get("texts"), TEXTS, CHARACTERS)
        pooling = choice("pooling", payload, card.details["pooling"], POOLINGS)
        ask = pool(pooling, truth("normalise", payload, True))
        found = tokenizer(card.details["folder"], card.limits["context"]).singles(
            [text for _, text in good]
        )
        places = [place for place, _ in good]
        job = ItemsJob(asked(found, ask), tuple(bad), cuts(places, found), card.details["model"])
        return job.request(self.task, KEY)

    def finish(self, request: Request, result: Sequence[Any]) -> dict[str, Any]:
        """For each text its vector, or None where it was none."""
        job: ItemsJob = request.payload
        vectors = merged(job, [vector.astype(float).round(7).tolist() for vector in result])
        return {
            "embeddings": vectors,
            "dimensions": len(result[0]),
            "tokens": job.tokens,
            "model": job.notes,
            **remarks(job),
        }

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How much, how fast, and what was left out."""
        tokens = counted(result["tokens"], "token")
        return f"{tokens} in {took:.1f} s · {result['dimensions']} dimensions{left_out(result)}"


def pool(pooling: str, normalise: bool) -> Pool:
    """What is asked of each text."""
    word: Pooling = next(each for each in POOLINGS if each == pooling)
    return Pool(word, normalise)


def asked(found: Sequence[Text], ask: Any) -> tuple[Item, ...]:
    """Items of texts, of which this is asked."""
    return tuple(Item(text.item.tokens, text.item.second, ask) for text in found)


def cuts(places: Sequence[int], found: Sequence[Text]) -> tuple[tuple[int, int], ...]:
    """How many tokens were cut off which places."""
    pairs = zip(places, found, strict=True)
    return tuple((place, text.cut) for place, text in pairs if text.cut)


def merged(job: Kept, results: Sequence[Any]) -> list[Any]:
    """Results in the caller's places, None where there was no item."""
    bad = {place for place, _ in job.errors}
    source = iter(results)
    count = len(results) + len(bad)
    return [None if place in bad else next(source) for place in range(count)]


def remarks(job: Kept) -> dict[str, Any]:
    """What was wrong with which text, and what was cut off."""
    return {
        "errors": [{"index": place, "error": error} for place, error in job.errors],
        "cut": [{"index": place, "tokens": tokens} for place, tokens in job.cut],
    }


def left_out(result: Mapping[str, Any]) -> str:
    """The same in words, for a line on a page."""
    bad, cut = len(result["errors"]), len(result["cut"])
    words = f" · {counted(bad, 'text')} left out: {result['errors'][0]['error']}" if bad else ""
    return words + (f" · {counted(cut, 'text')} cut to what the model takes" if cut else "")
