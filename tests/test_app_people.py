"""Who a caller is, and what may come through the door: signed names, logins, addresses, shapes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from gradio.state_holder import SessionState
from gradio_client import Client
from starlette.requests import Request

from app import Pages, opened
from queueing.door import HEADER, Door
from queueing.payload import shaped
from queueing.people import Person, Signer, secret
from queueing.settings import Settings
from queueing.shelf import Held
from queueing.work import Invalid
from tests.conftest import ROOT

SIGNER = Signer(b"ours")
FOREIGN = Signer(b"theirs").issue()


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path))
    return opened(Settings(pipeline="fake", secret="ours"))


def http(token: str = "", session: dict[str, Any] | None = None) -> Request:
    headers = [(HEADER.encode(), token.encode())] if token else []
    scope = {"type": "http", "headers": headers, "client": ("192.0.2.7", 1)}
    return Request({**scope, "session": session} if session else scope)


def test_a_name_that_the_server_signed_is_a_person() -> None:
    token = SIGNER.issue()
    assert SIGNER.person(None, token, "192.0.2.7") == Person(f"token:{token.partition('.')[0]}")


@pytest.mark.parametrize(
    "token",
    [FOREIGN, "", ".", "name.", "name." + "0" * 32, "a" * 10_000, "näme.x", None, 7, {}, ["x"]],
)
def test_a_forged_name_is_an_address_and_an_address_is_never_capped(token: Any) -> None:
    person = SIGNER.person(None, token, "192.0.2.7")
    assert person == Person("address:192.0.2.7", capped=False)


def test_a_changed_name_is_nobodys() -> None:
    token = SIGNER.issue()
    other = ("b" if token[0] == "a" else "a") + token[1:]
    assert SIGNER.name(other) is None


def test_no_two_names_are_equal() -> None:
    assert len({SIGNER.issue() for _ in range(1000)}) == 1000


def test_a_login_comes_before_a_token_and_a_token_before_the_address(door: Door) -> None:
    token = SIGNER.issue()
    profile = {"oauth_info": {"userinfo": {"preferred_username": "ada"}}}
    assert door._person(http(token, profile), None, None).name == "login:ada"
    assert door._person(http(token), "grace", None).name == "login:grace"
    assert door._person(http(token), None, None).name.startswith("token:")
    assert door._person(http(), None, token).name.startswith("token:")
    assert door._person(http(), None, None).name == "address:192.0.2.7"


def test_a_header_comes_before_what_a_page_kept(door: Door) -> None:
    header, kept = SIGNER.issue(), SIGNER.issue()
    assert door._person(http(header), None, kept).name == f"token:{header.partition('.')[0]}"


def test_the_identity_endpoint_gives_a_new_name_each_time(app: Any) -> None:
    client = Client(app.url, verbose=False)
    first, second = (client.predict(api_name="/identity") for _ in range(2))
    assert first != second and first.count(".") == 1
    known = Client(app.url, verbose=False, headers={HEADER: first})
    assert known.predict("Hi", max_tokens=2, api_name="/chat")


def test_the_secret_is_made_once_and_kept_private(tmp_path: Path) -> None:
    found: list[bytes] = []
    makers = [
        threading.Thread(target=lambda: found.append(secret("", tmp_path / "cache")))
        for _ in range(8)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(set(found)) == 1 and len(found[0]) == 32 and len(found) == 8
    assert (tmp_path / "cache" / "secret").stat().st_mode & 0o077 == 0
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["secret"]


def test_a_given_secret_is_not_written(tmp_path: Path) -> None:
    assert secret("given", tmp_path / "cache") == b"given"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_keeps_no_secret_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Invalid, match="CARPOOL_CACHE is .*cache.*Not a directory"):
        secret("", tmp_path / "file" / "cache")


def test_missing_values_are_the_defaults() -> None:
    assert shaped(["Hi"], {"message": None, "seed": 7}) == ["Hi", 7]


def test_too_many_values_are_refused() -> None:
    with pytest.raises(Invalid, match="data has 3 values; at most 2"):
        shaped([1, 2, 3], {"message": None, "history": None})


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("ünï \x00\x1b", "ünï \x00\x1b"),
    ],
)
def test_texts_become_valid_unicode_wherever_they_are(text: str, clean: str) -> None:
    assert shaped([{text: [text]}], {"message": None}) == [{clean: [clean]}]


async def test_the_server_keeps_no_conversation(door: Door) -> None:
    page = Pages(door).blocks
    chat = next(fn for fn in page.fns.values() if fn.api_name == "chat")
    state = SessionState(page)
    assert (await page.preprocess_data(chat, ["my secret"], state))[0] == "my secret"
    await page.postprocess_data(chat, ["my answer"], state)
    assert "my " not in str(state.config_values)


async def test_all_files_stand_in_one_set(door: Door) -> None:
    page = Pages(door).blocks
    assert {id(block.temp_files) for block in page.blocks.values()} == {id(page.upload_file_set)}
    assert page.temp_file_sets == [page.upload_file_set]


def test_files_may_come_while_others_are_looked_through() -> None:
    held = Held(["one"])
    for name in held:
        held.add(f"{name} more")
    assert held == {"one", "one more"}


SHARE = """
import os, signal, sys, app

def launch(self, **given):
    sys.stdout.write(str(given["share"]))
    self.local_url = "here"
    os.kill(os.getpid(), signal.SIGTERM)

app.Blocks.launch = launch
app.main()
"""


@pytest.mark.parametrize(("arguments", "shared"), [([], "False"), (["--share"], "True")])
def test_the_share_flag_reaches_gradio(tmp_path: Path, arguments: list[str], shared: str) -> None:
    settings = {"CARPOOL_PIPELINE": "fake", "CARPOOL_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", SHARE, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{shared}* Running on local URL:  here")
    assert ("--share" in done.stdout) == (shared == "False")
