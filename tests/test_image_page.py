"""The page of pictures in a real browser on the default model: drawing, previews, seeds, refusals.

Pictures of what it saw are left in build/. Skipped only where there is no Chromium.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator, Page, expect

from tests import test_browser
from tests.conftest import App
from tests.test_browser import PICTURES, WAIT

browser = test_browser.browser
pytestmark = [*test_browser.pytestmark, pytest.mark.model, pytest.mark.timeout(600)]
LONG = 120_000


@pytest.fixture
def page(browser: Browser, real_app: App) -> Iterator[Page]:
    """Open at the pictures, the model there and its suggestions on the page."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(f"{real_app.url}/image")
    expect(page.locator("#badge .ready")).to_contain_text("emoji", timeout=300_000)
    yield page
    context.close()


def settings(page: Page, **values: str) -> None:
    """Unfold the settings and type into them."""
    if not page.locator("#steps").is_visible():
        page.locator("#settings > .label-wrap").click()
    for name, value in values.items():
        box = page.locator(f"#{name} :is(textarea, input[type=number], input[type=text])").first
        typed(box, value)


def typed(box: Locator, value: str) -> None:
    """Once more where it came at the same moment as the model's suggestions, which replace it."""
    for _ in range(5):
        box.fill(value)
        box.blur()
        with suppress(AssertionError):
            expect(box).to_have_value(value, timeout=WAIT / 5)
            return
    expect(box).to_have_value(value)


def draw(page: Page, prompt: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(prompt)
    page.locator("#go").click()


def hanging(page: Page, count: int) -> None:
    expect(page.locator("#gallery .thumbnail-lg")).to_have_count(count, timeout=LONG)


def test_pictures_are_seen_as_they_come_and_hang_with_their_seeds(page: Page) -> None:
    settings(page, seed="42", count="2", steps="60")
    draw(page, "red apple")
    expect(page.locator("#live img")).to_have_count(2, timeout=LONG)
    expect(page.locator("#line .running")).to_contain_text("Drawing", timeout=LONG)
    expect(page.locator("#line .finished")).to_contain_text("2 pictures in", timeout=LONG)
    hanging(page, 2)
    for seed in (42, 43):
        expect(page.locator("#gallery")).to_contain_text(f"Seed {seed}")
    expect(page.locator("#live img")).to_have_count(0)
    expect(page.locator("#halt")).to_be_hidden()
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / "image.png")


def test_again_with_this_seed_draws_the_same_beside_it(page: Page) -> None:
    settings(page, steps="3")
    draw(page, "blue heart")
    hanging(page, 1)
    caption = page.locator("#gallery").get_by_text(re.compile(r"Seed \d+")).first.inner_text()
    expect(page.locator("#again")).to_have_text(f"Again with {caption.lower()}")
    page.locator("#again").click()
    hanging(page, 2)
    assert page.locator("#gallery").get_by_text(caption).count() == 2
    expect(page.locator("#seed textarea, #seed input")).to_have_value(caption.split()[1])


def test_a_dice_throws_a_seed(page: Page) -> None:
    settings(page)
    box = page.locator("#seed textarea, #seed input")
    expect(box).to_have_value("")
    page.locator("#dice").click()
    expect(box).to_have_value(re.compile(r"^\d+$"), timeout=WAIT)


def test_stopping_leaves_nothing_half_drawn(page: Page) -> None:
    settings(page, steps="100", count="4")
    draw(page, "yellow duck")
    expect(page.locator("#live img").first).to_be_visible(timeout=LONG)
    page.locator("#halt").click()
    expect(page.locator("#line .stopped")).to_be_visible(timeout=WAIT)
    expect(page.locator("#live img")).to_have_count(0)
    hanging(page, 0)


def test_a_refusal_is_in_the_words_of_the_page(page: Page) -> None:
    draw(page, " ")
    expect(page.locator("#line .refused")).to_contain_text("“Prompt” is empty", timeout=WAIT)
    settings(page, seed="-1")
    draw(page, "red apple")
    expect(page.locator("#line .refused")).to_contain_text("“Seed” is -1", timeout=WAIT)
    settings(page, seed="--5")
    draw(page, "red apple")
    expect(page.locator("#line .refused")).to_contain_text("“Seed” is text", timeout=WAIT)
    expect(page.locator("#go")).to_be_visible()


def test_only_what_the_model_takes_is_on_the_page(page: Page) -> None:
    settings(page)
    expect(page.locator("#guidance input[type=number]")).to_have_value("3", timeout=WAIT)
    for name in ("width", "height", "adapter", "weight", "solver"):
        expect(page.locator(f"#{name}")).to_be_hidden()


def test_a_picture_is_drawn_over(page: Page, tmp_path: Path) -> None:
    Image.new("RGB", (90, 90), "orange").save(tmp_path / "orange.png")
    page.locator("#over > .label-wrap").click()
    page.locator("#image input[type=file]").set_input_files(tmp_path / "orange.png")
    expect(page.locator("#image img")).to_be_visible(timeout=WAIT)
    draw(page, "red apple")
    hanging(page, 1)


def test_an_example_fills_the_prompt(page: Page) -> None:
    page.get_by_text("blue heart", exact=True).click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value("blue heart", timeout=WAIT)
