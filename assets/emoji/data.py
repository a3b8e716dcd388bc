"""Pictures and captions: two packages of the npm registry, checked by hash, and what is in them.

A picture is a Fluent 3D emoji of 64 by 64 pixels on white; its captions are made of the label and
the tags that emojibase gives it.
"""

from __future__ import annotations

import io
import json
import logging
import os
import random
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from pipelines.cache import sha256
from pipelines.fetch import Unprepared

log = logging.getLogger("emoji.data")

SIDE = 64  # pixels
CAPTIONS = 6  # of each picture, the label first
_REGISTRY = "https://registry.npmjs.org"
_LEFT_OUT = (2, 9)  # groups of emojibase: components and flags
_RARE = 3  # a tag of so many pictures at most says by itself which picture is meant


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the npm registry, in the one version this was written for."""

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        return f"{self.name.rpartition('/')[2]}-{self.version}.tgz"


FLUENT = Package(
    "@lobehub/fluent-emoji-3d",
    "1.1.0",
    "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58",
)
EMOJIBASE = Package(
    "emojibase-data",
    "17.0.0",
    "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
)


@dataclass(frozen=True, slots=True)
class Picture:
    """An emoji: what it is called, and its pixels in -1 to 1, [3, side, side]."""

    label: str
    tags: tuple[str, ...]
    pixels: Tensor


def pictures(folder: Path) -> list[Picture]:
    """All pictures that have a label, in the order of emojibase; fetched into the folder."""
    with tarfile.open(fetched(EMOJIBASE, folder)) as archive:
        entries = json.loads(_member(archive, "package/en/data.json"))
    with tarfile.open(fetched(FLUENT, folder)) as archive:
        files = {_plain(Path(name).stem): name for name in archive.getnames() if "assets/" in name}
        return [
            Picture(
                entry["label"],
                tuple(entry.get("tags", ())),
                pixels(_member(archive, files[_plain(entry["hexcode"])])),
            )
            for entry in _drawn(entries)
            if _plain(entry["hexcode"]) in files
        ]


def _drawn(entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Entries of the groups that are learned."""
    for entry in entries:
        if entry.get("group") not in (None, *_LEFT_OUT):
            yield entry


def _plain(code: str) -> str:
    """A code point sequence without the mark that asks for a coloured form, which few agree on."""
    return "-".join(part for part in code.lower().split("-") if part != "fe0f")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise Unprepared(f"{name} is no file of its package.")
    return file.read()


def pixels(file: bytes) -> Tensor:
    """An image file on white, made small: [3, side, side] in -1 to 1."""
    with Image.open(io.BytesIO(file)) as image:
        colours = image.convert("RGBA")
    white = Image.new("RGBA", colours.size, "white")
    small = Image.alpha_composite(white, colours).convert("RGB")
    small = small.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 127.5 - 1


def fetched(package: Package, folder: Path) -> Path:
    """The package's archive in the folder; a file with another hash is refused."""
    file = folder / package.file
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        registry = os.environ.get("npm_config_registry", _REGISTRY).rstrip("/")
        log.info("fetching %s %s", package.name, package.version)
        part = file.with_suffix(f".{os.getpid()}.part")
        with urllib.request.urlopen(f"{registry}/{package.name}/-/{package.file}") as source:
            part.write_bytes(source.read())
        part.rename(file)
    found = sha256(file)
    if found != package.sha256:
        raise Unprepared(f"{file} has SHA-256 {found}, expected {package.sha256}; delete it.")
    return file


def captions(pictures: Sequence[Picture], seed: int = 0) -> list[list[str]]:
    """For each picture as many captions: the label, a phrase with it, it with tags, tags alone."""
    chance = random.Random(seed)
    common = Counter(tag for picture in pictures for tag in picture.tags)
    return [_captions(picture, common, chance) for picture in pictures]


def _captions(picture: Picture, common: Counter[str], chance: random.Random) -> list[str]:
    label, tags = picture.label, list(picture.tags)
    rare = [tag for tag in tags if common[tag] <= _RARE and tag.lower() != label.lower()]
    article = "an" if label[0].lower() in "aeiou" else "a"
    phrases = (f"{article} {label}", f"the {label}", f"{label} emoji", f"a picture of {label}")
    found = [label, chance.choice(phrases)]
    for most in (2, 3):
        some = chance.sample(tags, min(most, len(tags)))
        found.append(", ".join([label, *some]))
    found.append(chance.choice(rare) if rare else label.lower())
    found.append(" ".join(chance.sample(tags, 3)) if len(tags) > 3 else label)
    return found[:CAPTIONS]
