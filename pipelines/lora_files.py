"""Low-rank adapters as files: which lie in a folder, and what the keys in one mean.

Keys of diffusers, PEFT and Kohya's scripts; whatever is no plain low-rank change is refused. It
imports no torch, and knows no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.fetch import Unprepared
from pipelines.lora_names import flat

SETTING = "CARPOOL_LORA"
_NAME = re.compile(r"\w[\w .+-]{0,99}")
_WEIGHT = re.compile(r"(.+?)[._]lora(?:_linear_layer)?[._](down|up|A|B)(?:\.\w+)?\.weight")
_ALPHA = re.compile(r"(.+?)(?:[._]lora)?\.alpha")
_KINDS: Mapping[str, str] = {"down": "down", "A": "down", "up": "up", "B": "up"}
_PARTS: Mapping[str, int] = {  # 0 is the denoiser, others are text encoders
    "lora_unet_": 0,
    "lora_transformer_": 0,
    "unet.": 0,
    "transformer.": 0,
    "diffusion_model.": 0,
    "lora_te_": 1,
    "lora_te1_": 1,
    "lora_te2_": 2,
    "lora_te3_": 3,
    "text_encoder.": 1,
    "text_encoder_2.": 2,
    "text_encoder_3.": 3,
}
_PREFIXES = ("unet", "transformer"), ("text_encoder",), ("text_encoder_2",), ("text_encoder_3",)
_OTHERS: Mapping[str, str] = {
    "dora_scale": "DoRA",
    "lora_magnitude_vector": "DoRA",
    "hada_": "LoHa",
    "lokr_": "LoKr",
    "lora_mid": "a Tucker decomposition",
    "oft_": "OFT",
}


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a key is of: the layer, by its flat name, of a part of the model."""

    part: int
    layer: str
    kind: str  # down, up or alpha


def named(environment: Mapping[str, str]) -> dict[str, Path]:
    """The adapters in the folder that the setting names; raises Unprepared."""
    folder = environment.get(SETTING)
    return available(Path(folder).expanduser()) if folder else {}


def available(folder: Path) -> dict[str, Path]:
    """The adapters in a folder, by their names, which are their files'; raises Unprepared."""
    if not folder.is_dir():
        raise Unprepared(f"{SETTING} is {folder}, which is no folder; name one, or leave it out.")
    root = folder.resolve()
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.resolve().is_relative_to(root):
            raise Unprepared(f"{path.name} is a link out of {folder}; put the file itself there.")
        if not path.is_file():
            raise Unprepared(f"{path.name} in {folder} is no file; take it out.")
        if not _NAME.fullmatch(path.stem):
            raise Unprepared(
                f"The name of {path.name!r} cannot be an adapter's; rename it with at most 100 "
                "letters, digits, spaces and . + - _, beginning with a letter or a digit."
            )
        found[path.stem] = path
    return found


def meaning(file: str, key: str) -> Meaning:
    """What a key stands for; raises Unprepared where it stands for nothing that is known here."""
    match, kind = _WEIGHT.fullmatch(key), "alpha"
    if match:
        kind = _KINDS[match.group(2)]
    else:
        match = _ALPHA.fullmatch(key)
    if not match:
        other = next((name for word, name in _OTHERS.items() if word in key), None)
        what = f"That is {other}, and only" if other else "Only"
        raise Unprepared(
            f"{file} has {key}. {what} plain low-rank adapters (LoRA, LoCon) are known here; "
            "choose another file."
        )
    layer = match.group(1).removeprefix("base_model.model.").replace(".processor.", ".")
    prefix = next((each for each in _PARTS if layer.startswith(each)), "")
    return Meaning(_PARTS.get(prefix, 0), flat(layer.removeprefix(prefix)), kind)


class Said:
    """What a file says of itself: the alphas of layers, where diffusers saved them beside."""

    def __init__(self, file: str, metadata: Mapping[str, str]) -> None:
        try:
            said = json.loads(metadata.get("lora_adapter_metadata") or "{}")
            self._said: Mapping[str, Any] = dict(said)
        except (ValueError, TypeError):
            raise Unprepared(
                f"{file} says of itself what cannot be read; choose another."
            ) from None
        for key, value in self._said.items():
            if value and key.endswith((".use_dora", ".use_rslora", ".lora_bias")):
                raise Unprepared(
                    f"{file} was made with {key}, which is not known here; choose another file."
                )

    def alpha(self, part: int, layer: str) -> float | None:
        """Of a layer, by its own name."""
        for prefix in _PREFIXES[part]:
            for pattern, alpha in (self._said.get(f"{prefix}.alpha_pattern") or {}).items():
                if re.fullmatch(rf"(.*\.)?({pattern})", layer):  # as PEFT reads it
                    return float(alpha)
            if f"{prefix}.lora_alpha" in self._said:
                return float(self._said[f"{prefix}.lora_alpha"])
        return None
