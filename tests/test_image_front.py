"""What is asked for a picture: made into a job, or refused by its field before it waits."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from dataclasses import dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines.image_front import CHARACTERS, Facts, ImageFront, ImageJob
from queueing.work import Card, Invalid

FACTS = Facts("SDXL", steps=30, guidance=5.0, size=512, multiple=8, least=64, most=1024)


def card(facts: Facts = FACTS, adapters: tuple[str, ...] = ("ink", "clay"), **limits: int) -> Card:
    details = {each.name: json.dumps(getattr(facts, each.name)) for each in fields(facts)}
    names = {"solvers": json.dumps(["euler", "ddim"]), "adapters": json.dumps(adapters)}
    return Card(limits=limits, details=details | names)


def asked(given: Card | None = None, /, **payload: Any) -> ImageJob:
    request = ImageFront().check({"prompt": "a red hat", **payload}, given or card())
    job: ImageJob = request.payload
    return job


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def test_the_model_suggests_what_was_not_asked_for() -> None:
    job = asked()
    assert job == ImageJob("a red hat", None, 30, 5.0, job.seed, 1, 512, 512, "euler")
    assert 0 <= job.seed < 1 << 32
    assert job.seed != asked().seed


def test_what_is_asked_for_is_drawn() -> None:
    job = asked(
        negative="blue", steps=8, guidance=7, seed=2**64 - 1, count=2, width=256, height=1024,
        solver="ddim", adapter="clay", weight=-0.5,
    )  # fmt: skip
    wanted = ImageJob(
        "a red hat", "blue", 8, 7.0, 2**64 - 1, 2, 1024, 256, "ddim", adapter=("clay", -0.5)
    )
    assert job == wanted


def test_no_negative_is_not_an_empty_one() -> None:
    assert asked().negative is None
    assert asked(negative=None).negative is None
    assert asked(negative="").negative == ""
    without = card(replace(FACTS, negatives=False))
    assert asked(without, negative="").negative is None


def test_no_adapter_may_be_said_in_two_ways() -> None:
    assert asked(adapter="").adapter is None
    assert asked(adapter=None, weight=0.5).adapter is None
    assert asked(adapter="ink").adapter == ("ink", 1.0)


def test_the_plan_counts_two_rows_for_guidance_and_steps_from_where_a_picture_begins() -> None:
    image = saved(Image.new("RGB", (64, 64)))
    payload = {"prompt": "a", "count": 3, "steps": 10, "image": image, "strength": 0.4}
    plan = ImageFront().check(payload, card()).plan
    assert [(work.key, work.most, work.weight) for work in plan] == [
        (("encode", 512, 512), 1, 2),
        (("denoise", 512, 512), 4, 6),
        (("decode", 512, 512), 3, 1),
    ]
    plain = ImageFront().check({"prompt": "a", "guidance": 1}, card()).plan
    assert [(work.most, work.weight) for work in plain] == [(1, 1), (30, 1), (1, 1)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt is empty; write"),
    ({"prompt": None}, "prompt is missing; give text"),
    ({"prompt": ["a"]}, "prompt is a list; give text"),
    ({"prompt": "a" * (CHARACTERS + 1)}, "prompt has 100,001 characters; at most 100,000"),
    ({"prompt": "\ud800"}, "prompt has an unpaired surrogate"),
    ({"negative": 5}, "negative is a number; give text"),
    ({"negative": "a" * (CHARACTERS + 1)}, "negative has 100,001 characters"),
    ({"steps": 0}, "steps is 0; give a whole number from 1 to 500"),
    ({"steps": -1}, "steps is -1; give a whole number from 1 to 500"),
    ({"steps": 10_000}, "steps is 10000; give a whole number from 1 to 500"),
    ({"steps": 2.5}, "steps is 2.5; give a whole number"),
    ({"steps": True}, "steps is true or false; give a whole number"),
    ({"guidance": float("nan")}, "guidance is nan; give a number from 0 to 100"),
    ({"guidance": -1}, "guidance is -1; give a number from 0 to 100"),
    ({"guidance": float("inf")}, "guidance is inf; give a number from 0 to 100"),
    ({"guidance": "5"}, "guidance is text; give a number"),
    ({"width": 0}, "width is 0; give a whole number of at least 1"),
    ({"width": 100_000}, "width is 100000; give a whole number from 64 to 1024"),
    ({"height": 60}, "height is 60; give a whole number from 64 to 1024"),
    ({"height": 100}, "height is 100; it must be a multiple of 8, such as 96 or 104"),
    ({"seed": -1}, "seed is -1; give a whole number from 0 to 18446744073709551615"),
    ({"seed": 2**64}, "seed is 18446744073709551616; give a whole number from 0"),
    ({"seed": 10**5000}, "seed is a number with very many digits"),
    ({"count": 0}, "count is 0; give a whole number from 1 to 4"),
    ({"count": 5}, "count is 5; give a whole number from 1 to 4"),
    ({"solver": "heun"}, "solver is heun; choose euler or ddim"),
    ({"adapter": "oil"}, "adapter is oil; there are: ink, clay"),
    ({"adapter": ["ink"]}, "adapter is .*; there are: ink, clay"),
    ({"adapter": "ink", "weight": float("nan")}, "weight is nan; give a number from -10 to 10"),
    ({"adapter": "ink", "weight": 11}, "weight is 11; give a number from -10 to 10"),
    ({"strength": 0}, "strength is 0; give a number above 0 and at most 1"),
    ({"image": "/etc/passwd"}, "image is text; give a picture's file"),
    ({"image": {"path": "/etc/passwd"}}, "image is an object; give a picture's file"),
    ({"image": Path("/nowhere.png")}, "image is a file that is not there any more"),
    ({"image": b""}, "image is no picture of the kinds PNG, JPEG"),
    ({"image": b"%PDF-1.4 and more"}, "image is no picture of the kinds PNG, JPEG"),
    ({"image": b"0" * 33_000_000}, "image has 33,000,000 bytes; at most 32,000,000"),
    ({"colour": 1}, "A picture has no field 'colour'; it has adapter, count"),
]


@pytest.mark.parametrize("given, words", REFUSED, ids=[words[:40] for _, words in REFUSED])
def test_what_is_wrong_is_refused_by_the_name_of_its_field(
    given: dict[str, Any], words: str
) -> None:
    with pytest.raises(Invalid, match=f"^{words}"):
        asked(**given)


def test_what_is_no_object_is_refused() -> None:
    for payload in (None, [], "a red hat"):
        with pytest.raises(Invalid, match="A picture is an object with fields"):
            ImageFront().judge(payload)


def test_before_the_model_is_there_only_what_no_model_draws_is_refused() -> None:
    front = ImageFront()
    front.judge({"prompt": "a", "width": 60, "solver": "heun", "adapter": "oil"})
    for wrong in ({"steps": 0}, {"seed": -1}, {"guidance": float("nan")}, {"image": b"no"}):
        with pytest.raises(Invalid, match=next(iter(wrong))):
            front.judge({"prompt": "a", **wrong})


def test_a_prompt_of_five_thousand_words_is_taken_as_it_is() -> None:
    prompt = "words " * 5000
    assert asked(prompt=prompt).prompt == prompt


def test_a_card_may_allow_less_than_the_model() -> None:
    tight = card(steps=20, pixels=512 * 512)
    assert asked(tight).steps == 20
    with pytest.raises(Invalid, match="steps is 30; give a whole number from 1 to 20"):
        asked(tight, steps=30)
    with pytest.raises(Invalid, match="width times height is 524,288 pixels; this device draws"):
        asked(tight, width=1024)


def test_models_without_negatives_or_adapters_say_so() -> None:
    with pytest.raises(Invalid, match="Flux takes no negative; leave it out"):
        asked(card(replace(FACTS, family="Flux", negatives=False)), negative="blue")
    with pytest.raises(Invalid, match="adapter is ink; there are none here; leave it out"):
        asked(card(adapters=()), adapter="ink")


def test_a_model_that_is_shown_its_guidance_takes_one_row() -> None:
    assert asked(card(replace(FACTS, shown=True)), guidance=3.5).weight == 1


def test_a_picture_has_the_size_that_was_asked_for_and_its_middle() -> None:
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    job = asked(image=saved(wide), width=64, height=64)
    assert job.image is not None
    assert (job.image.shape, job.image.dtype) == ((64, 64, 3), np.uint8)
    assert (job.image[:, 8:-8] == (0, 0, 255)).all()
    assert job.strength == 0.8


@pytest.mark.parametrize(
    "size, wanted",
    [
        ((512, 512), (512, 512)),
        ((800, 200), (1024, 256)),
        ((3, 7), (336, 784)),
        ((9000, 1), (1024, 64)),
    ],
)
def test_without_a_size_a_picture_keeps_its_proportions(
    size: tuple[int, int], wanted: tuple[int, int]
) -> None:
    job = asked(image=saved(Image.new("RGB", size)))
    assert (job.width, job.height) == wanted
    assert job.image is not None
    assert job.image.shape == (wanted[1], wanted[0], 3)


def test_what_is_clear_becomes_white() -> None:
    clear = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    half = Image.new("RGBA", (64, 64), (0, 0, 0, 128))
    gif = Image.new("P", (64, 64), 0)
    for image, grey in ((clear, 255), (half, 127), (clear.convert("LA"), 255)):
        job = asked(image=saved(image), width=64, height=64)
        assert job.image is not None
        assert (job.image == grey).all()
    job = asked(image=saved(gif, "GIF", transparency=0), width=64, height=64)
    assert job.image is not None
    assert (job.image == 255).all()


def test_pictures_of_all_kinds_look_as_they_should(tmp_path: Path) -> None:
    grey = Image.new("L", (64, 64), 100)
    deep = Image.fromarray(np.full((64, 64), 100 << 8, dtype=np.uint16))
    files = [saved(grey, format) for format in ("PNG", "JPEG", "BMP", "GIF")]
    files += [saved(deep), saved(grey.convert("CMYK"), "JPEG"), saved(grey.convert("RGB"), "WEBP")]
    (tmp_path / "grey.png").write_bytes(files[0])
    for file in (*files, tmp_path / "grey.png"):
        job = asked(image=file, width=64, height=64)
        assert job.image is not None
        assert abs(job.image.astype(int) - 100).max() <= 2


def test_a_picture_stands_as_its_camera_stood() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    lying = Image.new("RGB", (128, 64), "red")
    lying.paste("blue", (0, 0, 64, 64))
    job = asked(image=saved(lying, "JPEG", exif=exif, quality=95))
    assert job.image is not None
    assert (job.width, job.height) == (360, 728)
    assert job.image[10, 10, 2] > 200  # the left is on top now
    assert job.image[-10, 10, 0] > 200


def png(width: int, height: int) -> bytes:
    """A header that promises this, and next to nothing behind it."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))]
    parts += [(b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def turned_off(*_: Any) -> Any:
    raise RuntimeError("it was decoded")


@pytest.mark.parametrize(
    "size, words",
    [
        ((20_000, 10), "image is 20,000 by 10 pixels; at most 10,000 on a side"),
        ((9_000, 9_000), "image is 9,000 by 9,000 pixels; at most 10,000 on a side and 40,000,000"),
        ((10_000, 10_000), "image has far too many pixels|image is 10,000 by 10,000"),
        ((60_000, 60_000), "image has far too many pixels; at most 40,000,000"),
        ((2**31 - 1, 2**31 - 1), "image has far too many pixels"),
    ],
)
def test_what_would_burst_is_refused_by_its_header(
    size: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image.Image, "load", turned_off)
    with pytest.raises(Invalid, match=words):
        ImageFront().judge({"prompt": "a", "image": png(*size)})
    with pytest.raises(Invalid, match=words):
        asked(image=png(*size))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_that_ends_too_soon_is_refused(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(noise), format)
    with pytest.raises(Invalid, match=r"image is (broken \(.*\); save it anew|no picture of the)"):
        asked(image=whole[: len(whole) // 2])


def test_text_that_is_packed_into_a_picture_does_not_unpack() -> None:
    text = b"zTXt", b"Comment\0\0" + zlib.compress(bytes(50_000_000))
    chunk = struct.pack(">I", len(text[1])) + b"".join(text)
    chunk += struct.pack(">I", zlib.crc32(b"".join(text)))
    whole = saved(Image.new("RGB", (64, 64)))
    with pytest.raises(Invalid, match="image is broken"):
        asked(image=whole[:33] + chunk + whole[33:])


@dataclass(frozen=True)
class Came:
    images: tuple[Any, ...]
    cut: int = 0
    cut_negative: int = 0


SUMMARIES: list[tuple[Came, str]] = [
    (Came((1,)), "1 picture in 2.5 s"),
    (Came((1, None)), "2 pictures in 2.5 s · 1 hidden by the model's safety checker"),
    (Came((1,), cut=9), "1 picture in 2.5 s · the last 9 tokens of prompt were not read"),
    (Came((1,), 0, 1), "1 picture in 2.5 s · the last 1 token of negative was not read"),
]


@pytest.mark.parametrize("came, line", SUMMARIES)
def test_the_summary_says_what_was_left_out(came: Came, line: str) -> None:
    front = ImageFront()
    request = front.check({"prompt": "a"}, card())
    assert front.summary(front.finish(request, came), 2.5, 2.0) == line


def test_pictures_are_checked_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers', 'diffusers']))\n"
        "from pipelines.image_front import ImageFront\n"
        "print(ImageFront().judge({'prompt': 'a'}))"
    )
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "None", done.stderr
