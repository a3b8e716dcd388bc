"""The front door: builds the page over a table of tasks, serves it, follows every call to its end.

It is the only file that knows both the queue and the page. It knows no tensors: models live in
worker processes that are started by dotted names, and torch is never imported here.
"""

from __future__ import annotations

import argparse
import asyncio
import html
import json
import logging
import os
import signal
import threading
import uuid
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import LocalContext
from gradio.utils import get_function_params
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from pipelines import TASKS, Task, factory
from pipelines.talk import SAMPLING, asked, drawn, payload, said, spoken
from queueing.admission import TaskState
from queueing.desk import Caller, Desk, Phase, View
from queueing.dispatcher import Dispatcher
from queueing.limits import Limits
from queueing.payload import BodyLimit, shaped
from queueing.people import Person, Signer, secret
from queueing.process import ProcessWorker
from queueing.stream import Stream
from queueing.work import Invalid, Policy

logger = logging.getLogger("carpool")
ASSETS = Path(__file__).parent / "assets"
HEADER = "x-carpool-token"
FAKE = {"chat": Task("pipelines.fake:FakePipeline", "pipelines.fake:ChatFront")}
GREETING = (
    "### Ask me anything\nOne model for everybody who is here; you all ride in the same batch."
)
OURS = "Something went wrong on our side, and it has been noted. Please try again."
SHAPE = "data does not have the shape that this endpoint takes; the API page shows it."


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment decides; the README lists every name."""

    pipeline: str = "text"
    chat_model: str = ""
    rows: int = 16
    port: int | None = None
    share: bool = False
    secret: str = ""
    cache: Path = Path.home() / ".cache" / "carpool"
    grace: float = 0.0

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Settings:
        given = {name: text for name, text in environment.items() if text}
        port = given.get("CARPOOL_PORT") or given.get("GRADIO_SERVER_PORT")
        cache = given.get("CARPOOL_CACHE", "~/.cache/carpool")
        return cls(
            pipeline=given.get("CARPOOL_PIPELINE", "text"),
            chat_model=given.get("CARPOOL_CHAT_MODEL", ""),
            rows=int(given.get("CARPOOL_ROWS", 16)),
            port=int(port) if port else None,
            share=given.get("CARPOOL_SHARE", "").lower() in ("1", "true", "yes"),
            secret=given.get("CARPOOL_SECRET", ""),
            cache=Path(cache).expanduser(),
            grace=float(given.get("CARPOOL_GRACE", 0)),
        )


class Door:
    """Knows who calls, follows their calls at the desk, and ends one when its caller says so."""

    def __init__(self, settings: Settings) -> None:
        tasks = FAKE if settings.pipeline == "fake" else TASKS
        policies = {name: Policy(rows=settings.rows) for name in tasks}
        fronts = {name: factory(task.front)() for name, task in tasks.items()}
        factories = {name: task.pipeline for name, task in tasks.items()}
        limits = Limits()
        self.calls = 2 * limits.total  # Gradio's slots, so that only our queue makes people wait
        worker = partial(ProcessWorker, factories, policies)
        self.dispatcher = Dispatcher(policies, [worker], limits)
        self.desk = Desk(self.dispatcher, fronts, {"chat": chat_summary}, settings.grace)
        self.signer = Signer(secret(settings.secret, settings.cache))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: weakref.WeakSet[Any] = weakref.WeakSet()  # cancelled before they ran

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        """The workers live as long as the loop that serves the page."""
        self._loop = asyncio.get_running_loop()
        await self.dispatcher.start()
        try:
            yield
        finally:
            await self.dispatcher.close()

    def close(self, timeout: float = 10.0) -> None:
        """End every call and every worker; called from another thread than the loop's."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self.dispatcher.close(), self._loop).result(timeout)

    async def follow(self, task: str, payload: Any, caller: Caller) -> AsyncIterator[View]:
        """The one handler: views of a call to its end. An error of ours becomes a sentence."""
        try:
            async with aclosing(self.desk.follow(task, payload, caller)) as views:
                async for view in views:
                    yield view
        except Exception:
            logger.exception("a call failed in the application")
            yield View(Phase.FAILED, OURS)

    def caller(self, request: gr.Request, token: Any = None) -> Caller:
        id = LocalContext.event_id.get(None) or uuid.uuid4().hex
        event = LocalContext.blocks.get()._queue.event_ids_to_events.get(id)
        person = self._person(request.request, request.username, token)
        return Caller(person, id, request.session_hash or id, gone=event in self._early)

    def routes(self) -> list[Route]:
        """Stand before Gradio's own, which end all calls of a tab and ask for no owner."""
        return [
            Route(f"/gradio_api/{name}{slash}", endpoint, methods=["POST"])
            for name, endpoint in (("cancel", self._cancel), ("reset", self._reset))
            for slash in ("", "/")
        ]

    async def _cancel(self, http: Request) -> JSONResponse:
        body = await _body(http)
        id, tab = str(body.get("event_id")), str(body.get("session_hash"))
        event = http.app.get_blocks()._queue.event_ids_to_events.get(id)
        if not self.desk.stop(id, tab) and event is not None and event.session_hash == tab:
            self._early.add(event)
        return JSONResponse({"success": True})

    async def _reset(self, http: Request) -> JSONResponse:
        """What a Python client calls that was told to cancel before it knew its id."""
        body = await _body(http)
        self.desk.stop_own(str(body.get("event_id")), self._person(http, None, None))
        return JSONResponse({"success": True})

    def _person(self, http: Request, login: str | None, token: Any) -> Person:
        profile = http.scope.get("session", {}).get("oauth_info", {}).get("userinfo", {})
        address = http.client.host if http.client else "unknown"
        login = login or profile.get("preferred_username")
        return self.signer.person(login, http.headers.get(HEADER) or token, address)


async def _body(http: Request) -> dict[str, Any]:
    try:
        body = await http.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


class Blocks(gr.Blocks):
    """Blocks that refuse a payload of the wrong shape in words, before any component sees it."""

    async def preprocess_data(
        self, block_fn: Any, inputs: list[Any], *rest: Any, **more: Any
    ) -> Any:
        blocks = block_fn.inputs
        names = [name for name, *_ in get_function_params(block_fn.fn)]
        names += [str(block._id) for block in blocks[len(names) :]]
        defaults = {name: block.value for name, block in zip(names, blocks, strict=True)}
        try:
            return await super().preprocess_data(block_fn, shaped(inputs, defaults), *rest, **more)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Invalid as error:
            raise gr.Error(str(error), print_exception=False) from error
        except Exception as error:
            logger.info("a payload of the wrong shape: %r", error)
            raise gr.Error(SHAPE, print_exception=False) from error


class ChatPage:
    """A conversation that lives in the browser, and the same chat as an endpoint for programs."""

    def __init__(self, door: Door) -> None:
        self._door = door
        with Blocks(title="Carpool", analytics_enabled=False, fill_height=True) as self.blocks:
            self._lay_out()
            self._connect()
        self.blocks.queue(api_open=False, default_concurrency_limit=None, max_size=door.calls)

    def _lay_out(self) -> None:
        self.token = gr.BrowserState(None, storage_key="carpool-person", secret="carpool")
        self.ride = gr.Textbox("", visible=False)
        with gr.Row(elem_id="top"):
            gr.HTML("<h1>Carpool</h1><p>Many people, one model, one batch</p>", elem_id="name")
            self.badge = gr.HTML(badge(TaskState()), elem_id="badge")
            if os.environ.get("OAUTH_CLIENT_ID"):
                gr.LoginButton(size="sm", min_width=120)
        examples = json.loads((ASSETS / "examples.json").read_text("utf-8"))
        look = {"layout": "bubble", "buttons": ["copy"], "height": None, "placeholder": GREETING}
        self.chatbot = gr.Chatbot(
            show_label=False, elem_id="talk", editable="user", scale=1, examples=examples, **look
        )
        self.line = gr.HTML(status(), elem_id="line")
        self.box = gr.Textbox(
            show_label=False,
            elem_id="box",
            placeholder="Write a message",
            max_lines=8,
            submit_btn=True,
            autofocus=True,
        )
        with gr.Accordion("Settings", open=False, elem_id="settings"):
            self.settings = _settings()

    def _connect(self) -> None:
        page = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        triggers = [self.box.submit, self.chatbot.example_select]
        triggers += [self.chatbot.retry, self.chatbot.edit]
        inputs = [self.box, self.chatbot, self.token, *self.settings]
        gr.on(triggers, self.turn, inputs, [self.chatbot, self.box, self.line, self.ride], **page)
        self.box.stop(self.stop, self.ride, queue=False, **page)
        self.chatbot.clear(self.clear, self.ride, [self.box, self.line], queue=False, **page)
        self.blocks.load(self.arrive, self.token, self.token, queue=False, **page)
        self.blocks.load(self.watch, None, self.badge, **page)
        gr.api(self.chat, api_name="chat", concurrency_limit=None)
        gr.api(self.identity, api_name="identity", queue=False)

    async def chat(
        self,
        request: gr.Request,
        message: str,
        history: list[dict[str, Any]] | None = None,
        system: str = "",
        max_tokens: int = SAMPLING["max_tokens"],
        temperature: float = SAMPLING["temperature"],
        top_p: float = SAMPLING["top_p"],
        top_k: int = SAMPLING["top_k"],
        repetition_penalty: float = SAMPLING["repetition_penalty"],
        seed: int | None = None,
        stop: list[str] | None = None,
    ) -> AsyncIterator[str]:
        """Answer a message, streaming all text so far. history: {"role", "content"} of each before."""
        values = (max_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop)
        asking = payload(system, history, message, dict(zip(SAMPLING, values, strict=True)))
        async with aclosing(self._door.follow("chat", asking, self._door.caller(request))) as views:
            async for view in views:
                if view.phase.terminal and view.phase is not Phase.FINISHED:
                    raise gr.Error(view.line, print_exception=False)
                yield view.text

    async def identity(self) -> str:
        """A new signed name. Sent as the header x-carpool-token, it is who you are."""
        return self._door.signer.issue()

    async def turn(
        self,
        event: gr.EventData,
        request: gr.Request,
        message: str,
        talk: list[dict[str, Any]],
        token: Any,
        *settings: Any,
    ) -> AsyncIterator[dict[Any, Any]]:
        """One answer on the page: to the message, an example, or one asked again or edited."""
        before, message = _begun(event, spoken(talk), message)
        system, *values = settings
        values[-2:] = _number(values[-2]), [line for line in values[-1].splitlines() if line]
        asking = payload(system, before, message, dict(zip(SAMPLING, values, strict=True)))
        now, shown = [*before, said("user", message)], ""
        caller = self._door.caller(request, token)
        busy = gr.update(value="", submit_btn=False, stop_btn=True)
        yield {self.chatbot: drawn(now), self.box: busy, self.ride: caller.id}
        async with aclosing(self._door.follow("chat", asking, caller)) as views:
            async for view in views:
                update: dict[Any, Any] = {self.line: status(view)}
                if view.text != shown:
                    shown = view.text
                    update[self.chatbot] = drawn([*now, said("assistant", shown)])
                if view.phase.terminal:
                    update[self.box] = gr.update(submit_btn=True, stop_btn=False)
                if view.phase is Phase.REFUSED:  # as if it had not been sent
                    update[self.chatbot] = drawn(before)
                    update[self.box]["value"] = message
                yield update

    async def stop(self, request: gr.Request, ride: str) -> None:
        self._door.desk.stop(ride, request.session_hash)

    async def clear(self, request: gr.Request, ride: str):
        self._door.desk.stop(ride, request.session_hash, silent=True)
        return gr.update(submit_btn=True, stop_btn=False), status()

    async def arrive(self, token: Any):
        """A browser that is new here, or whose name is not ours, gets one."""
        known = self._door.signer.name(token)
        return gr.skip() if known else self._door.signer.issue()

    async def watch(self) -> AsyncIterator[str]:
        """What the model does, until it is there."""
        dispatcher = self._door.dispatcher
        state = dispatcher.state("chat")
        while state.card is None and not state.error:
            yield badge(state)
            state = await dispatcher.loaded("chat", 0.9)
        yield badge(state)


def _begun(event: gr.EventData, talk: list[Any], message: str) -> tuple[list[Any], str]:
    """What was said before, and the message that an event on the page asks to answer."""
    data = event._data or {}
    if "index" not in data:
        return talk, message
    if not talk:  # the examples are there while nothing has been said
        return [], data["value"]["text"]
    index = data["index"]
    before, again = asked(talk, index[0] if isinstance(index, list) else index)
    return before, data["value"] if "previous_value" in data else again


def _number(text: str) -> int | str | None:
    """The seed as it was written; what is no number is for the front to refuse."""
    text = text.strip()
    return int(text) if text.lstrip("-").isdecimal() else text or None


def _settings() -> list[gr.components.Component]:
    """The system prompt, then what `SAMPLING` names, in its order."""
    at = SAMPLING
    system = gr.Textbox(
        "", label="System prompt", lines=2, placeholder="You are helpful and brief."
    )
    with gr.Row():
        longest = gr.Slider(1, 2048, at["max_tokens"], step=1, label="Longest answer, in tokens")
        heat = gr.Slider(0, 2, at["temperature"], step=0.05, label="Temperature (0: the likeliest)")
    with gr.Row():
        top_p = gr.Slider(0.05, 1, at["top_p"], step=0.05, label="Top p")
        top_k = gr.Slider(0, 200, at["top_k"], step=1, label="Top k (0: all)")
        again = gr.Slider(1, 2, at["repetition_penalty"], step=0.05, label="Repetition penalty")
    with gr.Row():
        seed = gr.Textbox("", label="Seed (empty: a new one each time)")
        stop = gr.Textbox("", label="Stop strings, one a line", lines=2)
    return [system, longest, heat, top_p, top_k, again, seed, stop]


def chat_summary(stream: Stream) -> str:
    """The last word of the status line: how much, how fast, which seed."""
    times, result = stream.times, stream.result
    took = (times.ended or 0) - times.submitted
    if result is None:
        return f"Done in {took:.1f} s"
    seconds = max((times.ended or 0) - (times.started or 0), 1e-3)
    end = ", cut at the longest answer" if result.reason == "length" else ""
    rate = f"{result.output_tokens / seconds:.1f} tokens/s"
    return f"{result.output_tokens} tokens in {took:.1f} s{end} · {rate} · seed {result.seed}"


def status(view: View | None = None) -> str:
    phase, line = (view.phase, view.line) if view else ("idle", "")
    return f'<p class="{phase}" role="status"><i></i><span>{html.escape(line)}</span></p>'


def badge(state: TaskState) -> str:
    """The model's name and whether it is there."""
    if state.card is not None:
        name = html.escape(state.card.details.get("model", "the model"))
        return f'<p class="ready"><i></i>{name}</p>'
    if state.error:
        return f'<p class="failed"><i></i>{html.escape(state.error)}</p>'
    done = f"{state.fraction:.0%}"
    text = html.escape(state.text.rstrip("."))
    return f'<p class="loading"><i></i>{text}, {done}</p><div class="bar"><b style="width: {done}"></b></div>'


def theme() -> gr.themes.Base:
    fonts = ("ui-sans-serif", "system-ui", "sans-serif")
    mono = ("ui-monospace", "SFMono-Regular", "Menlo", "monospace")
    base = gr.themes.Base(
        primary_hue="teal", neutral_hue="stone", radius_size="lg", font=fonts, font_mono=mono
    )
    return base.set(
        body_background_fill="*neutral_50", body_background_fill_dark="*neutral_950"
    ).set(body_text_color_subdued="*neutral_500", body_text_color_subdued_dark="*neutral_400")


def launch(door: Door, page: ChatPage, settings: Settings) -> None:
    page.blocks.launch(
        server_port=settings.port,
        share=settings.share,
        max_threads=door.calls,
        app_kwargs={
            "lifespan": door.lifespan,
            "routes": door.routes(),
            "middleware": [Middleware(BodyLimit)],
        },
        theme=theme(),
        css_paths=ASSETS / "style.css",
        footer_links=["api", "settings"],
        show_error=True,
        run_history=False,
        enable_monitoring=False,
        state_session_capacity=1000,
        prevent_thread_lock=True,
    )


def main() -> None:
    """Serve until told to stop, then leave nothing running."""
    arguments = argparse.ArgumentParser(description="Many people, one GPU, one fair queue.")
    arguments.add_argument("--share", action="store_true", help="open a public link as well")
    settings = Settings.read(os.environ)
    if arguments.parse_args().share:
        settings = replace(settings, share=True)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    # Gradio sums up every event with pandas for a monitoring page that is off here.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000000")
    os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "1")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    door = Door(settings)
    page = ChatPage(door)
    launch(door, page, settings)
    stop.wait()
    door.close()
    page.blocks.close(verbose=False)


if __name__ == "__main__":
    main()
