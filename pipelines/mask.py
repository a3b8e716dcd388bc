"""Texts with blanks, filled by a model that was taught to: its mask stands where a blank is.

A word is one token of the model's vocabulary; where it has the word both with and without a space
before it, the likelier counts. It does not know the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelines.blanks import blanks, checked, judged, told
from pipelines.chat import counted
from pipelines.checks import shown
from pipelines.embed import KEY, left_out, merged, remarked, remarks
from pipelines.oneshot import Blank, Item, ItemsJob
from pipelines.texts import Text, Texts
from pipelines.texts import texts as tokenizer
from queueing.work import Card, Invalid, Request

OPEN = "mask_token"
FORMS = 2  # of a word: with a space before it, and without


class MaskFront:
    """Checks texts with blanks; gives words for them."""

    task = "fill"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return judged(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        where = card.details["folder"], card.limits["context"], OPEN
        tokens = tokenizer(*where)
        own = tokens.special(OPEN)
        if own is None:
            raise Invalid(
                f"{card.details['model']} has no mask, so it cannot fill blanks. Set "
                "CARPOOL_FILL_MODEL to a masked language model."
            )
        mask, number = own
        good, bad, targets, top = checked(payload, mask)
        words = _words(tokens, targets)
        found = tokens.singles([_masked(text, mask) for _, text in good])
        items, kept, errors = dict[int, Item](), list[str](), list(bad)
        read = list[Text]()
        for (place, text), each in zip(good, found, strict=True):
            places = tuple(n for n, token in enumerate(each.item.tokens) if token == number)
            wrong = _wrong(each, len(places) == len(blanks(text, mask)))
            if wrong:
                errors.append((place, f"{_name(payload, place)} {wrong}"))
            else:
                ask = Blank(places, FORMS * top, tuple(words))
                items[place] = Item(each.item.tokens, each.item.second, ask)
                kept.append(text)
                read.append(each)
        if not items:
            raise Invalid(min(errors)[1])
        notes = where, mask, top, tuple(kept), tuple(words.items())
        job = ItemsJob(tuple(items.values()), tuple(sorted(errors)), notes=notes)
        return remarked(job, list(items), read).request(self.task, KEY)

    def finish(self, request: Request, result: Sequence[Any]) -> dict[str, Any]:
        """For each text its blanks with words and scores, and the text filled with the best."""
        job: ItemsJob = request.payload
        where, mask, top, texts, words = job.notes
        tokens, named, found = tokenizer(*where), dict(words), []
        for text, places in zip(texts, result, strict=True):
            filled = [
                _distinct(
                    (named.get(int(id)) or tokens.word(int(id)).strip(), float(share))
                    for id, share in zip(*place, strict=True)
                )[:top]
                for place in places
            ]
            found.append(told(text, blanks(text, mask), filled))
        return {"results": merged(job, found), **remarks(job)}

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How many, how fast, and what was left out."""
        count = sum(each is not None for each in result["results"])
        return f"{counted(count, 'text')} in {took:.1f} s{left_out(result)}"


def _masked(text: str, mask: str) -> str:
    """A text with the model's own mask for its blanks."""
    begin, pieces = 0, list[str]()
    for start, end in blanks(text, mask):
        pieces += [text[begin:start], mask]
        begin = end
    return "".join((*pieces, text[begin:]))


def _name(payload: Mapping[str, Any], place: int) -> str:
    return "texts" if isinstance(payload["texts"], str) else f"texts[{place}]"


def _wrong(text: Text, whole: bool) -> str:
    """What is wrong with a text, or nothing; `whole` says whether all its blanks are masks."""
    most = len(text.item.tokens)
    if text.cut:
        return f"has {most + text.cut:,} tokens; at most {most:,} are taken. Shorten it."
    return "" if whole else "has a blank that the model cannot read; write ___ between spaces."


def _words(tokens: Texts, targets: Sequence[str]) -> dict[int, str]:
    """The tokens that may fill a blank, and the word each stands for."""
    found = dict[int, str]()
    for place, word in enumerate(targets):
        ids = tokens.forms(word)
        if not ids:
            raise Invalid(
                f"targets[{place}] is {shown(word)}, which is not one token of the model's "
                "vocabulary; choose another word."
            )
        for id in ids:
            if found.setdefault(id, word) != word:
                raise Invalid(
                    f"targets[{place}] is {shown(word)}, which the model reads as it reads "
                    f"{shown(found[id])}; give each once."
                )
    return found


def _distinct(words: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """Each word where it comes first."""
    found = dict[str, float]()
    for word, share in words:
        found.setdefault(word, share)
    return list(found.items())
