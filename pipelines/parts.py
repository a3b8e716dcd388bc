"""The parts of a diffusion model, read from its folder by the classes of diffusers.

What cannot be read is refused in a sentence; pickled weights are not read at all. It does not know
what the parts are for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pipelines import proof
from pipelines.fetch import PARTS, Unprepared
from pipelines.weights import must_be_whole

INDEX = PARTS
_WEIGHTS = "diffusion_pytorch_model"


def said(folder: Path, name: str) -> Mapping[str, Any]:
    """What a JSON file of a model says."""
    try:
        found = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Unprepared(
            f"{name} of {folder.name} cannot be read ({proof.reason(error)}); name the folder of a "
            "model of diffusers."
        ) from None
    if not isinstance(found, dict):
        raise Unprepared(f"{name} of {folder.name} is no table; name another model.")
    return found


def has(folder: Path, name: str) -> bool:
    """Whether a model's index names this part."""
    entry = said(folder, INDEX).get(name) or [None, None]
    return entry[1] is not None and (folder / name).is_dir()


def part(folder: Path, name: str, dtype: torch.dtype, *kinds: str) -> Any:
    """A part of one of these classes, ready to compute."""
    import diffusers

    kind = said(folder / name, "config.json").get("_class_name")
    if kind not in kinds:
        raise Unprepared(
            f"The {name} of {folder.name} is of class {kind}; known is {' or '.join(kinds)}."
        )
    try:
        model, report = getattr(diffusers, str(kind)).from_pretrained(
            folder / name,
            torch_dtype=dtype,
            variant=_variant(folder / name),
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as error:
        proof.unless_memory(error)
        raise Unprepared(
            f"The {name} of {folder.name} cannot be loaded ({proof.reason(error)}); check its "
            "files, or choose another model."
        ) from None
    must_be_whole(folder, sorted(report["missing_keys"]), f"weights of its {name}")
    return model.eval().requires_grad_(False)


def _variant(folder: Path) -> str | None:
    """Half precision, where a model comes in nothing else."""
    if any(folder.glob(f"{_WEIGHTS}*.safetensors")):
        plain = [f for f in folder.glob("*.safetensors") if ".fp16." not in f.name]
        return None if plain else "fp16"
    return None
