"""A conversation in three shapes: as a page holds it, as plain messages, as what a front checks.

It judges nothing and knows no model: whatever a caller sent is put there for the front to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

SAMPLING: Mapping[str, Any] = {
    "max_tokens": 256,
    "temperature": 0.2,
    "top_p": 0.5,  # small models wander: of two likely words, mostly the likelier
    "top_k": 0,
    "repetition_penalty": 1.0,
    "seed": None,
    "stop": None,
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


def begun(data: Any, talk: list[Message], message: str) -> tuple[list[Message], str]:
    """What was said before, and the message that an event on the page asks to answer.

    What is no such event counts as a message that was sent.
    """
    index = data.get("index") if isinstance(data, dict) else None
    index = index[0] if isinstance(index, list) and index else index
    value = data.get("value") if isinstance(data, dict) else None
    if not isinstance(index, int):  # sent
        return talk, message if isinstance(message, str) else ""
    if not talk:  # an example: they are shown while nothing has been said
        return [], _text(value)
    before, again = asked(talk, index)
    return before, str(value) if "previous_value" in data else again  # edited, or asked again


def seed_of(text: Any) -> int | str | None:
    """A seed as it was written; what is no number is for the front to refuse."""
    text = str(text or "").strip()
    return int(text) if text.lstrip("-").isdecimal() and len(text) < 40 else text or None


def stops_of(text: Any) -> list[str]:
    """Stop strings, one a line."""
    return [line for line in str(text or "").splitlines() if line]


def payload(system: Any, history: Any, message: Any, sampling: Mapping[str, Any]) -> Message:
    """What the chat front checks: the system prompt if any, what was said, and the message."""
    messages = [] if history is None else history
    if isinstance(messages, list):  # the front refuses anything else
        first = [] if system in ("", None) else [said("system", system)]
        messages = [*first, *messages, said("user", message)]
    return {"messages": messages, **sampling}


def _text(part: Any) -> str:
    return str(part.get("text") or "") if isinstance(part, dict) else str(part)


def summary(result: Any, took: float, ran: float) -> str:
    """How much, how fast, which seed; with the seconds since it was asked and those it ran."""
    if result is None:
        return f"Done in {took:.1f} s"
    cut = ", cut at the longest answer" if result.reason == "length" else ""
    count = result.output_tokens
    rate = f"{count / max(ran, 1e-3):.1f} tokens/s"
    return f"{count} tokens in {took:.1f} s{cut} · {rate} · seed {result.seed}"
