"""A text row's state, and its ride through one device call.

States are frozen and share what they have in common; a ride collects what one call makes of one row
and becomes an Advance. It does not know the model, the pages of others, or how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from pipelines.alone import Memory
from pipelines.chat import ChatJob, ChatResult, Reason
from pipelines.detokenize import Text, finish, push
from pipelines.sampling import Draw
from queueing.work import Advance, Mark, Output, Row

_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids that grow without being copied: full chunks are shared with earlier versions."""

    chunks: tuple[tuple[int, ...], ...] = ()
    recent: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.chunks) * _CHUNK + len(self.recent)

    def plus(self, token: int) -> Tokens:
        """These and one more."""
        recent = (*self.recent, token)
        if len(recent) < _CHUNK:
            return Tokens(self.chunks, recent)
        return Tokens((*self.chunks, recent), ())

    def last(self) -> int:
        """The newest; there must be one."""
        return self.recent[-1] if self.recent else self.chunks[-1][-1]

    def flat(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(token for chunk in (*self.chunks, self.recent) for token in chunk)


@dataclass(frozen=True, slots=True)
class Words:
    """How tokens become text, and which of them end an answer."""

    tokenizer: Tokenizer
    ends: frozenset[int]

    @classmethod
    def read(cls, folder: Path, ends: frozenset[int]) -> Words:
        """From a model's folder."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")), ends)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without control tokens; any ids will do."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


@dataclass(frozen=True, slots=True)
class TextState:
    """All there is to a row: `computed` tokens of prompt and answer are in its pages, or in its
    memory if the model computes rows alone.
    """

    job: ChatJob
    answer: Tokens
    computed: int
    text: Text
    reason: Reason | None = None
    cached: int = 0  # tokens that were in pages when it was opened
    memory: Memory = Memory()

    @classmethod
    def begin(cls, job: ChatJob) -> TextState:
        """Nothing computed, nothing said."""
        return cls(job, Tokens(), 0, Text())

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed; the last of them gives the next token."""
        return len(self.job.prompt) + len(self.answer) - self.computed

    @property
    def left(self) -> int:
        """Tokens it may still choose."""
        return self.job.settings.max_tokens - len(self.answer)

    def known(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.job.prompt + self.answer.flat()

    def found(self, tokens: int) -> TextState:
        """The same with its first tokens in pages that were there."""
        return replace(self, computed=tokens, cached=tokens)

    def tokens(self, count: int) -> Sequence[int]:
        """The next `count` tokens to compute."""
        prompt, end = self.job.prompt, self.computed + count
        if end <= len(prompt):
            return prompt[self.computed : end]
        if count == 1 and self.pending == 1:
            return (self.answer.last(),)
        return self.known()[self.computed : end]

    def said(self, token: int, words: Words) -> tuple[TextState, str]:
        """With one more token chosen; also the text that came out."""
        settings = self.job.settings
        if token in words.ends:
            return self._ended("stop", self.text, words)
        answer = self.answer.plus(token)
        text, delta = push(self.text, token, words.decode, settings.stop)
        state = replace(self, answer=answer, text=text)
        if text.stopped:
            return replace(state, reason="stop string"), delta
        if len(answer) < settings.max_tokens:
            return state, delta
        state, rest = state._ended("length", text, words)
        return state, delta + rest

    def replayed(self, mark: Mark, words: Words) -> TextState:
        """As if it had chosen the tokens of the mark, one after the other."""
        state = self
        for token in mark:
            state, _ = state.said(token, words)
        return state

    def result(self) -> ChatResult | None:
        """What became of it, once it has ended."""
        if self.reason is None:
            return None
        job = self.job
        return ChatResult(self.reason, len(job.prompt), len(self.answer), job.settings.seed)

    def _ended(self, reason: Reason, text: Text, words: Words) -> tuple[TextState, str]:
        text, delta = finish(text, words.decode, self.job.settings.stop)
        return replace(self, text=text, reason="stop string" if text.stopped else reason), delta


class Ride:
    """One row in one device call: takes tokens in, gives an Advance, leaves the row alone."""

    def __init__(self, row: Row, grant: int, pages: Sequence[int], size: int) -> None:
        self.state: TextState = row.state
        self._row = row
        self._grant = grant
        self._pages = pages
        self._size = size
        self._decodes = self.state.pending == 1
        self._at = self.state.text.at
        self._units = 0
        self._parts: list[str] = []
        self._mark: list[int] = []
        self._error: Exception | None = None

    @property
    def goes_on(self) -> bool:
        """Whether it has a further forward in this call; a cancelled row has not."""
        over = self._error is not None or self.state.reason is not None or self._row.cancelled
        return self._decodes and not over and self._units < self._grant

    def tokens(self) -> Sequence[int]:
        """What it computes in the next forward."""
        return self.state.tokens(1 if self._decodes else min(self._grant, self.state.pending))

    def pages_for(self, count: int) -> Sequence[int]:
        """Its pages, which must have room for `count` more tokens."""
        if self.state.computed + count > len(self._pages) * self._size:
            raise RuntimeError("A row was granted more than it had reserved. This is a bug.")
        return self._pages

    def completes(self, count: int) -> bool:
        """Whether computing `count` tokens leaves none pending, so that the next is chosen."""
        return count == self.state.pending

    def draw(self) -> Draw:
        """What the choice of its next token depends on."""
        state = self.state
        settings = state.job.settings
        seen = state.known() if settings.penalises else ()
        return Draw(settings, len(state.answer), seen)

    def remember(self, memory: Memory) -> None:
        """Keep what a model that computes rows alone holds of this one."""
        self.state = replace(self.state, memory=memory)

    def advance(self, count: int, chosen: int | None, words: Words) -> None:
        """Take the forward in: `count` tokens computed and, if that was all, one chosen."""
        self._units += count
        choosing = self.completes(count)
        self.state = replace(self.state, computed=self.state.computed + count)
        if not choosing:
            return
        if chosen is None:
            self._error = ArithmeticError("The model's numbers for this row are not finite.")
            return
        before = len(self.state.answer)
        self.state, delta = self.state.said(chosen, words)
        self._parts.append(delta)
        if len(self.state.answer) > before:
            self._mark.append(chosen)

    def outcome(self) -> Advance | Exception:
        """All of it, for the engine to commit."""
        if self._error is not None:
            return self._error
        delta = "".join(self._parts)
        result = self.state.result()
        prompt = len(self.state.job.prompt)
        output = None
        if delta or result is not None:
            output = Output(self._at, delta, result=result)
        elif self.state.computed < prompt:
            output = Output(self._at, progress=self.state.computed / prompt)
        first = self._row.state.computed == self._row.state.cached
        reused = self._row.state.cached if first else 0
        return Advance(self.state, self._units, output, tuple(self._mark), reused)
