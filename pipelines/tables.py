"""Tables: a text or CSV file read as lines with one text each, and what became of them written.

A file is judged as a whole before anything is computed; after that a line that cannot be read is
that line's own error. It does not know what is computed from the texts, nor who brought the file.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pipelines.chat import counted
from queueing.work import Invalid

BYTES = 16_000_000
LINES = 100_000
LARGEST = 600_000_000  # bytes of results: vectors of as many lines
COLUMNS = 1000
SUFFIXES = {".csv": ",;\t", ".tsv": "\t", ".tab": "\t"}  # of tables, and what may part their cells
ONE = "\x1f"  # parts the cells of a table with one column, whose texts may hold any other sign
SAMPLE, BEGINNING = 20, 1 << 18  # records, and characters, by which a delimiter is judged
NAMES = "text texts sentence sentences content message comment review document question".split()
FORMULAS = tuple("=+-@\t\r")  # what begins with these is computed by spreadsheets
WIDE = codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE
PIECES = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
UNCLOSED = "unexpected end of data"  # Python's words
QUOTES = "cannot be read: close its quotes, and write a quote inside a quoted cell twice."

csv.field_size_limit(BYTES)  # a cell may be as long as a file: what is too long, a front says


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, or several where a quoted cell has line breaks in it."""

    number: int  # of its first line, as an editor counts
    cells: tuple[str, ...]  # as many as there are columns
    text: str
    error: str = ""  # why there is no text


@dataclass(frozen=True, slots=True)
class Record:
    """What stands between two line ends, or between quotes with line ends inside."""

    first: int
    last: int
    cells: Sequence[str]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A file in memory; its lines are made while they are asked for."""

    content: str
    delimiter: str  # empty: a text file, each line of which is a text
    columns: tuple[str, ...]
    header: bool
    marked: bool  # began with a byte order mark, as spreadsheets want it
    column: int = 0  # where the texts are
    lines: int = 0

    @classmethod
    def read(cls, path: str | Path, column: str | int | None = None, header: bool = True) -> Table:
        """`column` is a name, or a number from 1, as text too where no column is called so; without
        one, the column that is named as texts are, or the only one. Raises Invalid, with the number
        of a line where one is to blame.
        """
        table = opened(path, header)
        place = table.place(column)
        return replace(table, column=place, lines=table._count())

    def __iter__(self) -> Iterator[Line]:
        return map(self._line, self._records())

    def usual(self) -> int | None:
        """The column that is taken when nobody says which, if that is clear."""
        named = [i for i, name in enumerate(self.columns) if _plain(name) in NAMES]
        return named[0] if named else 0 if len(self.columns) == 1 else None

    def place(self, column: str | int | None) -> int:
        """Where a column is; raises Invalid."""
        if column is None or column == "":
            usual = self.usual()
            if usual is None:
                raise Invalid(f"Say which column has the texts: {self._listed()}.")
            return usual
        given = str(column)
        found = [i for i, name in enumerate(self.columns) if name == column]
        if not found and isinstance(column, str):
            found = [i for i, name in enumerate(self.columns) if _plain(name) == _plain(given)]
        if not found and given.isdecimal() and len(given) < 6:
            found = [i for i in range(len(self.columns)) if i + 1 == int(given)]
        if not found:
            raise Invalid(f"There is no column {_cut(given)}; there is {self._listed()}.")
        if len(found) > 1:
            numbers = " or ".join(str(i + 1) for i in found)
            raise Invalid(f"Columns share the name {_cut(given)}; say which by number: {numbers}.")
        return found[0]

    def _listed(self) -> str:
        names = [_cut(name) for name in self.columns[:20]]
        more = len(self.columns) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")

    def _records(self) -> Iterator[Record]:
        return islice(_records(self.content, self.delimiter), int(self.header), None)

    def _count(self) -> int:
        count = 0
        for record in islice(self._records(), LINES + 1):
            if record.problem == UNCLOSED:
                raise Invalid(f"Line {record.first} {QUOTES}")
            count += 1
        if count == 0:
            raise Invalid("The file has a header and no line after it.")
        if count > LINES:
            raise Invalid(f"The file has more than {LINES:,} lines, the limit; split it.")
        return count

    def _line(self, record: Record) -> Line:
        width, cells = len(self.columns), record.cells
        if any(cells[width:]):  # too many, of which none is lost
            cells = [*cells[: width - 1], self.delimiter.join(cells[width - 1 :])]
        padded = (*cells[:width], *[""] * (width - len(cells)))
        error = self._wrong(record)
        return Line(record.first, padded, "" if error else cells[self.column], error)

    def _wrong(self, record: Record) -> str:
        """What keeps a record from having a text, in a sentence."""
        cells, name = record.cells, _cut(self.columns[self.column])
        where = f"Line {record.first}"
        if record.last > record.first:
            where = f"The record on lines {record.first} to {record.last}"
        if record.problem:
            return f"{where} {QUOTES}"
        if not any(cell.strip() for cell in cells):
            return f"{where} is empty."
        if any(cells[len(self.columns) :]):
            sign = "a tab" if self.delimiter == "\t" else self.delimiter
            return (
                f"{where} has {len(cells)} cells for {counted(len(self.columns), 'column')}; "
                f"a cell that holds {sign} must be quoted."
            )
        if len(cells) <= self.column:
            return f"{where} has {counted(len(cells), 'cell')} and none in column {name}."
        return "" if cells[self.column].strip() else f"{where} has no text in column {name}."


class Results:
    """A CSV that grows: of each line its cells as they came, what was computed, what went wrong.

    Texts that a spreadsheet would compute get a quote before them, those of a text file and those
    that were made here. Cells of a CSV go back as they came, since they were in a spreadsheet's
    file before.
    """

    def __init__(self, path: str | Path, table: Table, names: Sequence[str]) -> None:
        self._inert = not table.delimiter
        self._blank = [""] * len(names)
        encoding = "utf-8-sig" if table.marked else "utf-8"
        self._file = open(path, "w", encoding=encoding, newline="")
        self._delimiter = ";" if table.delimiter == ";" else ","
        self._write([_distinct(table.columns, [*names, "error"])])

    def write(self, rows: Iterable[tuple[Line, Sequence[Any] | None, str]]) -> None:
        """Append whole rows: lines, their results or None, their errors or nothing."""
        self._write(
            [*map(self._cell, line.cells), *map(_safe, result or self._blank), error]
            for line, result, error in rows
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, rows: Iterable[Sequence[str]]) -> None:
        draft = io.StringIO(newline="")
        csv.writer(draft, delimiter=self._delimiter).writerows(rows)
        if self._file.tell() + draft.tell() > LARGEST:
            raise OSError(f"they are larger than {LARGEST:,} bytes, the limit; split the file")
        self._file.write(draft.getvalue())
        self._file.flush()

    def _cell(self, text: str) -> str:
        return _safe(text) if self._inert else text


def opened(path: str | Path, header: bool = True) -> Table:
    """A file whose columns are known and whose lines have not been looked at; raises Invalid.

    `header`: the first line of a CSV holds the names of its columns.
    """
    path = Path(path)
    content, marked = _content(path)
    delimiter = _delimiter(path.suffix.lower(), content)
    if not delimiter:
        return Table(content, "", ("text",), header=False, marked=marked)
    first = next(_records(content, delimiter))
    if first.problem:
        raise Invalid(f"Line 1 {QUOTES}")
    if not any(name.strip() for name in first.cells):
        raise Invalid("Line 1 is empty, and the first line of a CSV tells which columns it has.")
    if len(first.cells) > COLUMNS:
        raise Invalid(f"The file has {len(first.cells):,} columns; at most {COLUMNS:,} are taken.")
    names = [name.strip() if header else "" for name in first.cells]
    columns = tuple(name or f"column {place}" for place, name in enumerate(names, 1))
    return Table(content, delimiter, columns, header, marked)


def written(value: Any) -> str:
    """A computed value as a cell: numbers with 6 digits that count, lists of them as JSON."""
    if isinstance(value, (str, int)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"[{', '.join(map('{:.6g}'.format, value))}]"


def _content(path: Path) -> tuple[str, bool]:
    """The text of a file, and whether a byte order mark was before it."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= BYTES else b""
    except OSError:
        raise Invalid("The file is not here any more; bring it again.") from None
    if size > BYTES:
        raise Invalid(f"The file has {size:,} bytes and the limit is {BYTES:,}; split it.")
    wide, marked = raw.startswith(WIDE), raw.startswith((*WIDE, codecs.BOM_UTF8))
    text = _decoded(raw, "utf-16") if wide else _decoded(raw.removeprefix(codecs.BOM_UTF8), "utf-8")
    if not text:
        raise Invalid("The file is empty.")
    return text, marked


def _decoded(raw: bytes, encoding: str) -> str:
    """Raises Invalid for what is no text."""
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding == "utf-8" and b"\0" in raw:
            text = raw.decode("latin-1")  # to be refused for what it is
        else:
            line = _line_of(raw[: error.start].decode(encoding, "ignore"))
            name = encoding.upper()
            raise Invalid(f"Line {line} is not {name} throughout; save it as UTF-8.") from None
    zero = text.find("\0")
    if zero >= 0:
        raise Invalid(
            f"Line {_line_of(text[:zero])} has a zero byte, which no text has: the file is a "
            "spreadsheet's own, or another binary. Save it as CSV or as text, in UTF-8."
        )
    return text


def _line_of(before: str) -> int:
    """The number of the line that comes after so much text."""
    return before.count("\n") + before.count("\r") - before.count("\r\n") + 1


def _delimiter(suffix: str, content: str) -> str:
    """What parts cells; empty for a text file.

    A file that is not called a table is one if a name of texts stands among others in its first
    line, and all lines after it have as many cells.
    """
    best, score = ONE, (0, 1)
    for delimiter in SUFFIXES.get(suffix, ",;\t"):
        sample = list(islice(_records(content[:BEGINNING], delimiter), SAMPLE))
        if len(content) > BEGINNING and 1 < len(sample) < SAMPLE:
            sample.pop()  # it was cut
        width = len(sample[0].cells)
        alike = sum(len(record.cells) == width for record in sample)
        named = any(_plain(name) in NAMES for name in sample[0].cells)
        if suffix not in SUFFIXES and not (named and 1 < alike == len(sample)):
            continue
        if width > 1 and (alike, width) > score:
            best, score = delimiter, (alike, width)
    return best if suffix in SUFFIXES or best != ONE else ""


def _records(content: str, delimiter: str) -> Iterator[Record]:
    """Every record, in order; one that cannot be read is there as it is, with its problem."""
    pieces = (piece.group() for piece in PIECES.finditer(content))
    if not delimiter:
        for number, piece in enumerate(pieces, 1):
            yield Record(number, number, (piece.rstrip("\r\n"),))
        return
    taken = list[str]()
    reader = csv.reader(_noted(pieces, taken), delimiter=delimiter, strict=True)
    while True:
        first = reader.line_num + 1
        cells, problem = list[str](), ""
        taken.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cells, problem = ["".join(taken).rstrip("\r\n")], str(error)
        yield Record(first, reader.line_num, cells, problem)


def _noted(pieces: Iterable[str], taken: list[str]) -> Iterator[str]:
    for piece in pieces:
        taken.append(piece)
        yield piece


def _safe(value: Any) -> str:
    """A value as a cell that no spreadsheet computes."""
    cell = written(value)
    return f"'{cell}" if isinstance(value, str) and cell.startswith(FORMULAS) else cell


def _distinct(taken: Iterable[str], names: Iterable[str]) -> list[str]:
    """All names; one of ours that is there already gets a number."""
    found = list(taken)
    for name in names:
        number, free = 1, name
        while free in found:
            number += 1
            free = f"{name}_{number}"
        found.append(free)
    return found


def _plain(name: str) -> str:
    return name.strip().casefold()


def _cut(name: str) -> str:
    """A name as it may stand in a sentence."""
    name = " ".join(name.split())
    return name if len(name) <= 40 else name[:40] + "..."
