"""Which models draw, by what their folder's index says, and how each is loaded.

It does not know what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch

from pipelines import parts
from pipelines.fetch import Unprepared
from pipelines.flux import FluxFamily, flux
from pipelines.unets import UNetFamily, emoji, sdxl, stable_diffusion

Known: TypeAlias = UNetFamily | FluxFamily
EMOJI = "CarpoolEmojiPipeline"  # in the index of this project's own model
_LOADERS: Mapping[str, Callable[[Path, torch.dtype, torch.device], Known]] = {
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionImg2ImgPipeline": stable_diffusion,
    "StableDiffusionXLPipeline": sdxl,
    "StableDiffusionXLImg2ImgPipeline": sdxl,
    "FluxPipeline": flux,
    "FluxImg2ImgPipeline": flux,
}


def bring(
    folder: Path, dtype: torch.dtype, device: torch.device, words: Callable[[], Path]
) -> Known:
    """The model in a folder; `words` finds the encoder of texts, for models that bring none."""
    kind = str(parts.said(folder, parts.INDEX).get("_class_name"))
    if kind == EMOJI:
        return emoji(folder, dtype, device, words())
    if kind not in _LOADERS:
        raise Unprepared(
            f"{folder.name} is a {kind}; known are {', '.join((*_LOADERS, EMOJI))}. Choose one."
        )
    return _LOADERS[kind](folder, dtype, device)
