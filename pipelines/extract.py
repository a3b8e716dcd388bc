"""Questions about a document: the words that answer, where they stand, on a model that was taught
to find them (SQuAD, arXiv 1806.03822).

Each question is paired with each window of the document; windows overlap, so that no answer is cut
in two. Where the model finds that nothing answers, the answer is empty, at 0 to 0, its score how
sure of that it is, and `others` has what it would have said. It does not know the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy
from numpy.lib.stride_tricks import sliding_window_view

from pipelines.answer import OTHERS, checked, summed
from pipelines.embed import KEY, merged, remarked, remarks
from pipelines.oneshot import ItemsJob
from pipelines.texts import Texts, bounded, half
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Invalid, Request, message

OVERLAP = 128  # tokens that a window shares with the next
LONGEST = 30  # tokens of an answer
BEST = 20  # spans of a window that are kept, and that share 1 in the end

Span: TypeAlias = tuple[int, int]  # its first and its last token, of the document's


@message
class Reading:
    """How a question went through a document: in windows of at most `room` tokens, which stand
    from place `first` of their items.
    """

    first: int
    room: int


class ExtractFront:
    """Checks questions and a document; gives the words that answer."""

    task = "answer"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return checked(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        good, bad, document = checked(payload)
        tokens = tokenizer(card.details["folder"], card.limits["context"])
        ids, offsets = tokens.plain(document)
        if not ids:
            raise Invalid("document has nothing that the model can read; give other text.")
        most = half(tokens.limit)
        frames = [tokens.frame(text, most, second=False) for _, text in good]
        readings = tuple(Reading(len(each.before), tokens.limit - len(each)) for each in frames)
        pairs = list(zip(frames, readings, strict=True))
        read = sum(
            len(frame) + end - begin
            for frame, reading in pairs
            for begin, end in windows(len(ids), reading.room)
        )
        bounded("Questions and document, each question with all of it,", read)
        items = tuple(
            frame.item(ids[begin:end])
            for frame, reading in pairs
            for begin, end in windows(len(ids), reading.room)
        )
        notes = document, numpy.array(offsets, numpy.int32), readings, missed(tokens, ids, offsets)
        job = remarked(ItemsJob(items, bad, notes=notes), [place for place, _ in good], frames)
        return job.request(self.task, KEY)

    def finish(self, request: Request, result: Sequence[Any]) -> dict[str, Any]:
        """For each question the likeliest words, where they stand, and those after them."""
        job: ItemsJob = request.payload
        document, offsets, readings, partly_read = job.notes
        source, answers = iter(result), []
        for reading in readings:
            spans, nothing = _found(source, len(offsets), reading)
            answers.append(_told(document, offsets, spans, nothing))
        found = {"results": merged(job, answers), "tokens": job.tokens}
        return found | remarks(job) | {"partly_read": list(partly_read)}

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How many, how fast, and what was left out."""
        return summed(result, took)


def missed(
    tokens: Texts, ids: Sequence[int], offsets: Sequence[Span]
) -> tuple[dict[str, int], ...]:
    """Where in a document words stand that the model does not know."""
    return tuple(
        {"start": begin, "end": end, "cut": 0, "unknown": 1}
        for id, (begin, end) in zip(ids, offsets, strict=True)
        if tokens.unknown([id])
    )


def windows(count: int, room: int) -> Iterator[Span]:
    """So many tokens in overlapping windows: where each begins, and where it has ended."""
    overlap = min(OVERLAP, room // 2)
    for begin in range(0, max(count - overlap, 1), room - overlap):
        yield begin, min(begin + room, count)


def _found(
    source: Iterator[Any], count: int, reading: Reading
) -> tuple[list[tuple[float, Span]], float]:
    """The best spans of all windows, the best first, and how much speaks for none of them: what
    the model reads off the first token, in the window where it is least.
    """
    spans, nothing = dict[Span, float](), numpy.inf
    for begin, end in windows(count, reading.room):
        numbers = next(source)
        nothing = min(nothing, float(numbers[0].sum()))
        for (first, last), score in _best(numbers[reading.first : reading.first + end - begin]):
            span = begin + first, begin + last
            spans[span] = max(score, spans.get(span, -numpy.inf))
    order = sorted(spans, key=lambda span: (-spans[span], span))
    return [(spans[span], span) for span in order], nothing


def _best(numbers: Any) -> list[tuple[Span, float]]:
    """The best spans of a window by the scores [tokens, 2] of beginning and ending there."""
    begins, ends = numbers.T
    beyond = numpy.full(LONGEST - 1, -numpy.inf, ends.dtype)
    sums = begins[:, None] + sliding_window_view(numpy.concatenate((ends, beyond)), LONGEST)
    flat = sums.ravel()  # [tokens * LONGEST]: of a span's first token and its length less one
    order = numpy.argpartition(-flat, BEST)[:BEST]
    spans = ((divmod(int(place), LONGEST), float(flat[place])) for place in order)
    return [((at, at + more), score) for (at, more), score in spans if score > -numpy.inf]


def _told(
    document: str, offsets: Any, spans: Sequence[tuple[float, Span]], nothing: float
) -> dict[str, Any]:
    """The best span, or none, with its share of the best; others are apart from better ones."""
    scores = [score for score, _ in spans[:BEST]]
    top = max(*scores, nothing)
    whole = sum(numpy.exp(score - top) for score in (*scores, nothing))
    told: list[dict[str, Any]] = []
    if nothing >= top:
        told.append({"answer": "", "score": _share(nothing - top, whole), "start": 0, "end": 0})
    for score, (first, last) in spans:
        if len(told) > OTHERS:
            break
        begin, end = _trimmed(document, int(offsets[first][0]), int(offsets[last][1]))
        if begin < end and all(end <= each["start"] or each["end"] <= begin for each in told):
            share = _share(score - top, whole)
            words = document[begin:end]
            told.append({"answer": words, "score": share, "start": begin, "end": end})
    if not told:  # nothing but space
        told.append({"answer": "", "score": 0.0, "start": 0, "end": 0})
    best, *others = told
    return {**best, "others": others}


def _share(score: float, whole: float) -> float:
    return round(float(numpy.exp(score) / whole), 6)


def _trimmed(document: str, begin: int, end: int) -> Span:
    """Without the space around it."""
    words = document[begin:end]
    return end - len(words.lstrip()), begin + len(words.rstrip())
