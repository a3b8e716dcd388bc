"""What the text benchmarks ask: 32 requests at once, and a slice of a public trace.

Prompts are pieces of the licence text, as token ids, so that every engine gets the same. It does
not know who answers.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from pipelines.fronts import ChatFront
from queueing.work import Card, Request
from tests.benchmarks.peers.wire import Ask

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "tests/benchmarks/data/azure-llm-2023-conversation.csv"
SEED = 1410  # whose lengths add up to what is usually quoted for this load
REQUESTS = 32
PROMPTS = (22, 1024)  # tokens
SCALE = 8  # by how much the trace's prompts and answers are shortened


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids to cut prompts from."""

    ids: Sequence[int]

    @classmethod
    def read(cls, folder: Path) -> Text:
        """The licence, in a model's own tokens."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(tokenizer.encode((ROOT / "LICENSE").read_text("utf-8")).ids)

    def piece(self, count: int, dice: random.Random) -> list[int]:
        """So many tokens from anywhere."""
        start = dice.randrange(len(self.ids) - count)
        return list(self.ids[start : start + count])


def at_once(text: Text) -> list[Ask]:
    """Lognormal prompts around 150 tokens, answers of 32 to 127."""
    dice = random.Random(SEED)
    low, high = PROMPTS
    prompts = [
        min(max(round(dice.lognormvariate(math.log(150), 0.75)), low), high)
        for _ in range(REQUESTS)
    ]
    answers = [dice.randint(32, 127) for _ in range(REQUESTS)]
    return [
        Ask(text.piece(prompt, dice), answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def trace(text: Text) -> list[Ask]:
    """The slice, lengths scaled down, at the times it came."""
    dice = random.Random(SEED)
    with TRACE.open() as file:
        rows = list(csv.DictReader(file))
    return [
        Ask(
            text.piece(max(int(row["context"]) // SCALE, 1), dice),
            max(int(row["generated"]) // SCALE, 1),
            float(row["seconds"]),
        )
        for row in rows
    ]


def paced(asks: Sequence[Ask], rate: float, seconds: float) -> list[Ask]:
    """As many of the trace's requests as come in `seconds` when `rate` come in one, their gaps
    stretched alike.
    """
    count = min(max(round(rate * seconds), 2), len(asks))
    own = asks[count - 1].at - asks[0].at
    stretch = (count / rate) / own
    return [Ask(ask.prompt, ask.tokens, (ask.at - asks[0].at) * stretch) for ask in asks[:count]]


class Greedy:
    """Makes of prompts what the front makes of greedy questions."""

    def __init__(self, card: Card) -> None:
        asked = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
        self._like = ChatFront().check(
            {**asked, "temperature": 0.0, "repetition_penalty": 1.0}, card
        )
        self._card = card

    def request(self, ask: Ask) -> Request:
        """With this prompt in place of its own."""
        job, (prefill, decode) = self._like.payload, self._like.plan
        settings = replace(job.settings, max_tokens=ask.tokens)
        tokens = len(ask.prompt) + ask.tokens + self._card.limits["page"]
        return replace(
            self._like,
            payload=replace(job, prompt=tuple(ask.prompt), settings=settings),
            plan=(replace(prefill, most=len(ask.prompt)), replace(decode, most=ask.tokens)),
            bytes=int(self._card.bytes_per_unit * tokens),
        )
