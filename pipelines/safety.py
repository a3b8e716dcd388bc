"""The judge of pictures that some models bring: which must not be shown.

It sees one picture at a time, so that nobody's picture hides another's. It does not know prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pipelines import proof
from pipelines.drawn import Picture
from pipelines.fetch import Unprepared

_MEAN = np.array((0.48145466, 0.4578275, 0.40821073), np.float32)  # of what CLIP was shown
_SPREAD = np.array((0.26862954, 0.26130258, 0.27577711), np.float32)


class Checker:
    """The safety checker of Stable Diffusion, in full precision."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

        try:
            model: Any = StableDiffusionSafetyChecker.from_pretrained(
                folder / "safety_checker", local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            proof.unless_memory(error)
            raise Unprepared(
                f"The safety checker of {folder.name} cannot be loaded ({proof.reason(error)}); "
                "fetch its files again, or take it out of model_index.json."
            ) from None
        self._model = model.to(device).eval().requires_grad_(False)
        self._side: int = self._model.config.vision_config.image_size
        self._device = device

    def hides(self, image: Picture) -> bool:
        """Whether a picture must not be shown."""
        seen = torch.from_numpy(_seen(image, self._side)).to(self._device)
        _, flags = self._model(clip_input=seen, images=np.zeros((1, 1, 1, 3), np.float32))
        return bool(flags[0])


def _seen(image: Picture, side: int) -> Any:
    """A picture as CLIP takes it: its middle, small, [1, 3, side, side]."""
    whole = Image.fromarray(image)
    scale = side / min(whole.size)
    width, height = (max(round(each * scale), side) for each in whole.size)
    left, top = (width - side) // 2, (height - side) // 2
    small = whole.resize((width, height), Image.Resampling.BICUBIC)
    middle = small.crop((left, top, left + side, top + side))
    pixels = (np.asarray(middle, np.float32) / 255 - _MEAN) / _SPREAD
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)
