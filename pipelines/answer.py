"""Questions about a document: the sentence that answers best, by vectors, where it stands.

Nothing is made up: an answer is a sentence of the document, with its place. A sentence is read
after the first of its paragraph, which mostly says whom or what the others are about. It does not
know the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from pipelines.chat import counted
from pipelines.checks import fields, text, texts
from pipelines.embed import KEY, Read, asked, left_out, merged, pool, remarked, remarks
from pipelines.oneshot import ItemsJob
from pipelines.sentences import sentences
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Invalid, Request

DOCUMENT = 200_000  # characters
SENTENCES = 5000
QUESTIONS = 256
QUESTION = 2000  # characters
OTHERS = 3  # sentences shown after the best
LEAD = 400  # characters of a paragraph's first sentence that are read before the others
FIELDS = ("questions", "document")
_PARAGRAPH = re.compile(r"\n\s*\n")


class AnswerFront:
    """Checks questions and a document; gives sentences."""

    task = "embed"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return checked(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        good, bad, document = checked(payload)
        places = sentences(document)
        if len(places) > SENTENCES:
            raise Invalid(
                f"There are {len(places):,} sentences in document; at most {SENTENCES:,} are "
                "taken. Paste a part of it."
            )
        tokens = tokenizer(card.details["folder"], card.limits["context"])
        found = tokens.singles([text for _, text in good])
        parts = tokens.singles(led(document, places))
        ask = pool(card.details["pooling"], True)
        notes = document, tuple(places), partly(places, parts)
        job = ItemsJob(asked([*found, *parts], ask), bad, notes=notes)
        job = remarked(job, [place for place, _ in good], found)
        return job.request(self.task, KEY)

    def finish(self, request: Request, result: Sequence[Any]) -> dict[str, Any]:
        """For each question the nearest sentence, where it stands, and those after it."""
        job: ItemsJob = request.payload
        document, places, partly_read = job.notes
        count = len(result) - len(places)
        vectors = numpy.stack(result)
        near = vectors[:count] @ vectors[count:].T  # [questions, sentences]
        answers = []
        for row in near:
            order = numpy.argsort(-row, kind="stable")[: 1 + OTHERS]
            best, *others = (_told(document, places[n], float(row[n])) for n in order)
            answers.append({**best, "others": others})
        found = {"results": merged(job, answers), "tokens": job.tokens}
        return found | remarks(job) | {"partly_read": list(partly_read)}

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How many, how fast, and what was left out."""
        return summed(result, took)


def checked(
    payload: Any,
) -> tuple[list[tuple[int, str]], tuple[tuple[int, str], ...], str]:
    """Questions with their places, what is none, and the document."""
    fields("A question", payload, FIELDS)
    document = text("document", payload.get("document"), DOCUMENT)
    good, bad = texts("questions", payload.get("questions"), QUESTIONS, QUESTIONS * QUESTION)
    return good, tuple(bad), document


def led(document: str, places: Sequence[tuple[int, int]]) -> list[str]:
    """Sentences, each after the first of its paragraph."""
    found, lead, before = [], "", 0
    for begin, end in places:
        sentence = document[begin:end]
        if not lead or _PARAGRAPH.search(document, before, begin):
            lead = sentence[:LEAD]
            found.append(sentence)
        else:
            found.append(f"{lead} {sentence}")
        before = end
    return found


def partly(places: Sequence[tuple[int, int]], found: Sequence[Read]) -> tuple[dict[str, int], ...]:
    """Where in a document the model does not read all: tokens cut off, words it does not know."""
    return tuple(
        {"start": begin, "end": end, "cut": text.cut, "unknown": text.unknown}
        for (begin, end), text in zip(places, found, strict=True)
        if text.cut or text.unknown
    )


def summed(result: Mapping[str, Any], took: float) -> str:
    """A line for a page."""
    count = sum(each is not None for each in result["results"])
    places = len(result["partly_read"])
    words = f" · {counted(places, 'place')} of the document read in part" if places else ""
    return f"{counted(count, 'question')} in {took:.1f} s{left_out(result)}{words}"


def _told(document: str, place: tuple[int, int], score: float) -> dict[str, Any]:
    begin, end = place
    return {
        "answer": document[begin:end],
        "score": round(score, 6),
        "start": begin,
        "end": end,
    }
