"""Pictures with low-rank adapters: each of a call has its own with its own weight, or none, and is
the picture that the same weights, merged into the model, draw alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from image_driver import Loaded, Stage
from lora_files import Changes, drawn, kohya, merged, peft, saved
from tiny_diffusers import write
from transformers import CLIPTextModel

from pipelines.drawn import heard, suggested
from pipelines.fetch import Unprepared
from pipelines.image import ImagePipeline
from queueing.work import Invalid, Request, Status

WEIGHTS = (None, ("ink", 1.0), ("clay", 0.5), ("ink", 0.5), None, ("clay", 1.0), ("ink", 0.0))
NEAR = 1e-4  # of the latents' scale

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # NumPy 2 on tensors, inside the solvers of diffusers 0.42.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@dataclass(frozen=True, slots=True)
class Shelf:
    """A tiny SDXL, a folder of adapters, and what these change by part of the model."""

    model: Path
    files: Mapping[str, Path]
    changes: Mapping[str, Mapping[str, Changes]]

    def load(self, model: Path | None = None, **fields: Any) -> Loaded:
        files = {} if model else self.files
        given = {"device": "cpu", "dtype": "float32", "threads": 1, "adapters": files, **fields}
        made = ImagePipeline(str(model or self.model), **given)
        return Loaded(made, made.load(lambda fraction, text: None))

    def merged(self, name: str, weight: float, folder: Path) -> Path:
        """The same model with an adapter in its weights."""
        shutil.copytree(self.model, folder)
        for part, changes in self.changes[name].items():
            kind: Any = UNet2DConditionModel if part == "unet" else CLIPTextModel
            own = kind.from_pretrained(self.model / part)
            merged(own, changes, weight).save_pretrained(folder / part)
        return folder


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    root = tmp_path_factory.mktemp("adapters")
    model = write(root / "sdxl", "sdxl")
    unet = UNet2DConditionModel.from_pretrained(model / "unet")
    text = CLIPTextModel.from_pretrained(model / "text_encoder")
    changes = {
        "ink": {"unet": drawn(unet, 1)},
        "clay": {"unet": drawn(unet, 2, "to_q", "to_v"), "text_encoder": drawn(text, 3, "q_proj")},
    }
    both = changes["clay"]
    parts = peft(both["unet"]), peft(both["text_encoder"], "text_encoder.")
    files = {
        "ink": saved(root / "ink.safetensors", kohya(changes["ink"]["unet"])),
        "clay": saved(root / "clay.safetensors", *parts),
    }
    return Shelf(model, files, changes)


@pytest.fixture(scope="module")
def loaded(shelf: Shelf) -> Loaded:
    return shelf.load()


def request(loaded: Loaded, id: str, **fields: Any) -> Request:
    facts, solvers = heard(loaded.card.details), json.loads(loaded.card.details["solvers"])
    given = {"solver": solvers[0], "height": 32, "width": 32, "steps": 4, **fields}
    return suggested(facts, "a red cat", **given).request(id=id, session=id)


def mixture(loaded: Loaded) -> list[Request]:
    """All of one prompt and seed, so that only adapters, steps and guidance tell them apart."""
    return [
        request(
            loaded, f"{n}", adapter=adapter, steps=3 + n % 3, guidance=(1.0, 4.0)[n % 2], seed=5
        )
        for n, adapter in enumerate(WEIGHTS)
    ]


def alone(loaded: Loaded, given: Request) -> np.ndarray:
    stage = Stage(loaded).run({0: [given]})
    assert stage.statuses() == {given.id: Status.FINISHED}
    return stage.latents[given.id]


def together(loaded: Loaded, given: list[Request]) -> dict[str, np.ndarray]:
    """They join at different ticks."""
    stage = Stage(loaded).run({tick: given[tick::3] for tick in range(3)})
    assert set(stage.statuses().values()) == {Status.FINISHED}
    assert len(stage.results) == len(given)
    return stage.latents


def near(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= NEAR * np.abs(other).max())


def test_each_picture_of_a_mixed_call_is_what_it_is_alone(loaded: Loaded) -> None:
    given = mixture(loaded)
    found = together(loaded, given)
    for each in given:
        assert near(found[each.id], alone(loaded, each))


@pytest.mark.parametrize(("name", "weight"), [("ink", 1.0), ("clay", 0.5)])
def test_an_adapter_draws_what_the_merged_model_draws(
    shelf: Shelf, loaded: Loaded, tmp_path: Path, name: str, weight: float
) -> None:
    given = request(loaded, "with", adapter=(name, weight), seed=5)
    found = together(loaded, [*mixture(loaded), given])["with"]
    other = shelf.load(shelf.merged(name, weight, tmp_path / "merged"))
    bare = request(other, "bare", seed=5)
    truth = alone(other, bare)
    assert np.abs(found - truth).max() <= 1e-3 * np.abs(truth).max()
    assert not near(alone(loaded, bare), truth)


def test_in_exact_mode_adapters_of_others_change_no_bit(shelf: Shelf) -> None:
    exact = shelf.load(exact=True)
    given = mixture(exact)
    found = together(exact, given)
    for each in given:
        assert np.array_equal(found[each.id], alone(exact, each))


def test_a_text_read_with_an_adapter_is_kept_apart(loaded: Loaded) -> None:
    first = request(loaded, "first", adapter=("clay", 1.0), seed=9)
    fresh = alone(loaded, first)
    assert not near(alone(loaded, request(loaded, "bare", seed=9)), fresh)
    assert near(alone(loaded, first), fresh)


def test_a_card_names_adapters_and_counts_their_memory(shelf: Shelf, loaded: Loaded) -> None:
    assert json.loads(loaded.card.details["adapters"]) == ["ink", "clay"]
    assert loaded.card.held > shelf.load(adapters={}).card.held


def test_adapters_come_from_the_folder_that_a_setting_names(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARPOOL_LORA", str(shelf.files["ink"].parent))
    assert json.loads(shelf.load(adapters=None).card.details["adapters"]) == ["clay", "ink"]


@pytest.mark.parametrize("adapter", [("other", 1.0), ("ink", float("nan")), ("ink", 1e9)])
def test_what_is_no_adapter_or_no_weight_is_refused(loaded: Loaded, adapter: Any) -> None:
    with pytest.raises(Invalid, match="adapter"):
        loaded.open(request(loaded, "bad", adapter=adapter))


def test_a_file_that_fits_nothing_is_named_at_the_start(shelf: Shelf, tmp_path: Path) -> None:
    path = saved(tmp_path / "odd.safetensors", {"unet.odd.lora_A.weight": torch.zeros(2, 2)})
    with pytest.raises(Unprepared, match=r"odd\.safetensors"):
        shelf.load(adapters={"odd": path})


def test_a_model_with_adapters_is_let_go(shelf: Shelf) -> None:
    pipeline = shelf.load().pipeline
    unet = pipeline._known().denoiser
    pipeline.unload()
    assert not any(module._forward_hooks for module in unet.modules())
