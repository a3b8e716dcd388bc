"""Values as callers send them, judged one by one: refused in a sentence that names the field, what
came and what is taken.

It knows no task.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any
from unicodedata import category

from queueing.work import Invalid

SILENT = frozenset(("Cc", "Cf", "Zl", "Zp", "Zs"))  # Unicode's classes of what does not show


def shows(text: str) -> bool:
    """Whether a reader would see anything of it."""
    return any(category(character) not in SILENT for character in text)


def check_unicode(name: str, text: str) -> None:
    """Raises Invalid for what no encoding could carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(
            f"{name} has an unpaired surrogate at character {error.start + 1}, which is not text; "
            "remove it."
        ) from None


def fields(what: str, payload: Any, known: Collection[str]) -> None:
    """Raises Invalid for what is no object, or has a field that nobody reads."""
    if not isinstance(payload, Mapping):
        raise Invalid(f"{what} is an object with fields, not {kind(payload)}.")
    unknown = sorted(str(name)[:40] for name in payload.keys() - set(known))
    if unknown:
        raise Invalid(f"{what} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}.")


def text(name: str, value: Any, most: int) -> str:
    """A text with something to read in it, of at most so many characters."""
    if not isinstance(value, str):
        raise Invalid(f"{name} is {kind(value)}; give text.")
    if not shows(value):
        raise Invalid(f"{name} is empty; write at least one character that shows.")
    if len(value) > most:
        raise Invalid(f"{name} has {len(value):,} characters; at most {most:,} are taken.")
    check_unicode(name, value)
    return value


def texts(
    name: str, value: Any, most: int, characters: int
) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """Of a list, the texts with their places, and what is wrong with those that are none.

    Raises Invalid when it is no list, is too long, or has no text at all.
    """
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)):
        raise Invalid(f"{name} is {kind(value)}; give a list of texts.")
    _check_count(name, entries, most)
    total = sum(len(entry) for entry in entries if isinstance(entry, str))
    if total > characters:
        raise Invalid(
            f"There are {total:,} characters in {name}; at most {characters:,} are taken at once. "
            "Send fewer texts, or shorter ones."
        )
    good, bad = [], []
    for place, entry in enumerate(entries):
        shown_as = name if isinstance(value, str) else f"{name}[{place}]"
        try:
            good.append((place, text(shown_as, entry, characters)))
        except Invalid as error:
            bad.append((place, str(error)))
    if not good:
        raise Invalid(bad[0][1])
    return good, bad


def _check_count(name: str, entries: Collection[Any], most: int) -> None:
    if not entries:
        raise Invalid(f"{name} is empty; give 1 to {most:,}.")
    if len(entries) > most:
        raise Invalid(f"There are {len(entries):,} entries in {name}; give 1 to {most:,}.")


def words(name: str, value: Any, most: int, characters: int) -> tuple[str, ...]:
    """Different short texts, without the space around them."""
    if not isinstance(value, (list, tuple)):
        raise Invalid(f"{name} is {kind(value)}; give a list of texts.")
    _check_count(name, value, most)
    found: dict[str, int] = {}
    for place, entry in enumerate(value):
        word = text(f"{name}[{place}]", entry, characters).strip()
        first = found.setdefault(word, place)
        if first != place:
            raise Invalid(
                f"{name}[{place}] is {shown(word)}, as {name}[{first}] is; give each once."
            )
    return tuple(found)


def truth(name: str, payload: Mapping[str, Any], missing: bool) -> bool:
    """True or false."""
    value = payload.get(name)
    if value is None:
        return missing
    if not isinstance(value, bool):
        raise Invalid(f"{name} is {kind(value)}; give true or false.")
    return value


def choice(name: str, payload: Mapping[str, Any], missing: str, choices: Collection[str]) -> str:
    """One of some words."""
    value = payload.get(name)
    if value is None:
        return missing
    if not isinstance(value, str) or value not in choices:
        raise Invalid(f"{name} is {shown(value)}; choose {' or '.join(choices)}.")
    return value


def number(
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
        raise Invalid(f"{name} is {kind(value)}; give a number {limits}.")
    if not low <= value <= high or (above and value == low):  # false for what is no number
        raise Invalid(f"{name} is {shown(value)}; give a number {limits}.")
    return float(value)


def whole(name: str, payload: Mapping[str, Any], missing: int, low: int, high: int | None) -> int:
    """A whole number; 3.0 is one, because in JSON it may be. `high` None: not known yet."""
    value = payload.get(name)
    if value is None:
        return missing
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Invalid(f"{name} is {kind(value)}; give a whole number {limits}.")
    if isinstance(value, float) and (not math.isfinite(value) or not value.is_integer()):
        raise Invalid(f"{name} is {shown(value)}; give a whole number {limits}.")
    if not low <= value <= (value if high is None else high):
        raise Invalid(f"{name} is {shown(value)}; give a whole number {limits}.")
    return int(value)


def kind(value: Any) -> str:
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


def shown(value: Any) -> str:
    """A value as it was given, cut short; a number of thousands of digits is not written out."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1 << 128:
        return "a number with very many digits"
    shown = "missing" if value is None else str(value)
    shown = shown.encode("ascii", "backslashreplace").decode()
    return shown if len(shown) <= 40 else shown[:40] + "..."
