"""Pictures from captions: noise becomes a latent in even steps, guided away from no caption."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from assets.emoji.condition import Condition
from assets.emoji.weights import CHANNELS, SIDE

STEPS = 25
GUIDANCE = 3.0


def velocity(unet: Any, latents: Tensor, times: Tensor, condition: Condition) -> Tensor:
    """Where noise lies from a picture, as the network sees it: [rows, channels, side, side]."""
    found: Tensor = unet(
        latents,
        1000 * times,
        encoder_hidden_states=condition.states.to(latents.dtype),
        encoder_attention_mask=condition.mask.to(latents.dtype),
        class_labels=condition.mean().to(latents.dtype),
    ).sample
    return found


def noise(seeds: Sequence[int]) -> Tensor:
    """A start for every seed, the same whoever is drawn beside it."""
    shape = (CHANNELS, SIDE, SIDE)
    return torch.stack(
        [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    )


@torch.inference_mode()
def draw(
    unet: Any,
    latents: Tensor,
    condition: Condition,
    empty: Condition,
    guidance: float = GUIDANCE,
    steps: int = STEPS,
) -> Tensor:
    """Latents of pictures, from noise, one for each row of the condition."""
    rows = len(latents)
    nothing = empty.rows(torch.zeros(rows, dtype=torch.long))
    both = Condition(
        torch.cat([condition.states, nothing.states]), torch.cat([condition.mask, nothing.mask])
    )
    for step in range(steps):
        times = torch.full((rows,), 1 - step / steps)
        with torch.autocast("cpu", torch.bfloat16):
            if guidance == 1.0:
                towards = velocity(unet, latents, times, condition).float()
            else:
                twice = velocity(unet, latents.repeat(2, 1, 1, 1), times.repeat(2), both).float()
                told, untold = twice.chunk(2)
                towards = untold + guidance * (told - untold)
        latents = latents - towards / steps
    return latents
