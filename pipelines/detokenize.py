"""Token ids become text as they come: never half a character, never a piece of a stop string.

A pure state, pushed one token at a time: the same tokens give the same deltas at the same offsets,
however they were batched, parked or replayed. It knows a decoder of token ids and nothing of models
or streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

_HALF = "\ufffd"  # what a decoder gives for bytes that are no character, or not yet one
_CONTEXT = 8  # tokens of an unfinished window that stay in doubt; a character has 4 bytes at most
_LONGEST = 32  # tokens an unfinished window may grow to before its settled part is let go


@dataclass(frozen=True, slots=True)
class Text:
    """Text so far. `at` counts characters given out; `held` is text kept back for a stop string."""

    at: int = 0
    held: str = ""
    window: tuple[
        int, ...
    ] = ()  # the tokens that came out last, as context, and those still in doubt
    context: int = 0  # how many of the window came out
    known: str = ""  # the text of those
    stopped: bool = False


def push(text: Text, token: int, decode: Decode, stops: Sequence[str]) -> tuple[Text, str]:
    """The text with one more token, and the characters that are now certain."""
    window = (*text.window, token)
    whole = decode(window)
    if whole.endswith(_HALF):
        return _unfinished(text, window, whole, decode, stops)
    fresh = whole[len(text.known) :]
    if not fresh:  # a token without text, such as a control token
        return text, ""
    # What came out stays as context: decoders treat the first token of a text differently.
    last = window[text.context :]
    settled = replace(text, window=last, context=len(last), known=decode(last))
    return _give(settled, fresh, stops)


def finish(text: Text, decode: Decode, stops: Sequence[str]) -> tuple[Text, str]:
    """The end of the tokens: what is held or unfinished comes out, if no stop string ended it."""
    if text.stopped:
        return text, ""
    whole = decode(text.window)
    fresh = whole[len(text.known) :]
    text, delta = _give(replace(text, window=(), context=0, known=""), fresh, stops)
    if text.stopped:
        return text, delta
    return replace(text, at=text.at + len(text.held), held=""), delta + text.held


def _unfinished(
    text: Text, window: tuple[int, ...], whole: str, decode: Decode, stops: Sequence[str]
) -> tuple[Text, str]:
    """Half a character at the end waits; a long window gives up what no later token can change."""
    waiting = replace(text, window=window)
    if len(window) < _LONGEST:
        return waiting, ""
    tail = window[-_CONTEXT:]
    settled = decode(window[:-_CONTEXT])
    if settled + decode(tail) != whole:
        return waiting, ""
    return _give(replace(text, window=tail, context=0, known=""), settled[len(text.known) :], stops)


def _give(text: Text, fresh: str, stops: Sequence[str]) -> tuple[Text, str]:
    """Let text out up to the first stop string, and keep back a tail that may become one."""
    if not fresh:
        return text, ""
    candidate = text.held + fresh
    found = [place for place in (candidate.find(stop) for stop in stops) if place >= 0]
    if found:
        delta = candidate[: min(found)]
        return replace(text, at=text.at + len(delta), held="", stopped=True), delta
    keep = max((_overlap(candidate, stop) for stop in stops), default=0)
    delta = candidate[: len(candidate) - keep]
    return replace(text, at=text.at + len(delta), held=candidate[len(candidate) - keep :]), delta


def _overlap(candidate: str, stop: str) -> int:
    """The longest proper beginning of the stop string that the text ends with."""
    for length in range(min(len(stop) - 1, len(candidate)), 0, -1):
        if candidate.endswith(stop[:length]):
            return length
    return 0
