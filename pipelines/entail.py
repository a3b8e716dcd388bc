"""Texts by labels that their caller makes up, on a model that was taught what follows from a text.

A label's sentence is the template with the label in it; each text is paired with each sentence, as
premise and hypothesis (arXiv 1909.00161). What is too long is cut off the text, alike for all
labels. It does not know the model, except by the names of its labels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy

from pipelines.checks import shown
from pipelines.classify import SLOT, checked, summed, told
from pipelines.embed import KEY
from pipelines.oneshot import ItemsJob
from pipelines.texts import Frame, Texts, bounded, half
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Invalid, Request

PAIRS = 10_000  # of a text and a label


class EntailFront:
    """Checks texts and labels; gives scores."""

    task = "classify"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        good, bad, labels, template, multi = checked(payload)
        if len(good) * len(labels) > PAIRS:
            raise Invalid(
                f"{len(good):,} texts with {len(labels):,} labels make "
                f"{len(good) * len(labels):,} pairs; at most {PAIRS:,} are taken at once. Send "
                "fewer texts or labels."
            )
        return good, bad, labels, template, multi

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        self.judge(payload)
        good, bad, labels, template, multi = checked(payload)
        alone = multi or len(labels) == 1  # the only label would always have the whole share
        sides = _sides(card, alone)
        tokens = tokenizer(card.details["folder"], card.limits["context"])
        frames = _frames(tokens, [template.replace(SLOT, label) for label in labels])
        room = tokens.limit - max(map(len, frames))
        found = [(place, tokens.plain(text)[0]) for place, text in good]
        cut = tuple((place, len(ids) - room) for place, ids in found if len(ids) > room)
        counts = ((place, tokens.unknown(ids)) for place, ids in found)
        unknown = tuple((place, count) for place, count in counts if count)
        around = sum(map(len, frames))
        read = sum(around + len(frames) * min(len(ids), room) for _, ids in found)
        bounded("Texts and labels, each text with each label,", read)
        items = tuple(frame.item(ids[:room]) for _, ids in found for frame in frames)
        notes = labels, alone, *sides
        return ItemsJob(items, bad, cut, notes, unknown).request(self.task, KEY)

    def finish(self, request: Request, result: Sequence[Any]) -> dict[str, Any]:
        """For each text its labels and scores, the best first; None where it was no text."""
        job: ItemsJob = request.payload
        labels, alone, entails, against = job.notes
        numbers = numpy.stack(result).reshape(-1, len(labels), len(result[0]))
        if alone:
            scores = _shares(numbers[..., [against, entails]])[..., 1]
        else:
            scores = _shares(numbers[..., entails])
        return told(job, labels, scores)

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How many, how fast, and what was left out."""
        return summed(result, took)


def _sides(card: Card, alone: bool) -> tuple[int, int]:
    """Which of the model's labels say that a sentence follows, and that it cannot be so; without
    the second a label can be compared with others and not be scored by itself.
    """
    names = json.loads(card.details["labels"])
    entails, against = _named(names, "entail"), _named(names, "contradict")
    if against < 0 and len(names) == 2:
        against = 1 - entails
    for word, place in (("entail", entails), ("contradict", against if alone else 0)):
        if place < 0:
            raise Invalid(
                f"{card.details['model']} cannot classify so: of its labels "
                f"({shown(', '.join(names))}) none begins with {word}. Set CARPOOL_CLASSIFY_MODEL "
                "to a model that was trained for natural language inference."
            )
    return entails, against


def _named(names: Sequence[str], start: str) -> int:
    places = (n for n, name in enumerate(names) if str(name).casefold().startswith(start))
    return next(places, -1)


def _frames(tokens: Texts, sentences: Sequence[str]) -> list[Frame]:
    """The sentences as second texts; one that leaves texts no room is refused."""
    most = half(tokens.limit)
    frames = [tokens.frame(sentence, most, second=True) for sentence in sentences]
    for place, frame in enumerate(frames):
        if frame.cut:
            raise Invalid(
                f"labels[{place}] has {frame.count} tokens in the template; at most {most} are "
                "taken. Shorten it, or the template."
            )
    return frames


def _shares(numbers: Any) -> Any:
    """Of 1, along the last axis."""
    raised = numpy.exp(numbers - numbers.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)
