"""The two networks and the scale of latents: made new, read from a folder, written to one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

# diffusers' constructors have no types of Python's.
AutoencoderTiny: Any = diffusers.AutoencoderTiny
UNet2DConditionModel: Any = diffusers.UNet2DConditionModel

CHANNELS = 8  # of a latent
SIDE = 16  # of a latent
_WIDTH = 384  # of a caption's states
INDEX = {  # for whom it draws
    "_class_name": "CarpoolEmojiPipeline",
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderTiny"],
}


@dataclass(frozen=True, slots=True)
class Scale:
    """Latents as the UNet takes them: what the encoder gives, less a mean, over one number."""

    mean: Tensor  # [channels]
    std: float

    @classmethod
    def of(cls, latents: Tensor) -> Scale:
        mean = latents.mean((0, 2, 3))
        return cls(mean, float((latents - mean[:, None, None]).std()))

    @classmethod
    def read(cls, folder: Path) -> Scale:
        found = json.loads((folder / "latents.json").read_text())
        return cls(torch.tensor(found["latent_mean"]), found["latent_std"])

    def write(self, folder: Path) -> None:
        numbers = {"latent_mean": self.mean.tolist(), "latent_std": self.std}
        (folder / "latents.json").write_text(json.dumps(numbers, indent=1) + "\n")

    def apply(self, latents: Tensor) -> Tensor:
        return (latents - self.mean[:, None, None]) / self.std

    def undo(self, scaled: Tensor) -> Tensor:
        return scaled * self.std + self.mean[:, None, None]


def new_autoencoder() -> Any:
    """64 by 64 pixels to 16 by 16 by 8 and back, 0.7 million parameters."""
    return AutoencoderTiny(
        encoder_block_out_channels=(48, 48, 48),
        decoder_block_out_channels=(48, 48, 48),
        num_encoder_blocks=(1, 2, 2),
        num_decoder_blocks=(2, 2, 1),
        latent_channels=CHANNELS,
    )


def new_unet() -> Any:
    """The network that is taught to tell noise from picture, 14.1 million parameters.

    A caption reaches it twice: its tokens by cross-attention, where a latent has 8 by 8 places and
    fewer, and its mean with the time, in every block.
    """
    unet: Any = UNet2DConditionModel(
        sample_size=SIDE,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        block_out_channels=(96, 160, 192),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        attention_head_dim=32,
        norm_num_groups=16,
        cross_attention_dim=_WIDTH,
        class_embed_type="projection",
        projection_class_embeddings_input_dim=_WIDTH,
    )
    nn.init.zeros_(unet.class_embedding.linear_2.weight)
    nn.init.zeros_(unet.class_embedding.linear_2.bias)
    return plain(unet)


def plain(unet: Any) -> Any:
    """The network with attention in plain steps: on hosts, torch's fused one takes twice as long
    for rows as short as these.
    """
    unet.set_attn_processor(AttnProcessor())
    return unet


def read_autoencoder(folder: Path) -> Any:
    return AutoencoderTiny.from_pretrained(folder / "vae", torch_dtype=torch.float32)


def read_unet(folder: Path) -> Any:
    """The network in a folder; one without a place for the mean gets it, without any effect yet."""
    found: Any = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32)
    if found.class_embedding is not None:
        return plain(found)
    unet = new_unet()
    unet.load_state_dict(found.state_dict(), strict=False)
    return unet


def write(folder: Path, autoencoder: Any, unet: Any, scale: Scale) -> None:
    """All three with their index, in half precision, as the application reads them."""
    autoencoder.half().save_pretrained(folder / "vae")
    config = json.loads((folder / "vae/config.json").read_text())
    config.pop("block_out_channels")  # which it writes, and warns of when it is read
    (folder / "vae/config.json").write_text(json.dumps(config, indent=2) + "\n")
    unet.half().save_pretrained(folder / "unet")
    (folder / "model_index.json").write_text(json.dumps(INDEX, indent=2) + "\n")
    scale.write(folder)
