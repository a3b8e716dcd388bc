"""Texts with blanks, whoever fills them: where the blanks are, what may be asked, and what comes
back.

It does not know models.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from pipelines.checks import fields, texts, whole, words
from queueing.work import Invalid

TEXTS = 1000
CHARACTERS = 500_000  # of all texts together
BLANKS = 16  # in a text
TARGETS = 1000
TARGET = 100  # characters
TOP, MOST = 5, 100  # words for a blank
FIELDS = ("texts", "targets", "top")
_BLANK = re.compile(r"\[MASK\]|<mask>|_{3,}")

Good: TypeAlias = list[tuple[int, str]]  # texts and their places in the list
Bad: TypeAlias = tuple[tuple[int, str], ...]  # what is wrong with others, by their places


def blanks(text: str, own: str = "") -> list[tuple[int, int]]:
    """Where each begins and ends: [MASK], <mask>, three underscores or more, or a model's own."""
    pattern = re.compile(f"{re.escape(own)}|{_BLANK.pattern}") if own else _BLANK
    return [match.span() for match in pattern.finditer(text)]


def checked(payload: Any, own: str = "") -> tuple[Good, Bad, tuple[str, ...], int]:
    """Texts with blanks, what are none, the words that may fill them (none: any), and how many to
    tell for a blank. Raises Invalid.
    """
    entries, bad, targets, top = judged(payload)
    good = []
    for place, text in entries:
        name = "texts" if isinstance(payload["texts"], str) else f"texts[{place}]"
        wrong = _wrong(name, len(blanks(text, own)))
        if wrong:
            bad.append((place, wrong))
        else:
            good.append((place, text))
    bad.sort()
    if not good:
        raise Invalid(bad[0][1])
    return good, tuple(bad), targets, top


def judged(payload: Any) -> tuple[Good, list[tuple[int, str]], tuple[str, ...], int]:
    """The same before it is known how a model writes its own blanks."""
    fields("Texts to fill", payload, FIELDS)
    given = payload.get("targets")
    targets = () if given in (None, [], ()) else words("targets", given, TARGETS, TARGET)
    top = whole("top", payload, len(targets) or TOP, 1, max(MOST, len(targets)))
    good, bad = texts("texts", payload.get("texts"), TEXTS, CHARACTERS)
    return good, bad, targets, top


def _wrong(name: str, count: int) -> str:
    if not count:
        return f"{name} has no blank; write ___ or [MASK] where a word is missing."
    return f"{name} has {count} blanks; at most {BLANKS} are taken." if count > BLANKS else ""


def told(
    text: str, places: Sequence[tuple[int, int]], found: Sequence[Sequence[tuple[str, float]]]
) -> dict[str, Any]:
    """For each blank its words and scores, the best first, and the text filled with the best."""
    begin, pieces = 0, []
    for (start, end), candidates in zip(places, found, strict=True):
        pieces += [text[begin:start], candidates[0][0]]
        begin = end
    return {
        "text": "".join((*pieces, text[begin:])),
        "blanks": [
            [{"word": word, "score": round(score, 6)} for word, score in candidates]
            for candidates in found
        ],
    }
