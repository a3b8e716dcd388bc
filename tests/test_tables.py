"""Files as people have them: marks, quotes, ragged rows, wrong columns, other encodings."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

import pytest

from pipelines.tables import BYTES, LINES, Line, Results, Table, opened, written
from queueing.work import Invalid


@pytest.fixture
def bring(tmp_path: Path):
    """Writes a file and returns its path."""

    def bring(content: str | bytes, name: str = "file.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return bring


def texts(path: Path, column: str | int | None = None, header: bool = True) -> list[str]:
    return [line.text for line in Table.read(path, column, header)]


def errors(path: Path, column: str | int | None = None) -> dict[int, str]:
    return {line.number: line.error for line in Table.read(path, column) if line.error}


def refused(path: Path, column: str | int | None = None, header: bool = True) -> str:
    with pytest.raises(Invalid) as caught:
        Table.read(path, column, header)
    return str(caught.value)


def rows(path: Path, delimiter: str = ",") -> list[list[str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def test_a_text_file_has_one_text_a_line_and_keeps_its_numbers(bring):
    path = bring("one, two\n\n  three\r\nfour\rfive", "file.txt")
    table = Table.read(path)
    assert [(line.number, line.text) for line in table] == [
        (1, "one, two"), (2, ""), (3, "  three"), (4, "four"), (5, "five")
    ]  # fmt: skip
    assert table.lines == 5
    assert errors(path) == {2: "Line 2 is empty."}


def test_signs_that_end_no_line_in_an_editor_end_none_here(bring):
    assert texts(bring("a\x0bb\x0cc\u2028d\x85e\n", "file.txt")) == ["a\x0bb\x0cc\u2028d\x85e"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_is_found(bring, delimiter):
    text = "one; two" if delimiter == "," else "one, two"
    rows = [["id", "text", "label"], ["1", text, "a"], ["2", "three", "b"]]
    assert texts(bring("\n".join(map(delimiter.join, rows)))) == [text, "three"]


def test_quotes_hold_delimiters_line_ends_and_quotes(bring):
    path = bring('id,text\r\n1,"one, ""two""\nthree"\r\n2,four\r\n')
    lines = list(Table.read(path))
    assert [(line.number, line.text) for line in lines] == [(2, 'one, "two"\nthree'), (4, "four")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_an_encoding_with_a_mark_is_known_by_it(bring, encoding):
    path = bring("text,n\nfür 漢字 🚗,1\n".encode(encoding))
    assert texts(path) == ["für 漢字 🚗"]
    assert Table.read(path).columns == ("text", "n")


def test_a_table_of_one_column_needs_no_quotes(bring):
    path = bring('review\nFine, really; yes\n"quoted, ""too"""\n')
    assert texts(path) == ["Fine, really; yes", 'quoted, "too"']


@pytest.mark.parametrize(
    ("column", "found"), [("B", "2"), ("b", "2"), (" b ", "2"), (3, "3"), ("3", "3"), ("1", "4")]
)
def test_a_column_is_named_or_numbered_and_names_come_first(bring, column, found):
    assert texts(bring("a,B,c,1\n1,2,3,4\n"), column) == [found]


def test_the_column_of_texts_is_known_by_its_name(bring):
    assert texts(bring("id, Sentence \n1,hello\n")) == ["hello"]
    assert opened(bring("a,b\n1,2\n")).usual() is None


def test_a_table_without_a_header_has_numbers_for_names(bring):
    path = bring("1,hello\n2,you\n")
    assert texts(path, 2, header=False) == ["hello", "you"]
    assert Table.read(path, 1, header=False).columns == ("column 1", "column 2")


def test_a_file_that_is_not_called_a_table_is_one_when_it_looks_so(bring):
    assert texts(bring("id\ttext\n1\thello\n", "file.txt")) == ["hello"]
    assert texts(bring("Body, soul and text\nHello\n", "file.txt")) == [
        "Body, soul and text",
        "Hello",
    ]
    assert len(texts(bring("text, I say\nis, more, text\n", "file"))) == 2


def test_ragged_rows_are_bad_lines_that_cost_nobody_else_anything(bring):
    path = bring(
        "id,text,label\n1,good,a\n2\n\n4,not quoted, so longer,a\n5, ,a\n6,short\n7,trailing,a,,\n"
        '8,"a "bad" quote",a\n9,"two\nlines "bad" too",a\n10,last,a\n'
    )
    wrong = errors(path)
    assert [line.text for line in Table.read(path) if not line.error] == [
        "good", "short", "trailing", "last"
    ]  # fmt: skip
    assert list(wrong) == [3, 4, 5, 6, 9, 10]
    assert wrong[3] == "Line 3 has 1 cell and none in column text."
    assert wrong[4] == "Line 4 is empty."
    assert wrong[5] == "Line 5 has 4 cells for 3 columns; a cell that holds , must be quoted."
    assert wrong[6] == "Line 6 has no text in column text."
    assert wrong[9].startswith("Line 9 cannot be read: close its quotes")
    assert wrong[10].startswith("The record on lines 10 to 11 cannot be read")


def test_cells_that_have_no_column_are_kept(bring):
    path = bring('id,text\n1,more,than,two\n2,"a "bad" quote\n3,fine,,\n')
    assert [line.cells for line in Table.read(path)] == [
        ("1", "more,than,two"),
        ('2,"a "bad" quote', ""),
        ("3", "fine"),
    ]


def test_every_line_has_as_many_cells_as_there_are_columns(bring):
    path = bring("a,text,b\n1\n1,x,2,3\n1,x\n1,x,2\n")
    assert {len(line.cells) for line in Table.read(path)} == {3}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "The file is empty."),
        (b"\xef\xbb\xbf", "The file is empty."),
        (b"text\n", "no line after it"),
        (b"text\nok\nf\xfcr\n", "Line 3 is not UTF-8"),
        (b"text\nok\ra\0b\n", "Line 3 has a zero byte"),
        (b"PK\x03\x04\xff\0\0", "Line 1 has a zero byte"),
        ("text\nok\n".encode("utf-16-le"), "Line 1 has a zero byte"),
        ("text\nok\n".encode("utf-16") + b"a", "Line 3 is not UTF-16"),
        (b'text,n\nok,1\n"open,2\nmore,3\n', "Line 3 cannot be read: close its quotes"),
        (b'"text,n\nok,1\n', "Line 1 cannot be read"),
        (b"\ntext,n\nok,1\n", "Line 1 is empty"),
        (b"a,b\n1,2\n", "Say which column has the texts: a, b."),
        (b"text" + 1001 * b",x" + b"\n", "1,002 columns"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_a_sentence(bring, content, said):
    sentence = refused(bring(content))
    assert said in sentence
    assert sentence.endswith(".")


def test_a_column_that_is_not_there_is_refused_with_those_that_are(bring):
    path = bring("id,a,a,b" + 30 * ",c" + "\n1,2,3,4\n")
    assert refused(path, "review").startswith("There is no column review; there is id, a, a, b, c")
    assert refused(path, "review").endswith("and 14 more.")
    assert refused(path, "99").startswith("There is no column 99")
    assert refused(path, "0").startswith("There is no column 0")
    assert refused(path, "a") == "Columns share the name a; say which by number: 2 or 3."
    assert len(refused(path, "x" * 10_000)) < 300


def test_a_file_over_a_limit_is_refused(bring):
    path = bring("a\n" * (LINES + 1), "file.txt")
    assert "more than 100,000 lines" in refused(path)
    assert Table.read(bring("a\n" * LINES, "file.txt")).lines == LINES
    path = bring(b"a" * (BYTES + 1), "file.txt")
    assert "16,000,001 bytes and the limit is 16,000,000" in refused(path)


def test_a_file_that_was_deleted_is_refused(tmp_path):
    assert "bring it again" in refused(tmp_path / "gone.csv")


def results(tmp_path: Path, table: Table, names: list[str], **values) -> Path:
    """What is written when every line gets the same values."""
    path = tmp_path / "results.csv"
    writer = Results(path, table, names)
    writer.write(
        (line, None if line.error else [values[name] for name in names], line.error)
        for line in table
    )
    writer.close()
    return path


def test_results_stand_beside_what_was_brought(bring, tmp_path):
    table = Table.read(bring('id,text\n1,"a, b"\n2\n3,"c\nd"\n'))
    path = results(tmp_path, table, ["label", "score"], label="x", score=0.123456789)
    assert rows(path) == [
        ["id", "text", "label", "score", "error"],
        ["1", "a, b", "x", "0.123457", ""],
        ["2", "", "", "", "Line 3 has 1 cell and none in column text."],
        ["3", "c\nd", "x", "0.123457", ""],
    ]


def test_a_column_of_ours_that_is_there_already_gets_a_number(bring, tmp_path):
    table = Table.read(bring("text,label,label_2,error\na,b,c,d\n"))
    path = results(tmp_path, table, ["label"], label="x")
    assert rows(path)[0] == ["text", "label", "label_2", "error", "label_3", "error_2"]


def test_a_file_from_a_spreadsheet_goes_back_as_it_came(bring, tmp_path):
    table = Table.read(bring("text;n\n=1+1;-1\n".encode("utf-8-sig")))
    path = results(tmp_path, table, ["label"], label="x")
    assert path.read_bytes().startswith(b"\xef\xbb\xbftext;n;label;error\r\n")
    assert rows(path, ";")[1] == ["=1+1", "-1", "x", ""]


def test_a_text_file_brings_no_formula_into_a_spreadsheet(bring, tmp_path):
    table = Table.read(bring("=1+1\n- point\n@you\nplain - text\n", "file.txt"))
    path = results(tmp_path, table, ["label"], label="x")
    assert [row[0] for row in rows(path)] == ["text", "'=1+1", "'- point", "'@you", "plain - text"]


def test_what_is_written_so_far_is_whole_at_any_time(bring, tmp_path):
    table = Table.read(bring("text\na\nb\n"))
    path = tmp_path / "results.csv"
    writer = Results(path, table, ["label"])
    lines = list(table)
    for count, line in enumerate(lines):
        assert len(rows(path)) == count + 1
        writer.write([(line, ["x"], "")])
    assert len(rows(path)) == len(lines) + 1
    writer.close()


def test_an_embedding_is_json_with_six_digits_that_count():
    assert json.loads(written([0.123456789, -1e-7, 3.0])) == [0.123457, -1e-7, 3.0]


@pytest.mark.parametrize("seed", range(20))
def test_any_cells_come_back_as_they_were(tmp_path, bring, seed):
    rng = random.Random(seed)
    signs = ["a", '"', ",", "\n", "\r", "\r\n", "'", ";", "\t", " ", "é", "\u2028"]

    def cell() -> str:
        return "x" + "".join(rng.choices(signs, k=rng.randint(0, 8)))

    cells = [[cell(), cell(), cell()] for _ in range(30)]
    file = io.StringIO(newline="")
    csv.writer(file).writerows([["id", "text", "label"], *cells])
    table = Table.read(bring(file.getvalue()))
    lines: list[Line] = list(table)
    assert [list(line.cells) for line in lines] == cells
    assert [line.text for line in lines] == [cell[1] for cell in cells]
    path = results(tmp_path, table, ["embedding"], embedding=[0.5, 0.25])
    assert [row[:3] for row in rows(path)[1:]] == cells
