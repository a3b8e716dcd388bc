"""Forms: what they read, how refusals and results are told in the words of a page."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from pipelines import drawing
from pipelines.catalogue import ANSWER, CLASSIFY, EMBED, FORMS
from pipelines.embed import left_out
from pipelines.forms import Form
from pipelines.task_page import spared


@pytest.mark.parametrize(
    ("form", "line", "told"),
    [
        (EMBED, "texts is empty; give 1 to 3.", "“Texts” is empty; give 1 to 3."),
        (EMBED, "There are 9 entries in texts; give 3.", "There are 9 entries in “Texts”; give 3."),
        (
            EMBED,
            "9 tokens · 1 left out: texts[0] is empty.",
            "9 tokens · 1 left out: “Texts”, number 1, is empty.",
        ),
        (
            CLASSIFY,
            "labels[1] is x, as labels[0] is; give each once.",
            "“Labels”, number 2, is x, as “Labels”, number 1, is; give each once.",
        ),
        (ANSWER, "1 question; a text about questions.", "1 question; a text about questions."),
    ],
)
def test_fields_are_named_as_they_are_on_the_page(form: Form, line: str, told: str) -> None:
    assert form.in_words(line) == told


def test_all_that_is_left_out_is_told_up_to_a_few() -> None:
    wrong = [{"index": n, "error": f"texts[{n}] is bad."} for n in range(7)]
    told = left_out({"errors": wrong[:2], "cut": [], "unknown": [1]})
    assert told.startswith(" · 1 with words that the model does not know · 2 left out: texts[0] is")
    assert told.endswith("bad. texts[1] is bad.")
    assert left_out({"errors": wrong, "cut": [], "unknown": []}).endswith(
        "texts[4] is bad. and 2 more"
    )


def test_lines_that_show_nothing_are_no_texts() -> None:
    written = EMBED.fields[0].read("a\n\n \n\u200b\n\x01\nb")
    assert written == ["a", "b"]


def shown(form: Form, label: str, seen: dict[str, Any]) -> Any:
    return next(each for each in form.shows if each.label == label).value(seen)


def test_results_stand_beside_their_texts() -> None:
    one = {"label": "<i>", "score": 0.5, "scores": {"<i>": 0.5}}
    drawn = shown(CLASSIFY, "All", {"texts": ["a", "", "<b>"], "results": [one, None, one]})
    assert "<td>a</td><td>&lt;i&gt;</td>" in drawn and "<td>&lt;b&gt;</td>" in drawn


def test_an_answer_of_nothing_is_said() -> None:
    one = {"answer": "", "score": 0.9, "others": [{"answer": "x", "score": 0.1}]}
    drawn = shown(ANSWER, "Likeliest answers", {"questions": ["Who?"], "results": [one]})
    assert "<td>Who?</td><td>nothing</td>" in drawn and "<td></td><td>x</td>" in drawn


def test_a_page_draws_no_more_than_can_be_read() -> None:
    drawn = drawing.table(("n",), [(n,) for n in range(1201)])
    assert drawn.count("<tr>") == 201 and "and 1,001 more, not drawn" in drawn
    vectors = [[1.0, 0.0]] * 10_000
    heat = drawing.heat({"embeddings": [None, *vectors[1:]]}, ["a"] * 10_000)
    assert heat.count("<tr>") == 25 and "and 9,975 more, not drawn" in heat
    assert heat.startswith('<table class="heat"><tr><th></th><td></td><th>2</th>')
    (label,) = (each.label for each in EMBED.shows if each.kind == "data")
    assert len(shown(EMBED, label, {"embeddings": vectors})) == 24


def test_long_results_are_json_before_gradio_walks_through_them() -> None:
    result = {"results": [{"a": [1.5, None]}, None], "tokens": 3, "errors": [], "model": "m"}
    assert orjson.loads(orjson.dumps(spared(result))) == result
    kinds = {name: type(value) for name, value in spared(result).items()}
    assert kinds["results"] is orjson.Fragment and kinds["tokens"] is int


def test_every_page_has_an_example_that_fills_its_first_fields() -> None:
    for form in FORMS.values():
        assert form.name == "chat" or form.examples
        assert all(len(example) <= len(form.page) for example in form.examples)
