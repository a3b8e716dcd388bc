"""Pictures that people bring, and that they get. Files are looked at before they are opened, and
become pixels; what is too large, broken or no picture is refused in a sentence, by the header alone
where it can be. It knows no task.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from pipelines.checks import kind
from queueing.work import Invalid

Picture: TypeAlias = "NDArray[np.uint8]"  # [height, width, 3]
FORMATS = "PNG", "JPEG", "WEBP", "GIF", "BMP"
BYTES = 32_000_000  # of a file
SIDE = 10_000  # pixels
PIXELS = 40_000_000  # which take up to 320 MB while they are made smaller
_ORIENTATION = 0x0112  # in what cameras write beside a picture
_SIDEWAYS = (5, 6, 7, 8)
_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    ValueError,
    SyntaxError,
    ArithmeticError,
    LookupError,
    EOFError,
    TypeError,
    struct.error,
)


def looked(name: str, source: Any) -> tuple[int, int]:
    """Width and height of what the bytes or the file say they are; raises Invalid.

    A file's path is given by our own page as a Path; text of a caller is never taken for one.
    """
    with _opened(name, source) as image, _decoding(name):
        width, height = image.size
        # Asked of others, a PNG would be decoded for it.
        turns = image.getexif().get(_ORIENTATION, 1) if image.info.get("exif") else 1
    return (height, width) if turns in _SIDEWAYS else (width, height)


def pixels(name: str, source: Any, width: int, height: int) -> Picture:
    """In the middle of it as much as has these proportions, in this size, transparency on white;
    raises Invalid.
    """
    with _opened(name, source) as image, _decoding(name):
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        fitted = ImageOps.fit(_plain(image), (width, height), Image.Resampling.LANCZOS)
    if fitted.mode == "RGBA":
        fitted = Image.alpha_composite(Image.new("RGBA", fitted.size, "white"), fitted)
    return np.array(fitted.convert("RGB"), dtype=np.uint8)


def png(picture: Picture, level: int = 6) -> bytes:
    """A PNG, which is smaller and takes longer at a higher level."""
    file = BytesIO()
    Image.fromarray(picture).save(file, "PNG", compress_level=level)
    return file.getvalue()


@contextmanager
def _opened(name: str, source: Any) -> Iterator[Image.Image]:
    """With no pixel read yet."""
    if not isinstance(source, bytes | Path):
        raise Invalid(f"{name} is {kind(source)}; give a picture's file.")
    size = len(source) if isinstance(source, bytes) else _size(name, source)
    if size > BYTES:
        raise Invalid(f"{name} has {size:,} bytes; at most {BYTES:,} are taken. Make it smaller.")
    try:
        with _decoding(name):
            image = Image.open(
                BytesIO(source) if isinstance(source, bytes) else source, "r", FORMATS
            )
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Invalid(f"{name} has far too many pixels; at most {PIXELS:,} are taken.") from None
    with image:
        width, height = image.size
        if max(width, height) > SIDE or width * height > PIXELS:
            raise Invalid(
                f"{name} is {width:,} by {height:,} pixels; at most {SIDE:,} on a side and "
                f"{PIXELS:,} in all are taken. Make it smaller."
            )
        yield image


def _size(name: str, path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise Invalid(f"{name} is a file that is not there any more; bring it again.") from None


@contextmanager
def _decoding(name: str) -> Iterator[None]:
    """Whatever decoders raise for what a stranger made up means the same."""
    try:
        yield
    except UnidentifiedImageError:
        raise Invalid(f"{name} is no picture of the kinds {', '.join(FORMATS)}.") from None
    except _ERRORS as error:
        why = str(error).partition("\n")[0][:80]
        raise Invalid(f"{name} is broken ({why}); save it anew, or bring another.") from None


def _plain(image: Image.Image) -> Image.Image:
    """In colours, and with transparency where it has any; not copied where that is so."""
    if image.mode.startswith("I"):  # 16 bits, which would be cut off and not scaled
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    wanted = "RGBA" if image.has_transparency_data else "RGB"
    return image if image.mode == wanted else image.convert(wanted)
