"""Who draws in the benchmark of pictures, and what is asked of them.

Static batches are diffusers' own pipeline, which takes those that wait and are alike to their end.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    EulerDiscreteScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from pipelines import IMAGES
from pipelines.drawn import Picture
from pipelines.image_front import ImageFront
from queueing.work import Status
from tests.benchmarks.oneshot_house import House
from tests.benchmarks.replay import percentiles

OURS = "Carpool"
SIDE = 32  # pixels
STEPS, GUIDANCES = (4, 8, 20), (2.0, 5.0, 7.5)
PROMPTS = ("red apple", "blue heart", "old bridge", "green leaf", "yellow duck", "night sky")
MOST = 8  # pictures of a static batch


@dataclass(frozen=True, slots=True)
class Asked:
    """One picture that somebody wants, `at` seconds after the beginning."""

    at: float
    prompt: str
    steps: int
    guidance: float
    seed: int


ALIKE: dict[str, Callable[[Asked], Any]] = {
    "diffusers, one by one": lambda each: each.seed,
    "static, same steps and guidance": lambda each: (each.steps, each.guidance),
    "static, same steps": lambda each: each.steps,
}


@dataclass(frozen=True, slots=True)
class Served:
    """What everybody got, and after how many seconds."""

    pictures: list[Picture]
    seconds: list[float]


@dataclass(frozen=True, slots=True)
class Point:
    """One way at one rate, round by round."""

    name: str
    rate: float
    means: Sequence[float]
    p95s: Sequence[float]

    @classmethod
    def of(cls, name: str, rate: float, rounds: Sequence[Sequence[float]]) -> Point:
        means = [statistics.mean(waits) for waits in rounds]
        return cls(name, rate, means, [percentiles(waits)[1] for waits in rounds])

    @property
    def mean(self) -> float:
        return statistics.median(self.means)

    @property
    def p95(self) -> float:
        return statistics.median(self.p95s)


def asked(count: int, rate: float, seed: int) -> list[Asked]:
    """Poisson arrivals."""
    dice, now, found = random.Random(seed), 0.0, []
    for place in range(count):
        now += dice.expovariate(rate)
        wish = dice.choice(PROMPTS), dice.choice(STEPS), dice.choice(GUIDANCES)
        found.append(Asked(now, *wish, 1000 * seed + place))
    return found


class Mixed(StableDiffusionXLPipeline):
    """Diffusers' own, which takes a guidance for each picture as well."""

    @property
    def do_classifier_free_guidance(self) -> bool:
        return True


class Static:
    """One batch after the other in this process: of those that wait, those like the first."""

    def __init__(self, folder: Path, alike: Callable[[Asked], Any]) -> None:
        self._alike = alike
        self._pipe = Mixed.from_pretrained(folder)
        self._pipe.set_progress_bar_config(disable=True)

    def replay(self, people: Sequence[Asked]) -> Served:
        began, left = time.perf_counter(), list(people)
        done: dict[int, tuple[Picture, float]] = {}
        while left:
            time.sleep(max(began + left[0].at - time.perf_counter(), 0.0))
            now = time.perf_counter() - began
            kind = self._alike(left[0])
            batch = [each for each in left if each.at <= now and self._alike(each) == kind][:MOST]
            pictures = self._draw(batch or left[:1])
            ended = time.perf_counter() - began
            for each, picture in zip(batch or left[:1], pictures, strict=True):
                done[each.seed] = picture, ended - each.at
                left.remove(each)
        return Served(*map(list, zip(*(done[each.seed] for each in people), strict=True)))

    @torch.inference_mode()
    def _draw(self, batch: Sequence[Asked]) -> Sequence[Picture]:
        guidance: Any = torch.tensor([each.guidance for each in batch]).reshape(-1, 1, 1, 1)
        found = self._pipe(
            prompt=[each.prompt for each in batch],
            num_inference_steps=batch[0].steps,
            guidance_scale=guidance,
            generator=[torch.Generator().manual_seed(each.seed) for each in batch],
            height=SIDE,
            width=SIDE,
            output_type="np",
        )
        return (found.images * 255).round().astype(np.uint8)


class Carpool:
    """Ours, as the application runs it: a dispatcher, and a worker process."""

    def __init__(self, folder: Path, threads: int) -> None:
        setting = {"model": str(folder), "device": "cpu", "dtype": "float32", "threads": threads}
        self._house = House(setting, model=IMAGES, front=ImageFront())
        self.start, self.close = self._house.start, self._house.close

    async def replay(self, people: Sequence[Asked]) -> Served:
        requests = [
            self._house.request(
                prompt=each.prompt,
                steps=each.steps,
                guidance=each.guidance,
                seed=each.seed,
                width=SIDE,
                height=SIDE,
            )
            for each in people
        ]
        found = await self._house.replay(requests, [each.at for each in people], 600.0)
        if any(each.status is not Status.FINISHED for each in found):
            raise RuntimeError("somebody got no picture")
        return Served([each.result.images[0] for each in found], [each.seconds for each in found])


def write(folder: Path) -> Path:
    """A tiny SDXL with random weights, as large as the one that diffusers tests with."""
    torch.manual_seed(0)
    letters = [chr(code) for code in range(33, 127)]
    ends = ["<|startoftext|>", "<|endoftext|>"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), *ends]
    vocab = {word: number for number, word in enumerate(words)}
    config = CLIPTextConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=37, num_attention_heads=4,
        num_hidden_layers=5, projection_dim=32, max_position_embeddings=77,
        bos_token_id=len(words) - 2, eos_token_id=len(words) - 1, pad_token_id=len(words) - 1,
    )  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=2, attention_head_dim=(2, 4),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), use_linear_projection=True,
        transformer_layers_per_block=(1, 2), cross_attention_dim=64, addition_time_embed_dim=8,
        addition_embed_type="text_time", projection_class_embeddings_input_dim=80,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(32, 32, 64), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, latent_channels=4, sample_size=SIDE,
    )  # fmt: skip
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", steps_offset=1,
        timestep_spacing="leading",
    )  # fmt: skip
    tokenizers = [CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77) for _ in range(2)]
    StableDiffusionXLPipeline(
        vae=vae, text_encoder=CLIPTextModel(config), unet=unet, scheduler=scheduler,
        text_encoder_2=CLIPTextModelWithProjection(config), tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1], add_watermarker=False,
    ).save_pretrained(folder)  # fmt: skip
    return folder
