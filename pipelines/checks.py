"""Values as callers send them, judged one by one: refused in a sentence that names the field, what
came and what is taken.

It knows no task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from queueing.work import Invalid


def check_unicode(name: str, text: str) -> None:
    """Raises Invalid for what no encoding could carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Invalid(
            f"{name} has an unpaired surrogate at character {error.start + 1}, which is not text; "
            "remove it."
        ) from None


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
