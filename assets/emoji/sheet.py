"""A sheet of drawings, each with its caption below: `python -m assets.emoji.sheet`.

The captions are combinations that are no label of the training set, with one seed, none chosen.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from assets.emoji import weights
from assets.emoji.condition import Encoder
from assets.emoji.draw import GUIDANCE, draw, noise
from assets.emoji.score import HERE

log = logging.getLogger("emoji.sheet")

UNSEEN = (
    "blue heart with a hat",
    "angry apple",
    "green dog",
    "a red house",
    "purple banana",
    "cat astronaut",
    "golden rocket",
    "a crying moon",
    "yellow car",
    "fish with sunglasses",
    "pink tree",
    "robot king",
    "a happy pizza",
    "black star",
    "blue strawberry",
    "ghost with a crown",
    "snowy pineapple",
    "sleepy owl",
    "red umbrella in the sun",
    "a bear playing guitar",
    "orange butterfly",
    "white rose",
    "a green hat",
    "burning book",
    "smiling cloud",
)
_ACROSS = 5
_SIDE, _MARGIN, _TEXT = 128, 12, 22
_SEED = 7


def pixels(network: object, latents: Tensor, scale: weights.Scale) -> list[Image.Image]:
    """Latents as pictures."""
    with torch.inference_mode():
        decoded = network.decode(scale.undo(latents)).sample  # type: ignore[attr-defined]
    numbers = ((decoded + 1) * 127.5).clamp(0, 255).round().byte().permute(0, 2, 3, 1)
    return [Image.fromarray(one.numpy()) for one in numbers]


def drawings(folder: Path, captions: Sequence[str], guidance: float) -> list[Image.Image]:
    """A picture for each caption, by the weights in a folder."""
    encoder = Encoder()
    latents = draw(
        weights.read_unet(folder).eval(),
        noise([_SEED] * len(captions)),
        encoder.encode(captions),
        encoder.encode([""]),
        guidance,
    )
    return pixels(weights.read_autoencoder(folder), latents, weights.Scale.read(folder))


def sheet(pictures: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    """All pictures on one, each above its caption."""
    wide, high = _SIDE + 2 * _MARGIN, _SIDE + _MARGIN + _TEXT
    rows = -(-len(pictures) // _ACROSS)
    whole = Image.new("RGB", (wide * _ACROSS, high * rows), "white")
    pen, font = ImageDraw.Draw(whole), ImageFont.load_default(12)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = place % _ACROSS * wide, place // _ACROSS * high
        large = picture.resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
        whole.paste(large, (left + _MARGIN, top + _MARGIN))
        middle = (left + wide / 2, top + high - _TEXT / 2)
        pen.text(middle, caption, fill="black", font=font, anchor="mm")
    return whole


def main() -> None:
    """Draw as the command line says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    words = argparse.ArgumentParser(prog="python -m assets.emoji.sheet")
    words.add_argument("--weights", type=Path, default=HERE, help="vae, unet and latents.json")
    words.add_argument("--guidance", type=float, default=GUIDANCE)
    words.add_argument("--to", type=Path, default=HERE.parent / "unseen.jpg")
    words.add_argument("captions", nargs="*", default=UNSEEN)
    asked = words.parse_args()
    torch.set_num_threads(1)
    captions = list(asked.captions)
    sheet(drawings(asked.weights, captions, asked.guidance), captions).save(asked.to, quality=88)
    log.info("%d drawings in %s", len(captions), asked.to)


if __name__ == "__main__":
    main()
