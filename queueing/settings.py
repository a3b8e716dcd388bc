"""What the environment decides, read and judged once; the README lists all names.

It knows what a name is called, which values it takes and what holds when it is not set, not what
it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from queueing.work import Invalid

TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no")
FORMATS = ("auto", "float32", "bfloat16", "float16")
SECRET = 16  # characters at least
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one application."""

    pipeline: str = "text"  # or "fake"
    rows: int = 32  # in one batch
    port: int | None = None
    share: bool = False
    secret: str = ""
    grace: float = 0.0  # seconds
    log: str = "WARNING"
    memory: float | None = None  # GB that models may hold together

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        """Raises Invalid, also for what only a worker reads: better now than when it loads."""
        given = {name: text for name, text in environment.items() if text}
        port = "CARPOOL_PORT" if "CARPOOL_PORT" in given else "GRADIO_SERVER_PORT"
        _one_of(given, "CARPOOL_DTYPE", "auto", FORMATS)
        _one_of(given, "CARPOOL_EXACT", "no", TRUE + FALSE, str.lower)
        return cls(
            pipeline=_one_of(given, "CARPOOL_PIPELINE", "text", ("text", "fake")),
            rows=int(_number(given, "CARPOOL_ROWS", 32, 1, 1024, whole=True)),
            port=int(_number(given, port, 0, 1, 65535, whole=True)) or None,
            share=_one_of(given, "CARPOOL_SHARE", "no", TRUE + FALSE, str.lower) in TRUE,
            secret=_secret(given.get("CARPOOL_SECRET", "")),
            grace=_number(given, "CARPOOL_GRACE", 0, 0, 3600),
            memory=_number(given, "CARPOOL_MEMORY", 0, 0.1, 10_000) or None,
            log=_one_of(given, "CARPOOL_LOG", "WARNING", LEVELS, str.upper),
        )


def _secret(text: str) -> str:
    if text and len(text) < SECRET:
        raise Invalid(
            f"CARPOOL_SECRET is too short to sign names; give {SECRET} characters or more, or none."
        )
    return text


def _one_of(
    given: Mapping[str, str],
    name: str,
    missing: str,
    choices: tuple[str, ...],
    cased: Callable[[str], str] = str,
) -> str:
    text = given.get(name, missing)
    if cased(text) not in choices:
        words = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise Invalid(f"{name} is {_shown(text)}; choose {words}.")
    return cased(text)


def _number(
    given: Mapping[str, str],
    name: str,
    missing: float,
    low: float,
    high: float,
    whole: bool = False,
) -> float:
    if name not in given:
        return missing
    try:
        value = int(given[name]) if whole else float(given[name])
    except ValueError:
        value = float("nan")
    if not low <= value <= high:  # false for what is no number
        kind = "whole number" if whole else "number"
        raise Invalid(f"{name} is {_shown(given[name])}; give a {kind} from {low:g} to {high:g}.")
    return value


def _shown(text: str) -> str:
    return text if len(text) <= 40 else text[:40] + "..."
