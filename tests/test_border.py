"""What comes over plain HTTP and is wrong: one sentence for the caller, nothing in the log."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from gradio_client import Client

from queueing.payload import DEEPEST, Gate, TooLong, opened
from queueing.work import Invalid
from tests.conftest import App
from tests.test_app import call, join, messages

NINES = b"9" * 5000
DEEP = b"[" * 10_000 + b"]" * 10_000
WRONG: list[tuple[str, bytes | Any, str]] = [
    ("no values", {"data": []}, "message is missing; give text"),
    ("too many values", {"data": ["Hi", *range(20)]}, "data has 21 values; at most 13"),
    (
        "data is a text",
        {"data": "Hi"},
        'data should be a valid list; send an object such as {"data',
    ),
    ("data is null", {"data": None}, "data should be a valid list"),
    ("no data", {}, 'data is missing; send an object such as {"data": ["Hello"]}'),
    ("a wrong tab", {"data": ["Hi"], "session_hash": 5}, "session_hash should be a valid string"),
    ("a list", [1], 'no object; send an object such as {"data": ["Hello"]}'),
    ("null", None, "no object; send"),
    ("nothing", b"", "The body is not a JSON object; send"),
    ("not JSON", b"{", "The body is not JSON (expecting property name"),
    ("not UTF-8", b'{"data": ["\xff"]}', "The body is not JSON (not UTF-8); send"),
    ("deep", b'{"data": ' + DEEP + b"}", "stand more than 100 deep in one another"),
    ("less deep", b'{"data": ' + DEEP[9500:10500] + b"}", "in data stand more than 100 deep"),
    ("many digits", b'{"data": ["Hi", null, "", ' + NINES + b"]}", "max_tokens is a number with"),
    ("empty", {"data": [""]}, "message is empty; write"),
    ("only spaces", {"data": ["  \n"]}, "message is empty"),
    ("a number", {"data": [5]}, "message is a number; give text"),
    ("an object", {"data": [{"path": "/etc/passwd"}]}, "message is an object; give text"),
    ("history is a text", {"data": ["Hi", "before"]}, "history is text; give a list of objects"),
    ("history of texts", {"data": ["Hi", ["before"]]}, "history[0] is text; give an object"),
    ("system is a number", {"data": ["Hi", None, 5]}, "system is a number; give text"),
    ("ten megabytes", {"data": ["a" * 10_000_000]}, "There are 10,000,000 characters in message"),
    ("twenty megabytes", {"data": ["a" * 20_000_000]}, "at most 16,000,000"),
    (
        "max_tokens 0",
        {"data": ["Hi", None, "", 0]},
        "max_tokens is 0; give a whole number from 1 to",
    ),
    ("max_tokens a text", {"data": ["Hi", None, "", "many"]}, "max_tokens is text"),
    ("temperature negative", {"data": ["Hi", None, "", 9, -1]}, "temperature is -1"),
    ("temperature NaN", b'{"data": ["Hi", null, "", 9, NaN]}', "temperature is nan"),
    ("top_p 0", {"data": ["Hi", None, "", 9, 1, 0]}, "top_p is 0"),
    ("top_p above 1", {"data": ["Hi", None, "", 9, 1, 1.5]}, "top_p is 1.5"),
    ("top_k", {"data": ["Hi", None, "", 9, 1, 1, 2**60]}, "give a whole number from 0 to 1048576"),
    ("seed too long", {"data": ["Hi", None, "", 9, 1, 1, 0, 1, 2**70]}, "seed is 11805"),
    ("stop too many", {"data": ["Hi", None, "", 9, 1, 1, 0, 1, 7, ["x"] * 1000]}, "stop has 1,000"),
]


@pytest.mark.parametrize(("body", "names"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
def test_a_wrong_payload_is_refused_in_one_sentence(app: App, body: Any, names: str) -> None:
    logged = len(app.lines)
    event, data = call(app, body)
    assert event in ("error", "400", "413", "422"), data
    sentence = data["error"] if event == "error" else json.loads(data)["detail"]
    assert names in sentence
    assert len(sentence) < 200
    assert call(app, {"data": ["Hi", None, "", 2]})[0] == "complete"
    assert app.lines[logged:] == []


def test_an_unknown_endpoint_is_refused_in_words(app: App) -> None:
    unknown = httpx.post(f"{app.url}/gradio_api/call/nothing", json={"data": []})
    body = {"data": [], "fn_index": 999, "session_hash": "tab-unknown"}
    for answer in (unknown, httpx.post(f"{app.url}/gradio_api/queue/join", json=body)):
        assert (answer.status_code, "no such endpoint" in answer.text) == (404, True)


def test_fields_by_name_that_do_not_exist_are_refused_in_words(app: App) -> None:
    logged = len(app.lines)
    answer = httpx.post(f"{app.url}/gradio_api/call/v2/chat", json={"data": ["Hi"]})
    assert (answer.status_code, "not the fields" in answer.text) == (422, True)
    assert app.lines[logged:] == []


def test_a_call_or_tab_that_is_not_there_is_answered_at_once(app: App) -> None:
    logged = len(app.lines)
    for path in ("call/chat/zzz", "call/nothing/zzz", "queue/data?session_hash=nobody"):
        answer = httpx.get(f"{app.url}/gradio_api/{path}", timeout=5)
        assert (answer.status_code, "no such call" in answer.json()["detail"]) == (404, True), path
    assert "session_hash is missing" in httpx.get(f"{app.url}/gradio_api/queue/data").text
    assert app.lines[logged:] == []


def test_an_answer_is_read_once_and_the_second_reader_is_told(app: App) -> None:
    address = f"{app.url}/gradio_api/call/chat"
    id = httpx.post(address, json={"data": ["Hi", None, "", 2]}).json()["event_id"]
    assert "event: complete" in httpx.get(f"{address}/{id}", timeout=30).text
    assert httpx.get(f"{address}/{id}", timeout=5).status_code == 404


def test_a_tab_may_go_on_after_its_stream_was_drained(app: App) -> None:
    for _ in range(2):
        join(app, "tab-drained", max_tokens=2)
        assert messages(app, "tab-drained")[-2]["success"]


def test_a_body_that_breaks_off_disturbs_nobody(app: App) -> None:
    logged, address = len(app.lines), urlsplit(app.url)
    head = b"POST /gradio_api/call/chat HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    for rest in (
        b"transfer-encoding: chunked\r\n\r\n10\r\n" + b'{"data": ["Hello',
        b'content-length: 400\r\n\r\n{"data": ["Hello',
    ):
        with socket.create_connection((address.hostname or "", address.port or 0)) as caller:
            caller.sendall(head + rest)
            caller.shutdown(socket.SHUT_WR)
            assert caller.recv(100) == b""
    assert call(app, {"data": ["Hi", None, "", 2]})[0] == "complete"
    assert app.lines[logged:] == []


def test_wrong_payloads_disturb_nobody(app: App) -> None:
    client = Client(app.url, verbose=False)
    job = client.submit("Hi", max_tokens=150, api_name="/chat")
    for _, body, _ in WRONG:
        call(app, body)
    assert len(job.result(timeout=60).split()) == 150


def test_unpaired_surrogates_and_control_characters_reach_the_model_as_valid_text(app: App) -> None:
    event, data = call(app, b'{"data": ["a \\ud800 b \\u0000 \\u001b", null, "", 5]}')
    assert event == "complete" or "control characters" in data["error"]


def test_a_body_passes_as_it_came_and_a_number_nobody_reads_is_cut() -> None:
    plain = b'{"data" : ["\\ud800", NaN, 1.0]}'
    assert opened(plain) is plain
    assert json.loads(opened(b'{"data": [' + NINES + b', "' + NINES + b'"]}')) == {
        "data": [10**4300 - 1, NINES.decode()]
    }


@pytest.mark.parametrize(("deep", "taken"), [(DEEPEST, True), (DEEPEST + 1, False)])
def test_depth_has_one_limit_for_lists_and_objects(deep: int, taken: bool) -> None:
    for left, right in ((b"[", b"]"), (b'{"a":', b"}")):
        body = (
            b'{"data": ' + left * (deep - 1) + (b"1" if left != b"[" else b"") + right * (deep - 1)
        )
        if taken:
            assert opened(body + b"}") == body + b"}"
        else:
            with pytest.raises(Invalid, match="deep"):
                opened(body + b"}")


async def application(scope: Any, receive: Any, send: Any) -> None:
    scope["heard"].extend([await receive(), await receive()])


def asked(headers: list[tuple[bytes, bytes]], parts: list[dict[str, Any]]) -> tuple[Any, Any, Any]:
    scope = {"type": "http", "method": "POST", "headers": headers, "heard": []}
    coming, sent = iter(parts), []

    async def receive() -> dict[str, Any]:
        return next(coming)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    return scope, receive, (send, sent)


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_a_body_in_parts_arrives_whole_and_a_hang_up_after_it_is_heard() -> None:
    gone = {"type": "http.disconnect"}
    scope, receive, (send, sent) = asked([], [part(b"123"), part(b"45", False), gone])
    await Gate(application, most=5)(scope, receive, send)
    assert scope["heard"] == [part(b"12345", False), gone]
    assert sent == []


async def test_a_body_that_did_not_say_its_length_is_refused_at_the_limit() -> None:
    scope, receive, (send, sent) = asked([], [part(b"12345")] * 3)
    await Gate(application, most=12)(scope, receive, send)
    assert (scope["heard"], sent[0]["status"]) == ([], 413)
    assert b"at most 12 are taken" in sent[1]["body"]
    assert issubclass(TooLong, Invalid)


async def test_whoever_hangs_up_within_a_body_is_nobody() -> None:
    scope, receive, (send, sent) = asked([], [part(b"123"), {"type": "http.disconnect"}])
    await Gate(application)(scope, receive, send)
    assert (scope["heard"], sent) == ([], [])
