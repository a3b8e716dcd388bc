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
from pipelines.template import Conversation
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
    """Checks chats; keeps one tokenizer per model folder."""

    task = "chat"

    def __init__(self) -> None:
        self._conversations: dict[str, Conversation] = {}

    def check(self, payload: Any, card: Card) -> Request:
        """Raises Invalid."""
        context = card.limits["context"]
        settings = check_settings(payload, card.limits)
        messages: list[dict[str, str]] = payload["messages"]
        _check_length(messages, context)
        conversation = self._conversation(card.details["folder"])
        prompt = conversation.tokens(messages)
        room = context - len(prompt)
        if room < 1:
            raise too_long(len(prompt), context)
        # A limit, not a promise: near the end of the context an answer has what is left.
        settings = settings.limited(room)
        job = ChatJob(prompt, settings, conversation.public(prompt))
        plan = (Work("text", 1, len(prompt)), Work("text", 1, settings.max_tokens, serial=True))
        return Request(self.task, job, plan, _bytes(len(prompt) + settings.max_tokens, card))

    def _conversation(self, folder: str) -> Conversation:
        found = self._conversations.get(folder)
        if found is None:
            found = self._conversations[folder] = Conversation(folder)
        return found


def check_settings(payload: Any, limits: Mapping[str, int] | None = None) -> Settings:
    """What needs no tokens; a missing seed is drawn. Raises Invalid.

    `limits` are the model's; before it is there, what is above them is not yet refused.
    """
    context, vocabulary = (limits or {}).get("context"), (limits or {}).get("vocabulary")
    if not isinstance(payload, Mapping):
        raise Invalid(f"A chat is an object with the field messages, not {_kind(payload)}.")
    unknown = sorted(str(name)[:40] for name in payload.keys() - FIELDS)
    if unknown:
        raise Invalid(f"A chat has no field {unknown[0]!r}; it has {', '.join(sorted(FIELDS))}.")
    _check_messages(payload.get("messages"))
    seed = payload.get("seed")
    if seed is None:
        seed = secrets.randbelow(1 << 32)  # short enough to be copied, and exact in a browser
    return Settings(
        max_tokens=_whole("max_tokens", payload, min(ANSWER, context or ANSWER), 1, context),
        temperature=_number("temperature", payload, 1.0, 0.0, HOTTEST),
        top_p=_number("top_p", payload, 1.0, 0.0, 1.0, above=True),
        top_k=_whole("top_k", payload, 0, 0, vocabulary),
        repetition_penalty=_number("repetition_penalty", payload, 1.0, *PENALTY),
        seed=_whole("seed", {"seed": seed}, 0, SEED_LOW, SEED_HIGH),
        stop=_stops(payload.get("stop")),
        min_p=_number("min_p", payload, 0.0, 0.0, 1.0),
        presence_penalty=_number("presence_penalty", payload, 0.0, -FIRMEST, FIRMEST),
        frequency_penalty=_number("frequency_penalty", payload, 0.0, -FIRMEST, FIRMEST),
    )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)):
        raise Invalid(
            f"messages is {_kind(messages)}; give a list of objects with role and content."
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
        _check_unicode(f"messages[{place}].content", message["content"])
    if messages[-1]["role"] != "user":
        raise Invalid("The last of messages must have the role user: it is the one to be answered.")


def _check_message(name: str, message: Any, place: int) -> None:
    if not isinstance(message, Mapping):
        raise Invalid(f"{name} is {_kind(message)}; give an object with role and content.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise Invalid(f"{name}.role is {_shown(role)}; it must be one of {', '.join(ROLES)}.")
    if role == "system" and place > 0:
        raise Invalid(f"{name}.role is system; only one message may be, the first of all.")
    if not isinstance(content, str):
        raise Invalid(f"{name}.content is {_kind(content)}; give text.")
    if role == "user" and not content.strip():
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


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(
            f"{name} has an unpaired surrogate at character {error.start + 1}, which is not text; "
            "remove it."
        ) from None


def _stops(value: Any) -> tuple[str, ...]:
    stops = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)):
        raise Invalid(f"stop is {_kind(value)}; give a text or a list of at most {STOPS}.")
    if len(stops) > STOPS:
        raise Invalid(f"stop has {len(stops):,} entries; at most {STOPS} are taken.")
    for place, stop in enumerate(stops):
        name = f"stop[{place}]"
        if not isinstance(stop, str):
            raise Invalid(f"{name} is {_kind(stop)}; give text.")
        if not 1 <= len(stop) <= STOP_CHARACTERS:
            raise Invalid(f"{name} has {len(stop):,} characters; give 1 to {STOP_CHARACTERS}.")
        _check_unicode(name, stop)
    return tuple(stops)


def _number(
    name: str,
    payload: Mapping[str, Any],
    missing: float,
    low: float,
    high: float,
    above: bool = False,
) -> float:
    """A finite number from `low` (or above it) to `high`."""
    value = payload.get(name)
    if value is None:
        return missing
    limits = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(f"{name} is {_kind(value)}; give a number {limits}.")
    if not low <= value <= high or (above and value == low):  # false for what is no number
        raise Invalid(f"{name} is {_shown(value)}; give a number {limits}.")
    return float(value)


def _whole(name: str, payload: Mapping[str, Any], missing: int, low: int, high: int | None) -> int:
    """A whole number; 3.0 is one, because in JSON it may be. `high` None: not known yet."""
    value = payload.get(name)
    if value is None:
        return missing
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(f"{name} is {_kind(value)}; give a whole number {limits}.")
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        raise Invalid(f"{name} is {_shown(value)}; give a whole number {limits}.")
    if not low <= value <= (value if high is None else high):
        raise Invalid(f"{name} is {_shown(value)}; give a whole number {limits}.")
    return int(value)


def _bytes(tokens: int, card: Card) -> int:
    """Memory that a row of so many tokens may come to hold, in whole pages."""
    page = card.limits.get("page", 1)
    tokens += card.limits.get("fixed", 0)
    return math.ceil(-(-tokens // page) * page * card.bytes_per_unit)


def _kind(value: Any) -> str:
    """What a caller gave, in a caller's words."""
    if value is None:
        return "missing"
    kinds = (
        (bool, "true or false"),
        (str, "text"),
        ((int, float), "a number"),
        (Mapping, "an object"),
    )
    for kind, words in kinds:
        if isinstance(value, kind):
            return words
    return "a list" if isinstance(value, (list, tuple)) else "something else"


def _shown(value: Any) -> str:
    """A value as it was given, cut short; a number of thousands of digits is not written out."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 128:
        return "a number with very many digits"
    shown = "missing" if value is None else str(value)
    shown = shown.encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= 40 else shown[:40] + "..."
