"""What the benchmark of one-shot tasks asks: texts of drawn lengths, at drawn times.

Texts are pieces of the licence, cut where words begin, so that every engine's tokenizer makes the
same tokens of them. It does not know who answers.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipelines.texts import Texts, texts
from tests.benchmarks.workload import ROOT

Draw: TypeAlias = Callable[[random.Random], int]

SEED = 4
CONTEXT = 512  # tokens that the model takes
CONTROL = 2  # tokens that the tokenizer puts around a text
SHORTEST = 4


def uniform(dice: random.Random) -> int:
    """From 4 to 512 tokens, all alike."""
    return dice.randint(SHORTEST, CONTEXT)


def short(dice: random.Random) -> int:
    """A query: 8 to 32 tokens."""
    return dice.randint(8, 32)


def mixed(dice: random.Random) -> int:
    """70 % queries of 4 to 20 tokens, 25 % passages of 64 to 200, 5 % documents of 300 to 512."""
    kind = dice.random()
    low, high = (4, 20) if kind < 0.7 else (64, 200) if kind < 0.95 else (300, CONTEXT)
    return dice.randint(low, high)


@dataclass(frozen=True, slots=True)
class Source:
    """A long text, and where in it each token begins and ends; a word may be several."""

    text: str
    spans: Sequence[tuple[int, int]]
    starts: Sequence[int]  # tokens at which words begin
    tokenizer: Texts

    @classmethod
    def read(cls, folder: Path, text: str = "") -> Source:
        """The licence, in a model's own tokens."""
        text = text or (ROOT / "LICENSE").read_text("utf-8")
        tokenizer = texts(str(folder), CONTEXT)
        _, spans = tokenizer.plain(text)
        starts = [n for n, (at, _) in enumerate(spans) if not n or text[at - 1].isspace()]
        return cls(text, spans, starts, tokenizer)

    def piece(self, tokens: int, dice: random.Random) -> str:
        """From a word anywhere, so many tokens with those around it, or up to a few less where the
        last word would not fit.
        """
        count = max(tokens - CONTROL, 1)
        place = dice.randrange(bisect_right(self.starts, len(self.spans) - count))
        start = self.starts[place]
        following = bisect_right(self.starts, start + count) - 1
        last = self.starts[following] if following > place else start + count
        return self.text[self.spans[start][0] : self.spans[last - 1][1]]

    def pieces(self, count: int, draw: Draw, seed: int = SEED) -> list[str]:
        """Always the same."""
        dice = random.Random(seed)
        return [self.piece(draw(dice), dice) for _ in range(count)]

    def tokens(self, pieces: Sequence[str]) -> int:
        """Of all texts, as the model reads them."""
        return sum(len(found.item.tokens) for found in self.tokenizer.singles(pieces))


@dataclass(frozen=True, slots=True)
class Line:
    """Of a file."""

    text: str
    error: str = ""


def lines(pieces: Sequence[str], count: int) -> Iterator[Line]:
    """So many, in turns."""
    for number in range(count):
        yield Line(pieces[number % len(pieces)])


def arrivals(rate: float, seconds: float, seed: int = SEED) -> list[float]:
    """Moments of a Poisson process of so many a second."""
    dice, moments, now = random.Random(seed), list[float](), 0.0
    while (now := now + dice.expovariate(rate)) < seconds:
        moments.append(now)
    return moments
