"""Texts by labels that their caller makes up: the label whose sentence is nearest, on vectors.

A label's sentence is the template with the label in it. Nearness is the cosine less that of the
same sentence about something (after "Calibrate Before Use", arXiv 2102.09690), so that a text is
not near by the template alone, and a label's score does not hang on other labels. Labels are a
request's own; their sentences are items like any text, so requests with different labels share
calls. It does not know the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy

from pipelines.chat import counted
from pipelines.checks import fields, shown, text, texts, truth, words
from pipelines.embed import CHARACTERS, KEY, asked, left_out, merged, pool, remarked, remarks
from pipelines.oneshot import ItemsJob
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Invalid, Request

LABELS = 1000
LABEL = 200  # characters
TEXTS = 10_000
TEMPLATE = "This text is about {}."
SLOT = "{}"
NOTHING = "something"  # in place of a label
SCALE = 20.0  # of cosines, before they become shares of 1
WIDTH, MIDDLE = 25.0, 0.09  # of cosines, before each becomes a share by itself
FIELDS = ("texts", "labels", "template", "multi")


class ClassifyFront:
    """Checks texts and labels; gives scores."""

    task = "embed"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return checked(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        good, bad, labels, template, multi = checked(payload)
        sentences = [template.replace(SLOT, label) for label in (*labels, NOTHING)]
        tokens = tokenizer(card.details["folder"], card.limits["context"])
        found = tokens.singles([text for _, text in good])
        items = (*found, *tokens.singles(sentences))
        ask = pool(card.details["pooling"], True)
        job = ItemsJob(asked(items, ask), bad, notes=(labels, multi))
        job = remarked(job, [place for place, _ in good], found)
        return job.request(self.task, KEY)

    def finish(self, request: Request, result: Sequence[Any]) -> dict[str, Any]:
        """For each text its labels and scores, the best first; None where it was no text."""
        job: ItemsJob = request.payload
        labels, multi = job.notes
        count = len(result) - len(labels) - 1
        vectors = numpy.stack(result)  # [texts + labels + 1, width]
        near = vectors[:count] @ vectors[count:].T  # [texts, labels + 1]
        scores = shares(near[:, :-1] - near[:, -1:], multi)
        return told(job, labels, scores)

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How many, how fast, and what was left out."""
        return summed(result, took)


def checked(
    payload: Any,
) -> tuple[list[tuple[int, str]], tuple[tuple[int, str], ...], tuple[str, ...], str, bool]:
    """Texts with their places, what is none, labels, template, and whether several may be right."""
    fields("A classification", payload, FIELDS)
    labels = words("labels", payload.get("labels"), LABELS, LABEL)
    template = payload.get("template")
    template = TEMPLATE if template is None else text("template", template, LABEL)
    if template.count(SLOT) != 1:
        raise Invalid(
            f"template is {shown(template)}; it must have {SLOT} once, where the label goes."
        )
    multi = truth("multi", payload, False)
    good, bad = texts("texts", payload.get("texts"), TEXTS, CHARACTERS)
    return good, tuple(bad), labels, template, multi


def shares(near: Any, multi: bool) -> Any:
    """Cosines [texts, labels], calibrated, to scores: each by itself, or together 1."""
    if multi:
        return 1 / (1 + numpy.exp(-WIDTH * (near - MIDDLE)))
    raised = numpy.exp(SCALE * (near - near.max(-1, keepdims=True)))
    return raised / raised.sum(-1, keepdims=True)


def told(job: ItemsJob, labels: Sequence[str], scores: Any) -> dict[str, Any]:
    """Scores [texts, labels] as a caller gets them."""
    found = []
    for row in scores:
        order = numpy.argsort(-row, kind="stable")
        found.append(
            {
                "label": labels[order[0]],
                "score": round(float(row[order[0]]), 6),
                "scores": {labels[place]: round(float(row[place]), 6) for place in order},
            }
        )
    return {"results": merged(job, found), "tokens": job.tokens, **remarks(job)}


def summed(result: Mapping[str, Any], took: float) -> str:
    """A line for a page."""
    count = sum(each is not None for each in result["results"])
    return f"{counted(count, 'text')} in {took:.1f} s{left_out(result)}"
