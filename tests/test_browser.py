"""The page in a real browser, as people use it: send, stop, ask again, edit; narrow, wide, dark.

Pictures of what it saw are left in build/. Skipped only where there is no Chromium.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest
from gradio_client import Client
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.conftest import ROOT, App, Launch

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PICTURES = ROOT / "build"
WAIT = 30_000  # milliseconds
BADGES = """
window.badges = [];
new MutationObserver(() => {
  const text = document.querySelector("#badge")?.innerText.trim();
  if (text && text !== window.badges.at(-1)) window.badges.push(text);
}).observe(document, { subtree: true, childList: true, characterData: true });
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="There is no Chromium on this machine."),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = ["--no-sandbox", "--disable-background-networking"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Browser, app: App) -> Iterator[Page]:
    """The shared application in a browser that was never here before."""
    context = browser.new_context(viewport={"width": 1400, "height": 900})
    yield visit(context.new_page(), app)
    context.close()


def visit(page: Page, app: App) -> Page:
    page.goto(app.url)
    page.locator("#box textarea").wait_for(timeout=WAIT)
    return page


def send(page: Page, text: str) -> None:
    page.locator("#box textarea").fill(text)
    page.locator("#box textarea").press("Enter")


def answer(page: Page) -> str:
    return page.locator("#talk .bot-row").last.inner_text()


def longest(page: Page, tokens: int) -> None:
    slide(page, "Longest answer, in tokens", tokens)


def slide(page: Page, label: str, value: float) -> None:
    """Set a number in the settings; one typed while they unfold may be lost to Gradio's drawing,
    so they are folded and unfolded until it is there.
    """
    unfold = page.locator("#settings > button")
    field = page.get_by_label(f"number input for {label}")
    slider = page.get_by_label(f"range slider for {label}")
    for _ in range(5):
        unfold.click()
        expect(slider).to_be_visible()
        field.fill(str(value))
        field.press("Tab")
        with suppress(AssertionError):
            expect(slider).to_have_value(str(value), timeout=3000)
        kept = slider.input_value() == str(value)
        unfold.click()
        if kept:
            return
    pytest.fail(f"{label} cannot be set.")


def status(page: Page, words: str) -> None:
    expect(page.locator("#line")).to_contain_text(re.compile(words), timeout=WAIT)


def picture(page: Page, name: str) -> None:
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_and_follows_the_scheme(
    browser: Browser, app: App, width: int, scheme: str
) -> None:
    size = {"width": width, "height": 800}
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = visit(context.new_page(), app)
    expect(page.locator("#badge .ready")).to_be_visible(timeout=WAIT)
    picture(page, f"empty-{width}-{scheme}")
    longest(page, 60)
    send(page, "Tell me about the sea, at some length and with " + "averylongword" * 12)
    status(page, "tokens|Done")
    picture(page, f"talk-{width}-{scheme}")
    page.locator("#settings > button").click()
    picture(page, f"settings-{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert re.match(r"(Use via API\s+)?Settings", page.locator("footer").inner_text())
    assert page.evaluate("document.body.classList.contains('dark')") == (scheme == "dark")
    context.close()


def test_an_answer_streams_into_the_page(page: Page) -> None:
    longest(page, 120)
    send(page, "Hello")
    status(page, "Writing, alone in this batch")
    early = len(answer(page))
    status(page, "tokens|Done")
    assert 0 < early < len(answer(page))
    expect(page.locator("#talk .user-row")).to_have_text(["Hello"])
    expect(page.locator("#box textarea")).to_have_value("")


def test_stop_ends_the_answer_and_keeps_what_was_said(page: Page) -> None:
    longest(page, 2000)
    send(page, "Hello")
    status(page, "Writing")
    page.locator("#box .stop-button").click()
    status(page, "Stopped")
    said = answer(page)
    expect(page.locator("#box .submit-button")).to_be_visible(timeout=WAIT)
    assert said == answer(page) != ""


def test_stop_works_while_it_waits(browser: Browser, narrow_app: App) -> None:
    job = Client(narrow_app.url, verbose=False).submit("Hi", max_tokens=1500, api_name="/chat")
    next(iter(job))
    context = browser.new_context()
    page = visit(context.new_page(), narrow_app)
    send(page, "Hello")
    status(page, "Next in line")
    picture(page, "waiting")
    page.locator("#box .stop-button").click()
    status(page, "Stopped")
    expect(page.locator("#talk .bot-row")).to_have_count(0)
    job.cancel()
    context.close()


def test_a_closed_tab_counts_as_stopped_within_two_seconds(
    browser: Browser, narrow_app: App
) -> None:
    context = browser.new_context()
    page = visit(context.new_page(), narrow_app)
    longest(page, 2000)
    send(page, "Hello")
    status(page, "Writing")
    left = time.monotonic()
    context.close()
    Client(narrow_app.url, verbose=False).predict("Hi", max_tokens=1, api_name="/chat")
    assert time.monotonic() - left < 2 + 2  # and two seconds for a client to come and be answered


def test_two_tabs_share_a_batch_and_say_so(browser: Browser, app: App, page: Page) -> None:
    job = Client(app.url, verbose=False).submit("Hi", max_tokens=1500, api_name="/chat")
    next(iter(job))
    longest(page, 200)
    send(page, "Hello")
    status(page, "Writing, 2 share in this batch")
    job.cancel()


def test_asking_again_replaces_the_answer(page: Page) -> None:
    longest(page, 20)
    send(page, "Hello")
    status(page, "tokens|Done")
    first = answer(page)
    page.get_by_label("Retry").click()
    expect(page.locator("#talk .bot-row")).not_to_have_text([first], timeout=WAIT)
    status(page, "tokens|Done")
    expect(page.locator("#talk .user-row")).to_have_text(["Hello"])
    expect(page.locator("#talk .bot-row")).to_have_count(1)


def test_editing_a_message_answers_it_anew(page: Page) -> None:
    longest(page, 20)
    for text in ("First", "Second"):
        send(page, text)
        expect(page.locator("#talk .user-row")).to_contain_text(
            [text][:1] if text == "First" else ["First", "Second"]
        )
        status(page, "tokens|Done")
        expect(page.locator("#box .submit-button")).to_be_visible(timeout=WAIT)
    page.get_by_label("Edit").first.click()
    page.locator("#talk textarea").fill("Changed")
    page.get_by_label("Submit").click()
    expect(page.locator("#talk .user-row")).to_have_text(["Changed"], timeout=WAIT)
    status(page, "tokens|Done")
    expect(page.locator("#talk .bot-row")).to_have_count(1)


def test_a_refused_edit_or_retry_leaves_the_conversation_as_it_was(page: Page) -> None:
    longest(page, 20)
    send(page, "First")
    status(page, "tokens|Done")
    expect(page.locator("#box .submit-button")).to_be_visible(timeout=WAIT)
    said = answer(page)
    page.locator("#settings > button").click()
    page.get_by_label("Seed").fill("abc")
    page.get_by_label("Retry").click()
    status(page, "The seed is text")
    expect(page.locator("#talk .bot-row")).to_have_text([said], timeout=WAIT)
    page.get_by_label("Edit").first.click()
    page.locator("#talk textarea").fill("Changed")
    page.get_by_label("Submit").click()
    status(page, "The seed is text")
    expect(page.locator("#talk .user-row")).to_have_text(["First"], timeout=WAIT)
    expect(page.locator("#talk .bot-row")).to_have_text([said])
    expect(page.locator("#box textarea")).to_have_value("Changed")


def test_an_example_starts_a_conversation(page: Page) -> None:
    page.get_by_text("What is the capital of France?").click()
    expect(page.locator("#talk .user-row")).to_have_text(["What is the capital of France?"])
    status(page, "Writing")
    page.locator("#box .stop-button").click()
    status(page, "Stopped")


def test_clearing_starts_over_even_while_it_writes(page: Page) -> None:
    longest(page, 2000)
    send(page, "Hello")
    status(page, "Writing")
    page.get_by_label("Clear").click()
    expect(page.locator("#talk .user-row")).to_have_count(0, timeout=WAIT)
    expect(page.locator("#box .submit-button")).to_be_visible(timeout=WAIT)
    expect(page.locator("#talk .bot-row")).to_have_count(0)


def test_what_is_refused_goes_back_into_the_box(page: Page) -> None:
    page.locator("#settings > button").click()
    page.get_by_label("Seed").fill("a few")
    send(page, "Hello")
    status(page, "The seed is text; give a whole number")
    expect(page.locator("#box textarea")).to_have_value("Hello")
    expect(page.locator("#talk .user-row")).to_have_count(0)


def test_the_page_tells_how_far_the_model_is(browser: Browser, launch: Launch) -> None:
    app = launch(SLOW_LOAD="8")
    context = browser.new_context()
    page = visit(context.new_page(), app)
    expect(page.locator("#badge .loading")).to_contain_text("Pretending to load", timeout=WAIT)
    longest(page, 5)
    send(page, "Hello")
    status(page, "The model is loading")
    picture(page, "loading")
    status(page, "tokens|Done")
    expect(page.locator("#badge .ready")).to_be_visible(timeout=WAIT)
    context.close()
    app.stop()


def test_the_badge_is_true_for_the_life_of_the_page(browser: Browser, launch: Launch) -> None:
    app = launch(SLOW_LOAD="2")
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(BADGES)
    visit(page, app)
    expect(page.locator("#badge .ready")).to_be_visible(timeout=WAIT)
    send(page, "Hello")
    status(page, "Writing")
    said = answer(page)
    psutil.Process(app.process.pid).children()[0].kill()
    expect(page.locator("#badge .loading")).to_contain_text("restarting", timeout=WAIT)
    status(page, "Your answer continues after that")
    picture(page, "restarting")
    expect(page.locator("#badge .ready")).to_be_visible(timeout=WAIT)
    status(page, "256 tokens")
    assert answer(page).startswith(said.strip())
    page.reload()
    expect(page.locator("#badge .ready")).to_be_visible(timeout=WAIT)
    assert page.evaluate("window.badges") == ["a pretended model"]  # at once, and nothing untrue
    app.stop()
    expect(page.locator("#badge .failed")).to_contain_text("does not answer", timeout=WAIT)
    context.close()


def test_what_is_typed_while_a_message_is_taken_stays_in_the_box(page: Page) -> None:
    longest(page, 2000)
    box = page.locator("#box textarea")
    with page.expect_request(lambda request: "queue/join" in request.url):
        send(page, "First")
    send(page, "Second")  # within milliseconds
    status(page, "Writing")
    expect(page.locator("#talk .user-row")).to_have_text(["First"])
    expect(box).to_have_value("Second")
    page.locator("#box .stop-button").click()
    status(page, "Stopped")
    box.press("Enter")
    expect(page.locator("#talk .user-row")).to_have_text(["First", "Second"], timeout=WAIT)
    expect(box).to_have_value("")
    page.locator("#box .stop-button").click()
    status(page, "Stopped")
    box.fill("Third")
    page.get_by_label("Retry").click()
    status(page, "Writing")
    expect(box).to_have_value("Third")
    page.locator("#box .stop-button").click()
    status(page, "Stopped")


def test_a_refusal_on_the_page_is_in_the_words_of_the_page(page: Page) -> None:
    send(page, "   ")
    status(page, "Your message is empty; write at least one character that shows")
    send(page, "x" * 40_000)
    status(page, "tokens in the conversation, and the context of 8,192 must hold an answer too")
    expect(page.locator("#talk .user-row")).to_have_count(0)


def test_a_browser_is_one_person_in_all_its_tabs(browser: Browser, app: App) -> None:
    context = browser.new_context()
    tokens = set()
    for _ in range(2):
        page = visit(context.new_page(), app)
        page.wait_for_function("localStorage.getItem('carpool-person')", timeout=WAIT)
        longest(page, 1)
        with page.expect_request(re.compile("queue/join"), timeout=WAIT) as request:
            send(page, "Hello")
        tokens.add(request.value.post_data_json["data"][2])
        status(page, "tokens|Done")
    assert len(tokens) == 1 and len(tokens.pop()) > 40
    context.close()


@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_real_model_knows_the_capital_of_france(browser: Browser, real_app: App) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 760})
    page = visit(context.new_page(), real_app)
    expect(page.locator("#badge .ready")).to_be_visible(timeout=300_000)
    slide(page, "Temperature (0: the likeliest)", 0)
    page.get_by_text("What is the capital of France?").click()
    expect(page.locator("#line")).to_contain_text("tokens/s", timeout=120_000)
    assert "Paris" in answer(page)
    picture(page, "page")
    context.close()
    assert httpx.get(real_app.url).status_code == 200
