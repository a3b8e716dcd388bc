"""Tiny random diffusion models, saved as diffusers saves them, one folder each.

Their weights are large enough that every input moves the output. They know letters, no words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from tiny_image import lively
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    CLIPConfig,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

LENGTH = 77
LETTERS = [chr(code) for code in range(33, 127)]
NOISES = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def write(folder: Path, kind: str, **fields: Any) -> Path:
    """A model of a family, in `folder`."""
    torch.manual_seed(len(kind))
    return {"sd": _sd, "sdxl": _sdxl, "flux": _flux, "emoji": _emoji}[kind](folder, **fields)


def write_words(folder: Path) -> Path:
    """The encoder that the emoji model reads with."""
    torch.manual_seed(5)
    vocab = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])}
    letters = [letter.lower() for letter in LETTERS]
    for word in [*letters, *(f"##{letter}" for letter in letters)]:
        vocab.setdefault(word, len(vocab))
    config = BertConfig(
        vocab_size=len(vocab), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=37, max_position_embeddings=64,
    )  # fmt: skip
    lively(BertModel(config)).save_pretrained(folder)
    BertTokenizer(vocab=vocab).save_pretrained(folder)
    return folder


def add_checker(folder: Path, hides: bool) -> None:
    """A judge of pictures that hides all, or none."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = CLIPConfig(
        projection_dim=16,
        text_config={**small, "num_attention_heads": 2},
        vision_config={**small, "num_attention_heads": 2, "image_size": 32, "patch_size": 8},
    )
    checker = StableDiffusionSafetyChecker(config)
    checker.concept_embeds_weights.data.fill_(-2.0 if hides else 2.0)
    checker.save_pretrained(folder / "safety_checker")
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))


def _sd(folder: Path) -> Path:
    StableDiffusionPipeline(
        vae=_vae(),
        text_encoder=lively(CLIPTextModel(_clip())),
        tokenizer=_tokenizer(),
        unet=_unet(cross_attention_dim=32),
        scheduler=EulerDiscreteScheduler(steps_offset=1, **NOISES),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def _sdxl(folder: Path) -> Path:
    StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=lively(CLIPTextModel(_clip())),
        text_encoder_2=lively(CLIPTextModelWithProjection(_clip())),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        unet=_unet(
            cross_attention_dim=64,
            transformer_layers_per_block=(1, 2),
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=80,
        ),
        scheduler=EulerDiscreteScheduler(steps_offset=1, timestep_spacing="leading", **NOISES),
        add_watermarker=False,
    ).save_pretrained(folder)
    return folder


def _flux(folder: Path) -> Path:
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    words += [(letter, -3.0) for letter in LETTERS]
    t5 = T5Config(
        vocab_size=len(words), d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_vae(shift_factor=0.1, scaling_factor=0.36),
        text_encoder=lively(CLIPTextModel(_clip())),
        tokenizer=_tokenizer(),
        text_encoder_2=lively(T5EncoderModel(t5)),
        tokenizer_2=T5Tokenizer(vocab=words, extra_ids=0),
        transformer=lively(transformer),
    ).save_pretrained(folder)
    return folder


def _emoji(folder: Path, **fields: Any) -> Path:
    shape = {"cross_attention_dim": 32, "in_channels": 8, "out_channels": 8, "sample_size": 8}
    if fields:
        shape["projection_class_embeddings_input_dim"] = 32
    _unet(**shape, **fields).save_pretrained(folder / "unet")
    vae = AutoencoderTiny(
        encoder_block_out_channels=(8,) * 3,
        decoder_block_out_channels=(8,) * 3,
        num_encoder_blocks=(1,) * 3,
        num_decoder_blocks=(1,) * 3,
        latent_channels=8,
    )
    vae.save_pretrained(folder / "vae")
    numbers = {"latent_mean": [0.1 * n for n in range(8)], "latent_std": 0.3}
    (folder / "latents.json").write_text(json.dumps(numbers))
    index = {
        "_class_name": "CarpoolEmojiPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderTiny"],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _tokenizer() -> CLIPTokenizer:
    ends = ["<|startoftext|>", "<|endoftext|>"]
    words = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *ends]
    vocab = {word: n for n, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=LENGTH)


def _clip() -> CLIPTextConfig:
    size = 2 * len(LETTERS) + 2
    return CLIPTextConfig(
        vocab_size=size, hidden_size=32, intermediate_size=37, num_attention_heads=4,
        num_hidden_layers=3, projection_dim=32, max_position_embeddings=LENGTH,
        bos_token_id=size - 2, eos_token_id=size - 1, pad_token_id=size - 1,
    )  # fmt: skip


def _unet(**fields: Any) -> UNet2DConditionModel:
    settings: dict[str, Any] = {
        "sample_size": 16,
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
    }
    unet = lively(UNet2DConditionModel(**(settings | fields)))
    return unet  # type: ignore[return-value]


def _vae(**fields: Any) -> AutoencoderKL:
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=32,
        **fields,
    )  # fmt: skip
    return lively(vae)  # type: ignore[return-value]
