"""Whole files on a page in a real browser: chosen, started, watched, stopped, fetched, left."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Download, Page, expect

from tests import test_browser
from tests.conftest import App, Launch
from tests.test_browser import WAIT, picture
from tests.test_files import numbered, results, until

browser = test_browser.browser
pytestmark = test_browser.pytestmark


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def lists(launch: Launch, folder: Path) -> App:
    return launch(LISTS="0.2", GRADIO_TEMP_DIR=str(folder))


@pytest.fixture
def page(browser: Browser, lists: App) -> Iterator[Page]:
    """The page of a task, with the part for files unfolded."""
    context = browser.new_context(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    yield visit(context.new_page(), lists)
    context.close()


def visit(page: Page, app: App, task: str = "classify") -> Page:
    page.goto(f"{app.url}/{task}")
    page.locator("#bring > button").click(timeout=WAIT)
    expect(page.locator("#bring-go")).to_be_visible(timeout=WAIT)
    return page


def bring(page: Page, content: str, name: str = "reviews.csv") -> None:
    file = {"name": name, "mimeType": "text/csv", "buffer": content.encode()}
    page.locator("#bring input[type=file]").set_input_files(file)
    expect(page.locator(f"#bring a[href*='{name}']")).to_be_visible(timeout=WAIT)


def said(page: Page, words: str) -> None:
    expect(page.locator("#bring-line")).to_contain_text(re.compile(words), timeout=WAIT)


def column(page: Page, name: str) -> None:
    expect(page.get_by_label("Column of texts")).to_have_value(name, timeout=WAIT)


def ending(*names: str) -> list[re.Pattern[str]]:
    """Options, which have a mark before their names."""
    return [re.compile(f"{name}$") for name in names]


def fetched(page: Page) -> list[dict[str, str]]:
    with page.expect_download() as download:
        page.locator("#bring a").last.click()
    found: Download = download.value
    assert found.suggested_filename == "reviews classify.csv"
    with open(found.path(), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_file_goes_through_a_page_and_comes_back(page: Page) -> None:
    rows = "".join(f"{n},{'' if n == 5 else f'line {n}'}\n" for n in range(700))
    bring(page, "id,review\n" + rows)
    column(page, "review")
    page.get_by_label("Labels").fill("x, y")
    page.locator("#bring-go").click()
    said(page, "0 of 700 lines|256 of 700 lines, 1 with an error")
    said(page, "700 lines, 1 with an error, in")
    expect(page.locator("#bring-go")).to_be_visible(timeout=WAIT)
    found = fetched(page)
    assert [row["id"] for row in found] == [str(n) for n in range(700)]
    assert {n: row["error"] for n, row in enumerate(found) if row["error"]} == {
        5: "Line 7 has no text in column review."
    }


def test_a_stopped_file_is_there_as_far_as_it_came(page: Page) -> None:
    bring(page, numbered(30_000))
    page.get_by_label("Labels").fill("x, y")
    page.locator("#bring-go").click()
    said(page, r"\d of 30,000 lines, about .* left")
    expect(page.locator("#bring-line .bar b")).to_be_visible()
    picture(page, "file")
    page.locator("#bring-halt").click()
    said(page, r"Stopped after [\d,]+ of 30,000 lines")
    expect(page.get_by_text("Results so far")).to_be_visible(timeout=WAIT)
    expect(page.locator("#bring-halt")).to_be_hidden()
    done = re.search(r"after ([\d,]+) of", page.locator("#bring-line").inner_text())
    assert done is not None
    assert len(fetched(page)) == int(done[1].replace(",", "")) > 0


def test_a_tab_that_is_left_ends_its_file(browser: Browser, lists: App, folder: Path) -> None:
    before, context = results(folder), browser.new_context()
    page = visit(context.new_page(), lists, "embed")
    bring(page, numbered(30_000))
    page.locator("#bring-go").click()
    said(page, r"\d of 30,000 lines, about .* left")
    assert len(results(folder)) == len(before) + 1
    context.close()
    assert until(lambda: results(folder) == before)


def test_the_columns_are_those_of_the_file(page: Page) -> None:
    bring(page, "id,what,n\n1,2,3\n")
    said(page, "Choose the column that has the texts")
    names = page.get_by_label("Column of texts")
    names.click()
    expect(page.get_by_role("option")).to_have_text(ending("id", "what", "n"), timeout=WAIT)
    page.get_by_role("option", name="what").click()
    column(page, "what")
    page.get_by_label("The first line of a CSV names the columns").uncheck()
    column(page, "")
    names.click()
    expect(page.get_by_role("option")).to_have_text(ending("n 1", "n 2", "n 3"), timeout=WAIT)


def test_what_is_wrong_is_said_on_the_page(page: Page) -> None:
    page.locator("#bring-go").click()
    said(page, "There is no file; bring a CSV or text file")
    bring(page, "a,b\n1,2\n")
    page.get_by_label("Labels").fill("x, x")
    page.locator("#bring-go").click()
    said(page, "Say which column has the texts: a, b.")
    page.get_by_label("Column of texts").click()
    page.get_by_role("option", name="b").click()
    page.locator("#bring-go").click()
    said(
        page, "“Labels”, number 2, is x, as “Labels”, number 1, is; give each|give each label once"
    )
    expect(page.locator("#bring-halt")).to_be_hidden()
    page.get_by_label("Clear").first.click()
    bring(page, "PK\x03\x04\0", "sheet.csv")
    said(page, "zero byte")
