"""Pictures: each equals its run alone whatever happens around it, and diffusers' own.

Tiny random models in float32 under a virtual clock, so that every call is the same in every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from image_driver import Loaded, Stage
from tiny_diffusers import write, write_words

from pipelines.drawn import Facts, Picture, heard, suggested
from pipelines.image import ImagePipeline
from pipelines.solvers import FLOW
from queueing.work import Request, Status

# NumPy 2 on tensors, inside the solvers of diffusers 0.42.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NEAR = 1e-4  # of the latents' scale
FAMILIES = ("sd", "sdxl", "emoji")
SOLVERS = {
    "sd": ("euler", "euler ancestral", "ddim", "dpm++ 2m", "unipc", "lcm"),
    "sdxl": ("euler", "euler ancestral", "ddim", "dpm++ 2m", "unipc", "lcm"),
    "emoji": (FLOW,) * 6,
}
ARRIVES = (0, 0, 2, 3, 5, 8)
CASES = [(family, place) for family in FAMILIES for place in range(len(ARRIVES))]


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Nothing is fetched, and one thread computes."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


class Models:
    """Tiny models on demand, each once."""

    def __init__(self, root: Any) -> None:
        self.root, self.words = root, write_words(root / "words")
        self._loaded: dict[tuple[str, bool], Loaded] = {}
        self._alone: dict[tuple[str, str], tuple[np.ndarray, Any]] = {}

    def folder(self, family: str) -> Any:
        path = self.root / family
        return path if path.exists() else write(path, family)

    def __call__(self, family: str, exact: bool = False) -> Loaded:
        if (family, exact) not in self._loaded:
            folder, words = str(self.folder(family)), str(self.words)
            made = pipeline(folder, words=words, exact=exact)
            self._loaded[family, exact] = Loaded(made, made.load(lambda fraction, text: None))
        return self._loaded[family, exact]

    def alone(self, family: str, request: Request) -> tuple[np.ndarray, Any]:
        """Latents and result of a request in an engine of its own, granted steps by the handful."""
        if (family, request.id) not in self._alone:
            stage = Stage(self(family), hasty=True).run({0: [request]})
            assert stage.statuses() == {request.id: Status.FINISHED}
            found = stage.loaded.latents[request.id], stage.results[request.id]
            self._alone[family, request.id] = found
        return self._alone[family, request.id]


@pytest.fixture(scope="module")
def models(offline: None, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def pipeline(folder: str, **fields: Any) -> ImagePipeline:
    return ImagePipeline(folder, device="cpu", dtype="float32", threads=1, **fields)


def facts(loaded: Loaded) -> Facts:
    return heard(loaded.card.details)


def photo(height: int, width: int) -> Picture:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 7 % 256, columns * 5 % 256, rows * columns % 256], -1).astype(np.uint8)


def request(loaded: Loaded, id: str, prompt: str = "a red cat", **fields: Any) -> Request:
    solver = json.loads(loaded.card.details["solvers"])[0]
    job = suggested(facts(loaded), prompt, **({"solver": solver} | fields))
    return job.request(id=id, session=id)


def mixture(loaded: Loaded, family: str) -> list[Request]:
    """One for each solver, all different; the second is smaller, the fifth over a photo."""
    side = facts(loaded).size
    other = facts(loaded).least
    kinds: list[dict[str, Any]] = [
        {"prompt": "a red cat", "steps": 5, "guidance": 5.0, "seed": 1},
        {"prompt": "two dogs", "steps": 4, "guidance": 1.0, "seed": 2, "height": other},
        {"prompt": "sun", "steps": 7, "guidance": 7.5, "seed": 3, "negative": "rain", "count": 2},
        {"prompt": "a tree", "steps": 3, "guidance": 2.0, "seed": 2**64 - 1, "negative": ""},
        {"prompt": "car", "steps": 6, "guidance": 3.0, "seed": 5, "image": photo(side, side)},
        {"prompt": "a red cat", "steps": 4, "guidance": 0.0, "seed": 6},
    ]
    jobs = [
        suggested(facts(loaded), solver=solver, **kind)
        for solver, kind in zip(SOLVERS[family], kinds, strict=True)
    ]
    return [job.request(id=f"{n}", session=f"{n}") for n, job in enumerate(jobs)]


def arrivals(requests: list[Request]) -> dict[int, list[Request]]:
    found: dict[int, list[Request]] = {}
    for tick, each in zip(ARRIVES, requests, strict=True):
        found.setdefault(tick, []).append(each)
    return found


def assert_near(one: np.ndarray, other: np.ndarray) -> None:
    assert one.shape == other.shape
    assert np.abs(one - other).max() <= NEAR * np.abs(other).max()


def assert_as_alone(models: Models, family: str, stage: Stage, each: Request) -> None:
    latents, result = models.alone(family, each)
    assert stage.ends[each.id].status is Status.FINISHED
    assert_near(stage.loaded.latents[each.id], latents)
    for one, other in zip(stage.results[each.id].images, result.images, strict=True):
        assert np.abs(one.astype(int) - other).max() <= 1
    assert stage.results[each.id].seeds == result.seeds == each.payload.seeds


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gives_each_what_it_gets_alone(models: Models, family: str) -> None:
    requests = mixture(models(family), family)
    stage = Stage(models(family)).run(arrivals(requests))
    sizes = [len(call.ids) for call in stage.calls if call.key[0] == "denoise"]  # type: ignore[index]
    assert max(sizes) >= 3
    for each in requests:
        assert_as_alone(models, family, stage, each)
        assert len(stage.previews[each.id]) == each.payload.steps - each.payload.begin


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_mode_gives_the_same_bits_whatever_the_load(models: Models, family: str) -> None:
    loaded = models(family, exact=True)
    requests = mixture(loaded, family)
    together = Stage(loaded).run(arrivals(requests))
    latents, results = dict(loaded.latents), together.results
    for each in requests:
        alone = Stage(loaded, hasty=True).run({0: [each]})
        assert np.array_equal(loaded.latents[each.id], latents[each.id])
        for one, other in zip(alone.results[each.id].images, results[each.id].images, strict=True):
            assert np.array_equal(one, other)
