"""Training from nothing, or from the weights in a folder: `python -m assets.emoji.train`.

Pictures and captions become latents and states once, and lie ready in the folder; then the UNet
learns by flow matching until it is ended. Started again, it goes on where it was. `--decay STEPS`
takes what has been reached, learns ever more slowly for so many steps, and stops.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from assets.emoji import autoencoder, data, weights
from assets.emoji.condition import Condition, Encoder
from assets.emoji.draw import velocity
from assets.emoji.loop import Loop, Plan
from pipelines import cache

log = logging.getLogger("emoji.train")

FOLDER = Path("~/.cache/carpool-emoji").expanduser()
RUNNING, FINAL = "unet.pt", "final.pt"
_BATCH = 32
_RATE = 6e-4
_LABEL = 0.6  # how often a picture's caption is its label
_UNTOLD = 0.1  # how often there is no caption, for guidance
_SHIFT = 2.0  # how much oftener noise is learned from than nearly finished pictures
_EVERY = 240.0  # seconds between checkpoints


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the network learns from, ready in memory."""

    latents: Tensor  # [pictures, channels, side, side], scaled
    condition: Condition  # every picture's captions one after the other, then the empty one

    @property
    def each(self) -> int:
        """Captions of a picture."""
        return (len(self.condition.mask) - 1) // len(self.latents)


def loss(network: Any, prepared: Prepared, chance: torch.Generator, batch: int = _BATCH) -> Tensor:
    """Flow matching: between picture and noise, the network says where noise lies."""
    each = prepared.each
    which = torch.randint(len(prepared.latents), (batch,), generator=chance)
    caption = torch.randint(each, (batch,), generator=chance)
    luck = torch.rand(2, batch, generator=chance)
    caption = torch.where(luck[0] < _LABEL, 0, caption) + each * which
    caption = torch.where(luck[1] < _UNTOLD, len(prepared.condition.mask) - 1, caption)
    clean = prepared.latents[which]
    even = torch.rand(batch, generator=chance)
    times = _SHIFT * even / (1 + (_SHIFT - 1) * even)
    noise = torch.randn(clean.shape, generator=chance)
    mixed = torch.lerp(clean, noise, times[:, None, None, None])
    with torch.autocast("cpu", torch.bfloat16):
        found = velocity(network, mixed, times, prepared.condition.rows(caption))
    return (found.float() - (noise - clean)).square().mean()


def prepare(folder: Path, start: Path | None) -> Prepared:
    """An autoencoder, its latents and the captions' states, made if they are not in the folder."""
    file = folder / "prepared.safetensors"
    if not file.exists():
        pictures = data.pictures(folder / "data")
        log.info("%d pictures", len(pictures))
        pixels = torch.stack([picture.pixels for picture in pictures])
        network, scale = _autoencoder(folder, start, pixels)
        lists = data.captions(pictures)
        texts = [caption for captions in lists for caption in captions]
        condition = Encoder().encode([*texts, ""])
        parts = {
            "latents": scale.apply(encoded(network, pixels)),
            "states": condition.states,
            "mask": condition.mask,
        }
        save_file(parts, file.with_suffix(".part"))
        file.with_suffix(".part").rename(file)
    parts = load_file(file)
    return Prepared(parts["latents"], Condition(parts["states"], parts["mask"]))


def _autoencoder(folder: Path, start: Path | None, pixels: Tensor) -> tuple[Any, weights.Scale]:
    """The one in the folder, else that of the start, else a new one."""
    if (folder / "latents.json").exists():  # written last
        return weights.read_autoencoder(folder), weights.Scale.read(folder)
    if start:
        shutil.copytree(start / "vae", folder / "vae", dirs_exist_ok=True)
        scale = weights.Scale.read(start)
        scale.write(folder)
        return weights.read_autoencoder(folder), scale
    network = autoencoder.train(pixels, folder / "autoencoder.pt")
    scale = weights.Scale.of(encoded(network, pixels))
    network.save_pretrained(folder / "vae")
    scale.write(folder)
    return network, scale


@torch.inference_mode()
def encoded(network: Any, pixels: Tensor) -> Tensor:
    """Latents of pictures as the encoder gives them."""
    return torch.cat([network.encode(some).latents for some in torch.split(pixels, 64)])


def begin(prepared: Prepared, file: Path, plan: Plan, start: Path | None) -> Loop:
    """The training, where it was; else at the start's weights; else at new ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = weights.read_unet(start) if start else weights.new_unet()
    loop = Loop(network, plan, file, lambda found, chance: loss(found, prepared, chance))
    if loop.load():
        log.info("going on at step %d", loop.step)
    return loop


def finish(prepared: Prepared, folder: Path, steps: int) -> Loop:
    """What has been reached, on its way down: to the same end however often it is interrupted."""
    if not (folder / FINAL).exists():
        shutil.copyfile(folder / RUNNING, folder / "copy.part")
        (folder / "copy.part").rename(folder / FINAL)
    state = torch.load(folder / FINAL, weights_only=True, mmap=True)
    down = state.get("down") or steps
    end = state["end"] if state.get("down") else state["step"] + steps
    plan = Plan(_RATE, down=down, end=end, average=0.998)
    return begin(prepared, folder / FINAL, plan, None)


def main() -> None:
    """Train as the command line says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    words = argparse.ArgumentParser(prog="python -m assets.emoji.train")
    words.add_argument("--folder", type=Path, default=FOLDER, help="checkpoints and data")
    words.add_argument("--start", type=Path, help="a folder with vae, unet and latents.json")
    words.add_argument("--steps", type=int, help="end there, else when it is ended")
    words.add_argument("--decay", type=int, help="finish in so many steps, in a file of its own")
    words.add_argument("--threads", type=int, default=1)
    asked = words.parse_args()
    torch.set_num_threads(asked.threads)
    asked.folder.mkdir(parents=True, exist_ok=True)
    file = asked.folder / (FINAL if asked.decay else RUNNING)
    with cache.lock(file, lambda _fraction, text: log.info(text)):
        prepared = prepare(asked.folder, asked.start)
        if asked.decay:
            loop = finish(prepared, asked.folder, asked.decay)
        else:
            loop = begin(prepared, file, Plan(_RATE, end=asked.steps), asked.start)
        loop.run(_EVERY)


if __name__ == "__main__":
    main()
