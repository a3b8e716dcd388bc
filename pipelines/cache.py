"""Folders that are either complete or not there: built aside, stamped with hashes, renamed into
place.

A folder that lost or changed a file since is no longer complete and is built anew; two processes
that want the same folder take turns. It does not know what lies in the folders.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from queueing.work import CarpoolError, Tell

STAMP = "carpool.json"


def root() -> Path:
    """The cache folder: CARPOOL_CACHE, else the user's own cache folder."""
    named = os.environ.get("CARPOOL_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "carpool"


def complete(folder: Path) -> bool:
    """Whether every file is as it was stamped; hashing 270 MB takes a quarter of a second."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
        return all(
            (folder / name).stat().st_size == size and sha256(folder / name) == digest
            for name, (size, digest) in stamp["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def sha256(file: Path) -> str:
    """The file's hash in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def lock(folder: Path, tell: Tell) -> Iterator[None]:
    """One process at a time works on a folder; the kernel lets go when its holder dies."""
    with _writable(folder.with_name(folder.name + ".lock")) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(0.0, "Waiting for another process that prepares the same model")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _writable(file: Path) -> TextIO:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return file.open("w")
    except OSError as error:
        raise CarpoolError(
            f"CARPOOL_CACHE is {file.parent}, where nothing can be kept ({error.strerror}); "
            "name a folder that can be written."
        ) from error


@contextmanager
def building(folder: Path) -> Iterator[Path]:
    """An empty folder to fill; without an error it becomes `folder`, stamped. Needs the lock."""
    for left in folder.parent.glob(f"{folder.name}.building-*"):  # a builder was killed
        shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        yield aside
        _stamp(aside)
        aside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _stamp(folder: Path) -> None:
    """Write what is there; everything reaches the disk before the folder gets its name."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
        files[file.relative_to(folder).as_posix()] = (file.stat().st_size, sha256(file))
    with (folder / STAMP).open("w") as stamp:
        json.dump({"files": files}, stamp, indent=1)
        stamp.flush()
        os.fsync(stamp.fileno())
