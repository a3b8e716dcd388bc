"""The front door: builds the page over a table of tasks, serves it, follows every call to its end.

The only file that knows both queue and page. Models live in worker processes started by name.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr
from fastapi.exceptions import RequestValidationError
from gradio.context import LocalContext
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_function_params
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route

from pipelines import TASKS, Task, factory
from pipelines.cache import root
from pipelines.fronts import check_settings
from pipelines.talk import SAMPLING, SLIDERS, Question, begun, drawn, said, sampled, summary
from queueing.desk import BEAT, Desk, Phase, Service
from queueing.dispatcher import Dispatcher
from queueing.door import Door
from queueing.limits import Limits
from queueing.lines import dot
from queueing.payload import Gate, misshapen, shaped
from queueing.people import Signer, secret
from queueing.process import ProcessWorker
from queueing.settings import Settings
from queueing.work import Invalid

logger = logging.getLogger("carpool")
ASSETS = Path(__file__).parent / "assets"
SLOTS = 2 * Limits().total  # Gradio's slots, so that only our queue makes people wait
FAKE = {"chat": Task("pipelines.fake:FakePipeline", "pipelines.fake:ChatFront")}
GREETING = "### Ask me anything\nOne model for everybody who is here: you share every batch."
GONE = "The server does not answer"
LOST = "There is no such endpoint or session; /gradio_api/info lists what there is."
OVER = "There is no such call, or its answer has been read; a POST without the id starts a new one."
MISFIT = "The body has not the fields that this endpoint takes; the API page shows them."
SHAPE = "data does not have the shape that this endpoint takes; the API page shows it."


def script(name: str) -> str:
    return (ASSETS / f"{name}.js").read_text("utf-8")


def refusal(status: int, text: str) -> JSONResponse:
    return JSONResponse({"detail": text}, status)


async def misfit(_: Request, error: Exception) -> JSONResponse:
    logger.info("a request did not fit a route", exc_info=error)
    return refusal(422, MISFIT)


GUARDS = {
    "middleware": [Middleware(Gate)],
    "exception_handlers": {
        RequestValidationError: lambda _, error: refusal(422, misshapen(error.errors())),
        FnIndexInferError: lambda *_: refusal(404, LOST),
        KeyError: lambda *_: refusal(404, LOST),
        TypeError: misfit,
    },
}


async def over(_: Request) -> JSONResponse:
    return refusal(404, OVER)


class Over(Route):
    """Stands before a stream of Gradio's that would break off or never end: nothing is left in it.

    Of a call, whoever asks by its id; of a tab, whoever lost it or never had it.
    """

    def matches(self, scope: Any) -> Any:
        match, child = super().matches(scope)
        if match is not Match.FULL:
            return match, child
        waiting = scope["app"].get_blocks()._queue
        id, tab = child["path_params"].get("id"), Request(scope).query_params.get("session_hash")
        if id is not None:
            left = any(id in ids for ids in waiting.pending_event_ids_session.values())
        else:
            left = tab is None or tab in waiting.pending_messages_per_session
        return (Match.NONE, {}) if left else (match, child)


CALLS = ["/gradio_api/call/{name}/{id}", "/gradio_api/call/v2/{name}/{id}"]
ENDS = [Over(path, over) for path in ("/gradio_api/queue/data", *CALLS)]


class Blocks(gr.Blocks):
    """Blocks that refuse a payload of the wrong shape in words, and keep no conversation."""

    async def preprocess_data(self, block_fn: Any, inputs: Any, state: Any, *rest: Any) -> Any:
        if state is not None:  # where Gradio would keep the last values of a tab for an hour
            state._update_value_in_config = lambda *_: None
        blocks = block_fn.inputs
        names = [name for name, *_ in get_function_params(block_fn.fn)]
        names += [str(block._id) for block in blocks[len(names) :]]
        defaults = {name: block.value for name, block in zip(names, blocks, strict=True)}
        try:
            return await super().preprocess_data(block_fn, shaped(inputs, defaults), state, *rest)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Exception as error:
            text = str(error) if isinstance(error, Invalid) else SHAPE
            raise gr.Error(text, print_exception=False) from error


def opened(settings: Settings) -> Door:
    """The way in to the tasks that the settings name, their workers not yet started."""
    tasks = FAKE if settings.pipeline == "fake" else TASKS
    policies = {name: replace(task.policy, rows=settings.rows) for name, task in tasks.items()}
    factories = {name: task.pipeline for name, task in tasks.items()}
    dispatcher = Dispatcher(policies, [partial(ProcessWorker, factories, policies)])
    chat = Service(factory(tasks["chat"].front)(), check_settings, summary)
    desk = Desk(dispatcher, {"chat": chat}, settings.grace)
    return Door(desk, Signer(secret(settings.secret, root())))


def current() -> Any:
    """Of the page's queue, the one that is being handled: every call comes through that queue."""
    events = LocalContext.blocks.get()._queue.event_ids_to_events
    return events.get(LocalContext.event_id.get())


class ChatPage:
    """A conversation that lives in the browser, and the same chat as an endpoint for programs."""

    def __init__(self, door: Door) -> None:
        self._door = door
        with Blocks(title="Carpool", analytics_enabled=False, fill_height=True) as self.blocks:
            self._lay_out()
            self._connect()
        self.blocks.queue(api_open=False, default_concurrency_limit=None, max_size=SLOTS)

    def _lay_out(self) -> None:
        self.token = gr.BrowserState(None, storage_key="carpool-person", secret="carpool")
        self.ride = gr.Textbox("", visible=False)
        self.news = gr.JSON({}, visible="hidden")  # which message was taken, or comes back
        with gr.Row(elem_id="top"):
            gr.HTML("<h1>Carpool</h1><p>Many people, one model, one batch</p>", elem_id="name")
            gr.HTML("", elem_id="badge", js_on_load=script("badge"), gone=dot("failed", GONE))
            if os.environ.get("OAUTH_CLIENT_ID"):
                gr.LoginButton(size="sm", min_width=120)
        examples = json.loads((ASSETS / "examples.json").read_text("utf-8"))
        look = {"layout": "bubble", "buttons": ["copy"], "height": None, "placeholder": GREETING}
        self.chatbot = gr.Chatbot(
            show_label=False, elem_id="talk", editable="user", scale=1, examples=examples, **look
        )
        self.line = gr.HTML(dot("idle", ""), elem_id="line")
        look = {"placeholder": "Write a message", "max_lines": 8, "autofocus": True}
        self.box = gr.Textbox(show_label=False, elem_id="box", submit_btn=True, **look)
        with gr.Accordion("System prompt and sampling", open=False, elem_id="settings"):
            self.settings = _settings()

    def _connect(self) -> None:
        page = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}
        talk, inputs = self.chatbot, [self.box, self.chatbot, self.token, *self.settings]
        triggers = [self.box.submit, talk.example_select, talk.retry, talk.edit]
        gr.on(
            triggers, self.turn, inputs, [talk, self.box, self.line, self.ride, self.news], **page
        )
        self.box.stop(self.stop, self.ride, queue=False, **page)
        self.chatbot.clear(self.clear, self.ride, self.line, queue=False, **page)
        self.blocks.load(self.arrive, self.token, self.token, queue=False, **page)
        self.news.change(None, [self.news, self.box], self.box, js=script("box"), **page)
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
        min_p: float = SAMPLING["min_p"],
        presence_penalty: float = SAMPLING["presence_penalty"],
        frequency_penalty: float = SAMPLING["frequency_penalty"],
    ) -> AsyncIterator[str]:
        """Answer a message, streaming all text so far. history: {"role", "content"} before it."""
        penalties = repetition_penalty, presence_penalty, frequency_penalty
        values = max_tokens, temperature, top_p, top_k, min_p, *penalties, seed, stop
        sampling = dict(zip(SAMPLING, values, strict=True))
        asked = Question(system, history, message, sampling)
        caller, shown, due = self._door.caller(current()), "", monotonic() + BEAT
        async with aclosing(self._door.follow("chat", asked.payload(), caller)) as views:
            async for view in views:
                if view.phase.terminal and view.phase is not Phase.FINISHED:
                    raise gr.Error(asked.in_fields(view.line), print_exception=False)
                if view.phase.terminal or view.text != shown or monotonic() >= due:
                    shown, due = view.text, monotonic() + BEAT
                    yield shown

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
        turn = begun(event._data, talk, message)
        asked = Question(settings[0], turn.before, turn.message, sampled(settings[1:]))
        now, shown = [*turn.before, said("user", turn.message)], ""
        caller = self._door.caller(current(), token)
        news = {"id": caller.id, "taken": message if message == turn.message else ""}
        busy = gr.update(submit_btn=False, stop_btn=True)
        first = {self.chatbot: drawn(now), self.box: busy, self.ride: caller.id}
        yield {**first, self.news: news}
        async with aclosing(self._door.follow("chat", asked.payload(), caller)) as views:
            async for view in views:
                line = asked.in_words(view.line)
                update: dict[Any, Any] = {self.line: dot(view.phase, line)}
                if view.text != shown:
                    shown = view.text
                    update[self.chatbot] = drawn([*now, said("assistant", shown)])
                if view.phase.terminal:
                    update[self.box] = gr.update(submit_btn=True, stop_btn=False)
                if view.phase is Phase.REFUSED:  # as if it had not been sent
                    news = {"id": caller.id, "back": turn.back}
                    update |= {self.chatbot: drawn(turn.was), self.news: news}
                if view.phase is Phase.FORGOTTEN:
                    update[self.chatbot] = []
                yield update

    async def stop(self, request: gr.Request, ride: str) -> None:
        self._door.desk.stop(ride, request.session_hash)

    async def clear(self, request: gr.Request, ride: str) -> str:
        self._door.desk.stop(ride, request.session_hash, forget=True)
        return dot("idle", "")

    async def arrive(self, token: Any):
        """A browser that is new here, or whose name is not ours, gets one."""
        return gr.skip() if self._door.signer.name(token) else self._door.signer.issue()


def _settings() -> list[gr.components.Component]:
    """The system prompt, then what `SAMPLING` names, in its order."""
    system = gr.Textbox("", label="System prompt", lines=2, placeholder="Be helpful and brief.")
    with gr.Row():
        sliders = [
            gr.Slider(low, high, SAMPLING[name], step=step, label=label, min_width=220)
            for name, (low, high, step, label) in SLIDERS.items()
        ]
    with gr.Row():
        seed = gr.Textbox("", label="Seed (empty: a new one each time)")
        stop = gr.Textbox("", label="Stop strings, one a line", lines=2)
    return [system, *sliders, seed, stop]


def launch(door: Door, page: ChatPage, settings: Settings) -> None:
    """Open the page and say where it is; raises Invalid where it cannot be."""
    try:
        page.blocks.launch(
            server_port=settings.port,
            share=settings.share,
            max_threads=SLOTS,
            app_kwargs={"lifespan": door.lifespan, "routes": [*ENDS, *door.routes()], **GUARDS},
            theme=gr.themes.Base(primary_hue="teal", neutral_hue="stone", radius_size="lg"),
            css_paths=ASSETS / "style.css",
            footer_links=["api", "settings"],
            show_error=True,
            run_history=False,
            enable_monitoring=False,
            state_session_capacity=1000,
            prevent_thread_lock=True,
            quiet=True,  # Gradio's hints are for whoever writes its launch()
        )
    except OSError as error:
        port = f"CARPOOL_PORT is {settings.port}, which" if settings.port else "Every port tried"
        raise Invalid(f"{port} is in use or not allowed; choose another.") from error
    hint = "" if settings.share else "* For a public link as well: make run ARGUMENTS=--share\n"
    sys.stdout.write(f"* Running on local URL:  {page.blocks.local_url.rstrip('/')}\n{hint}")
    sys.stdout.flush()


def serve(settings: Settings) -> None:
    """Until told to stop; then leave nothing running."""
    # Gradio sums up every event with pandas for a monitoring page that is off here.
    os.environ.setdefault("GRADIO_ANALYTICS_CACHE_FREQUENCY", "1000000000")
    os.environ.setdefault("GRADIO_ANALYTICS_MAX_EVENTS", "1")
    # A second signal may interrupt the first: a put survives that, an Event's set waits for ever.
    stop: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stop.put(number))
    door = opened(settings)
    page = ChatPage(door)
    launch(door, page, settings)
    stop.get()
    door.close()
    page.blocks.close(verbose=False)


def main() -> None:
    """What the command line and the environment say, judged before anything starts."""
    arguments = argparse.ArgumentParser(description="Many people, one GPU, one fair queue.")
    arguments.add_argument("--share", action="store_true", help="open a public link as well")
    share = arguments.parse_args().share
    try:
        settings = Settings.read(os.environ)
        logging.basicConfig(level=settings.log, format="%(levelname)s %(name)s: %(message)s")
        serve(replace(settings, share=settings.share or share))
    except Invalid as error:
        arguments.exit(2, f"{error}\n")


if __name__ == "__main__":
    main()
