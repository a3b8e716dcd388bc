"""Whole files over the wire, as programs bring them: results in order, stops, refusals, rests."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError

from pipelines import tables
from pipelines.brought import Brought
from pipelines.catalogue import CLASSIFY, FORMS
from pipelines.tables import BYTES, LINES
from queueing.bulk import CHUNK, Progress
from queueing.door import HEADER
from queueing.lines import carrying_line
from queueing.shelf import make_room
from queueing.work import Invalid, Status
from tests.conftest import App, Launch

SOON = 10.0  # seconds that suffice for what is quick, on a busy machine
ANSWER = "A library opens at nine. It closes at two."

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the application keeps files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def lists(launch: Launch, folder: Path) -> App:
    """An application with a quick model of lists."""
    return launch(LISTS="0.01", GRADIO_TEMP_DIR=str(folder))


@pytest.fixture(scope="module")
def slow(launch: Launch, folder: Path) -> App:
    """An application that takes seconds for a part of a file."""
    return launch(LISTS="0.4", GRADIO_TEMP_DIR=str(folder / "slow"))


@pytest.fixture
def client(lists: App) -> Client:
    return Client(lists.url, verbose=False)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file and returns its path."""

    def write(content: str | bytes, name: str = "file.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def numbered(count: int) -> str:
    return "text\n" + "".join(f"this is line {n} of a file\n" for n in range(count))


def table(path: Any) -> list[dict[str, str]]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def results(root: Path) -> list[Path]:
    return [path for path in root.rglob("* *.csv") if "slow" not in path.relative_to(root).parts]


def run(client: Client, path: Path, task: str = "embed", **fields: Any) -> list[dict[str, str]]:
    done = client.predict(file=handle_file(path), api_name=f"/{task}_file", **fields)
    return table(done["file"])


def refused(client: Client, file: Any, task: str = "embed", **fields: Any) -> str:
    with pytest.raises(AppError) as caught:
        client.predict(file=file, api_name=f"/{task}_file", **fields)
    return str(caught.value)


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SOON
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_every_line_comes_back_in_order_with_what_was_wrong(client: Client, write: Write) -> None:
    lines = [f'{n},"line {n}, said ""so"""' for n in range(1000)]
    lines[0], lines[300], lines[700] = "0,", "300,a,b", "700"
    lines[999] = "999," + "x" * 150
    rows = run(client, write("id,review\n" + "\n".join(lines)))
    assert [row["id"] for row in rows] == [str(n) for n in range(1000)]
    wrong = {int(row["id"]): row["error"] for row in rows if row["error"]}
    assert wrong == {
        0: "Line 2 has no text in column review.",
        300: "Line 302 has 3 cells for 2 columns; a cell that holds , must be quoted.",
        700: "Line 702 has 1 cell and none in column review.",
    }
    assert all(not rows[n]["vector"] for n in wrong)
    assert rows[1]["review"] == 'line 1, said "so"'
    assert all(
        json.loads(row["vector"])[0] == len(row["review"]) for row in rows if not row["error"]
    )
    assert [row["id"] for row in rows if row["cut"]] == ["999"]
    assert rows[999]["cut"] == "50"


def test_it_is_told_how_far_a_file_is(slow: App, write: Write) -> None:
    job = Client(slow.url, verbose=False).submit(
        file=handle_file(write(numbered(600))), api_name="/embed_file"
    )
    told = list(job)
    assert all(set(each) == {"status", "done", "total", "failed", "left", "file"} for each in told)
    done = [each["done"] for each in told]
    assert done == sorted(done) and set(done) == {0, 256, 512, 600}
    assert [bool(each["file"]) for each in told] == [False] * (len(told) - 1) + [True]
    middle = next(each for each in told if each["done"] == 512)
    assert middle["left"] > 0
    assert middle["status"].startswith("512 of 600 lines, about ")
    assert told[-1]["status"].startswith("600 lines, in ")


def test_labels_get_a_column_each(client: Client, write: Write) -> None:
    rows = run(client, write("a\nbb\n", "file.txt"), "classify", labels=["x", " y "])
    assert [row["label"] for row in rows] == ["y", "x"]
    assert [(row["score x"], row["score y"]) for row in rows] == [("0", "1"), ("1", "0")]


def test_an_error_of_a_task_names_the_line_and_not_its_place_in_a_request(
    client: Client, write: Write
) -> None:
    lines = ["the ___ barks\n"] * 600
    lines[400] = "nothing is missing\n"
    rows = run(client, write("".join(lines), "file.txt"), "fill")
    assert rows[0]["filled"] == "the dog barks"
    assert (rows[0]["words"], rows[0]["scores"]) == ("dog, cat", "[0.75, 0.25]")
    assert {n: row["error"] for n, row in enumerate(rows) if row["error"]} == {
        400: "Line 401 has no blank; write ___ or [MASK] where a word is missing."
    }


def test_a_first_line_that_is_wrong_refuses_no_file(client: Client, write: Write) -> None:
    rows = run(client, write("no blank\nthe ___ barks\n", "file.txt"), "fill")
    assert [bool(row["error"]) for row in rows] == [True, False]


def test_the_column_is_chosen_and_a_first_line_may_be_a_line(client: Client, write: Write) -> None:
    path = write("one,three\nfour,seven\n")
    rows = run(client, path, column="column 2", header=False)
    assert [json.loads(row["vector"])[0] for row in rows] == [5, 5]
    assert [len(run(client, path, column=column)) for column in ("one", "2")] == [1, 1]


def test_spreadsheets_come_back_as_spreadsheets_want_them(client: Client, write: Write) -> None:
    path = write("\ufefftext;n\nbücher;1\n")
    done = client.predict(file=handle_file(path), api_name="/embed_file")
    raw = Path(done["file"]).read_bytes()
    assert raw.decode("utf-8-sig").splitlines()[0] == "text;n;vector;cut;unknown;error"
    assert raw.startswith(b"\xef\xbb\xbf")
    assert Path(done["file"]).name == "file embeddings.csv"


BAD: list[tuple[str | bytes, str]] = [
    (b"text\ncaf\xe9\n", "Line 2 is not UTF-8 throughout"),
    (b"PK\x03\x04\0\0", "zero byte"),
    (b"", "The file is empty."),
    ("text\n", "The file has a header and no line after it."),
    ("text\n" + "a\n" * (LINES + 1), "more than 100,000 lines"),
    ('text,n\n"a,1\n', "Line 2 cannot be read: close its quotes"),
    ("a,b\n1,2\n", "Say which column has the texts: a, b."),
]


@pytest.mark.parametrize(("content", "words"), BAD)
def test_a_bad_file_is_refused_in_a_sentence(
    client: Client, write: Write, content: str | bytes, words: str
) -> None:
    assert words in refused(client, handle_file(write(content)))


@pytest.mark.parametrize(
    ("task", "fields", "words"),
    [
        ("embed", {"column": "review"}, "There is no column review; there is text."),
        ("embed", {"column": ["text"]}, "column is a list; give its name, or its number from 1."),
        ("embed", {"header": "no"}, "header is text; give true or false."),
        ("embed", {"pooling": "most"}, "pooling is most; choose"),
        ("classify", {"labels": []}, "labels is empty"),
        ("classify", {"labels": ["x"], "template": "none"}, "it must have {} once"),
        ("fill", {"top": 1000}, "top is 1000; give a whole number from 1 to"),
    ],
)
def test_a_field_that_is_wrong_refuses_the_file_before_a_line_is_computed(
    client: Client, write: Write, folder: Path, task: str, fields: dict[str, Any], words: str
) -> None:
    before = results(folder)
    assert words in refused(client, handle_file(write(numbered(3))), task, **fields)
    assert results(folder) == before


def upload(app: App, path: Path) -> str:
    with path.open("rb") as file:
        answer = httpx.post(f"{app.url}/gradio_api/upload", files={"files": file})
    return str(answer.raise_for_status().json()[0])


def begun(app: App, file: Any, tab: str, headers: dict[str, str] | None = None) -> None:
    """Put a file in as a browser tab does."""
    config = httpx.get(f"{app.url}/config").json()
    index = next(d["id"] for d in config["dependencies"] if d["api_name"] == "embed_file")
    body = {"data": [file], "fn_index": index, "session_hash": tab}
    answer = httpx.post(f"{app.url}/gradio_api/queue/join", json=body, headers=headers)
    answer.raise_for_status()


def messages(app: App, tab: str) -> list[dict[str, Any]]:
    """Everything a tab is told until its last event has ended."""
    address = f"{app.url}/gradio_api/queue/data?session_hash={tab}"
    with httpx.stream("GET", address, timeout=60) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data:")]


def taken(path: str) -> dict[str, Any]:
    """A file as programs name one that they have sent."""
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


PLACES: list[tuple[Any, str]] = [
    ("/etc/hostname", "There is no file; bring a CSV"),
    ({"path": "/etc/hostname"}, "There is no file; bring a CSV"),
    (taken("/etc/hostname"), "file is no file that is kept here; send it"),
    (taken("http://127.0.0.1/file.csv"), "file is no file that is kept here; send it"),
    (None, "There is no file; bring a CSV"),
    ([taken("/etc/hostname")], "file is no file that is kept here; send it"),
    ([taken(["a"])], "file is no file that is kept here; send it"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("file", "words"), PLACES)
def test_only_what_was_uploaded_is_read(lists: App, file: Any, words: str) -> None:
    begun(lists, file, "tab-path")
    last = messages(lists, "tab-path")[-2]
    assert not last["success"] and last["output"]["error"].startswith(words)


def test_a_file_above_another_in_its_name_is_not_read(lists: App, write: Write) -> None:
    path = Path(upload(lists, write(numbered(1)))).parent / "../../../../../../etc/hostname"
    begun(lists, taken(str(path)), "tab-above")
    assert "no file that is kept here" in messages(lists, "tab-above")[-2]["output"]["error"]


@pytest.mark.parametrize("above", [0, 1])
def test_a_folder_is_no_file(lists: App, write: Write, above: int) -> None:
    path = Path(upload(lists, write(numbered(1)))).parents[above]
    begun(lists, taken(str(path)), "tab-folder")
    assert "no file that is kept here" in messages(lists, "tab-folder")[-2]["output"]["error"]


def test_a_file_of_the_largest_size_is_taken_and_one_byte_more_is_not(
    lists: App, write: Write
) -> None:
    assert upload(lists, write(b"x" * BYTES))
    with write(b"x" * (BYTES + 1)).open("rb") as file:
        answer = httpx.post(f"{lists.url}/gradio_api/upload", files={"files": file})
    assert answer.status_code == 413
    assert "16000000 bytes" in answer.text


def test_a_stopped_file_gives_what_was_done(slow: App, write: Write) -> None:
    client = Client(slow.url, verbose=False)
    job = client.submit(file=handle_file(write(numbered(5000))), api_name="/embed_file")
    next(each for each in job if each["done"])
    body = {"event_id": job.communicator.event_id, "session_hash": client.session_hash}
    httpx.post(f"{slow.url}/gradio_api/cancel", json=body)
    with pytest.raises(AppError, match=r"Stopped after [\d,]+ of 5,000 lines"):
        job.result(timeout=SOON)
    last = job.outputs()[-1]
    rows = table(last["file"])
    assert CHUNK <= len(rows) == last["done"] < 5000
    assert [row["text"] for row in rows] == [
        f"this is line {n} of a file" for n in range(len(rows))
    ]
    assert not any(row["error"] for row in rows)


def test_a_person_has_one_file_at_a_time_wherever_it_comes_from(slow: App, write: Write) -> None:
    name = Client(slow.url, verbose=False).predict(api_name="/identity")
    first, second = (Client(slow.url, verbose=False, headers={HEADER: name}) for _ in range(2))
    stranger = Client(slow.url, verbose=False)
    path = write(numbered(5000))
    job = first.submit(file=handle_file(path), api_name="/embed_file")
    next(each for each in job if each["total"])
    assert refused(second, handle_file(path)).startswith("A file of yours is running")
    assert len(run(stranger, write(numbered(3), "other.csv"))) == 3
    job.cancel()
    path = write(numbered(2))

    def free() -> bool:
        try:
            return len(run(second, path)) == 2
        except AppError:
            return False

    assert until(free)


def test_a_call_that_is_abandoned_ends_and_leaves_no_results(
    slow: App, write: Write, folder: Path
) -> None:
    path, before = upload(slow, write(numbered(20_000))), results(folder / "slow")
    person = {HEADER: Client(slow.url, verbose=False).predict(api_name="/identity")}
    begun(slow, taken(path), "tab-gone", person)
    address = f"{slow.url}/gradio_api/queue/data?session_hash=tab-gone"
    with httpx.stream("GET", address, timeout=30) as answer:
        next(line for line in answer.iter_lines() if "256 of 20,000" in line)
        assert len(results(folder / "slow")) == len(before) + 1
    assert until(lambda: results(folder / "slow") == before)
    begun(slow, taken(upload(slow, write(numbered(2)))), "tab-next", person)
    assert messages(slow, "tab-next")[-2]["success"]  # one file at a time, and none is running


def test_whoever_waits_for_an_answer_comes_before_a_file(slow: App, write: Write) -> None:
    client = Client(slow.url, verbose=False)
    job = client.submit(file=handle_file(write(numbered(20_000))), api_name="/embed_file")
    next(each for each in job if each["done"])
    other = Client(slow.url, verbose=False)
    assert other.submit(["Hello"], api_name="/embed").result(timeout=SOON)["embeddings"]
    assert not job.done()
    job.cancel()


def test_what_was_brought_and_made_is_gone_when_the_application_is(
    launch: Launch, write: Write, tmp_path: Path
) -> None:
    root = tmp_path / "kept"
    app = launch(LISTS="0.01", GRADIO_TEMP_DIR=str(root))
    run(Client(app.url, verbose=False), write(numbered(3)))
    assert len(list(root.rglob("*.csv"))) == 2
    assert app.stop() == []
    assert list(root.rglob("*.csv")) == []


def test_the_oldest_files_make_room(tmp_path: Path) -> None:
    files = set[str]()
    for place in range(5):
        path = tmp_path / str(place) / "file.csv"
        path.parent.mkdir()
        path.write_text("x" * 100)
        os.utime(path, (place, place))
        files.add(str(path))
    (tmp_path / "0" / "file.csv").unlink()
    make_room(files, most=250)
    assert sorted(files) == [str(tmp_path / name / "file.csv") for name in "34"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "3", "4"]
    make_room(files, count=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "4"]


def freight(path: Path | None, root: Path, **asked: Any) -> Brought:
    assert CLASSIFY.lines is not None
    return Brought(CLASSIFY, CLASSIFY.lines, path, None, True, asked, root)


def classified(*labels: str) -> dict[str, Any]:
    found = [{"label": label, "score": 0.5, "scores": {label: 0.5}} for label in labels]
    return {
        "results": [found[0], None, *found[1:]],
        "cut": [{"index": 2, "tokens": 7}],
        "unknown": [],
    }


def test_results_are_deleted_unless_somebody_keeps_them(write: Write, tmp_path: Path) -> None:
    for keeps in (True, False):
        brought = freight(write(numbered(3)), tmp_path / "made", labels=["x"])
        assert brought.open() == 3
        lines = list(brought)
        assert brought.keep() is None  # nothing was written
        rows = brought.rows(classified("x", "x"))
        assert rows == [("x", 0.5, 0.5, "", ""), ("x", 0.5, 0.5, 7, "")]
        brought.write([(lines[0], rows[0], ""), (lines[1], None, "The worker died.")])
        made = list((tmp_path / "made").rglob("*.csv"))
        assert len(made) == 1
        kept = brought.keep() if keeps else None
        brought.close()
        brought.close()
        assert list((tmp_path / "made").rglob("*.csv")) == ([kept] if keeps else [])
        if kept:
            assert [row["error"] for row in table(kept)] == ["", "Line 3: The worker died."]
            kept.unlink()


def test_results_beyond_the_limit_are_not_written(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "LARGEST", 100)
    brought = freight(write(numbered(3)), tmp_path / "made", labels=["x"])
    brought.open()
    with pytest.raises(OSError, match="they are larger than 100 bytes, the limit; split the file"):
        for line in brought:
            brought.write([(line, ("x", 0.5, 0.5, "", ""), "")])
    brought.close()
    assert list((tmp_path / "made").rglob("*.csv")) == []


def test_what_no_line_could_mend_is_refused_and_a_bad_line_is_not(
    write: Write, tmp_path: Path
) -> None:
    brought, asked = freight(write(numbered(3)), tmp_path, labels=["x"]), list[Any]()

    def check(error: str) -> Callable[[Any], object]:
        def check(payload: Any) -> object:
            asked.append(payload)
            raise Invalid(error)

        return check

    brought.open()
    brought.prove(check("texts[0] is bad."))
    brought.prove(check("There are 7 characters in texts."))
    with pytest.raises(Invalid, match="labels is missing"):
        brought.prove(check("labels is missing."))
    assert asked == 3 * [{"labels": ["x"], "texts": ["this is line 0 of a file"]}]


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        (Progress(Status.RUNNING, 0, 5000, 0, 1.0), "0 of 5,000 lines so far; those who wait"),
        (
            Progress(Status.RUNNING, 1000, 5000, 0, 9.0, 50.0),
            "1,000 of 5,000 lines, about 80 s left",
        ),
        (
            Progress(Status.RUNNING, 1000, 5000, 12, 9.0, 5.0),
            "1,000 of 5,000 lines, 12 with an error, about 13 min left",
        ),
        (Progress(Status.FINISHED, 1, 1, 0, 3.0), "1 line, in 3 s"),
        (Progress(Status.FINISHED, 5000, 5000, 1, 3.0), "5,000 lines, 1 with an error, in 3 s"),
        (
            Progress(Status.CANCELLED, 12_345, 100_000, 0, 3.0),
            "Stopped after 12,345 of 100,000 lines",
        ),
        (
            Progress(Status.FAILED, 10, 20, 10, 3.0, error="It died."),
            "Stopped after 10 of 20 lines, 10 with an error. It died.",
        ),
    ],
)
def test_what_is_said_of_a_file(progress: Progress, line: str) -> None:
    assert carrying_line(progress).startswith(line)


def test_every_task_for_lists_takes_files() -> None:
    assert [name for name, form in FORMS.items() if form.lines] == [
        "embed", "classify", "answer", "fill",
    ]  # fmt: skip


def alike(rows: Sequence[dict[str, str]], one_by_one: Sequence[dict[str, Any]]) -> bool:
    return [row["label"] for row in rows] == [each["label"] for each in one_by_one]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_file_through_the_real_model_gets_what_a_list_gets(real_app: App, write: Write) -> None:
    client = Client(real_app.url, verbose=False, httpx_kwargs={"timeout": 120})
    topics = ("The goalkeeper saved a penalty", "Fry the onions in butter", "The bank cut rates")
    texts = [f"{topics[n % 3]}, for the {n}th time." for n in range(600)]
    labels = ["sport", "cooking", "money"]
    rows = run(client, write("\n".join(texts), "file.txt"), "classify", labels=labels)
    listed = client.predict(texts=texts, labels=labels, api_name="/classify")["results"]
    assert [row["text"] for row in rows] == texts
    assert alike(rows, listed)
    assert [row["label"] for row in rows[:3]] == labels
    asked = run(client, write("When does it close?\n", "ask.txt"), "answer", document=ANSWER)
    assert asked[0]["answer"] == "It closes at two."
