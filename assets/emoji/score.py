"""How often a label's drawing is nearest its own picture: `python -m assets.emoji.score`.

Every label of the training set is drawn once, with its own fixed seed, and compared in the latents
of the autoencoder with all pictures that were learned from.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from assets.emoji import data, weights
from assets.emoji.condition import Encoder
from assets.emoji.draw import GUIDANCE, STEPS, draw, noise
from assets.emoji.train import FOLDER, encoded

log = logging.getLogger("emoji.score")

HERE = Path(__file__).parent / "model"
_TOGETHER = 64
_NEAR = 5


@dataclass(frozen=True, slots=True)
class Score:
    """Percent of labels, and how they were drawn."""

    labels: int
    nearest: float
    among_5_nearest: float
    steps: int
    guidance: float
    seconds: float


def places(drawn: Tensor, own: Tensor, pictures: Tensor) -> Tensor:
    """How many pictures are nearer to each drawing than its own is: [drawn]."""
    distances = torch.cdist(drawn.flatten(1), pictures.flatten(1))
    return (distances < distances.gather(1, own[:, None])).sum(1)


def score(
    folder: Path, downloads: Path, guidance: float, steps: int, labels: int | None
) -> tuple[Score, list[str]]:
    """The score of the weights in a folder, and the labels whose drawings went astray."""
    began = time.monotonic()
    pictures = data.pictures(downloads)
    network, unet = weights.read_autoencoder(folder), weights.read_unet(folder).eval()
    pixels = torch.stack([picture.pixels for picture in pictures])
    latents = weights.Scale.read(folder).apply(encoded(network, pixels))
    encoder = Encoder()
    empty = encoder.encode([""])
    chosen = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(1))[:labels]
    chosen = chosen.sort().values
    found = []
    for some in torch.split(chosen, _TOGETHER):
        condition = encoder.encode([pictures[place].label for place in some.tolist()])
        drawn = draw(unet, noise(some.tolist()), condition, empty, guidance, steps)
        found.append(places(drawn, some, latents))
        log.info("%d of %d drawn", sum(map(len, found)), len(chosen))
    ranks = torch.cat(found)
    nearest, among = ((ranks < near).float().mean().item() * 100 for near in (1, _NEAR))
    lost = chosen[ranks >= _NEAR].tolist()
    seconds = time.monotonic() - began
    made = Score(len(ranks), round(nearest, 1), round(among, 1), steps, guidance, round(seconds))
    return made, [pictures[place].label for place in lost]


def main() -> None:
    """Score as the command line says; the log ends with the score as JSON."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    words = argparse.ArgumentParser(prog="python -m assets.emoji.score")
    words.add_argument("--weights", type=Path, default=HERE, help="vae, unet and latents.json")
    words.add_argument("--folder", type=Path, default=FOLDER, help="where data lies, or will")
    words.add_argument("--guidance", type=float, default=GUIDANCE)
    words.add_argument("--steps", type=int, default=STEPS)
    words.add_argument("--labels", type=int, help="only so many, chosen by chance")
    words.add_argument("--threads", type=int, default=1)
    asked = words.parse_args()
    torch.set_num_threads(asked.threads)
    found, lost = score(
        asked.weights, asked.folder / "data", asked.guidance, asked.steps, asked.labels
    )
    log.info("astray: %s", "; ".join(lost))
    log.info(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
