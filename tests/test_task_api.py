"""One-shot tasks over the wire on the default models: results, refusals, company, stopping."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from tests.conftest import App

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]  # the first run prepares the models

CATS = ["A cat sleeps on the sofa.", "The kitten naps on the couch.", "Shares fell in trading."]
LIBRARY = (
    "The town library opened in 1906. It is open from nine to six on weekdays. On Saturdays it "
    "closes at two in the afternoon. On Sundays it stays shut. Late books cost ten cents a day."
)
ASKED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("/embed", (CATS,)),
    ("/embed", (["Bread rises.", "The bridge over the river has been closed " * 20],)),
    ("/classify", (["I was charged twice this month."], ["billing", "delivery", "praise"])),
    ("/classify", (CATS, ["pets", "finance"], "It deals with {}.", True)),
    ("/answer", (["When does the library close on Saturday?"], LIBRARY)),
    ("/fill", (["The ___ barked at the postman."], ["dog", "cat", "horse"])),
    ("/fill", (["[MASK] is the capital of France."],)),
    ("/summarise", (LIBRARY, "short")),
)


@pytest.fixture
def client(real_app: App) -> Client:
    return Client(real_app.url, verbose=False)


def near(one: Any, other: Any) -> bool:
    """The same, numbers within 1e-5."""
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-5)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(near, one, other))
    return bool(one == other)


def test_texts_alike_have_vectors_alike(client: Client) -> None:
    found = client.predict([*CATS, "", "so " * 2000], api_name="/embed")
    cat, kitten, shares, empty, long = found["embeddings"]
    assert found["dimensions"] == len(cat) == len(long) == 384 and empty is None
    dot = [sum(a * b for a, b in zip(cat, other, strict=True)) for other in (cat, kitten, shares)]
    assert dot[0] == pytest.approx(1, abs=1e-5) and dot[1] > 0.5 > dot[2]
    assert found["errors"] == [
        {"index": 3, "error": "texts[3] is empty; write at least one character that shows."}
    ]
    assert found["cut"] == [{"index": 4, "tokens": 2000 - 510}]


def test_words_that_the_model_does_not_know_are_told(client: Client) -> None:
    texts = ["A word of " + "l" * 200 + " letters", "Known words", "\U0001fae0 \U0001fae0"]
    found = client.predict(texts, api_name="/embed")
    assert found["unknown"] == [{"index": 0, "words": 1}, {"index": 2, "words": 2}]
    document = "It is known. " + "z" * 150 + " is not."
    (place,) = client.predict(["Who?"], document, api_name="/answer")["partly_read"]
    assert place == {"start": 13, "end": len(document), "cut": 0, "unknown": 1}


def test_plain_http_gets_what_it_can_be_given_without_a_stop_for_others(real_app: App) -> None:
    address = f"{real_app.url}/gradio_api/call/embed"

    def ask(texts: list[str]) -> str:
        event = httpx.post(address, json={"data": [texts]}).json()["event_id"]
        return httpx.get(f"{address}/{event}", timeout=60).text

    last = ask(CATS).strip().splitlines()[-1].removeprefix("data: ")
    (found,) = json.loads(last)
    assert [len(vector) for vector in found["embeddings"]] == [384] * 3
    assert "a call by plain HTTP takes at most 1,000. Send fewer" in ask(["a"] * 1001)


def test_a_vector_need_not_have_length_1(client: Client) -> None:
    found = client.predict(CATS[:1], "cls", False, api_name="/embed")
    assert sum(number**2 for number in found["embeddings"][0]) > 1.5


def test_labels_are_the_callers_own(client: Client) -> None:
    texts = ["The striker scored twice before half time.", "Simmer the onions in butter."]
    found = client.predict(texts, ["politics", "sport", "cooking"], api_name="/classify")
    assert [each["label"] for each in found["results"]] == ["sport", "cooking"]
    for each in found["results"]:
        assert sum(each["scores"].values()) == pytest.approx(1, abs=1e-4)
        assert each["score"] == max(each["scores"].values())


def test_several_labels_may_be_right(client: Client) -> None:
    text = "My phone does not connect to the car by bluetooth."
    asked = [text], ["phone", "car", "cooking"], "This text is about {}.", True
    scores = client.predict(*asked, api_name="/classify")["results"][0]["scores"]
    assert scores["phone"] > 0.5 and scores["car"] > 0.5 and scores["cooking"] < 0.1


def test_the_sentence_that_answers_is_told_with_its_place(client: Client) -> None:
    asked = ["When does it close on Saturday?", "What do late books cost?"], LIBRARY
    first, second = client.predict(*asked, api_name="/answer")["results"]
    assert first["answer"] == "On Saturdays it closes at two in the afternoon."
    assert second["answer"] == "Late books cost ten cents a day."
    for each in (first, second, *first["others"]):
        assert LIBRARY[each["start"] : each["end"]] == each["answer"]


def test_a_sentence_beyond_the_model_is_not_cut_silently(client: Client) -> None:
    found = client.predict(["Who?"], "A short one. " + "word " * 3000, api_name="/answer")
    (place,) = found["partly_read"]
    assert place["cut"] > 0 and len(found["results"][0]["others"]) == 1


def test_blanks_are_filled_by_the_whole_text(client: Client) -> None:
    texts = ["The ___ barked at the postman all morning.", "No blank here.", "[MASK] is in France."]
    found = client.predict(texts, ["dog", "Paris", "cake"], api_name="/fill")
    dog, none, paris = found["results"]
    assert dog["blanks"][0][0]["word"] == "dog" and paris["blanks"][0][0]["word"] == "Paris"
    assert dog["text"] == "The dog barked at the postman all morning."
    assert none is None and [each["index"] for each in found["errors"]] == [1]
    assert "no blank" in found["errors"][0]["error"]


def test_a_summary_streams_and_only_grows(client: Client) -> None:
    texts = list(client.submit(LIBRARY, "short", api_name="/summarise"))
    assert len(set(texts)) >= 3 and "library" in texts[-1]
    assert all(later.startswith(text) for text, later in zip(texts, texts[1:], strict=False))


@pytest.mark.parametrize(
    ("name", "asked", "words"),
    [
        ("/embed", ([],), "texts is empty; give 1 to 10,000."),
        ("/embed", (["", " \n"],), "texts[0] is empty"),
        ("/embed", (["\0", "\u200b\u2060"],), "texts[0] is empty"),
        ("/embed", (["a"] * 10_001,), "There are 10,001 entries in texts"),
        ("/embed", (["a"], "middle"), "pooling is middle; choose mean or cls or last."),
        ("/embed", (["a"], "mean", "yes"), "normalise is text; give true or false."),
        ("/embed", ([["a"]],), "texts[0] is a list; give text."),
        ("/classify", (["a"], []), "labels is empty; give 1 to 1,000."),
        ("/classify", (["a"], [str(n) for n in range(1001)]), "There are 1,001 entries in labels"),
        ("/classify", (["a"], ["x", " x "]), "labels[1] is x, as labels[0] is"),
        ("/classify", (["a"], ["x"], "About this."), "template is About this.; it must have {}"),
        ("/classify", (["a"], ["x"], "{} and {}"), "it must have {} once"),
        ("/answer", ([], "A text."), "questions is empty"),
        ("/answer", (["Who?"], "  "), "document is empty"),
        ("/answer", (["Who?"], "a" * 200_001), "at most 200,000 are taken"),
        ("/fill", (["No blank."],), "texts[0] has no blank; write ___ or [MASK]"),
        ("/fill", (["___ " * 17],), "texts[0] has 17 blanks; at most 16 are taken."),
        ("/fill", (["A ___."], None, 0), "top is 0; give a whole number from 1 to 100."),
        ("/fill", (["___ " + "long " * 3000],), "tokens; a text has at most"),
        ("/summarise", ("",), "text is empty"),
        ("/summarise", ("Short.", "tiny"), "length is tiny; choose short or medium or long."),
        ("/summarise", ("long " * 9000,), "text"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(
    client: Client, name: str, asked: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(AppError) as refused:
        client.predict(*asked, api_name=name)
    assert words in str(refused.value)


def test_a_thousand_labels_are_taken(client: Client) -> None:
    labels = [f"number {n}" for n in range(999)] + ["cooking"]
    found = client.predict(["Simmer the onions in butter."], labels, api_name="/classify")
    assert found["results"][0]["label"] == "cooking" and len(found["results"][0]["scores"]) == 1000


def test_everybody_gets_in_company_what_they_get_alone(client: Client, real_app: App) -> None:
    alone = [client.predict(*asked, api_name=name) for name, asked in ASKED]
    clients = [Client(real_app.url, verbose=False) for _ in range(2 * len(ASKED))]

    def ask(place: int) -> Any:
        name, asked = ASKED[place % len(ASKED)]
        return clients[place].predict(*asked, api_name=name)

    with ThreadPoolExecutor(len(clients)) as pool:
        together = list(pool.map(ask, range(len(clients))))
    for place, found in enumerate(together):
        assert near(found, alone[place % len(ASKED)]), ASKED[place % len(ASKED)]


def test_ten_thousand_texts_let_others_through_and_stop_when_told(
    client: Client, real_app: App
) -> None:
    other = Client(real_app.url, verbose=False)
    texts = [f"Line {n} of a very long list about trains, trees and tea." for n in range(10_000)]
    job = client.submit(texts, api_name="/embed")
    assert "status" in next(iter(job))
    assert other.predict(CATS, api_name="/embed")["dimensions"] == 384
    assert not job.done()
    job.cancel()
    assert other.predict(CATS, api_name="/embed")["dimensions"] == 384
    assert not any("embeddings" in each for each in job.outputs())


def test_the_api_page_says_what_each_takes(client: Client) -> None:
    found = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    names = {name: [each["parameter_name"] for each in found[name]["parameters"]] for name in found}
    assert names["/embed"] == ["texts", "pooling", "normalise"]
    assert names["/classify"] == ["texts", "labels", "template", "multi"]
    assert names["/answer"] == ["questions", "document"]
    assert names["/fill"] == ["texts", "targets", "top"]
    assert names["/summarise"] == ["text", "length"]
    assert "near one another" in found["/embed"]["description"]
