"""Models that settings name for classification, answers and blanks, tiny and random, from what a
caller sends to what it gets: as transformers' own pipelines give it where there are any, and as a
slow reference of every span says where not.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_bench import Bench, Loaded, run
from tiny_encoders import BERT, BYTES, CONTEXT, NAMES, ROBERTA, write_words

from pipelines import FRONTS, OWN, factory, served
from pipelines.entail import EntailFront
from pipelines.extract import LONGEST, ExtractFront, windows
from pipelines.mask import MaskFront
from queueing.work import Card, Invalid, Request, Row

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parent.parent
NEAR = 2e-6  # of shares that are told with six digits
TEXTS = ["The dog barked at the river.", "a library", "was it the lake?", "old blue bird house"]
TOPICS = ["sport", "politics", "cooking and water"]
LONG = " ".join(["the cat sleeps in the old house of the river and"] * 12)
DOCUMENT = (
    "The old library opened in 1906. It closes at two. A cat sleeps in it, naïve and green; the 🐦 "
    "barked. When was the blue river old? Not 12 birds of politics, cooking by the lake. A house "
    "and a dog (what sport!) is where water was; who is to say it? This text, about it all, ends."
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("own"))


def ask(front: Any, loaded: Loaded, payload: Mapping[str, Any]) -> Any:
    """A payload from check to end."""
    request = front.check(payload, loaded.card)
    row = Row(request, loaded.open(request), 0, float("inf"))
    return front.finish(request, run(loaded, [row], random.Random(0))[0])


def card(folder: Path, family: str, context: int = CONTEXT, **details: Any) -> Card:
    """Of a model that is not needed."""
    labels = json.dumps(details.pop("labels", ["contradiction", "neutral", "entailment"]))
    folder = write_words(folder / family, family)
    told = {"folder": str(folder), "model": "tiny", "labels": labels, **details}
    return Card(limits={"context": context}, details=told)


def theirs(folder: Path, family: str) -> Any:
    """Transformers' tokenizer over the same file."""
    order = (1, 3, 0, 2, 4) if family in BYTES else range(5)
    special = [(ROBERTA if family in BYTES else BERT)[place] for place in order]
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if family == "bert" else [])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        model_input_names=inputs,
        model_max_length=CONTEXT,
        **dict(zip(NAMES, special, strict=True)),
    )


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Transformers advises on devices and batches."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


def pipe(bench: Bench, family: str, task: str, kind: str, head: str) -> Any:
    folder = bench.folder(family, task)
    model = getattr(transformers, head).from_pretrained(folder)
    return transformers.pipeline(kind, model=model, tokenizer=theirs(folder, family))


@pytest.mark.parametrize("multi", [False, True])
@pytest.mark.parametrize("family", ["bert", "roberta", "bart"])
def test_labels_score_as_in_transformers_zero_shot_pipeline(
    bench: Bench, family: str, multi: bool
) -> None:
    texts = [*TEXTS, LONG]
    payload = {"texts": texts, "labels": TOPICS, "multi": multi, "template": "it was about {}."}
    found = ask(EntailFront(), bench.get(family, "classify"), payload)
    head = "AutoModelForSequenceClassification"
    peer = pipe(bench, family, "classify", "zero-shot-classification", head)
    for text, got in zip(TEXTS, found["results"], strict=False):
        wanted = peer(
            text,
            candidate_labels=TOPICS,
            multi_label=multi,
            hypothesis_template=payload["template"],
        )
        assert list(got["scores"]) == wanted["labels"]
        assert list(got["scores"].values()) == pytest.approx(wanted["scores"], abs=NEAR)
        assert (got["label"], got["score"]) == next(iter(got["scores"].items()))
        assert sum(got["scores"].values()) == pytest.approx(1, abs=1e-5) or multi
    assert [each["index"] for each in found["cut"]] == [4]
    assert found["errors"] == []


def test_a_text_scores_alike_whatever_stands_in_the_list(bench: Bench) -> None:
    loaded = bench.get("bert", "classify")
    together = ask(EntailFront(), loaded, {"texts": [LONG, "", *TEXTS], "labels": TOPICS})
    for text, got in zip([LONG, None, *TEXTS], together["results"], strict=True):
        if text is None:
            assert got is None
        else:
            alone = ask(EntailFront(), loaded, {"texts": text, "labels": TOPICS})["results"][0]
            assert got["scores"] == pytest.approx(alone["scores"], abs=1e-5)
    assert [each["index"] for each in together["errors"]] == [1]


def test_what_is_too_long_is_cut_off_the_text_and_alike_for_all_labels(tmp_path: Path) -> None:
    known = card(tmp_path, "bert")
    request = EntailFront().check({"texts": [LONG], "labels": TOPICS}, known)
    items = request.payload.items
    assert max(len(item.tokens) for item in items) == CONTEXT
    assert len({item.tokens[: len(item.tokens) - item.second] for item in items}) == 1
    ((place, cut),) = request.payload.cut
    most = max(item.second for item in items)
    count = len(theirs(Path(known.details["folder"]), "bert")(LONG, add_special_tokens=False)[0])
    assert (place, cut) == (0, count - (CONTEXT - most - 2))


def test_a_single_label_is_scored_by_itself(bench: Bench) -> None:
    loaded = bench.get("bert", "classify")
    (one,) = ask(EntailFront(), loaded, {"texts": TEXTS[0], "labels": ["sport"]})["results"]
    (all_,) = ask(EntailFront(), loaded, {"texts": TEXTS[0], "labels": TOPICS, "multi": True})[
        "results"
    ]
    assert one["score"] == pytest.approx(all_["scores"]["sport"], abs=1e-5)
    assert 0 < one["score"] < 1


def test_of_two_labels_the_other_one_is_the_contradiction(tmp_path: Path) -> None:
    front, known = EntailFront(), card(tmp_path, "bert", labels=["entailment", "not_entailment"])
    request = front.check({"texts": ["a"], "labels": ["x", "y"], "multi": True}, known)
    result = (np.array([2.0, 0.0], np.float32), np.array([0.0, 2.0], np.float32))
    (found,) = front.finish(request, result)["results"]
    shares = 1 / (1 + np.exp([-2.0, 2.0]))
    assert found["scores"] == pytest.approx({"x": shares[0], "y": shares[1]}, abs=NEAR)


@pytest.mark.parametrize(
    ("payload", "labels", "words"),
    [
        ({}, ["LABEL_0", "LABEL_1"], "CARPOOL_CLASSIFY_MODEL"),
        ({}, ["not_entailment", "neutral", "x"], "begins with entail"),
        ({"multi": True}, ["entailment", "neutral", "x"], "begins with contradict"),
        ({"texts": ["a"] * 200, "labels": [str(n) for n in range(51)]}, None, "10,200 pairs"),
        ({"labels": ["x" * 100]}, None, r"labels\[0\] has 10\d tokens"),
        ({"labels": []}, None, "labels"),
        ({"template": "none"}, None, "template"),
        ({"color": 1}, None, "color"),
    ],
)
def test_labels_are_refused_in_words(
    tmp_path: Path, payload: dict[str, Any], labels: list[str] | None, words: str
) -> None:
    known = card(tmp_path, "bert", **({} if labels is None else {"labels": labels}))
    with pytest.raises(Invalid, match=words):
        EntailFront().check({"texts": ["a"], "labels": ["b", "c"]} | payload, known)


def test_too_many_tokens_at_once_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.texts.TOKENS", 100)
    known = card(tmp_path, "bert")
    with pytest.raises(Invalid, match="tokens; at most 100 are taken"):
        EntailFront().check({"texts": TEXTS, "labels": TOPICS}, known)
    with pytest.raises(Invalid, match="tokens; at most 100 are taken"):
        ExtractFront().check({"questions": ["a"], "document": DOCUMENT}, known)


def spans(bench: Bench, family: str, question: str, document: str) -> list[tuple[float, int, int]]:
    """Every span of every window, by plain loops, the best first; the first says that nothing
    answers.
    """
    folder = bench.folder(family, "answer")
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
    tokenizer = theirs(folder, family)
    control = tokenizer.num_special_tokens_to_add(pair=True)
    room = CONTEXT - control - len(tokenizer(question, add_special_tokens=False)["input_ids"])
    found = tokenizer(
        question, document, truncation="only_second", max_length=CONTEXT, stride=room // 2,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    nothing, best = float("inf"), dict[tuple[int, int], float]()
    for n, ids in enumerate(found["input_ids"]):
        given = {name: torch.tensor([found[name][n]]) for name in tokenizer.model_input_names}
        with torch.inference_mode():
            out = model(**given)
        begins, ends = out.start_logits[0].tolist(), out.end_logits[0].tolist()
        nothing = min(nothing, begins[0] + ends[0])
        own = [place for place in range(len(ids)) if found.sequence_ids(n)[place] == 1]
        for first in own:
            for last in own:
                if first <= last < first + LONGEST:
                    offsets = found["offset_mapping"][n]
                    span = offsets[first][0], offsets[last][1]
                    best[span] = max(best.get(span, -1e9), begins[first] + ends[last])
    order = sorted(((score, *span) for span, score in best.items()), reverse=True)
    return [(nothing, 0, 0), *order]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_answers_are_the_best_spans_of_all_windows(bench: Bench, family: str) -> None:
    loaded = bench.get(family, "answer")
    questions = ["When was it?", "what sleeps in the house of the old bird", "who?"]
    found = ask(ExtractFront(), loaded, {"questions": questions, "document": DOCUMENT})
    assert len(found["results"]) == 3
    for question, got in zip(questions, found["results"], strict=True):
        nothing, *order = spans(bench, family, question, DOCUMENT)
        raised = np.exp(np.array([nothing[0], *(score for score, *_ in order[:20])]))
        shares = raised / raised.sum()
        best = int(shares[:2].argmax())
        wanted = (nothing, order[0])[best]
        assert got["score"] == pytest.approx(shares[best], abs=1e-4)
        assert (got["start"], got["end"]) == wanted[1:]
        told = [got, *got["others"]]
        assert [each["score"] for each in told] == sorted(
            (each["score"] for each in told), reverse=True
        )
        for each in told:
            assert each["answer"] == DOCUMENT[each["start"] : each["end"]]
        parts = sorted((each["start"], each["end"]) for each in told)
        assert all(end <= begin for (_, end), (begin, _) in zip(parts, parts[1:], strict=False))


def made(request: Request, score: Any) -> list[Any]:
    """Results in which score(tokens, place) says how likely an answer begins and ends there."""
    results = []
    for item in request.payload.items:
        numbers = np.full((len(item.tokens), 2), -5.0, np.float32)
        for place in range(len(item.tokens)):
            numbers[place] += score(item.tokens, place)
        results.append(numbers)
    return results


@pytest.fixture(params=["bert", "roberta"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Card:
    return card(tmp_path, request.param)


def token(known: Card, word: str) -> int:
    family = Path(known.details["folder"]).name
    ids: list[int] = theirs(Path(known.details["folder"]), family)(
        f" {word}", add_special_tokens=False
    )["input_ids"]
    assert len(ids) == 1
    return ids[0]


def test_an_answer_beyond_the_first_window_is_found_where_it_stands(where: Card) -> None:
    front = ExtractFront()
    document = f"{LONG} green politics {LONG} {LONG}"
    request = front.check({"questions": ["what was it about?"], "document": document}, where)
    assert len(request.payload.items) > 5
    green, politics = token(where, "green"), token(where, "politics")

    def score(tokens: Sequence[int], place: int) -> tuple[float, float]:
        return 9.0 * (tokens[place] == green), 9.0 * (tokens[place] == politics)

    (found,) = front.finish(request, made(request, score))["results"]
    assert found["answer"] == "green politics"
    assert found["start"] == document.index("green politics") > len(LONG)
    assert found["end"] == found["start"] + len("green politics")
    assert 0.9 < found["score"] <= 1


def test_where_nothing_answers_the_answer_is_empty_and_others_are_told(where: Card) -> None:
    front = ExtractFront()
    document = "the old cat sleeps in green water"
    request = front.check({"questions": ["who?"], "document": document}, where)
    green = token(where, "green")

    def score(tokens: Sequence[int], place: int) -> float:
        return 9.0 * (place == 0) + 6.0 * (tokens[place] == green)

    (found,) = front.finish(request, made(request, score))["results"]
    assert (found["answer"], found["start"], found["end"]) == ("", 0, 0)
    assert found["score"] > 0.5
    assert found["others"][0]["answer"] == "green"


def test_nothing_answers_only_where_it_is_likely_in_every_window(where: Card) -> None:
    front = ExtractFront()
    request = front.check({"questions": ["who?"], "document": f"{LONG} green {LONG}"}, where)
    green = token(where, "green")

    def score(tokens: Sequence[int], place: int) -> float:
        return 12.0 * (place == 0 and green not in tokens) + 6.0 * (tokens[place] == green)

    (found,) = front.finish(request, made(request, score))["results"]
    assert found["answer"] == "green"


def test_no_span_is_of_the_question_turned_round_or_too_long(where: Card) -> None:
    front = ExtractFront()
    document = "the green water in the lake politics"
    request = front.check({"questions": ["green politics sport"], "document": document}, where)
    (item,) = request.payload.items
    green, politics, sport = (token(where, word) for word in ("green", "politics", "sport"))
    assert sport in item.tokens

    def score(tokens: Sequence[int], place: int) -> tuple[float, float]:
        within = tokens[place] == sport
        return 5.0 * (tokens[place] == politics) + 9 * within, 5.0 * (
            tokens[place] == green
        ) + 9 * within

    (found,) = front.finish(request, made(request, score))["results"]
    assert "sport" not in found["answer"]
    assert 0 <= found["start"] < found["end"] <= len(document)
    assert found["score"] < 0.5  # green and politics are each as good as the other


@pytest.mark.parametrize(("count", "room"), [(1, 10), (10, 10), (11, 10), (500, 30), (4000, 480)])
def test_windows_cover_a_document_and_share_what_an_answer_may_need(count: int, room: int) -> None:
    found = list(windows(count, room))
    assert found[0][0] == 0
    assert found[-1][1] == count
    assert all(begin < end <= begin + room for begin, end in found)
    for (_, end), (begin, _) in zip(found, found[1:], strict=False):
        assert end - begin == min(128, room // 2)


def test_a_question_that_is_too_long_is_cut_and_an_empty_one_fails_alone(where: Card) -> None:
    payload = {"questions": [LONG, "", "who?"], "document": DOCUMENT}
    request = ExtractFront().check(payload, where)
    assert [place for place, _ in request.payload.errors] == [1]
    ((place, cut),) = request.payload.cut
    assert place == 0
    assert cut > 50
    assert max(len(item.tokens) for item in request.payload.items) <= CONTEXT


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"document": "\u200b\u0007"}, "document"),
        ({"document": " "}, "document is empty"),
        ({"questions": []}, "questions"),
        ({"color": 1}, "color"),
    ],
)
def test_questions_are_refused_in_words(
    tmp_path: Path, payload: dict[str, Any], words: str
) -> None:
    with pytest.raises(Invalid, match=words):
        ExtractFront().check(
            {"questions": ["a"], "document": "b"} | payload, card(tmp_path, "bert")
        )


BLANKED = [
    "The old ___ barked at the cat.",
    "[MASK] sleeps in the <mask>.",
    "it was ____",
    "a_[MASK]",
]


def masked(text: str, mask: str) -> str:
    for blank in ("____", "___", "[MASK]", "<mask>"):
        text = text.replace(blank, "\0")
    return text.replace("\0", mask)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_blanks_are_filled_as_in_transformers_fill_mask_pipeline(bench: Bench, family: str) -> None:
    found = ask(MaskFront(), bench.get(family, "fill"), {"texts": BLANKED, "top": 4})
    peer = pipe(bench, family, "fill", "fill-mask", "AutoModelForMaskedLM")
    mask = peer.tokenizer.mask_token
    for text, got in zip(BLANKED, found["results"], strict=True):
        wanted = peer(masked(text, mask), top_k=8)
        wanted = wanted if isinstance(wanted[0], list) else [wanted]
        assert len(got["blanks"]) == len(wanted)
        for words, tokens in zip(got["blanks"], wanted, strict=True):
            distinct = dict[str, float]()
            for each in tokens:
                word = each["token_str"].strip().removeprefix("##")
                distinct.setdefault(word, each["score"])
            assert [each["word"] for each in words] == list(distinct)[:4]
            scores = [each["score"] for each in words]
            assert scores == pytest.approx(list(distinct.values())[:4], abs=NEAR)
        best = iter(words[0]["word"] for words in got["blanks"])
        assert got["text"] == "".join(
            next(best) if part == "\0" else part for part in masked(text, "\0")
        )


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_targets_are_whole_words_with_the_space_before_them(bench: Bench, family: str) -> None:
    loaded = bench.get(family, "fill")
    words = ["dog", "library", "river"]
    payload = {"texts": BLANKED[0], "targets": words}
    (found,) = ask(MaskFront(), loaded, payload)["results"]
    peer = pipe(bench, family, "fill", "fill-mask", "AutoModelForMaskedLM")
    space = "Ġ" if family in BYTES else ""
    wanted = peer(
        masked(BLANKED[0], peer.tokenizer.mask_token), targets=[f"{space}{word}" for word in words]
    )
    assert {each["word"] for each in found["blanks"][0]} == set(words)
    assert [each["word"] for each in found["blanks"][0]] == [
        each["token_str"].strip() for each in wanted
    ]
    scores = [each["score"] for each in found["blanks"][0]]
    assert scores == pytest.approx([each["score"] for each in wanted], abs=NEAR)


def test_a_word_with_and_without_a_space_is_told_once_as_its_likelier_form(tmp_path: Path) -> None:
    front, known = MaskFront(), card(tmp_path, "roberta")
    request = front.check({"texts": ["___ b"], "targets": ["a", "of"]}, known)
    (item,) = request.payload.items
    spaced, bare, of = item.ask.targets
    result = [(np.array([bare, of, spaced]), np.array([0.5, 0.3, 0.1], np.float32))]
    (found,) = front.finish(request, (result,))["results"]
    assert found["blanks"] == [[{"word": "a", "score": 0.5}, {"word": "of", "score": 0.3}]]
    assert found["text"] == "a b"


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_only_blanks_become_masks_and_other_control_tokens_stay_text(
    tmp_path: Path, family: str
) -> None:
    known = card(tmp_path, family)
    text = "a </s> [SEP] ___ <s> [CLS] [MASK] b"
    request = MaskFront().check({"texts": [text]}, known)
    (item,) = request.payload.items
    control = (0, 2) if family in BYTES else (2, 3)
    assert [token for token in item.tokens if token in control] == list(control)
    assert [item.tokens[place] for place in item.ask.places] == [4, 4]
    assert item.tokens.count(4) == 2


def test_a_mask_that_takes_the_space_before_it_is_read_so(tmp_path: Path) -> None:
    known = card(tmp_path, "roberta")
    (item,) = MaskFront().check({"texts": ["the ___ barked"]}, known).payload.items
    peer = theirs(Path(known.details["folder"]), "roberta")
    assert list(item.tokens) == peer("the <mask> barked")["input_ids"]
    assert len(item.tokens) == len(peer("the barked")["input_ids"]) + 1


def test_a_text_that_is_too_long_or_has_no_blank_fails_alone(tmp_path: Path) -> None:
    texts = ["___ b", f"{LONG} ___", "none", "a [MASK]", ""]
    request = MaskFront().check({"texts": texts}, card(tmp_path, "bert"))
    errors = dict(request.payload.errors)
    assert list(errors) == [1, 2, 4]
    assert errors[1].startswith("texts[1] has ")
    assert f"at most {CONTEXT}" in errors[1]
    one = [(np.array([20]), np.array([0.5], np.float32))]
    found = MaskFront().finish(request, (one, one))
    assert [each is not None for each in found["results"]] == [True, False, False, True, False]
    assert [each["index"] for each in found["errors"]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"texts": "none"}, "texts has no blank"),
        ({"texts": [f"___ {LONG}"]}, r"texts\[0\] has \d+ tokens"),
        ({"texts": f"___ {LONG}"}, r"texts has \d+ tokens"),
        ({"targets": ["dog", "zebra"]}, r"targets\[1\] is zebra.*not one token"),
        ({"targets": ["dog", "Ω"]}, r"targets\[1\] is .*not one token"),
        ({"targets": ["dog", "Dog"]}, r"targets\[1\] is Dog.*as it reads dog"),
        ({"top": 0}, "top"),
        ({"color": 1}, "color"),
    ],
)
def test_blanks_are_refused_in_words(tmp_path: Path, payload: dict[str, Any], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        MaskFront().check({"texts": ["a ___"]} | payload, card(tmp_path, "bert"))


def test_a_model_without_a_mask_is_refused_in_words(tmp_path: Path) -> None:
    known = card(tmp_path, "bert")
    (Path(known.details["folder"]) / "tokenizer_config.json").write_text("{}")
    with pytest.raises(Invalid, match="CARPOOL_FILL_MODEL"):
        MaskFront().check({"texts": ["a ___"]}, known)


def test_a_setting_brings_a_model_and_a_front_of_its_own() -> None:
    own = dict.fromkeys(("classify", "answer", "fill"), "a-model")
    found = served(own)
    assert set(found.models) == {"chat", "embed", "image", *own}
    for task in own:
        front = factory(found.fronts[task])()
        assert front.task == task
        assert found.models[task].pipeline[1] == {"task": task}
        assert not found.models[task].policy.preload
        assert served({}).fronts[task] == FRONTS[task] != OWN[task][0]
    assert served({}).models["embed"].policy.preload


def test_a_summary_says_how_many_and_what_was_left_out(bench: Bench) -> None:
    front, loaded = EntailFront(), bench.get("bert", "classify")
    found = ask(front, loaded, {"texts": ["a", ""], "labels": TOPICS})
    assert "1 text in 2.0 s" in front.summary(found, 2.0, 1.0)
    assert "left out" in front.summary(found, 2.0, 1.0)


def test_fronts_work_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    known = replace(card(tmp_path, "bert"))
    code = f"""
import sys; sys.modules.update(dict.fromkeys(["torch", "transformers"]))
from pipelines.entail import EntailFront; from pipelines.extract import ExtractFront
from pipelines.mask import MaskFront; from queueing.work import Card
card = Card(limits={known.limits!r}, details={known.details!r})
EntailFront().check({{"texts": ["a"], "labels": ["b", "c"]}}, card)
ExtractFront().check({{"questions": ["a"], "document": "b"}}, card)
MaskFront().check({{"texts": ["a ___"]}}, card)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
