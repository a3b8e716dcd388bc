"""The application over the wire, as programs use it: streams, cancels, lost clients, refusals."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import CancelledError
from typing import Any

import httpx
import psutil
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from app import OWN, SHAPE
from tests.conftest import App, Launch

LONG = 1500  # tokens: half a minute on the pretended model
SOON = 10.0  # seconds that suffice for a short answer on a busy machine


def join(app: App, tab: str, **fields: Any) -> str:
    """Put a message in the queue as a browser tab does; returns its event id."""
    config = httpx.get(f"{app.url}/config").json()
    index = next(d["id"] for d in config["dependencies"] if d["api_name"] == "chat")
    values = [fields.get("message", "Hi"), None, "", fields.get("max_tokens", 5)]
    body = {"data": values, "fn_index": index, "session_hash": tab}
    answer = httpx.post(f"{app.url}/gradio_api/queue/join", json=body)
    return str(answer.raise_for_status().json()["event_id"])


def cancel(app: App, id: str, tab: str) -> dict[str, Any]:
    body = {"event_id": id, "session_hash": tab, "fn_index": 0}
    answer: dict[str, Any] = httpx.post(f"{app.url}/gradio_api/cancel", json=body).json()
    return answer


def messages(app: App, tab: str) -> list[dict[str, Any]]:
    """Everything a tab is told until its last event has ended."""
    address = f"{app.url}/gradio_api/queue/data?session_hash={tab}"
    with httpx.stream("GET", address, timeout=60) as answer:
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data:")]


def call(app: App, body: bytes | Any) -> tuple[str, Any]:
    """A call over plain HTTP: the last event and its data."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    address = f"{app.url}/gradio_api/call/chat"
    answer = httpx.post(address, content=content, headers=headers, timeout=30)
    if answer.status_code != 200:
        return str(answer.status_code), answer.text
    lines = httpx.get(f"{address}/{answer.json()['event_id']}", timeout=30).text.splitlines()
    return lines[-3].removeprefix("event: "), json.loads(lines[-2].removeprefix("data: "))


@pytest.fixture
def client(app: App) -> Client:
    return Client(app.url, verbose=False)


def test_a_message_alone_is_enough(client: Client) -> None:
    assert len(client.predict("Hi", api_name="/chat").split()) > 10


def test_an_answer_streams_and_only_grows(client: Client) -> None:
    texts = list(client.submit("Hi", max_tokens=80, api_name="/chat"))
    assert len(set(texts)) >= 3
    assert all(later.startswith(text) for text, later in zip(texts, texts[1:], strict=False))


def test_a_stream_begins_with_text_where_nobody_waits(client: Client) -> None:
    client.predict("Hi", max_tokens=2, api_name="/chat")  # the model is there
    assert next(iter(client.submit("Hi", max_tokens=80, api_name="/chat")))


def test_a_call_over_plain_http_needs_only_the_message(app: App) -> None:
    event, data = call(app, {"data": ["Hi"]})
    assert event == "complete"
    assert len(data[0].split()) > 10


def test_a_cancelled_job_ends_and_its_siblings_run_on(client: Client) -> None:
    jobs = [client.submit("Hi", max_tokens=120, api_name="/chat") for _ in range(3)]
    next(iter(jobs[1]))
    jobs[1].cancel()
    with pytest.raises(
        (CancelledError, AppError)
    ):  # the client's own word, or ours if it is faster
        jobs[1].result(timeout=SOON)
    assert [len(job.result(timeout=30).split()) for job in (jobs[0], jobs[2])] == [120, 120]


def answered(app: App) -> str:
    """By a client of its own: one that cancels may lose what it submits while its stream closes."""
    client = Client(app.url, verbose=False)
    answer: str = client.submit("Hi", max_tokens=3, api_name="/chat").result(timeout=SOON)
    return answer


def test_a_cancelled_job_frees_its_row(narrow_app: App) -> None:
    client = Client(narrow_app.url, verbose=False)
    long = client.submit("Hi", max_tokens=LONG, api_name="/chat")
    next(iter(long))
    long.cancel()
    assert answered(narrow_app)


def test_a_job_cancelled_before_it_has_an_id_does_not_run(narrow_app: App) -> None:
    client = Client(narrow_app.url, verbose=False)
    client.submit("Hi", max_tokens=LONG, api_name="/chat").cancel()
    assert answered(narrow_app)


def test_a_cancel_while_it_waits_takes_it_out_of_the_queue(narrow_app: App) -> None:
    first = join(narrow_app, "tab-first", max_tokens=150)
    second = join(narrow_app, "tab-second", max_tokens=LONG)
    assert cancel(narrow_app, second, "tab-second") == {"success": True}
    last = messages(narrow_app, "tab-second")[-2]
    assert (last["msg"], last["success"]) == ("process_completed", False)
    assert last["output"]["error"].startswith("Stopped")
    cancel(narrow_app, first, "tab-first")


@pytest.mark.parametrize("tab", ["tab-of-a-stranger", "", None])
def test_a_cancel_from_a_foreign_tab_does_nothing(app: App, tab: str) -> None:
    id = join(app, "tab-mine", max_tokens=60)
    assert cancel(app, id, tab) == {"success": True}
    assert messages(app, "tab-mine")[-2]["success"]


def test_a_cancel_of_an_unknown_id_does_nothing(app: App) -> None:
    join(app, "tab-known", max_tokens=60)
    assert cancel(app, "0" * 32, "tab-known") == {"success": True}
    assert messages(app, "tab-known")[-2]["success"]


def test_a_cancel_that_is_no_cancel_is_answered(app: App) -> None:
    for content in (b"", b"[]", b'{"event_id": {}}', b"{"):
        answer = httpx.post(f"{app.url}/gradio_api/cancel", content=content)
        assert answer.status_code == 200, content


def test_cancelling_twice_or_after_the_end_is_harmless(app: App) -> None:
    id = join(app, "tab-twice", max_tokens=LONG)
    for _ in range(3):
        assert cancel(app, id, "tab-twice") == {"success": True}
    assert messages(app, "tab-twice")[-2]["msg"] == "process_completed"
    assert cancel(app, id, "tab-twice") == {"success": True}


def test_a_client_that_vanished_counts_as_stopped_within_two_seconds(narrow_app: App) -> None:
    join(narrow_app, "tab-gone", max_tokens=LONG)
    address = f"{narrow_app.url}/gradio_api/queue/data?session_hash=tab-gone"
    with httpx.stream("GET", address, timeout=30) as answer:
        next(line for line in answer.iter_lines() if "process_generating" in line)
    left = time.monotonic()
    assert call(narrow_app, {"data": ["Hi", None, "", 1]})[0] == "complete"
    assert time.monotonic() - left < 2 + 1  # and a second for the short answer itself


PAGE_EVENTS: list[tuple[list[Any], Any]] = [
    (["Hi"], {"index": "x"}),
    (["Hi"], {"index": 3, "value": 5}),
    (["Hi"], {"index": [], "value": {}}),
    (["Hi"], [1]),
    (["Hi", "no conversation"], None),
    (["Hi", [{"role": "user"}]], None),
    ([None, None, None], None),
    ([None, None, {}, 7, None, None, None, None, None, None, None], {"index": -5}),
]


def test_a_wrong_event_of_the_page_leaks_nothing(app: App) -> None:
    config = httpx.get(f"{app.url}/config").json()
    turn = max(config["dependencies"], key=lambda d: len(d["inputs"]) * (d["api_name"] != "chat"))
    for number, (data, event) in enumerate(PAGE_EVENTS):
        body = {"data": data, "event_data": event, "fn_index": turn["id"]}
        body["session_hash"] = f"tab-odd-{number}"
        httpx.post(f"{app.url}/gradio_api/queue/join", json=body).raise_for_status()
    for number, sent in enumerate(PAGE_EVENTS):
        last = messages(app, f"tab-odd-{number}")[-2]
        assert last["msg"] == "process_completed", sent
        assert last["success"] or last["output"]["error"] in (SHAPE,), sent


def test_what_only_the_page_does_is_no_event(app: App) -> None:
    dependencies = httpx.get(f"{app.url}/config").json()["dependencies"]
    own = [each["id"] for each in dependencies if not each["backend_fn"]]
    assert own
    body = {"data": [], "fn_index": own[0], "session_hash": "tab-own"}
    httpx.post(f"{app.url}/gradio_api/queue/join", json=body).raise_for_status()
    assert messages(app, "tab-own")[-2]["output"]["error"] == OWN


def test_a_refusal_reaches_a_python_client_in_words(client: Client) -> None:
    with pytest.raises(AppError, match="message"):
        client.predict("", api_name="/chat")


def test_nobody_gets_past_the_queue(app: App) -> None:
    answer = httpx.post(f"{app.url}/gradio_api/run/chat", json={"data": ["Hi"]})
    assert answer.status_code == 404


def test_the_events_of_the_page_are_not_an_interface(client: Client) -> None:
    named = client.view_api(return_format="dict", print_info=False)["named_endpoints"]
    assert sorted(named) == ["/chat", "/identity"]


def test_there_is_no_monitoring_and_no_run_history(app: App) -> None:
    assert httpx.get(f"{app.url}/monitoring/summary").status_code != 200
    assert not httpx.get(f"{app.url}/config").json().get("run_history")


def test_the_application_process_never_imports_torch(app: App, client: Client) -> None:
    client.predict("Hi", max_tokens=3, api_name="/chat")
    os.kill(app.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + SOON
    while not app.report.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    modules = app.report.read_text().split("\n")
    assert "gradio" in modules
    assert not {"torch", "transformers", "diffusers"} & set(modules)


def test_it_starts_within_two_seconds_of_its_own_time(app: App) -> None:
    assert app.times["running"] - app.times["Imported"] < 2 + 2  # twice that on a busy machine


def test_the_page_is_up_while_the_model_loads_and_messages_wait_for_it(launch: Launch) -> None:
    app = launch(SLOW_LOAD="4")
    assert httpx.get(app.url).status_code == 200
    texts = list(Client(app.url, verbose=False).submit("Hi", max_tokens=3, api_name="/chat"))
    assert texts[0] == "" and len(texts[-1].split()) == 3
    assert app.stop() == []


@pytest.mark.parametrize("numbers", [[signal.SIGINT], 3 * [signal.SIGTERM]])
def test_nothing_outlives_the_application(launch: Launch, numbers: list[int]) -> None:
    app = launch()
    join(app, "tab-open", max_tokens=LONG)
    Client(app.url, verbose=False).predict("Hi", max_tokens=2, api_name="/chat")
    family = app.family()
    assert len(family) >= 2
    for number in numbers:
        app.process.send_signal(number)
    assert psutil.wait_procs(family, timeout=20)[1] == []
    assert app.process.wait(1) == 0


def test_the_worker_ends_when_the_application_is_killed(launch: Launch) -> None:
    app = launch()
    Client(app.url, verbose=False).predict("Hi", max_tokens=2, api_name="/chat")
    family = app.family()
    app.process.kill()
    assert psutil.wait_procs(family, timeout=20)[1] == []
