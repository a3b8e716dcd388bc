"""Texts with blanks, filled by the chat model: each candidate scored with the whole text.

Around a text stand a few sentences that everybody's text gets, so that a short one is read as a
sentence and not as the beginning of anything. It does not know the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.blanks import blanks, checked, told
from pipelines.chat import counted
from pipelines.cloze import Blanked, ClozeJob, Filled, begin
from pipelines.embed import left_out, merged, remarks
from pipelines.template import conversation
from queueing.work import Card, Invalid, Request

SENTENCES = (
    ("The sky is ____ today.", "The sky is blue today."),
    ("____ bite the postman.", "Dogs bite the postman."),
    ("The ____ flew over the lake.", "The bird flew over the lake."),
    ("She drank a glass of ____.", "She drank a glass of water."),
)
BEFORE = "".join(f"{whole}\n" for _, whole in SENTENCES)
SHOWN = "".join(f"{gap}\n{whole}\n" for gap, whole in SENTENCES)
LONGEST = 128  # tokens of a text: what follows a blank is computed for every candidate


class FillFront:
    """Checks texts with blanks; gives words for them."""

    task = "chat"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return checked(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        good, bad, targets, top = checked(payload)
        folder = card.details["folder"]
        tell = conversation(folder).plain
        kept, errors = dict[int, Blanked](), list(bad)
        for place, text in good:
            made = _blanked(text, tell)
            wrong = _too_long(f"texts[{place}]", made, card.limits["context"] // 2)
            if wrong:
                errors.append((place, wrong))
            else:
                kept[place] = made
        if not kept:
            raise Invalid(min(errors)[1])
        spaced, bare = (tuple(tell(f"{gap}{word}") for word in targets) for gap in (" ", ""))
        notes = folder, tuple(text for place, text in good if place in kept)
        asked = tell(BEFORE), spaced, bare, tuple(sorted(errors)), notes
        job = ClozeJob(tuple(kept.values()), top, *asked)
        plan = begin(job, ()).work()
        if plan is None:
            raise RuntimeError("There is a text without a blank. This is a bug.")
        read = max(len(job.start) + sum(map(len, each.pieces)) for each in job.texts)
        return Request(self.task, job, (plan,), bytes=math.ceil(read * card.bytes_per_unit))

    def finish(self, request: Request, result: Sequence[Filled]) -> dict[str, Any]:
        """For each text its blanks with words and scores, and the text filled with the best."""
        job: ClozeJob = request.payload
        folder, texts = job.notes
        say, source, found = conversation(folder).text, iter(result), []
        for text in texts:
            places = blanks(text)
            filled = [
                [(say(candidate).strip(), share) for candidate, share in next(source)]
                for _ in places
            ]
            found.append(told(text, places, filled))
        return {"results": merged(job, found), **remarks(job)}

    def summary(self, result: Any, took: float, ran: float) -> str:
        """How many, how fast, and what was left out."""
        count = sum(each is not None for each in result["results"])
        return f"{counted(count, 'text')} in {took:.1f} s{left_out(result)}"


def _too_long(name: str, text: Blanked, half: int) -> str:
    """A refusal, or nothing; `half` of a context holds what comes before and the text."""
    length, most = sum(map(len, text.pieces)), min(LONGEST, half)
    return f"{name} has {length} tokens; a text has at most {most}." if length > most else ""


def _blanked(text: str, tell: Callable[[str], tuple[int, ...]]) -> Blanked:
    """A text in pieces around its blanks."""
    places = blanks(text)
    ends = [0, *(end for _, end in places)]
    starts = [*(start for start, _ in places), len(text)]
    pieces = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    spaced = tuple(piece.endswith(" ") for piece in pieces[:-1])
    before = [piece[:-1] if piece.endswith(" ") else piece for piece in pieces[:-1]]
    hint = f"{SHOWN}{'____'.join(pieces)}\n"
    return Blanked(tuple(map(tell, (*before, pieces[-1]))), spaced, tell(hint))
