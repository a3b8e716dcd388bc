"""A file that somebody brought: its lines become what a task is asked, and results become rows of a
CSV that is kept or deleted.

It knows no queue and no page; which task it is, is in its form.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.checks import kind, truth
from pipelines.forms import Form, Lines
from pipelines.tables import BYTES, Line, Results, Table
from queueing.work import Invalid

MISSING = f"There is no file; bring a CSV or text file of at most {BYTES:,} bytes."
# Columns: of a line, how many tokens were too many for the model, and how many words it does not
# know.
CUT, UNKNOWN = "cut", "unknown"
NAME = 40  # characters of a file's name that its results keep


class Brought:
    """One file, read when it is opened; its results lie in a folder of their own until `close`."""

    def __init__(
        self,
        form: Form,
        lines: Lines,
        source: Path | None,
        column: Any,
        header: Any,
        asked: Mapping[str, Any],  # of the task's other fields
        folder: Path,  # where results may lie
    ) -> None:
        self._form, self._lines, self._asked = form, lines, asked
        self._source, self._column, self._header = source, column, header
        self._folder = folder
        self._table: Table | None = None
        self._results: Results | None = None
        self._path: Path | None = None

    def open(self) -> int:
        """How many lines there are. Raises Invalid."""
        if self._source is None:
            raise Invalid(MISSING)
        column, header = self._column, truth("header", {"header": self._header}, True)
        if isinstance(column, bool) or not isinstance(column, (str, int, type(None))):
            raise Invalid(f"column is {kind(column)}; give its name, or its number from 1.")
        self._table = Table.read(self._source, column, header)
        return self._table.lines

    def __iter__(self) -> Iterator[Line]:
        return iter(self._read)

    def prove(self, check: Callable[[Any], object]) -> None:
        """Have all but the lines checked, with the first text that there is. Raises Invalid for
        what no line could mend.
        """
        texts = (line.text for line in self._read if not line.error)
        try:
            check(self.payload([next(texts, "")]))
        except Invalid as error:
            if not re.search(rf"\b{self._lines.field}\b", str(error)):
                raise

    def payload(self, texts: Sequence[str]) -> Any:
        """What is asked of these texts."""
        return self._form.ask({**self._asked, self._lines.field: list(texts)}).payload()

    def rows(self, result: Mapping[str, Any]) -> list[Sequence[Any]]:
        """What stands beside each line whose text was computed."""
        cut = {each["index"]: each["tokens"] for each in result["cut"]}
        unknown = {each["index"]: each["words"] for each in result["unknown"]}
        found = enumerate(result[self._lines.results])
        cells = self._lines.cells
        return [
            (*cells(one, self._asked), cut.get(place, ""), unknown.get(place, ""))
            for place, one in found
            if one is not None
        ]

    def write(self, rows: Sequence[tuple[Line, Any, str]]) -> None:
        """Keep the next rows, and name the line in every error."""
        if self._results is None:
            self._results = self._begun()
        self._results.write(
            (line, result, self._of_line(line, error)) for line, result, error in rows
        )

    def keep(self) -> Path | None:
        """The results so far, which are from now on somebody else's; None where there are none."""
        path, self._path = self._path, None
        self.close()
        return path

    def close(self) -> None:
        """No more is written, and what nobody kept is deleted. Idempotent."""
        if self._results is not None:
            self._results.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()
            self._path = None

    @property
    def _read(self) -> Table:
        if self._table is None:
            raise RuntimeError("A file is used that was not opened. This is a bug.")
        return self._table

    def _begun(self) -> Results:
        folder = self._folder / secrets.token_hex(16)
        folder.mkdir(parents=True)
        stem = self._source.stem.lstrip(".")[:NAME] if self._source else ""
        self._path = folder / f"{stem} {self._form.title.lower()}.csv"
        return Results(self._path, self._read, [*self._lines.names(self._asked), CUT, UNKNOWN])

    def _of_line(self, line: Line, error: str) -> str:
        """A front names a text by its place in a request, a table by its line."""
        if not error or line.error:
            return error
        name, where = self._lines.field, f"line {line.number}"
        said = re.sub(rf"\b{name}(\[\d+\])?", where, error)
        return said[0].upper() + said[1:] if where in said else f"Line {line.number}: {error}"
