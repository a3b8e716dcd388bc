"""Pictures: each equals its run alone whatever happens around it, and diffusers' own.

Tiny random models in float32 under a virtual clock, so that every call is the same in every run.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from image_driver import Loaded, Stage, refuse_decoding
from PIL import Image
from tiny_diffusers import add_checker, write, write_words

from pipelines.drawn import Facts, ImageJob, Picture, heard, suggested
from pipelines.fetch import Unprepared
from pipelines.image import ImagePipeline
from pipelines.readers import Read, Remembering
from pipelines.solvers import FLOW, generators
from queueing.messages import Cancel
from queueing.work import Invalid, Request, Row, Status

# NumPy 2 on tensors, inside the solvers of diffusers 0.42.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NEAR = 1e-4  # of the latents' scale
FAMILIES = ("sd", "sdxl", "flux", "emoji")
SOLVERS = {
    "sd": ("euler", "euler ancestral", "ddim", "dpm++ 2m", "unipc", "lcm"),
    "sdxl": ("euler", "euler ancestral", "ddim", "dpm++ 2m", "unipc", "lcm"),
    "flux": (FLOW,) * 6,
    "emoji": (FLOW,) * 6,
}
ARRIVES = (0, 0, 2, 3, 5, 8)


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
        self._own: dict[str, Any] = {}
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

    def own(self, family: str, kind: str) -> Any:
        """A pipeline of diffusers on the same folder."""
        if kind not in self._own:
            made = getattr(diffusers, kind).from_pretrained(self.folder(family))
            made.set_progress_bar_config(disable=True)
            self._own[kind] = made
        return self._own[kind]

    def alone(self, family: str, request: Request) -> tuple[np.ndarray, Any]:
        """Latents and result of a request in an engine of its own, granted steps by the handful."""
        if (family, request.id) not in self._alone:
            stage = Stage(self(family), hasty=True).run({0: [request]})
            assert stage.statuses() == {request.id: Status.FINISHED}
            found = stage.latents[request.id], stage.results[request.id]
            self._alone[family, request.id] = found
        return self._alone[family, request.id]


@pytest.fixture(scope="module")
def models(offline: None, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def pipeline(folder: str, **fields: Any) -> ImagePipeline:
    given = {"dtype": "float32", **fields}
    return ImagePipeline(folder, device="cpu", threads=1, **given)


def facts(loaded: Loaded) -> Facts:
    return heard(loaded.card.details)


def photo(height: int, width: int) -> Picture:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 7 % 256, columns * 5 % 256, rows * columns % 256], -1).astype(np.uint8)


def request(loaded: Loaded, id: str, prompt: str = "a red cat", **fields: Any) -> Request:
    solver = json.loads(loaded.card.details["solvers"])[0]
    side = min(facts(loaded).size, 32)
    given = {"solver": solver, "height": side, "width": side} | fields
    job = suggested(facts(loaded), prompt, **given)
    return job.request(id=id, session=id)


def mixture(loaded: Loaded, family: str) -> list[Request]:
    """One for each solver, all different; the second is smaller, the fifth over a photo."""
    side = min(facts(loaded).size, 32)
    other = facts(loaded).least
    kinds: list[dict[str, Any]] = [
        {"prompt": "a red cat", "steps": 5, "guidance": 5.0, "seed": 1},
        {"prompt": "two dogs", "steps": 4, "guidance": 1.0, "seed": 2, "height": other},
        {"prompt": "sun", "steps": 7, "guidance": 7.5, "seed": 3, "negative": "rain", "count": 2},
        {"prompt": "a tree", "steps": 3, "guidance": 2.0, "seed": 2**64 - 1, "negative": ""},
        {"prompt": "car", "steps": 6, "guidance": 3.0, "seed": 5, "image": photo(side, side)},
        {"prompt": "a red cat", "steps": 4, "guidance": 0.0, "seed": 6},
    ]
    if not facts(loaded).negatives:
        kinds = [{name: v for name, v in kind.items() if name != "negative"} for kind in kinds]
    jobs = [
        suggested(facts(loaded), solver=solver, **{"height": side, "width": side, **kind})
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
    assert_near(stage.latents[each.id], latents)
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
        steps = each.payload.steps - each.payload.begin
        every = models(family).pipeline._known().autoencoder.every
        assert len(stage.previews[each.id]) == -(-steps // every)


OWN = {
    "sd": ("StableDiffusionPipeline", "StableDiffusionImg2ImgPipeline"),
    "sdxl": ("StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"),
    "flux": ("FluxPipeline", "FluxImg2ImgPipeline"),
}
SCHEDULERS = {
    "euler": "EulerDiscreteScheduler",
    "ddim": "DDIMScheduler",
    "dpm++ 2m": "DPMSolverMultistepScheduler",
    "unipc": "UniPCMultistepScheduler",
    FLOW: "FlowMatchEulerDiscreteScheduler",
}


def diffusers_draws(models: Models, family: str, job: ImageJob) -> tuple[np.ndarray, np.ndarray]:
    """Latents and pixels of one picture, by diffusers' own pipeline."""
    kind = OWN.get(family, OWN["sd"])[job.image is not None]
    own = models.own(family, kind)
    scheduler = getattr(diffusers, SCHEDULERS[job.solver])
    more = {"clip_sample": False} if job.solver == "ddim" else {}
    fields: dict[str, Any] = {"height": job.height, "width": job.width}
    if job.image is not None:
        size = fields if family == "flux" else {}
        fields = {**size, "image": Image.fromarray(job.image), "strength": job.strength}
    if job.negative is not None:
        fields["negative_prompt"] = job.negative
    found = []
    for kind in ("latent", "np"):
        own.scheduler = scheduler.from_config(own.scheduler.config, **more)
        source = torch.Generator().manual_seed(job.seed)
        steps, scale = job.steps, job.guidance
        found.append(
            own(
                job.prompt,
                num_inference_steps=steps,
                guidance_scale=scale,
                generator=source,
                output_type=kind,
                **fields,
            ).images
        )
    return found[0].numpy(), found[1][0]


@pytest.mark.parametrize("family, solver, negative", [
    *(
        (family, solver, negative)
        for family in ("sd", "sdxl")
        for solver in SCHEDULERS
        for negative in (None, "", "rain")
        if solver == "euler" or (solver != FLOW and negative == "rain")
    ),
    ("flux", FLOW, None),
])  # fmt: skip
def test_alone_a_picture_is_what_diffusers_draws(
    models: Models, family: str, solver: str, negative: str | None
) -> None:
    id = f"{solver} {negative}"
    fields = {"solver": solver, "steps": 6, "seed": 3, "negative": negative}
    assert_same_as_diffusers(models, family, request(models(family), id, **fields))


@pytest.mark.parametrize("family, solver", [
    ("sd", "euler"), ("sd", "dpm++ 2m"), ("sdxl", "ddim"), ("flux", FLOW),
])  # fmt: skip
def test_over_a_picture_it_is_what_diffusers_draws(
    models: Models, family: str, solver: str
) -> None:
    image = photo(32, 32)
    given = request(
        models(family), f"over {solver}", image=image, strength=0.5, steps=6, seed=3, solver=solver
    )
    assert_same_as_diffusers(models, family, given)


@pytest.mark.parametrize("change", [
    {"height": 24, "width": 40}, {"steps": 1}, {"guidance": 1.0},
    {"solver": "dpm++ 2m", "steps": 2},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_at_its_limits_it_is_what_diffusers_draws(
    models: Models, family: str, change: dict[str, Any]
) -> None:
    given = request(models(family), str(change), seed=8, **({"steps": 3} | change))
    assert_same_as_diffusers(models, family, given)


def test_a_model_that_predicts_velocities_draws_what_diffusers_draws(
    models: Models, tmp_path: Path
) -> None:
    folder = shutil.copytree(models.folder("sd"), tmp_path / "velocity")
    file = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text()) | {"prediction_type": "v_prediction"}
    file.write_text(json.dumps(config))
    others = Models(tmp_path)
    for solver in ("euler", "dpm++ 2m", "ddim"):
        given = request(others("velocity"), f"of {solver}", steps=4, solver=solver)
        assert_same_as_diffusers(others, "velocity", given)
    file.write_text(json.dumps(config | {"prediction_type": "sample"}))
    with pytest.raises(Unprepared, match="predicts 'sample'"):
        pipeline(str(folder)).load(lambda fraction, text: None)


def assert_same_as_diffusers(models: Models, family: str, given: Request) -> None:
    latents, result = models.alone(family, given)
    wanted, pixels = diffusers_draws(models, family, given.payload)
    if family == "flux":
        latents = packed(latents)
    assert_near(latents, wanted)
    assert np.abs(result.images[0] - 255 * pixels).max() <= 0.6


def packed(latents: np.ndarray) -> np.ndarray:
    """As Flux keeps them: [rows, patches, 4 channels]."""
    rows, channels, height, width = latents.shape
    patches = latents.reshape(rows, channels, height // 2, 2, width // 2, 2)
    return patches.transpose(0, 2, 4, 1, 3, 5).reshape(rows, -1, 4 * channels)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_mode_gives_the_same_bits_whatever_the_load(models: Models, family: str) -> None:
    loaded = models(family, exact=True)
    requests = mixture(loaded, family)
    together = Stage(loaded).run(arrivals(requests))
    for each in requests:
        alone = Stage(loaded, hasty=True).run({0: [each]})
        assert np.array_equal(alone.latents[each.id], together.latents[each.id])
        pairs = (stage.results[each.id].images for stage in (alone, together))
        for one, other in zip(*pairs, strict=True):
            assert np.array_equal(one, other)


@pytest.mark.parametrize(("exact", "most"), [(False, 0.05), (True, 0.0)])
def test_what_half_precision_makes_of_company(models: Models, exact: bool, most: float) -> None:
    folder, words = str(models.folder("emoji")), str(models.words)
    made = pipeline(folder, words=words, exact=exact, dtype="bfloat16")
    loaded = Loaded(made, made.load(lambda fraction, text: None))
    requests = mixture(loaded, "emoji")
    together = Stage(loaded).run(arrivals(requests))
    for each in requests:
        alone = Stage(loaded).run({0: [each]}).latents[each.id]
        assert np.abs(together.latents[each.id] - alone).max() <= most * np.abs(alone).max()


def test_a_neighbour_that_is_stopped_disturbs_nobody(models: Models) -> None:
    requests = mixture(models("sdxl"), "sdxl")
    stage = Stage(models("sdxl"))
    stage.start(*requests)
    stage.until("denoise", 4)
    stage.engine.handle(Cancel("2"))
    stage.run()
    assert stage.statuses()["2"] is Status.CANCELLED
    assert "2" not in stage.results
    for each in requests[:2] + requests[3:]:
        assert_as_alone(models, "sdxl", stage, each)


def rides(stage: Stage, id: str) -> int:
    return sum(id in call.ids for call in stage.calls)


@pytest.mark.parametrize("family", ["sd", "emoji"])
def test_a_picture_of_no_numbers_fails_alone(models: Models, family: str) -> None:
    loaded = models(family)
    requests = mixture(loaded, family)
    stage = Stage(loaded)
    bad = request(loaded, "bad", steps=5, seed=7)
    stage.start(*requests, bad)
    stage.until("denoise", 2)
    row, rode = stage.engine._rows["bad"], rides(stage, "bad")
    spoilt = row.state.latents.clone()
    spoilt[0, 0, 0, 0] = float("nan")
    row.state = replace(row.state, latents=spoilt)
    stage.run()
    assert rides(stage, "bad") == rode + 1  # the step that gave no numbers is its last
    end = stage.ends["bad"]
    assert end.status is Status.FAILED
    assert "not finite" in str(end.error)
    assert "bad" not in stage.results
    assert sum(call.error != "" for call in stage.calls) == 0
    for each in requests:
        assert_as_alone(models, family, stage, each)


def test_pixels_of_no_numbers_are_no_black_picture(models: Models) -> None:
    loaded = models("sd")
    stage = Stage(loaded)
    stage.start(request(loaded, "bad", steps=2))
    stage.until("denoise", 2)
    row = stage.engine._rows["bad"]
    row.state = replace(row.state, latents=row.state.latents * float("inf"))
    stage.run()
    assert stage.statuses() == {"bad": Status.FAILED}
    assert not stage.results


def test_memory_that_runs_out_in_decode_costs_nobody_a_picture(models: Models) -> None:
    loaded = models("sdxl")
    requests = mixture(loaded, "sdxl")
    stage = Stage(loaded)
    stage.start(*requests)
    refuse_decoding(stage, 3)
    stage.run()
    assert stage.parked  # rows that made room for one that failed alone
    again = [each for each in requests if each.id in stage.parked]
    stage.start(*again, marks=stage.parked)
    stage.run()
    assert sum(call.error == "OutOfMemory" for call in stage.calls) == 3
    for each in requests:
        assert_as_alone(models, "sdxl", stage, each)


def test_memory_that_never_suffices_fails_one_and_the_next_is_as_ever(models: Models) -> None:
    loaded = models("sdxl")
    first, second = mixture(loaded, "sdxl")[:2]
    stage = Stage(loaded)
    stage.start(first)
    refuse_decoding(stage, 1)
    stage.run()
    assert stage.statuses() == {"0": Status.FAILED}
    stage.run({0: [second]})
    assert_as_alone(models, "sdxl", stage, second)


@pytest.mark.parametrize("family", FAMILIES)
def test_parked_and_begun_elsewhere_pictures_go_on(models: Models, family: str) -> None:
    requests = mixture(models(family), family)
    stage = Stage(models(family))
    stage.start(*requests)
    stage.until("denoise", 2)
    for each in requests:
        if each.id in stage.engine._rows:
            stage.park(pickle.loads(pickle.dumps(each)))
    stage.run()
    assert any(call.key[0] == "encode" for call in stage.calls[3:])  # type: ignore[index]
    for each in requests:
        assert_as_alone(models, family, stage, each)


def test_a_mark_is_host_data_and_a_repeated_step_gives_the_same_bits(models: Models) -> None:
    loaded = models("sd")
    for each in mixture(loaded, "sd"):
        row = Row(each, loaded.open(each), 0, 1e9)
        while (work := loaded.next(row)) is not None:
            before = loaded.park(row)
            assert "torch" not in repr(words_of_a_pickle(before))
            grant = min(work.most, 2)
            first, again = (loaded.pipeline.step([row], [grant])[0] for _ in range(2))
            np.testing.assert_equal(loaded.park(row), before)
            row.state = first.state
            one = loaded.park(row)
            row.state = again.state
            np.testing.assert_equal(loaded.park(row), one)


def words_of_a_pickle(value: Any) -> list[str]:
    """Names of modules and fields among them."""
    found = pickletools.genops(pickle.dumps(value))
    return [str(argument) for _, argument, _ in found if isinstance(argument, str)]


@pytest.mark.parametrize("change", [
    {"seed": 9}, {"steps": 6}, {"guidance": 5.5}, {"guidance": 1.0}, {"crop": (16, 0)},
    {"prompt": "dog"}, {"negative": "rain"}, {"negative": ""}, {"solver": "unipc"},
    {"original": (64, 64)}, {"image": photo(32, 32)},
], ids=lambda change: next(iter(change)))  # fmt: skip
def test_every_setting_of_a_picture_shows(models: Models, change: dict[str, Any]) -> None:
    """Else equality would prove nothing."""
    base = mixture(models("sdxl"), "sdxl")[0]
    other = replace(base, payload=replace(base.payload, **change), id=repr(change)[:40])
    latents, wanted = (models.alone("sdxl", each)[0] for each in (other, base))
    assert np.abs(latents - wanted).max() > 10 * NEAR * np.abs(wanted).max()


def test_each_of_several_pictures_is_that_of_its_seed(models: Models) -> None:
    base = request(models("sd"), "several", seed=4, count=3, steps=4, solver="euler ancestral")
    latents, result = models.alone("sd", base)
    assert result.seeds == (4, 5, 6)
    for place in range(3):
        job = replace(base.payload, seed=4 + place, count=1)
        alone, drawn = models.alone("sd", replace(base, payload=job, id=f"several {place}"))
        assert_near(latents[place : place + 1], alone)
        assert np.abs(drawn.images[0].astype(int) - result.images[place]).max() <= 1


def test_tokens_that_were_too_many_are_said(models: Models) -> None:
    loaded = models("sd")
    given = request(loaded, "long", "x" * 100, negative="y" * 80, steps=1)
    result = models.alone("sd", given)[1]
    assert (result.cut, result.cut_negative) == (25, 5)  # of 77, two begin and end
    assert models.alone("sd", request(loaded, "short", steps=1))[1].cut == 0


def test_what_was_read_is_read_once_and_forgotten_at_a_bound(models: Models) -> None:
    read: list[str | None] = []

    class Counting:
        models = ()

        def read(self, texts: Sequence[str | None]) -> list[Read]:
            read.extend(texts)
            return [Read({"words": torch.zeros(2)}) for _ in texts]

    around: list[Any] = []

    def rows(adapters: Sequence[Any]) -> Any:
        around.append(list(adapters))
        return nullcontext()

    reader = Remembering(Counting(), rows, most=3 * 8)
    plain = [(text, None) for text in ("a", "b", "a", None)]
    assert len(reader.read(plain)) == 4
    assert read == ["a", "b", None]
    reader.read([("a", None), ("c", None)])
    reader.read([("a", None), (None, None), ("c", None)])
    assert read == ["a", "b", None, "c"]
    reader.read([("b", None), ("c", ("ink", 0.5))])
    assert read == ["a", "b", None, "c", "b", "c"]
    assert around == [[None] * 3, [None], [None, ("ink", 0.5)]]


@pytest.mark.parametrize("hides", [True, False])
def test_a_model_with_a_judge_shows_what_it_allows(
    models: Models, tmp_path: Path, hides: bool
) -> None:
    folder = shutil.copytree(models.folder("sd"), tmp_path / "judged")
    add_checker(folder, hides)
    made = pipeline(str(folder))
    loaded = Loaded(made, made.load(lambda fraction, text: None))
    assert loaded.card.details["checked"] == "yes"
    given = request(loaded, "judged", count=2, steps=2)
    stage = Stage(loaded).run({0: [given]})
    assert [image is None for image in stage.results["judged"].images] == [hides] * 2


def test_only_the_pictures_that_are_judged_so_are_hidden(models: Models, tmp_path: Path) -> None:
    loaded = models("sd")
    requests = mixture(loaded, "sd")[:4]
    shown = [image for each in requests for image in models.alone("sd", each)[1].images]
    loaded.pipeline._checker = SimpleNamespace(hides=lambda image: near(image, shown[1]))
    try:
        stage = Stage(loaded).run({0: requests})
    finally:
        loaded.pipeline._checker = None
    found = [image for each in requests for image in stage.results[each.id].images]
    assert [image is None for image in found] == [place == 1 for place in range(len(found))]


def near(one: Picture, other: Picture) -> bool:
    return one.shape == other.shape and bool(np.abs(one.astype(int) - other).max() <= 1)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"steps": 0}, "steps"), ({"steps": -1}, "steps"), ({"steps": 10_000}, "steps"),
    ({"guidance": float("nan")}, "guidance"), ({"guidance": -1.0}, "guidance"),
    ({"height": 0}, "height"), ({"width": 33}, "width"), ({"height": 100_000}, "height"),
    ({"seed": -1}, "seed"), ({"seed": 2**64}, "seed"), ({"count": 0}, "count"),
    ({"count": 5}, "count"), ({"solver": FLOW}, "solver"), ({"solver": "pndm"}, "solver"),
    ({"adapter": ("cat", 1.0)}, "adapter"), ({"image": photo(16, 32)}, "image"),
    ({"image": photo(32, 32), "strength": float("nan")}, "strength"),
    ({"solver": "lcm", "steps": 60}, "steps"), ({"shown": True}, "Send it again"),
]  # fmt: skip


@pytest.mark.parametrize("change, word", BAD, ids=lambda each: str(each)[:20])
def test_what_cannot_be_drawn_is_refused_by_its_name(
    models: Models, change: dict[str, Any], word: str
) -> None:
    loaded = models("sd")
    given = request(loaded, "bad")
    with pytest.raises(Invalid, match=word):
        loaded.open(replace(given, payload=replace(given.payload, **change)))


def test_folders_that_cannot_be_read_are_refused_in_a_sentence(
    models: Models, tmp_path: Path
) -> None:
    broken = shutil.copytree(models.folder("sd"), tmp_path / "broken")
    (broken / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    strange = shutil.copytree(models.folder("emoji"), tmp_path / "strange")
    (strange / "model_index.json").write_text('{"_class_name": "KolorsPipeline"}')
    (tmp_path / "empty").mkdir()
    for folder, words in (
        (broken, "The unet of broken cannot be loaded"),
        (strange, "strange is a KolorsPipeline; known are"),
        (tmp_path / "empty", "model_index.json of empty cannot be read"),
        (tmp_path / "nowhere", "nor a model that the Hub gives with model_index.json"),
    ):
        with pytest.raises(Unprepared, match=words):
            pipeline(str(folder)).load(lambda fraction, text: None)


def test_previews_are_small_and_come_for_every_picture(models: Models) -> None:
    for family in FAMILIES:
        loaded = models(family)
        given = request(loaded, "seen", steps=2, count=2, height=facts(loaded).least)
        stage = Stage(loaded).run({0: [given]})
        for previews in stage.previews["seen"]:
            assert len(previews) == 2
            assert all(each.dtype == np.uint8 and max(each.shape) <= 256 for each in previews)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_preview_comes_with_the_second_call_of_everybody(
    models: Models, family: str
) -> None:
    loaded = models(family)
    people = [request(loaded, f"{n}", steps=3 + n % 4, seed=n) for n in range(20)]
    stage = Stage(loaded).run({tick: people[tick::5] for tick in range(5)})
    assert stage.first == {each.id: 2 for each in people}


def test_a_wide_preview_is_thinned(models: Models) -> None:
    autoencoder = models("sdxl").pipeline._known().autoencoder
    (seen,) = autoencoder.rough(torch.randn(1, 4, 300, 600))
    assert seen.shape == (100, 200, 3)


def test_models_are_let_go(models: Models) -> None:
    made = pipeline(str(models.folder("sd")))
    made.load(lambda fraction, text: None)
    kept = weakref.ref(made._known().denoiser)
    made.unload()
    assert kept() is None
    made.unload()


def test_exact_calls_always_have_as_many_rows(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = models("sdxl", exact=True)
    family, seen = loaded.pipeline._known(), []
    predict = family.predict

    def counted(latents: Any, times: Any, condition: Any) -> Any:
        seen.append({len(each) for each in (latents, times, *condition.values())})
        return predict(latents, times, condition)

    monkeypatch.setattr(family, "predict", counted)
    requests = [request(loaded, f"{n}", steps=3, seed=n, count=1 + n) for n in range(4)]
    stage = Stage(loaded).run({0: requests})
    assert stage.statuses() == {f"{n}": Status.FINISHED for n in range(4)}
    assert seen
    assert all(rows == {8} for rows in seen)
    keys = [work.key for work in requests[0].plan]
    assert [loaded.sizes(key) for key in keys] == [(8,), (8,), None]
    assert [models("sdxl").sizes(key) for key in keys] == [None] * 3


def test_a_picture_stopped_between_the_forwards_of_one_call_leaves_it(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = models("sd")
    stage = Stage(loaded, hasty=True)
    stage.start(request(loaded, "long", steps=9))
    stage.until("denoise", 1)
    forward, forwards = loaded.pipeline._forward, []

    def stopped_on_the_way(sketches: Any) -> Any:
        forwards.append(len(sketches))
        stage.engine.flag("long")
        return forward(sketches)

    monkeypatch.setattr(loaded.pipeline, "_forward", stopped_on_the_way)
    stage.run()
    assert forwards == [1]
    assert stage.calls[-1].forwards == 1
    assert stage.statuses() == {"long": Status.CANCELLED}


def test_calls_are_only_shared_by_pictures_of_one_size(models: Models) -> None:
    loaded = models("sd")
    stage = Stage(loaded).run(arrivals(mixture(loaded, "sd")))
    keys = {call.key for call in stage.calls if call.key[0] == "denoise"}  # type: ignore[index]
    assert keys == {("denoise", 32, 32), ("denoise", 16, 32)}
    widest = max(stage.calls, key=lambda call: call.rows)
    assert widest.rows > len(widest.ids)  # rows with guidance count twice


def test_half_precision_never_touches_an_autoencoder_that_overflows_in_it(
    models: Models, tmp_path: Path
) -> None:
    folder = shutil.copytree(models.folder("sdxl"), tmp_path / "half")
    made = ImagePipeline(str(folder), device="cpu", dtype="float16", threads=1)
    loaded = Loaded(made, made.load(lambda fraction, text: None))
    first, second = (request(loaded, id, steps=2, solver="euler") for id in ("first", "second"))
    stage = Stage(loaded)
    stage.start(first)
    autoencoder = made._known().autoencoder.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoder, "decode", out_of_memory)
        stage.run()
    assert stage.statuses() == {"first": Status.FAILED}
    assert "memory" in str(stage.ends["first"].error)
    stage.run({0: [second]})
    assert autoencoder.dtype == torch.float32
    assert made._known().denoiser.dtype == torch.float16
    wanted = models.alone("sdxl", replace(second, id="whole"))[1].images[0]
    assert np.abs(stage.results["second"].images[0].astype(int) - wanted).mean() < 8


def out_of_memory(*given: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


def test_a_model_that_comes_only_in_half_precision_is_read(models: Models, tmp_path: Path) -> None:
    folder = shutil.copytree(models.folder("sd"), tmp_path / "variant")
    for part in ("unet", "vae"):
        file = folder / part / "diffusion_pytorch_model.safetensors"
        file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert pipeline(str(folder)).load(lambda fraction, text: None).held > 0


def test_the_emoji_model_may_want_the_mean_of_a_prompt(models: Models, tmp_path: Path) -> None:
    folder = write(tmp_path / "mean", "emoji", class_embed_type="projection")
    made = pipeline(str(folder), words=str(models.words))
    loaded = Loaded(made, made.load(lambda fraction, text: None))
    stage = Stage(loaded).run({0: [request(loaded, id, steps=2) for id in ("one", "two")]})
    assert stage.statuses() == dict.fromkeys(("one", "two"), Status.FINISHED)
    with torch.inference_mode():
        (read,) = made._known().reader.read(["cat"])
    states, mask = read.condition["encoder_hidden_states"], read.condition["encoder_attention_mask"]
    assert int(mask.sum()) == 5  # letters, a beginning and an end
    assert torch.allclose(read.condition["class_labels"], states[:5].mean(0), atol=1e-6)


def test_unlike_prompts_and_times_draw_noise_of_their_own() -> None:
    drawn = [
        torch.randn(4, generator=source).tolist()
        for step in range(3)
        for source in generators((0, 1, 2**64 - 1), step)
    ]
    assert len({tuple(numbers) for numbers in drawn}) == 9
    (own,) = generators((5,), 0)
    assert torch.equal(torch.randn(4, generator=own), torch.randn(4, generator=seeded(5)))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
