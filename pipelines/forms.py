"""A task as people meet it, in data: what it asks for, with good defaults and examples, and how its
result is shown. Pages and endpoints are made from it alike.

It knows no page and no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from pipelines.checks import shows

Kind: TypeAlias = Literal["text", "long", "lines", "words", "choice", "switch", "number", "picture"]
Show: TypeAlias = Literal["text", "bars", "marked", "drawing", "data"]
TYPES: Mapping[str, Any] = {"lines": list[str], "words": list[str], "switch": bool, "number": int}


class Asked(Protocol):
    """What somebody asks: as a front takes it, and refusals of it by the names of its fields."""

    def payload(self) -> dict[str, Any]: ...

    def in_fields(self, line: str) -> str: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Fields that a front takes as they are."""

    values: Mapping[str, Any]

    def payload(self) -> dict[str, Any]:
        """What was not given is left out."""
        return {name: value for name, value in self.values.items() if value is not None}

    def in_fields(self, line: str) -> str:
        """A front says them by their names."""
        return line


@dataclass(frozen=True, slots=True)
class Field:
    """One thing a task takes; without a value an endpoint wants one.

    On a page "lines" is a text on each line, and "words" are parted by commas; an endpoint takes
    lists of texts for both.
    """

    name: str
    kind: Kind
    label: str = ""  # on a page; without one it is not on it
    value: Any = None
    needed: bool = False
    hint: str = ""
    choices: tuple[Any, ...] = ()  # or least, most and step of a number
    taken: Any = None  # the type that an endpoint takes, where it does not follow from the kind

    @property
    def type(self) -> Any:
        """For an endpoint."""
        type = self.taken or TYPES.get(self.kind, str)
        return type if self.needed or self.value is not None else type | None

    def read(self, written: Any) -> Any:
        """What is written on a page, as an endpoint would have got it."""
        if self.kind == "lines":
            return [line for line in str(written or "").splitlines() if shows(line)]
        if self.kind == "words":
            return [word.strip() for word in str(written or "").split(",") if shows(word)]
        return None if written == "" and not self.needed else written


@dataclass(frozen=True, slots=True)
class Shown:
    """One thing that a page shows of a result."""

    kind: Show
    label: str
    value: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Lines:
    """What a task makes of a file of many lines.

    `names` are those of the columns that come beside each line, by what was asked, and `cells` what
    stands in them, by one of the results.
    """

    field: str  # which takes the lines
    about: str  # of the columns, for those who call the endpoint
    names: Callable[[Mapping[str, Any]], Sequence[str]]
    cells: Callable[[Any, Mapping[str, Any]], Sequence[Any]]
    results: str = "results"  # where they stand in what an endpoint gives


@dataclass(frozen=True, slots=True)
class Form:
    """A task's page and endpoint. Where it streams, its text shows as it grows, and is what an
    endpoint gives.
    """

    name: str
    title: str
    about: str  # for those who call the endpoint
    fields: tuple[Field, ...]
    intro: str = ""
    verb: str = ""
    shows: tuple[Shown, ...] = ()
    examples: tuple[tuple[Any, ...], ...] = ()
    streams: bool = False
    draws: bool = False  # pictures, on a page and with an endpoint of their own
    lines: Lines | None = None  # of a file, where one may be brought
    ask: Callable[[Mapping[str, Any]], Asked] = Plain

    @property
    def page(self) -> tuple[Field, ...]:
        """Fields that are on the page."""
        return tuple(field for field in self.fields if field.label)

    def written(self, values: Sequence[Any]) -> Asked:
        """What is on the page."""
        pairs = zip(self.page, values, strict=True)
        return self.ask({field.name: field.read(value) for field, value in pairs})

    def in_words(self, line: str) -> str:
        """A refusal in the words of the page."""
        for field in self.page:
            where = rf"(?<![\w“]){field.name}\[(\d+)\]|(?:^|(?<=\bin )){field.name}\b()"
            line = re.sub(where, partial(_named, field), line)
        return line


def _named(field: Field, found: re.Match[str]) -> str:
    number = f", number {int(found[1]) + 1}," if found[1] else ""
    return f"“{field.label}”{number}"
