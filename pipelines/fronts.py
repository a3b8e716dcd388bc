"""The fronts: what a caller sends is checked and made into a request, on the host, without torch.

`ChatFront` takes a plain dictionary from anywhere and refuses, in a sentence that names the field
and the limit, whatever breaks a rule. Text is kept as it is, control characters included; only
unpaired surrogates are refused. It does not know people, queues or pages.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.chat import ChatJob, Settings, counted
from pipelines.checks import check_unicode, kind, number, shown, shows, whole
from pipelines.talk import summary
from pipelines.template import conversation
from queueing.work import Card, Invalid, Request, Work

ROLES = ("system", "user", "assistant")
MESSAGES = 1000
CHARACTERS = 1_000_000  # of all messages together, whatever the model
PER_TOKEN = 16  # characters that a token has at most in any text a person would send
STOPS = 8
STOP_CHARACTERS = 64
HOTTEST = 2.0
PENALTY = 0.1, 10.0  # far below the least, scores overflow
FIRMEST = 2.0  # of the penalties that are added
ANSWER = 512  # tokens of an answer when nobody says
SEED_LOW, SEED_HIGH = -(1 << 63), (1 << 64) - 1

FIELDS = frozenset(
    (
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
    )
)


class ChatFront:
    """Checks chats."""

    task = "chat"

    def judge(self, payload: Any) -> object:
        """What needs no model. Raises Invalid."""
        return check_settings(payload)

    def finish(self, request: Request, result: Any) -> Any:
        """An answer is its text; the result says how it ended."""
        return result

    def summary(self, result: Any, took: float, ran: float) -> str:
        """A line for a page."""
        return summary(result, took, ran)

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        context = card.limits["context"]
        settings = check_settings(payload, card.limits)
        messages: list[dict[str, str]] = payload["messages"]
        _check_length(messages, context)
        known = conversation(card.details["folder"])
        prompt = known.tokens(messages)
        room = context - len(prompt)
        if room < 1:
            raise too_long(len(prompt), context)
        # A limit, not a promise: near the end of the context an answer has what is left.
        settings = settings.limited(room)
        job = ChatJob(prompt, settings, known.public(prompt))
        plan = (Work("text", 1, len(prompt)), Work("text", 1, settings.max_tokens, serial=True))
        return Request(self.task, job, plan, _bytes(len(prompt) + settings.max_tokens, card))


def check_settings(payload: Any, limits: Mapping[str, int] | None = None) -> Settings:
    """What needs no tokens; a missing seed is drawn. Raises Invalid.

    `limits` are the model's; before it is there, what is above them is not yet refused.
    """
    context, vocabulary = (limits or {}).get("context"), (limits or {}).get("vocabulary")
    if not isinstance(payload, Mapping):
        raise Invalid(f"A chat is an object with the field messages, not {kind(payload)}.")
    unknown = sorted(str(name)[:40] for name in payload.keys() - FIELDS)
    if unknown:
        raise Invalid(f"A chat has no field {unknown[0]!r}; it has {', '.join(sorted(FIELDS))}.")
    _check_messages(payload.get("messages"))
    seed = payload.get("seed")
    if seed is None:
        seed = secrets.randbelow(1 << 32)  # short enough to be copied, and exact in a browser
    return Settings(
        max_tokens=whole("max_tokens", payload, min(ANSWER, context or ANSWER), 1, context),
        temperature=number("temperature", payload, 1.0, 0.0, HOTTEST),
        top_p=number("top_p", payload, 1.0, 0.0, 1.0, above=True),
        top_k=whole("top_k", payload, 0, 0, vocabulary),
        repetition_penalty=number("repetition_penalty", payload, 1.0, *PENALTY),
        seed=whole("seed", {"seed": seed}, 0, SEED_LOW, SEED_HIGH),
        stop=_stops(payload.get("stop")),
        min_p=number("min_p", payload, 0.0, 0.0, 1.0),
        presence_penalty=number("presence_penalty", payload, 0.0, -FIRMEST, FIRMEST),
        frequency_penalty=number("frequency_penalty", payload, 0.0, -FIRMEST, FIRMEST),
    )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)):
        raise Invalid(
            f"messages is {kind(messages)}; give a list of objects with role and content."
        )
    if not 1 <= len(messages) <= MESSAGES:
        raise Invalid(f"There are {len(messages):,} entries in messages; give 1 to {MESSAGES:,}.")
    for place, message in enumerate(messages):
        _check_message(f"messages[{place}]", message, place)
    total = sum(len(message["content"]) for message in messages)
    if total > CHARACTERS:
        raise Invalid(
            f"There are {total:,} characters in messages; at most {CHARACTERS:,} are taken. "
            "Shorten them."
        )
    for place, message in enumerate(messages):
        check_unicode(f"messages[{place}].content", message["content"])
    if messages[-1]["role"] != "user":
        raise Invalid("The last of messages must have the role user: it is the one to be answered.")


def _check_message(name: str, message: Any, place: int) -> None:
    if not isinstance(message, Mapping):
        raise Invalid(f"{name} is {kind(message)}; give an object with role and content.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise Invalid(f"{name}.role is {shown(role)}; it must be one of {', '.join(ROLES)}.")
    if role == "system" and place > 0:
        raise Invalid(f"{name}.role is system; only one message may be, the first of all.")
    if not isinstance(content, str):
        raise Invalid(f"{name}.content is {kind(content)}; give text.")
    if role == "user" and not shows(content):
        raise Invalid(f"{name}.content is empty; write at least one character that shows.")


def too_long(tokens: int, context: int) -> Invalid:
    """For a conversation after which there is no room for an answer."""
    over = counted(tokens + 1 - context, "token")
    return Invalid(
        f"There are {counted(tokens, 'token')} in messages, and the context of {context:,} "
        f"must hold an answer too; shorten them by {over} or more."
    )


def _check_length(messages: Sequence[Mapping[str, str]], context: int) -> None:
    """Before tokenising, which takes time that grows with the text."""
    total, most = sum(len(message["content"]) for message in messages), context * PER_TOKEN
    if total > most:
        raise Invalid(
            f"There are {total:,} characters in messages; a model with a context of {context:,} "
            f"tokens takes at most {most:,}. Shorten them."
        )


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        raise Invalid(f"stop is {kind(value)}; give a text or a list of at most {STOPS}.")
    if len(stops) > STOPS:
        raise Invalid(f"stop has {len(stops):,} entries; at most {STOPS} are taken.")
    for place, stop in enumerate(stops):
        name = f"stop[{place}]"
        if not isinstance(stop, str):
            raise Invalid(f"{name} is {kind(stop)}; give text.")
        if not 1 <= len(stop) <= STOP_CHARACTERS:
            raise Invalid(f"{name} has {len(stop):,} characters; give 1 to {STOP_CHARACTERS}.")
        check_unicode(name, stop)
    return tuple(stops)


def _bytes(tokens: int, card: Card) -> int:
    """Memory that a row of so many tokens may come to hold, in whole pages."""
    page = card.limits.get("page", 1)
    tokens += card.limits.get("fixed", 0)
    return math.ceil(-(-tokens // page) * page * card.bytes_per_unit)
