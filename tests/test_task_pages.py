"""Pages of one-shot tasks in a real browser on the default models: examples, results, refusals.

Pictures of what it saw are left in build/. Skipped only where there is no Chromium.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from pipelines.catalogue import FORMS
from tests import test_browser
from tests.conftest import App
from tests.test_browser import PICTURES, WAIT

browser = test_browser.browser
pytestmark = [*test_browser.pytestmark, pytest.mark.model, pytest.mark.timeout(600)]
RESULTS = {  # by what is seen of the first example
    "embed": ("0.53", ".drawing .heat"),
    "classify": ("billing", "#result"),
    "answer": ("On Saturdays it closes at two in the afternoon.", "#result .textfield span"),
    "fill": ("The dog barked at the postman all morning.", ".drawing .results"),
    "summarise": ("bridge", "#result textarea"),
}


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1200, "height": 860})
    yield context.new_page()
    context.close()


def visit(page: Page, app: App, name: str) -> Page:
    page.goto(f"{app.url}/{name}")
    expect(page.locator("#badge .ready")).to_be_visible(timeout=300_000)
    return page


def write(page: Page, label: str, text: str) -> None:
    page.get_by_label(label, exact=True).fill(text)


def go(page: Page) -> None:
    page.locator("#go").click()


def ended(page: Page, line: str | re.Pattern[str]) -> None:
    expect(page.locator("#line")).to_contain_text(line, timeout=120_000)


@pytest.mark.parametrize("name", RESULTS)
def test_an_example_and_a_click_give_a_result(page: Page, real_app: App, name: str) -> None:
    visit(page, real_app, name)
    page.locator(".gallery-item, table tbody tr").first.click()
    for field, value in zip(FORMS[name].page, FORMS[name].examples[0], strict=False):
        if field.kind in ("text", "long", "lines"):
            expect(page.get_by_label(field.label, exact=True)).to_have_value(value, timeout=WAIT)
    go(page)
    ended(page, re.compile(r" in \d"))
    words, place = RESULTS[name]
    if name == "summarise":
        expect(page.locator(place)).to_have_value(re.compile(words))
    else:
        expect(page.locator(place).filter(has_text=words).first).to_be_visible(timeout=WAIT)
    expect(page.locator("#go")).to_be_visible()
    expect(page.locator("#halt")).to_be_hidden()
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def test_scores_of_several_texts_are_listed(page: Page, real_app: App) -> None:
    visit(page, real_app, "classify")
    write(page, "Texts", "The goalie made forty saves.\n\nShares fell <b>today</b>.")
    write(page, "Labels", "sport, finance, ")
    go(page)
    ended(page, "2 texts in")
    rows = page.locator(".drawing .results tr")
    expect(rows).to_have_count(3, timeout=WAIT)
    assert [row.split("\t")[:2] for row in rows.all_inner_texts()[1:]] == [
        ["The goalie made forty saves.", "sport"],
        ["Shares fell <b>today</b>.", "finance"],
    ]


@pytest.mark.parametrize(
    ("name", "written", "words"),
    [
        ("embed", {}, "“Texts” is empty; give 1 to 10,000."),
        ("classify", {"Texts": "A text."}, "“Labels” is empty; give 1 to 1,000."),
        ("classify", {"Texts": "A", "Labels": "x, x"}, "“Labels”, number 2, is x"),
        ("classify", {"Texts": "A", "Labels": "x", "Template": "no slot"}, "“Template” is no slot"),
        ("answer", {"Question": "Who?"}, "“Document” is empty"),
        ("fill", {"Texts": "No blank here."}, "“Texts”, number 1, has no blank"),
        ("summarise", {"Text": " "}, "“Text” is empty"),
    ],
)
def test_a_refusal_is_in_the_words_of_the_page(
    page: Page, real_app: App, name: str, written: dict[str, str], words: str
) -> None:
    visit(page, real_app, name)
    for label, text in written.items():
        write(page, label, text)
    go(page)
    expect(page.locator("#line .refused")).to_contain_text(words, timeout=WAIT)
    expect(page.locator("#go")).to_be_visible()


def test_a_refusal_leaves_no_result_of_an_earlier_question(page: Page, real_app: App) -> None:
    visit(page, real_app, "classify")
    write(page, "Texts", "The goalie made forty saves.\nShares fell.")
    write(page, "Labels", "sport, " + "a label that is much too long for its bar " * 4)
    go(page)
    ended(page, "2 texts in")
    expect(page.locator(".drawing .results")).to_be_visible(timeout=WAIT)
    wide = "const e = document.querySelector('#result'); e.scrollWidth <= e.clientWidth"
    assert page.evaluate(f"(() => {{ {wide.replace('e.scroll', 'return e.scroll')} }})()")
    write(page, "Labels", "")
    go(page)
    expect(page.locator("#line .refused")).to_contain_text("“Labels” is empty", timeout=WAIT)
    expect(page.locator(".drawing .results")).to_have_count(0)
    expect(page.locator("#result .confidence-set")).to_have_count(0)


def test_a_long_list_can_be_stopped(page: Page, real_app: App) -> None:
    visit(page, real_app, "embed")
    lines = [f"Line {n} " + "of a very long list about trains and tea " * 8 for n in range(900)]
    write(page, "Texts", "\n".join(lines))
    go(page)
    page.locator("#halt").click(timeout=WAIT)
    expect(page.locator("#line .stopped")).to_be_visible(timeout=WAIT)
    expect(page.locator("#go")).to_be_visible()


def test_all_pages_are_a_click_apart_and_fit_a_telephone(page: Page, real_app: App) -> None:
    page.set_viewport_size({"width": 390, "height": 780})
    visit(page, real_app, "classify")
    for title in ("Embeddings", "Answers", "Fill in", "Summaries", "Pictures", "Chat"):
        page.locator("nav").get_by_text(title, exact=True).click()
        expect(page.locator("nav .active")).to_have_text(title, timeout=WAIT)
        expect(page.locator("#badge .ready")).to_be_visible(timeout=WAIT)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, title
