"""A checkpoint's average as weights: `python -m assets.emoji.export --to FOLDER`.

Writes `vae`, `unet` and `latents.json` in half precision, as the application reads them. It takes
the finished training, if there is one, unless it is told which file.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from assets.emoji import weights
from assets.emoji.loop import averaged
from assets.emoji.train import FINAL, FOLDER, RUNNING

log = logging.getLogger("emoji.export")


def main() -> None:
    """Export as the command line says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    words = argparse.ArgumentParser(prog="python -m assets.emoji.export")
    words.add_argument("--folder", type=Path, default=FOLDER, help="where it was trained")
    words.add_argument("--checkpoint", help=f"a file there; else {FINAL}, else {RUNNING}")
    words.add_argument("--to", type=Path, default=Path(__file__).parent / "model")
    asked = words.parse_args()
    name = asked.checkpoint or (FINAL if (asked.folder / FINAL).exists() else RUNNING)
    unet = weights.new_unet()
    step = averaged(unet, asked.folder / name)
    asked.to.mkdir(parents=True, exist_ok=True)
    scale = weights.Scale.read(asked.folder)
    weights.write(asked.to, weights.read_autoencoder(asked.folder), unet, scale)
    log.info("%s of step %d is in %s", name, step, asked.to)


if __name__ == "__main__":
    main()
