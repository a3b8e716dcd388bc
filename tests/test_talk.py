"""How a refusal reads: by the endpoint's fields for programs, in the page's words for people."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.chat import ChatResult
from pipelines.fronts import check_settings, too_long
from pipelines.talk import SAMPLING, Question, Turn, begun, drawn, said, sampled, summary
from queueing.work import Invalid

SAID = [said("user", "a"), said("assistant", "b")]
CASES: list[tuple[Any, Any, Any, str, str]] = [
    ("", None, "", "message is empty;", "Your message is empty;"),
    ("", SAID, 5, "message is a number;", "Your message is a number;"),
    ("be", SAID, " ", "message is empty;", "Your message is empty;"),
    (5, SAID, "Hi", "system is a number;", "The system prompt is a number;"),
    (
        "",
        [*SAID, {"role": "user"}],
        "x",
        "history[2].content is missing;",
        "Message 3 above is mis",
    ),
    ("be", ["a"], "Hi", "history[0] is text;", "Message 1 above is text;"),
    ("be", [said("tool", "x")], "Hi", "history[0].role is tool;", "Message 1 above is tool;"),
    ("be", [said("system", "x")], "Hi", "history[0].role is system;", "Message 1 above is system;"),
    ("", "before", "Hi", "history is text;", "the conversation is text;"),
    ("", [*SAID] * 500, "Hi", "1,001 entries in history and message;", "in the conversation;"),
    ("be", SAID, "x" * 10**6, "in system, history and message;", "characters in the conversation;"),
    (
        "",
        None,
        "x" * 1_000_001,
        "There are 1,000,001 characters in message;",
        "in the conversation",
    ),
]


@pytest.mark.parametrize(("system", "history", "message", "field", "words"), CASES)
def test_a_refusal_names_what_the_caller_gave(
    system: Any, history: Any, message: Any, field: str, words: str
) -> None:
    question = Question(system, history, message, SAMPLING)
    with pytest.raises(Invalid) as raised:
        check_settings(question.payload())
    assert field in question.in_fields(str(raised.value))
    assert words in question.in_words(str(raised.value))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seed", "a few", "The seed is text; give a whole number from"),
        ("stop", ["x" * 70], "The list of stop strings, number 1, has 70 characters;"),
        ("max_tokens", 0, "The longest answer is 0; give a whole number of at least 1."),
    ],
)
def test_a_setting_has_its_name_in_fields_and_its_label_in_words(
    name: str, value: Any, words: str
) -> None:
    question = Question("", None, "Hi", {**SAMPLING, name: value})
    with pytest.raises(Invalid) as raised:
        check_settings(question.payload())
    assert question.in_fields(str(raised.value)) == str(raised.value)
    assert words in question.in_words(str(raised.value))


def test_one_token_is_singular() -> None:
    assert str(too_long(10, 10)).endswith("shorten them by 1 token or more.")
    assert str(too_long(11, 10)).endswith("shorten them by 2 tokens or more.")
    assert summary(ChatResult("stop", 3, 1, 7), 2.0, 1.0).startswith("1 token in 2.0 s")


def test_the_settings_of_the_page_become_what_a_front_takes() -> None:
    assert sampled([9, 0, 1, 0, 0.1, 1, 0.5, -1, " 12 ", "a\n\nb"]) == {
        "max_tokens": 9,
        "temperature": 0,
        "top_p": 1,
        "top_k": 0,
        "min_p": 0.1,
        "repetition_penalty": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "seed": 12,
        "stop": ["a", "b"],
    }
    assert sampled([9, 0, 1, 0, 0, 1, 0, 0, "-", None])["seed"] == "-"


TALK = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]


@pytest.mark.parametrize(
    ("data", "talk", "wanted"),
    [
        (None, TALK, Turn(TALK, "typed", TALK, "typed")),
        ({"index": 1, "value": "an example"}, [], Turn([], "an example", [], "an example")),
        ({"index": [3, 0], "value": "d"}, TALK, Turn(TALK[:2], "c", TALK, "")),
        (
            {"index": 0, "value": "new", "previous_value": "a"},
            [said("user", "new"), *TALK[1:]],
            Turn([], "new", TALK, "new"),
        ),
        ("odd", TALK, Turn(TALK, "typed", TALK, "typed")),
    ],
)
def test_what_is_refused_leaves_the_conversation_as_it_was(
    data: Any, talk: list[Any], wanted: Turn
) -> None:
    assert begun(data, drawn(talk), "typed") == wanted
