"""Summaries by the chat model: a text and a wish become a conversation, and ride with all others.

It does not know the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipelines.chat import ChatResult, counted
from pipelines.checks import choice, fields, text
from pipelines.fronts import CHARACTERS, ChatFront
from queueing.work import Card, Invalid, Request

# The wishes that SmolLM2 was taught for summaries; other models understand them as well.
WISHES: Mapping[str, tuple[str, int]] = {  # and the longest answer, in tokens
    "short": (
        "Extract and present the main key point of the input text in one very short sentence, "
        "including essential details like dates or locations if necessary.",
        64,
    ),
    "medium": (
        "Provide a concise, objective summary of the input text in up to three sentences, focusing "
        "on key actions and intentions without using second or third person pronouns.",
        160,
    ),
    "long": (
        "Provide an objective summary of the input text in up to eight sentences, keeping names, "
        "dates and numbers.",
        400,
    ),
}
FIELDS = ("text", "length")


class SummariseFront:
    """Checks texts; asks the chat model for a summary, always its likeliest words."""

    task = "chat"

    def __init__(self) -> None:
        self._chat = ChatFront()

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return judged(payload)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        written, length = judged(payload)
        wish, longest = WISHES[length]
        messages = [{"role": "system", "content": wish}, {"role": "user", "content": written}]
        asked = {"max_tokens": min(longest, card.limits["context"]), "temperature": 0.0}
        try:
            return self._chat.check({"messages": messages, **asked}, card)
        except Invalid as error:
            said = re.sub(r"\bmessages(\[\d\]\.content)?", "text", str(error))
            raise Invalid(said.replace("shorten them", "shorten it")) from None

    def finish(self, request: Request, result: Any) -> Any:
        """A summary is its text; the result says how it ended."""
        return result

    def summary(self, result: Any, took: float, ran: float) -> str:
        """A line for a page."""
        return line(result, took)


def judged(payload: Any) -> tuple[str, str]:
    """A text and the length that is wished for. Raises Invalid."""
    fields("A summary", payload, FIELDS)
    length = choice("length", payload, "medium", WISHES)
    return text("text", payload.get("text"), CHARACTERS), length


def line(result: ChatResult, took: float) -> str:
    """What became of a summary, in a line for a page."""
    cut = ", cut at the longest summary" if result.reason == "length" else ""
    read = counted(result.prompt_tokens, "token")
    return f"{counted(result.output_tokens, 'token')} out of {read} in {took:.1f} s{cut}"
