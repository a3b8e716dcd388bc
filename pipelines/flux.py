"""Flux: a flow-matching transformer, which reads a prompt and the patches of a picture as one row.

Guidance is one of its inputs, so a picture takes one row of a call. It does not know solvers or who
asks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines import parts
from pipelines.autoencoder import Autoencoder
from pipelines.drawn import Facts, ImageJob
from pipelines.readers import ClipAndT5, Condition, Read, Reader
from pipelines.solvers import Solvers
from pipelines.unets import latent

_SIDE = 128  # latents of a picture's side, as it was trained


class FluxFamily:
    """A transformer with its reader and its autoencoder."""

    def __init__(
        self,
        facts: Facts,
        transformer: Any,
        reader: Reader,
        autoencoder: Autoencoder,
        solvers: Solvers,
    ) -> None:
        self.facts = facts
        self.denoiser = transformer
        self._dtype: torch.dtype = transformer.dtype  # which it would look for among its weights
        self.reader = reader
        self.autoencoder = autoencoder
        self.solvers = solvers

    def length(self, height: int, width: int) -> int:
        """Of a picture in patches of two by two latents."""
        return (height // self.facts.multiple) * (width // self.facts.multiple)

    def condition(self, job: ImageJob, read: Read) -> Condition:
        """A text of a job, and its guidance where the model was made for it."""
        if not self.denoiser.config.guidance_embeds:
            return read.condition
        device = read.condition["pooled_projections"].device
        return {**read.condition, "guidance": torch.tensor(job.guidance, device=device)}

    def predict(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """One forward: latents [rows, channels, height, width], times [rows], conditions [rows,
        ...].
        """
        dtype = self._dtype
        given = {name: each.to(dtype) for name, each in condition.items() if name != "guidance"}
        height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
        places = torch.zeros(height, width, 3, device=latents.device)
        places[..., 1] += torch.arange(height, device=latents.device)[:, None]
        places[..., 2] += torch.arange(width, device=latents.device)
        found = self.denoiser(
            hidden_states=_packed(latents).to(dtype),
            timestep=times / 1000,
            guidance=condition.get("guidance"),
            txt_ids=places.new_zeros(given["encoder_hidden_states"].shape[1], 3),
            img_ids=places.flatten(0, 1),
            **given,
        ).sample
        return _unpacked(found, height, width).float()


def flux(folder: Path, dtype: torch.dtype, device: torch.device) -> FluxFamily:
    """Flux from its folder: dev, which was made for guidance, or schnell, for few steps."""
    transformer = parts.part(folder, "transformer", dtype, "FluxTransformer2DModel").to(device)
    guided = transformer.config.guidance_embeds
    reader = ClipAndT5(folder, dtype, device, 512 if guided else 256)
    autoencoder = latent(folder, dtype, device)
    factor = autoencoder.factor
    size = _SIDE * factor
    facts = Facts(
        "Flux", 28 if guided else 4, 3.5, size, 2 * factor, 8 * factor, 2 * size, True, False
    )
    solvers = Solvers(parts.said(folder / "scheduler", "scheduler_config.json"), folder.name)
    return FluxFamily(facts, transformer, reader, autoencoder, solvers)


def _packed(latents: Tensor) -> Tensor:
    """[rows, channels, 2 height, 2 width] as patches [rows, height * width, 4 channels]."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(rows, -1, 4 * channels)


def _unpacked(patches: Tensor, height: int, width: int) -> Tensor:
    """The other way."""
    rows, _, channels = patches.shape
    latents = patches.reshape(rows, height, width, channels // 4, 2, 2)
    return latents.permute(0, 3, 1, 4, 2, 5).reshape(rows, channels // 4, 2 * height, 2 * width)
