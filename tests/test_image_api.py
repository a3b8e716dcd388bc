"""Pictures over the wire on the default model: files, progress, company, refusals, stopping."""

from __future__ import annotations

import io
import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from tests.conftest import App

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]  # the first run prepares the models

PEOPLE = 20
WORDS = ("red apple", "blue heart", "yellow duck", "smiling face", "old house")


@pytest.fixture
def client(real_app: App, tmp_path: Path) -> Client:
    return Client(real_app.url, verbose=False, download_files=str(tmp_path))


def draw(client: Client, prompt: str = "red apple", **fields: Any) -> Any:
    return client.predict(prompt, **{"steps": 4, "seed": 7, **fields}, api_name="/image")


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.asarray(image).astype(int)


def near(one: str, other: str) -> bool:
    return bool(np.abs(pixels(one) - pixels(other)).max() <= 1)


def test_a_picture_comes_as_a_file_with_its_seed(client: Client) -> None:
    found = draw(client, seed=2**64 - 1, count=2)
    assert found["seeds"] == [2**64 - 1, 0]
    assert [pixels(path).shape for path in found["images"]] == [(64, 64, 3)] * 2
    assert "2 pictures in" in found["status"]
    assert (found["cut"], found["cut_negative"], found["progress"]) == (0, 0, 1.0)
    assert not near(*found["images"])


def test_the_same_seed_draws_the_same_and_no_seed_draws_another(client: Client) -> None:
    first, again = draw(client)["images"][0], draw(client)["images"][0]
    assert near(first, again)
    one, other = (client.predict("red apple", steps=2, api_name="/image") for _ in range(2))
    assert one["seeds"] != other["seeds"] and 0 <= one["seeds"][0] < 2**32


def test_progress_comes_while_it_is_drawn(client: Client) -> None:
    job = client.submit("red apple", steps=100, seed=1, api_name="/image")
    job.result(timeout=300)
    told = [each["progress"] for each in job.outputs()[:-1] if each["progress"] is not None]
    assert told == sorted(told) and len(set(told)) > 3
    assert any("Drawing" in each["status"] for each in job.outputs())


def test_each_of_many_gets_the_picture_that_they_would_get_alone(
    real_app: App, tmp_path: Path
) -> None:
    asked = [
        {
            "prompt": WORDS[n % len(WORDS)],
            "steps": (2, 3, 5)[n % 3],
            "guidance": (1.0, 3.0, 6.0)[n % 3],
            "seed": n,
            "count": 1 + (n % 5 == 0),
        }
        for n in range(PEOPLE)
    ]
    clients = [
        Client(real_app.url, verbose=False, download_files=str(tmp_path / str(n)))
        for n in range(PEOPLE)
    ]
    with ThreadPoolExecutor(PEOPLE) as pool:
        together = list(
            pool.map(lambda pair: draw(pair[0], **pair[1]), zip(clients, asked, strict=True))
        )
    for fields, found in zip(asked, together, strict=True):
        alone = draw(clients[0], **fields)
        assert alone["seeds"] == found["seeds"]
        assert all(map(near, alone["images"], found["images"]))


def test_a_picture_may_be_drawn_over(client: Client, tmp_path: Path) -> None:
    Image.new("RGBA", (200, 100), (20, 120, 60, 128)).save(tmp_path / "green.png")
    over = {"image": handle_file(str(tmp_path / "green.png")), "steps": 10}
    slightly = pixels(draw(client, strength=0.1, **over)["images"][0])
    anew = pixels(draw(client, strength=1.0, **over)["images"][0])
    green = np.array([137, 187, 157])  # laid on white
    assert np.abs(slightly - green).mean() < np.abs(anew - green).mean()


def bomb() -> bytes:
    """A PNG that says it is huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": " "}, "prompt is empty"),
        ({"steps": 0}, "steps is 0; give a whole number from 1 to 500"),
        ({"steps": -1}, "steps is -1"),
        ({"steps": 10_000}, "steps is 10000"),
        ({"guidance": -1.0}, "guidance is -1"),
        ({"width": 0}, "width is 0"),
        ({"height": 60}, "height is 60"),
        ({"width": 100_000}, "width is 100000"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"count": 5}, "count is 5; give a whole number from 1 to 4"),
        ({"solver": "heun"}, "solver is heun; choose flow-match euler"),
        ({"adapter": "ink"}, "adapter is ink; there are none here"),
        ({"prompt": "x" * 200_000}, "prompt has 200,000 characters; at most 100,000"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_its_field(
    client: Client, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(AppError, match=words):
        draw(client, **fields)


def test_a_prompt_that_is_too_long_is_cut_and_that_is_said(client: Client) -> None:
    found = draw(client, prompt="many words " * 2500, steps=1)
    assert found["cut"] > 4000
    assert "of prompt were not read" in found["status"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"no picture at all", "image is no picture of the kinds PNG, JPEG"),
        (bomb(), "image (is 20,000 by 20,000|has far too many) pixels"),
    ],
)
def test_a_file_that_is_no_picture_for_us_is_refused(
    client: Client, tmp_path: Path, content: bytes, words: str
) -> None:
    (tmp_path / "file.png").write_bytes(content)
    with pytest.raises(AppError, match=words):
        draw(client, image=handle_file(str(tmp_path / "file.png")))


def said(app: App, data: str) -> str:
    """What plain HTTP answers: at once, or as the event that a call ends with."""
    address = f"{app.url}/gradio_api/call/image"
    answer = httpx.post(address, content=data, headers={"content-type": "application/json"})
    if answer.status_code != 200:
        return answer.text
    return httpx.get(f"{address}/{answer.json()['event_id']}", timeout=60).text


@pytest.mark.parametrize(
    "image",
    [
        "/etc/passwd",
        {"path": "/etc/passwd"},
        {"path": "/etc/passwd", "meta": {"_type": "gradio.FileData"}},
        [1, 2],
        5,
    ],
)
def test_only_files_that_were_brought_are_opened(real_app: App, image: Any) -> None:
    data = ["red apple", *[None] * 6, 1, None, None, 1.0, image]
    answer = said(real_app, json.dumps({"data": data}))
    assert "error" in answer and "complete" not in answer
    assert "root:" not in answer


@pytest.mark.parametrize(
    ("place", "words"), [(5, "guidance is nan"), (10, "weight is nan"), (12, "strength is nan")]
)
def test_what_is_no_number_is_refused(real_app: App, place: int, words: str) -> None:
    data: list[Any] = ["red apple", *[None] * 6, 1, None, None, 1.0, None, 0.8]
    data[place] = "@"
    answer = said(real_app, json.dumps({"data": data}).replace('"@"', "NaN"))
    assert words in answer and "complete" not in answer


def test_plain_http_gets_the_address_of_a_file(real_app: App) -> None:
    address = f"{real_app.url}/gradio_api/call/image"
    data = ["red apple", None, None, None, 3, 2.0, 5]
    event = httpx.post(address, json={"data": data}).json()["event_id"]
    last = httpx.get(f"{address}/{event}", timeout=120).text.strip().splitlines()[-1]
    (found,) = json.loads(last.removeprefix("data: "))
    picture = httpx.get(found["images"][0]["url"]).content
    assert Image.open(io.BytesIO(picture)).size == (64, 64)


def test_a_stopped_picture_leaves_no_file(client: Client) -> None:
    job = client.submit("red apple", steps=500, seed=1, count=4, api_name="/image")
    while not any(each["progress"] for each in job.outputs()):
        assert not job.done()
    job.cancel()
    assert not any("images" in each for each in job.outputs())
    assert draw(client)["seeds"] == [7]
