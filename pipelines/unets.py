"""Denoisers with a UNet: Stable Diffusion 1, SDXL and the emoji model, which differ in what reads
their prompts.

Every row has its own time and conditions. It does not know solvers or who
asks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines import parts
from pipelines.autoencoder import Autoencoder
from pipelines.drawn import Facts, ImageJob
from pipelines.fetch import Unprepared
from pipelines.readers import Condition, OneClip, Read, Reader, Sentences, TwoClips
from pipelines.solvers import Solvers

_ADDED = ("text_embeds", "time_ids")


class UNetFamily:
    """A UNet with its reader and its autoencoder."""

    def __init__(
        self,
        facts: Facts,
        unet: Any,
        reader: Reader,
        autoencoder: Autoencoder,
        solvers: Solvers,
    ) -> None:
        self.facts = facts
        self.denoiser = unet
        self._dtype: torch.dtype = unet.dtype  # which it would look for among its weights
        self.reader = reader
        self.autoencoder = autoencoder
        self.solvers = solvers

    def length(self, height: int, width: int) -> int:
        """Of a picture in tokens, for solvers that look at it; here they do not."""
        return 0

    def condition(self, job: ImageJob, read: Read) -> Condition:
        """A text of a job, and what else the denoiser is told of the picture."""
        if "text_embeds" not in read.condition:
            return read.condition
        size = job.height, job.width
        numbers = [*(job.original or size), *job.crop, *size]
        device = read.condition["text_embeds"].device
        return {**read.condition, "time_ids": torch.tensor(numbers, device=device).float()}

    def predict(self, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
        """One forward: latents [rows, channels, height, width], times [rows], conditions [rows,
        ...].
        """
        dtype = self._dtype
        given = {name: each.to(dtype) for name, each in condition.items() if name not in _ADDED}
        added = {name: condition[name].to(dtype) for name in _ADDED if name in condition}
        found: Tensor = self.denoiser(
            latents.to(dtype), times, added_cond_kwargs=added or None, **given
        ).sample
        return found.float()


def stable_diffusion(folder: Path, dtype: torch.dtype, device: torch.device) -> UNetFamily:
    """Stable Diffusion 1 from its folder."""
    reader = OneClip(folder, dtype, device)
    return _family(folder, dtype, device, reader, "Stable Diffusion", 50, 7.5)


def sdxl(folder: Path, dtype: torch.dtype, device: torch.device) -> UNetFamily:
    """SDXL from its folder."""
    zeros = parts.said(folder, parts.INDEX).get("force_zeros_for_empty_prompt", True)
    reader = TwoClips(folder, dtype, device, bool(zeros))
    return _family(folder, dtype, device, reader, "SDXL", 50, 5.0)


def _family(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    reader: Reader,
    name: str,
    steps: int,
    guidance: float,
) -> UNetFamily:
    unet = _unet(folder, dtype, device)
    autoencoder = latent(folder, dtype, device)
    factor = autoencoder.factor
    size = unet.config.sample_size * factor
    facts = Facts(name, steps, guidance, size, factor, 8 * factor, 2 * size)
    solvers = Solvers(parts.said(folder / "scheduler", "scheduler_config.json"), folder.name)
    return UNetFamily(facts, unet, reader, autoencoder, solvers)


def emoji(folder: Path, dtype: torch.dtype, device: torch.device, words: Path) -> UNetFamily:
    """This project's own small model, whose prompts are read by the encoder in `words`."""
    unet = _unet(folder, dtype, device)
    mean = getattr(unet.config, "class_embed_type", None) is not None
    model = parts.part(folder, "vae", dtype, "AutoencoderTiny").to(device)
    numbers = parts.said(folder, "latents.json")
    try:
        shift, scale = torch.tensor(numbers["latent_mean"]), 1 / numbers["latent_std"]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise Unprepared(
            f"latents.json of {folder.name} must give latent_mean and latent_std "
            f"({type(error).__name__}); fetch it again."
        ) from None
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    autoencoder = Autoencoder(model, scale, shift, factor)
    size = unet.config.sample_size * factor
    facts = Facts("emoji", 12, 3.0, size, factor, size, size)
    solvers = Solvers({"_class_name": "FlowMatchEulerDiscreteScheduler"}, folder.name)
    return UNetFamily(facts, unet, Sentences(words, dtype, device, mean), autoencoder, solvers)


def _unet(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    unet = parts.part(folder, "unet", dtype, "UNet2DConditionModel").to(device)
    if unet.config.time_cond_proj_dim is not None:
        raise Unprepared(
            f"{folder.name} was distilled to take its guidance as an input, which is not known "
            "here. Choose the model that it was made from."
        )
    return unet


def latent(folder: Path, dtype: torch.dtype, device: torch.device) -> Autoencoder:
    """The autoencoder of a published model."""
    config = parts.said(folder / "vae", "config.json")
    half = dtype == torch.float16 and config.get("force_upcast", True)
    kinds = "AutoencoderKL", "AutoencoderTiny"
    model = parts.part(folder, "vae", torch.float32 if half else dtype, *kinds).to(device)
    if getattr(model.config, "latents_mean", None) is not None:
        raise Unprepared(
            f"The latents of {folder.name} have a mean for every channel, which is not known here "
            f"({json.dumps(config.get('latents_mean'))}). Choose another model."
        )
    shift = torch.tensor([getattr(model.config, "shift_factor", None) or 0.0])
    factor = 2 ** (len(model.config.block_out_channels) - 1)
    return Autoencoder(model, model.config.scaling_factor, shift, factor)
