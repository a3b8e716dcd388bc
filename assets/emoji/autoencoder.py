"""The autoencoder's training: pictures to latents and back, until little is lost.

It is judged by how far pixels and their differences to the neighbours are off. A little noise on
the latents makes the decoder forgive what a sampler leaves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from assets.emoji.loop import Loop, Plan
from assets.emoji.weights import new_autoencoder

STEPS = 1500
_BATCH = 16
_EDGES = 0.5  # the weight of differences between neighbours
_NOISE = 0.05
_RATE = 1e-3
_EVERY = 120.0  # seconds between checkpoints


def train(pixels: Tensor, file: Path, steps: int = STEPS, until: int | None = None) -> Any:
    """An autoencoder trained for so many steps, or until a step on the way there; what the file
    keeps goes on where it was.
    """

    def draw(network: Any, chance: torch.Generator) -> Tensor:
        batch = pixels[torch.randint(len(pixels), (_BATCH,), generator=chance)]
        turned = torch.rand(_BATCH, 1, 1, 1, generator=chance) < 0.5
        batch = torch.where(turned, batch.flip(3), batch)
        with torch.autocast("cpu", torch.bfloat16):
            latents = network.encode(batch).latents
            noise = torch.randn(latents.shape, generator=chance)
            drawn = network.decode(latents + _NOISE * noise).sample.float()
        return loss(drawn, batch)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = new_autoencoder()
    plan = Plan(_RATE, warm=50, down=steps, end=steps, average=0.99)
    loop = Loop(network, plan, file, draw)
    loop.load()
    loop.run(_EVERY, until)
    with torch.no_grad():
        for part, value in zip(network.parameters(), loop.average, strict=True):
            part.copy_(value)
    return network.eval()


def loss(drawn: Tensor, wanted: Tensor) -> Tensor:
    """How far off pixels are, and edges."""
    across = l1_loss(drawn.diff(dim=3), wanted.diff(dim=3))
    down = l1_loss(drawn.diff(dim=2), wanted.diff(dim=2))
    return l1_loss(drawn, wanted) + _EDGES * (across + down)
