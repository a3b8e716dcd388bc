"""The training of the emoji model: it goes on as if it had never been ended; captions; scores."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from assets.emoji import autoencoder, data, train, weights
from assets.emoji.condition import Condition
from assets.emoji.draw import draw, noise
from assets.emoji.loop import Loop, Plan, averaged
from assets.emoji.score import places
from pipelines.fetch import Unprepared


class Small(nn.Module):
    """A network that is asked as the UNet is."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = nn.Conv2d(weights.CHANNELS, weights.CHANNELS, 3, padding=1)
        self.captions = nn.Linear(4, weights.CHANNELS)

    def forward(self, latents: Tensor, times: Tensor, class_labels: Tensor, **_: Tensor) -> Any:
        told = self.captions(class_labels)[:, :, None, None]
        sample = self.pictures(latents) + told + times[:, None, None, None] / 1000
        return type("Found", (), {"sample": sample})


def prepared() -> train.Prepared:
    """Three pictures with two captions each, and the empty caption."""
    chance = torch.Generator().manual_seed(1)
    latents = torch.randn(3, weights.CHANNELS, weights.SIDE, weights.SIDE, generator=chance)
    states = torch.randn(7, 2, 4, generator=chance).half()
    return train.Prepared(latents, Condition(states, torch.ones(7, 2, dtype=torch.uint8)))


def loop(folder: Path, end: int, name: str = train.RUNNING) -> Loop:
    ready = prepared()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Small()
    plan = Plan(1e-2, warm=3, end=end)
    found = Loop(network, plan, folder / name, lambda net, luck: train.loss(net, ready, luck, 4))
    found.load()
    return found


def test_training_that_was_ended_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    at_once, in_parts = tmp_path / "once", tmp_path / "parts"
    for folder, ends in ((at_once, (9,)), (in_parts, (4, 9))):
        folder.mkdir()
        for end in ends:
            loop(folder, end).run(every=1e9)
    one, other = (torch.load(f / train.RUNNING, weights_only=True) for f in (at_once, in_parts))
    assert one["step"] == other["step"] == 9
    assert torch.equal(one["chance"], other["chance"])
    for name, part in one["network"].items():
        assert torch.equal(part, other["network"][name])
    assert all(map(torch.equal, one["average"], other["average"]))


def test_training_ended_while_it_writes_goes_on_from_the_last_whole_file(tmp_path: Path) -> None:
    loop(tmp_path, 4).run(every=1e9)
    (tmp_path / train.RUNNING).with_suffix(".part").write_bytes(b"half a file")
    assert loop(tmp_path, 4).step == 4


def test_a_finish_that_was_ended_keeps_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "new_unet", Small)
    loop(tmp_path, 4).run(every=1e9)
    first = train.finish(prepared(), tmp_path, 6)
    assert (first.step, first.plan.end) == (4, 10)
    first.save()
    loop(tmp_path, 7).run(every=1e9)  # the running one is ahead by now
    again = train.finish(prepared(), tmp_path, 3)
    assert (again.step, again.plan.end, again.plan.down) == (4, 10, 6)


def test_rates_rise_stay_and_fall() -> None:
    plan = Plan(1.0, warm=4, down=10, end=30)
    assert [plan.at(step) for step in (0, 1, 10, 20, 25, 29)] == [0.25, 0.5, 1.0, 1.0, 0.5, 0.1]


def test_an_average_is_given_to_a_network(tmp_path: Path) -> None:
    done = loop(tmp_path, 5)
    done.run(every=1e9)
    network = Small()
    assert averaged(network, tmp_path / train.RUNNING) == 5
    assert all(map(torch.equal, network.parameters(), done.average))


@torch.no_grad()
def hard(network: Any) -> float:
    """How hard a network finds it, by the same chance every time."""
    return float(train.loss(network, prepared(), torch.Generator().manual_seed(5), 64))


def test_training_learns(tmp_path: Path) -> None:
    before = hard(Small())
    done = loop(tmp_path, 150)
    done.run(every=1e9)
    assert hard(done.network) < 0.8 * before


def test_an_autoencoder_that_was_ended_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    pixels = torch.rand(5, 3, 16, 16, generator=torch.Generator().manual_seed(2)) * 2 - 1
    at_once = autoencoder.train(pixels, tmp_path / "once", steps=4)
    autoencoder.train(pixels, tmp_path / "parts", steps=4, until=2)
    in_parts = autoencoder.train(pixels, tmp_path / "parts", steps=4)
    assert all(map(torch.equal, at_once.parameters(), in_parts.parameters()))
    assert train.encoded(at_once, pixels).shape == (5, weights.CHANNELS, 4, 4)


def picture(label: str, *tags: str) -> data.Picture:
    return data.Picture(label, tags, torch.zeros(3, data.SIDE, data.SIDE))


def test_captions_begin_with_the_label_and_are_the_same_every_time() -> None:
    pictures = [picture("red apple", "fruit", "red"), picture("ox")]
    found = data.captions(pictures)
    assert found == data.captions(pictures)
    assert [captions[0] for captions in found] == ["red apple", "ox"]
    assert all(len(captions) == data.CAPTIONS for captions in found)
    assert set(found[0][2].split(", ")) == {"red apple", "fruit", "red"}


def test_a_tag_that_many_pictures_have_is_no_caption_by_itself() -> None:
    pictures = [picture(f"face {number}", "face") for number in range(9)]
    assert not any("face" in captions for captions in data.captions(pictures))


def test_pictures_are_put_on_white() -> None:
    image = Image.new("RGBA", (128, 128), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 64, 128))
    file = io.BytesIO()
    image.save(file, "PNG")
    pixels = data.pixels(file.getvalue())
    assert pixels.shape == (3, data.SIDE, data.SIDE)
    assert pixels[:, 5, 5].tolist() == [-1, -1, 1]
    assert pixels[:, 5, -5].tolist() == [1, 1, 1]


def test_a_download_that_is_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / data.FLUENT.file).write_bytes(b"something else")
    with pytest.raises(Unprepared, match="expected c1bb7eee"):
        data.fetched(data.FLUENT, tmp_path)


def test_a_drawing_is_scored_by_how_many_pictures_are_nearer_than_its_own() -> None:
    pictures = torch.tensor([[0.0], [1.0], [2.0], [10.0]])
    drawn = torch.tensor([[0.2], [1.4], [9.0], [1.9]])
    assert places(drawn, torch.tensor([0, 2, 3, 0]), pictures).tolist() == [0, 1, 0, 2]


def test_a_seed_draws_the_same_whoever_is_drawn_beside_it() -> None:
    torch.manual_seed(0)
    network, ready = Small().eval(), prepared()
    empty = ready.condition.rows(torch.tensor([6]))
    condition = ready.condition.rows(torch.tensor([2, 4]))
    both = draw(network, noise([3, 8]), condition, empty, steps=3)
    alone = draw(network, noise([8]), condition.rows(torch.tensor([1])), empty, steps=3)
    torch.testing.assert_close(both[1:], alone, rtol=0.02, atol=0.02)


def test_the_scale_of_latents_is_undone_and_kept(tmp_path: Path) -> None:
    latents = torch.randn(4, weights.CHANNELS, 2, 2) * 3 + 1
    weights.Scale.of(latents).write(tmp_path)
    scale = weights.Scale.read(tmp_path)
    scaled = scale.apply(latents)
    assert abs(float(scaled.mean())) < 1e-5
    assert abs(float(scaled.std()) - 1) < 1e-2
    torch.testing.assert_close(scale.undo(scaled), latents)
