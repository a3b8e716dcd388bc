"""Words for blanks by a causal model: candidates, and how likely the whole text is with each.

Candidates are what continues the text before a blank and what the model answers when shown the
text with a gap; each is then scored by the likelihood of itself and of all that follows, so that
a blank may stand anywhere. Of several blanks the earlier are filled first, with their best. It is
a row's state and what to compute next; it does not know the model, or who asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from queueing.work import Work, message

KEY = "score"
Candidate: TypeAlias = tuple[int, ...]  # token ids
Filled: TypeAlias = tuple[tuple[Candidate, float], ...]  # candidates and shares, likeliest first


@message
class Blanked:
    """A text around its blanks, whether a space comes before each, and a prompt that shows the text
    with its gaps and is followed by the text as far as it is known.
    """

    pieces: tuple[Candidate, ...]  # one more than blanks
    spaced: tuple[bool, ...]
    hint: Candidate


@message
class ClozeJob:
    """Texts with blanks. `start` comes before each, so that it is one text among others; targets
    are candidates, with and without a space before them.
    """

    texts: tuple[Blanked, ...]
    top: int
    start: Candidate
    spaced: tuple[Candidate, ...] = ()
    bare: tuple[Candidate, ...] = ()
    errors: tuple[tuple[int, str], ...] = ()  # of what its caller sent, what is no text
    notes: Any = None  # of its front, for the end
    cut: tuple[tuple[int, int], ...] = ()
    unknown: tuple[tuple[int, int], ...] = ()

    @property
    def blanks(self) -> tuple[tuple[int, int], ...]:
        """All of them: number of the text, number in the text."""
        return tuple((n, m) for n, each in enumerate(self.texts) for m in range(len(each.spaced)))


@dataclass(frozen=True, slots=True)
class Read:
    """What a model keeps of the text before a blank: keys and values by layer, each [tokens, heads,
    width], and the scores of the token after it [vocabulary].
    """

    layers: Mapping[int, tuple[Any, Any]]
    after: Any


@dataclass(frozen=True, slots=True)
class ClozeState:
    """A row: what its first blanks were filled with, and how far it is with the next one."""

    job: ClozeJob
    filled: tuple[Filled, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    scores: tuple[float, ...] = ()  # of the first candidates
    read: Read | None = None  # the text before the blank has been

    @property
    def done(self) -> bool:
        return len(self.filled) == len(self.job.blanks)

    @property
    def left(self) -> Candidate:
        """What stands before the blank, earlier blanks filled."""
        number, blank = self.job.blanks[len(self.filled)]
        pieces = self.job.texts[number].pieces
        found = list(pieces[0])
        for before in range(blank):
            best, _ = self.filled[len(self.filled) - blank + before][0]
            found += [*best, *pieces[before + 1]]
        return tuple(found)

    @property
    def right(self) -> Candidate:
        """What stands after it, up to the next one."""
        number, blank = self.job.blanks[len(self.filled)]
        return self.job.texts[number].pieces[blank + 1]

    @property
    def begun(self) -> Candidate:
        """The same after the text that all begin with."""
        return (*self.job.start, *self.left)

    @property
    def hint(self) -> Candidate:
        """The same after the prompt."""
        number, _ = self.job.blanks[len(self.filled)]
        return (*self.job.texts[number].hint, *self.left)

    @property
    def spaced(self) -> bool:
        """Whether a space comes before it."""
        number, blank = self.job.blanks[len(self.filled)]
        return self.job.texts[number].spaced[blank]

    def opened(self) -> ClozeState:
        """With the caller's targets as candidates, where there are any."""
        if self.done or self.candidates or not self.job.spaced:
            return self
        return replace(self, candidates=self.job.spaced if self.spaced else self.job.bare)

    def work(self) -> Work | None:
        """Tokens: the text before the blank, and the prompt if candidates are to be found; then any
        number of the candidates that are left.
        """
        if self.done:
            return None
        if self.read is None:
            count = len(self.begun) + (0 if self.candidates else len(self.hint))
            return Work(KEY, count, count)
        each = [len(tokens) for tokens in self.ahead(len(self.candidates))]
        return Work(KEY, each[0], sum(each))

    def ahead(self, count: int) -> list[Candidate]:
        """The next candidates, each with all that follows."""
        after, done = self.right, len(self.scores)
        return [(*candidate, *after) for candidate in self.candidates[done : done + count]]

    def granted(self, grant: int) -> list[Candidate]:
        """What the next call scores; one candidate at least."""
        found: list[Candidate] = []
        for tokens in self.ahead(len(self.candidates)):
            grant -= len(tokens)
            if grant < 0 and found:
                break
            found.append(tokens)
        return found

    def begins(self, read: Read, candidates: Sequence[Candidate]) -> ClozeState:
        """With the text before the blank read, and candidates to score."""
        return replace(self, read=read, candidates=tuple(candidates))

    def scored(self, scores: tuple[float, ...], shares: Filled | None) -> ClozeState:
        """With so many candidates scored; `shares` once all are."""
        if shares is None:
            return replace(self, scores=scores)
        return ClozeState(self.job, (*self.filled, shares)).opened()


def begin(job: ClozeJob, mark: Sequence[Filled]) -> ClozeState:
    """A row whose first blanks were filled elsewhere."""
    return ClozeState(job, tuple(mark)).opened()
