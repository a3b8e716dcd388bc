"""Settings: what they are without a word, and one sentence for what cannot be."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from queueing.settings import Settings
from queueing.work import Invalid
from tests.conftest import ROOT, App, Launch

GIVEN = {
    "CARPOOL_PIPELINE": "fake",
    "CARPOOL_ROWS": "4",
    "CARPOOL_SHARE": "1",
    "CARPOOL_SECRET": "sixteen letters.",
    "CARPOOL_GRACE": "2.5",
    "CARPOOL_LOG": "info",
    "CARPOOL_MEMORY": "1.5",
    "GRADIO_SERVER_PORT": "81",
}


def test_settings_have_defaults_and_names() -> None:
    assert Settings.read({"CARPOOL_ROWS": "", "OTHER": "1"}) == Settings()
    assert Settings.read(GIVEN) == Settings(
        "fake", 4, 81, True, "sixteen letters.", 2.5, "INFO", 1.5
    )
    assert Settings.read({**GIVEN, "CARPOOL_PORT": "82"}).port == 82
    assert not Settings.read({**GIVEN, "CARPOOL_SHARE": "No"}).share


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(Invalid, match="CARPOOL_SECRET is too short.* 16 characters or more"):
        Settings.read({"CARPOOL_SECRET": "x"})


WRONG = [
    ("CARPOOL_PIPELINE", "foo", "choose text or fake."),
    ("CARPOOL_DTYPE", "float8", "choose auto, float32, bfloat16 or float16."),
    ("CARPOOL_EXACT", "maybe", "choose 1, true, yes, 0, false or no."),
    ("CARPOOL_ROWS", "0", "give a whole number from 1 to 1024."),
    ("CARPOOL_ROWS", "x", "give a whole number from 1 to 1024."),
    ("CARPOOL_ROWS", "1.5", "give a whole number from 1 to 1024."),
    ("CARPOOL_ROWS", "9" * 5000, "give a whole number from 1 to 1024."),
    ("CARPOOL_PORT", "abc", "give a whole number from 1 to 65535."),
    ("CARPOOL_PORT", "70000", "give a whole number from 1 to 65535."),
    ("GRADIO_SERVER_PORT", "0", "give a whole number from 1 to 65535."),
    ("CARPOOL_SHARE", "maybe", "choose 1, true, yes, 0, false or no."),
    ("CARPOOL_GRACE", "-1", "give a number from 0 to 3600."),
    ("CARPOOL_GRACE", "nan", "give a number from 0 to 3600."),
    ("CARPOOL_GRACE", "inf", "give a number from 0 to 3600."),
    ("CARPOOL_LOG", "loud", "choose DEBUG, INFO, WARNING, ERROR or CRITICAL."),
]


@pytest.mark.parametrize(("name", "text", "limit"), WRONG)
def test_a_wrong_setting_is_refused_by_name(name: str, text: str, limit: str) -> None:
    with pytest.raises(Invalid) as raised:
        Settings.read({name: text})
    sentence = str(raised.value)
    assert sentence.startswith(f"{name} is {text[:4]}") and sentence.endswith(limit)
    assert len(sentence) < 120


def ended(tmp_path: Path, **environment: str) -> tuple[int, str]:
    """What an application that cannot start leaves: its exit code, and what it said."""
    settings = {"CARPOOL_PIPELINE": "fake", "CARPOOL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "app.py"],
        cwd=ROOT,
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_application_ends_with_one_sentence(tmp_path: Path) -> None:
    assert ended(tmp_path, CARPOOL_ROWS="x") == (
        2,
        "CARPOOL_ROWS is x; give a whole number from 1 to 1024.\n",
    )


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, said = ended(tmp_path, CARPOOL_CACHE=str(tmp_path / "file" / "cache"))
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"CARPOOL_CACHE is {tmp_path}/file/cache, where no secret can be kept")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = ended(tmp_path, CARPOOL_PORT=port)
    assert (code, said) == (
        2,
        f"CARPOOL_PORT is {port}, which is in use or not allowed; choose another.\n",
    )


def test_the_address_is_told_at_once_and_the_hint_is_ours(launch: Launch) -> None:
    app: App = launch(PYTHONUNBUFFERED="", CARPOOL_LOG="info")  # returns once the address is there
    assert f"* Running on local URL:  {app.url}" in app.lines
    assert app.stop() == []
    assert "* For a public link as well: make run ARGUMENTS=--share" in app.lines
    assert "launch()" not in "".join(app.lines)
