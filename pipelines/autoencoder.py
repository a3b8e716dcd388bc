"""Pictures to latents and back, always one picture at a time, and rough previews of many.

A model that overflows in half precision is kept in full precision for good, so that no failure can
leave it in between. It does not know prompts, solvers or requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipelines.drawn import Picture

WIDEST = 256  # pixels of a preview's side
_SAMPLES = 4  # pictures of colours, to learn previews from
_SIDE = 16  # latents of their sides


class Autoencoder:
    """Latents are (what the encoder gives - shift) * scale."""

    def __init__(self, model: Any, scale: float, shift: Tensor, factor: int) -> None:
        self.model = model
        self.factor = factor  # pixels a latent, along a side
        self.channels: int = model.config.latent_channels
        self._scale = scale
        self._shift = shift.reshape(1, -1, 1, 1).to(model.device, torch.float32)
        self._quick = type(model).__name__ == "AutoencoderTiny"
        self.every = 4 if self._quick else 1  # steps that a preview is worth
        self._colours = torch.zeros(self.channels + 1, 3, device=model.device)

    def encode(self, image: Picture, generator: torch.Generator | None = None) -> Tensor:
        """Latents of one picture: float32 [1, channels, height, width]; without a generator, the
        likeliest ones.
        """
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 127.5 - 1
        return self._latents(pixels, generator)

    def decode(self, latents: Tensor) -> Picture:
        """One picture from latents [1, channels, height, width]; raises ArithmeticError where it
        would be no picture.
        """
        pixels = self._pixels(latents)
        if not bool(torch.isfinite(pixels).all()):
            raise ArithmeticError("The autoencoder's numbers are not finite.")
        image: Picture = _pictures(pixels)[0]
        return image

    def rough(self, latents: Tensor) -> list[Picture]:
        """Previews of many, WIDEST a side at most: by the nearest colour of every latent, or, where
        that is quick, as they are.
        """
        height, width = (side * self.factor for side in latents.shape[-2:])
        if self._quick and max(height, width) <= WIDEST // 2:
            return list(_pictures(self._pixels(latents)))
        mapping, base = self._colours[:-1], self._colours[-1]
        step = -(-max(latents.shape[-2:]) // WIDEST)
        seen = latents[..., ::step, ::step].float()
        pixels = torch.einsum("rchw,cp->rphw", seen, mapping) + base.reshape(1, 3, 1, 1)
        return list(_pictures(pixels.nan_to_num()))

    def learn(self) -> None:
        """Colours from latents, linearly, as they lie in pictures of soft random colours."""
        generator = torch.Generator().manual_seed(0)
        coarse = torch.rand(_SAMPLES, 3, 5, 5, generator=generator) * 2 - 1
        pixels = functional.interpolate(coarse, size=_SIDE * self.factor, mode="bicubic").clamp(
            -1, 1
        )
        latents = torch.cat([self._latents(each[None], None).cpu() for each in pixels])
        colours = functional.avg_pool2d(pixels, self.factor)
        given = latents.permute(0, 2, 3, 1).reshape(-1, self.channels)
        given = torch.cat([given, torch.ones(len(given), 1)], dim=1)
        wanted = colours.permute(0, 2, 3, 1).reshape(-1, 3)
        found = torch.linalg.lstsq(given, wanted, driver="gelsd").solution
        self._colours = found.to(self.model.device)

    def _latents(self, pixels: Tensor, generator: torch.Generator | None) -> Tensor:
        found = self.model.encode(pixels.to(self.model.device, self.model.dtype))
        if hasattr(found, "latents"):
            latents: Tensor = found.latents
        elif generator is None:
            latents = found.latent_dist.mode()
        else:
            latents = found.latent_dist.sample(generator)
        return (latents.float() - self._shift) * self._scale

    def _pixels(self, latents: Tensor) -> Tensor:
        whole = latents.float() / self._scale + self._shift
        pixels: Tensor = self.model.decode(whole.to(self.model.dtype)).sample
        return pixels.float()


def _pictures(pixels: Tensor) -> Picture:
    """[pictures, 3, height, width] from -1 to 1, as bytes [pictures, height, width, 3]."""
    whole = ((pixels / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
    found: Picture = np.ascontiguousarray(whole.permute(0, 2, 3, 1).cpu().numpy())
    return found
