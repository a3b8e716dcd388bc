"""The house keeps its shape: imports one way, small files and functions, a true README."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("queueing", "pipelines", "kernels")
README = (ROOT / "README.md").read_text("utf-8")
SOURCES = [
    ROOT / "app.py",
    *(path for room in ROOMS for path in sorted((ROOT / room).glob("*.py"))),
]
NATIVE = sorted([*(ROOT / "kernels").glob("*.cpp"), *(ROOT / "kernels").glob("*.h")])
LONGEST_FILE = 350
LONGEST_FUNCTION = 60
ALLOWED = {  # what a room may import of this house
    "queueing": {"queueing"},
    "kernels": {"kernels"},
    "pipelines": {"pipelines", "kernels", "queueing.work"},
}
PAGES = {
    "task_page.py",
    "chat_page.py",
    "file_page.py",
    "image_page.py",
}  # know both sides, as app.py does
HEAVY = {"torch", "transformers", "diffusers", "gradio"}
BARRED = {"queueing": HEAVY, "kernels": HEAVY - {"torch"}, "pipelines": {"gradio"}}
TOP = {"app.py", "requirements.txt", "README.md", "pyproject.toml", "Makefile", "LICENSE"}
TOP |= {"queueing", "pipelines", "kernels", "tests", "assets"}
ids = [str(path.relative_to(ROOT)) for path in SOURCES]


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def modules(room: str) -> dict[str, set[str]]:
    """Who imports whom inside a room."""
    paths = [path for path in (ROOT / room).glob("*.py") if path.stem != "__init__"]
    imported = {path.stem: set(imports(path)) for path in paths}
    return {
        name: {other for other in imported if f"{room}.{other}" in needed} - {name}
        for name, needed in imported.items()
    }


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = path.parent.name
    house = [name for name in imports(path) if name.split(".")[0] in (*ROOMS, "app", "tests")]
    if path.name in PAGES | {"app.py"}:
        assert not [name for name in house if name.split(".")[0] in ("kernels", "tests", "app")]
        assert not {"torch", "transformers"} & {name.split(".")[0] for name in imports(path)}
        return
    allowed = ALLOWED[room]
    wrong = [n for n in house if n not in allowed and n.split(".")[0] not in allowed]
    assert not wrong
    assert not BARRED[room] & {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_inside_a_room_go_one_way(room: str) -> None:
    left = modules(room)
    while left:
        free = [name for name, needs in left.items() if not needs & left.keys()]
        assert free, f"{sorted(left)} import one another in a circle"
        for name in free:
            del left[name]


def test_the_words_of_the_house_import_nobody() -> None:
    assert modules("queueing")["work"] == set()


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert text.count("\n") <= LONGEST_FILE
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    long = [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST_FUNCTION]
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_every_file_says_what_it_is(path: Path) -> None:
    text = path.read_text("utf-8")
    doc = ast.get_docstring(ast.parse(text)) if text.strip() else "empty"
    assert doc
    assert len(doc.splitlines()) <= 7


@pytest.mark.parametrize("path", [*SOURCES[1:], *NATIVE], ids=lambda path: path.name)
def test_the_readme_has_one_line_for_every_room(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    lines = [line for line in README.splitlines() if line.startswith(f"- `{name}`")]
    assert len(lines) == (0 if path.name == "__init__.py" and not path.read_text().strip() else 1)


def test_the_readme_names_no_room_that_is_not_there() -> None:
    named = re.findall(r"^- `((?:queueing|pipelines|kernels)/\w+\.\w+)`", README, re.MULTILINE)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_readme_lists_exactly_the_settings_that_are_read() -> None:
    read = {name for path in SOURCES for name in re.findall(r"CARPOOL_[A-Z_]+", path.read_text())}
    listed = set(re.findall(r"^\| `(CARPOOL_[A-Z_]+)`", README, re.MULTILINE))
    assert read == listed


def test_the_top_level_holds_what_was_agreed_and_no_more() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode:
        pytest.skip("This is not a git checkout, so nothing tells files from build products.")
    top = {line.split("/")[0] for line in tracked.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} == TOP


def test_the_queue_runs_where_torch_and_gradio_cannot_be_imported() -> None:
    names = [f"queueing.{name}" for name in modules("queueing")]
    block = f"import sys; sys.modules.update(dict.fromkeys({sorted(HEAVY)}))"
    code = f"{block}\nimport importlib\n[importlib.import_module(name) for name in {names}]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SAYS = re.compile(
    r"\bassert\b|pytest\.raises|assert_close|assert_same|\bexpect\(|\.verdict\(\)|\bstatus\(|\bmust_run\("
)


def written() -> Iterator[tuple[str, str]]:
    """Every test function with its text."""
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("test_"):
                    yield f"{path.name}::{node.name}", ast.get_source_segment(text, node) or ""


def test_every_test_asserts_something() -> None:
    silent = [name for name, text in written() if not SAYS.search(text.split(":\n", 1)[1])]
    assert silent == []
