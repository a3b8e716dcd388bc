"""Texts to vectors: what a caller sends becomes items, and vectors become what a caller gets.

Texts that are none fail alone, with a sentence; what is too long is cut and said to be. It does not
know the model, people or queues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pipelines.chat import counted
from pipelines.checks import choice, fields, texts, truth
from pipelines.oneshot import Item, ItemsJob, Kept, Pool, Pooling
from pipelines.texts import Text
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Request

KEY = "encode"  # of all that wants vectors: they share calls
TEXTS = 10_000
CHARACTERS = 2_000_000  # of all texts together
NAMED = 5  # of texts that are left out, in words
POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")
FIELDS = ("texts", "pooling", "normalise")


class Read(Protocol):
    """A text as a tokenizer found it."""

    @property
    def cut(self) -> int: ...

    @property
    def unknown(self) -> int: ...


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
        job = ItemsJob(asked(found, ask), tuple(bad), notes=card.details["model"])
        job = remarked(job, [place for place, _ in good], found)
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


def remarked(job: ItemsJob, places: Sequence[int], found: Sequence[Read]) -> ItemsJob:
    """With how many tokens were cut off the texts of which places, and how many are unknown."""
    pairs = list(zip(places, found, strict=True))
    cut = tuple((place, text.cut) for place, text in pairs if text.cut)
    unknown = tuple((place, text.unknown) for place, text in pairs if text.unknown)
    return replace(job, cut=cut, unknown=unknown)


def merged(job: Kept, results: Sequence[Any]) -> list[Any]:
    """Results in the caller's places, None where there was no item."""
    bad = {place for place, _ in job.errors}
    source = iter(results)
    count = len(results) + len(bad)
    return [None if place in bad else next(source) for place in range(count)]


def remarks(job: Kept) -> dict[str, Any]:
    """What was wrong with which text, what was cut off, and how many words are unknown."""
    return {
        "errors": [{"index": place, "error": error} for place, error in job.errors],
        "cut": [{"index": place, "tokens": tokens} for place, tokens in job.cut],
        "unknown": [{"index": place, "words": words} for place, words in job.unknown],
    }


def left_out(result: Mapping[str, Any]) -> str:
    """The same in words, for a line on a page."""
    errors, cut, unknown = result["errors"], len(result["cut"]), len(result["unknown"])
    words = f" · {cut} cut to what the model takes" if cut else ""
    words += f" · {unknown} with words that the model does not know" if unknown else ""
    if not errors:
        return words
    said = " ".join(each["error"] for each in errors[:NAMED])
    more = f" and {len(errors) - NAMED:,} more" if len(errors) > NAMED else ""
    return f"{words} · {len(errors):,} left out: {said}{more}"
