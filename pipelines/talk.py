"""A conversation in three shapes: as a page holds it, as plain messages, as what a front checks.

It judges nothing and knows no model: whatever a caller sent is put there for the front to refuse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipelines.chat import counted

Message: TypeAlias = dict[str, Any]

SAMPLING: Mapping[str, Any] = {
    "max_tokens": 256,
    "temperature": 0.2,
    "top_p": 0.5,  # small models wander: of two likely words, mostly the likelier
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
    "stop": None,
}
SLIDERS: Mapping[str, tuple[float, float, float, str]] = {  # least, most, step, label
    "max_tokens": (1, 2048, 1, "Longest answer, in tokens"),
    "temperature": (0, 2, 0.05, "Temperature (0: the likeliest)"),
    "top_p": (0.05, 1, 0.05, "Top p"),
    "top_k": (0, 200, 1, "Top k (0: all)"),
    "min_p": (0, 1, 0.01, "Min p (0: all)"),
    "repetition_penalty": (1, 2, 0.05, "Repetition penalty"),
    "presence_penalty": (-2, 2, 0.1, "Presence penalty"),
    "frequency_penalty": (-2, 2, 0.1, "Frequency penalty"),
}
LABELS: Mapping[str, str] = {  # on the page
    "system": "The system prompt",
    "message": "Your message",
    "max_tokens": "The longest answer",
    "temperature": "The temperature",
    "top_p": "Top p",
    "top_k": "Top k",
    "min_p": "Min p",
    "repetition_penalty": "The repetition penalty",
    "presence_penalty": "The presence penalty",
    "frequency_penalty": "The frequency penalty",
    "seed": "The seed",
    "stop": "The list of stop strings",
}


def said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def spoken(talk: list[Message]) -> list[Message]:
    """The page's conversation as plain messages."""
    return [said(turn["role"], "".join(map(_text, turn["content"]))) for turn in talk]


def drawn(messages: list[Message]) -> list[Message]:
    """Plain messages as the page takes them, their text untouched."""
    return [said(turn["role"], [{"type": "text", "text": turn["content"]}]) for turn in messages]


def asked(messages: list[Message], index: int) -> tuple[list[Message], str]:
    """What was said before the person's message at or before an index, and that message."""
    turns = [at for at, turn in enumerate(messages[: index + 1]) if turn["role"] == "user"]
    return (messages[: turns[-1]], messages[turns[-1]]["content"]) if turns else ([], "")


@dataclass(frozen=True, slots=True)
class Turn:
    """What an event on the page asks for, and what stands there again if it is refused."""

    before: list[Message]  # what was said before the message
    message: str
    was: list[Message]  # the conversation as it was
    back: str  # of the message, what returns to the box


def begun(data: Any, drawn: list[Message], typed: Any) -> Turn:
    """The turn that an event on the page begins: sent, an example, asked again, or edited.

    What is no such event counts as a message that was sent.
    """
    talk = spoken(drawn)
    index = data.get("index") if isinstance(data, dict) else None
    index = index[0] if isinstance(index, list) and index else index
    value = data.get("value") if isinstance(data, dict) else None
    if not isinstance(index, int):  # sent
        message = typed if isinstance(typed, str) else ""
        return Turn(talk, message, talk, message)
    if not talk:  # an example: they are shown while nothing has been said
        return Turn([], _text(value), [], _text(value))
    before, again = asked(talk, index)
    if "previous_value" not in data:
        return Turn(before, again, talk, "")
    place = len(before)
    was = [*before, said("user", str(data["previous_value"])), *talk[place + 1 :]]
    return Turn(before, str(value), was if place < len(talk) else talk, str(value))


def sampled(written: Sequence[Any]) -> dict[str, Any]:
    """What `SAMPLING` names, from the page's settings; what is wrong there is left to the front."""
    *numbers, seed, stop = written
    return dict(zip(SAMPLING, (*numbers, _seed(seed), _stops(stop)), strict=True))


def _seed(text: Any) -> int | str | None:
    text = str(text or "").strip()
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 40 else text or None


def _stops(text: Any) -> list[str]:
    """Stop strings, one a line."""
    return [line for line in str(text or "").splitlines() if line]


@dataclass(frozen=True, slots=True)
class Question:
    """A message to answer with what belongs to it, and how its caller calls the parts.

    A front knows one list of messages, and names places in it when it refuses one.
    """

    system: Any
    history: Any
    message: Any
    sampling: Mapping[str, Any]

    def payload(self) -> Message:
        """What the chat front checks: the system prompt if any, what was said, and the message."""
        messages = [] if self.history is None else self.history
        if isinstance(messages, list):  # the front refuses anything else
            first = [said("system", self.system)] if self._first else []
            messages = [*first, *messages, said("user", self.message)]
        return {"messages": messages, **self.sampling}

    def in_fields(self, line: str) -> str:
        """A refusal by the names of the endpoint's fields."""
        line = re.sub(r"\bmessages\[(\d+)\](\.\w+)?", self._field, line, count=1)
        return re.sub(r"\bmessages\b", self._fields(), line, count=1)

    def in_words(self, line: str) -> str:
        """A refusal in the words of the page."""
        line = re.sub(r"\bmessages\[(\d+)\](\.\w+)?", self._words, line, count=1)
        line = re.sub(r"\bmessages\b", "the conversation", line, count=1)
        return re.sub(rf"^({'|'.join(LABELS)})\b(?:\[(\d+)\])?", _label, line)

    @property
    def _first(self) -> bool:
        """Whether a system prompt comes before the history."""
        return self.system not in ("", None)

    def _place(self, text: str) -> int | str:
        """The place in the history that a place in the list is, or which other field."""
        place, said_before = int(text) - self._first, len(self.history or ())
        return "system" if place < 0 else "message" if place == said_before else place

    def _field(self, found: re.Match[str]) -> str:
        place = self._place(found[1])
        return place if isinstance(place, str) else f"history[{place}]{found[2] or ''}"

    def _words(self, found: re.Match[str]) -> str:
        place = self._place(found[1])
        return LABELS[place] if isinstance(place, str) else f"Message {place + 1} above"

    def _fields(self) -> str:
        if not isinstance(self.history, list | None):
            return "history"
        names = ["system"] * self._first + ["history"] * bool(self.history) + ["message"]
        return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _label(found: re.Match[str]) -> str:
    number = "" if found[2] is None else f", number {int(found[2]) + 1},"
    return LABELS[found[1]] + number


def _text(part: Any) -> str:
    return str(part.get("text") or "") if isinstance(part, dict) else str(part)


def summary(result: Any, took: float, ran: float) -> str:
    """How much, how fast, which seed; with the seconds since it was asked and those it ran."""
    if result is None:
        return f"Done in {took:.1f} s"
    cut = ", cut at the longest answer" if result.reason == "length" else ""
    count = result.output_tokens
    rate = f"{count / max(ran, 1e-3):.1f} tokens/s"
    return f"{counted(count, 'token')} in {took:.1f} s{cut} · {rate} · seed {result.seed}"
