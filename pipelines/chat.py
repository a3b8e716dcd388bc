"""The words of a chat between its front and its pipeline: a checked job, and what became of it.

Both sides import it, so it imports neither torch nor a tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal["stop", "length", "stop string"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How the next token is chosen and when an answer ends."""

    max_tokens: int
    temperature: float  # 0 takes the likeliest token always
    top_p: float
    top_k: int  # 0 means all
    repetition_penalty: float  # 1 means none
    seed: int
    stop: tuple[str, ...]
    min_p: float = 0.0  # of the likeliest token's probability; 0 means all
    presence_penalty: float = 0.0  # taken from the score of what the answer has said
    frequency_penalty: float = 0.0  # the same, once for each time it was said

    @property
    def penalises(self) -> bool:
        """Whether the next token depends on the tokens before it other than through the model."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def limited(self, tokens: int) -> Settings:
        """The same with at most so many tokens."""
        return replace(self, max_tokens=min(self.max_tokens, tokens))


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A conversation as token ids, ready to be continued."""

    prompt: tuple[int, ...]
    settings: Settings
    public: int = 0  # tokens at its start that are the model's own words, the same for everybody


@dataclass(frozen=True, slots=True)
class ChatResult:
    """Why an answer ended: the model's own end, the limit of tokens, or one of the stop strings."""

    reason: Reason
    prompt_tokens: int
    output_tokens: int
    seed: int


def counted(number: int, thing: str) -> str:
    """So many of a thing, in the singular where there is one."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
