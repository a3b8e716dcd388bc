"""Pages and endpoints of tasks, made from their forms, and what all pages have on top.

Like app.py it knows both Gradio and the queue, and decides nothing about either; a result is shown
as its form says. It knows no task.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from inspect import Parameter, Signature
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr
import orjson
from gradio.context import LocalContext
from gradio.utils import get_upload_folder, is_in_or_equal
from gradio_client.utils import is_file_obj_with_meta

from pipelines.forms import Field, Form, Shown
from queueing.desk import BEAT, Phase, View
from queueing.door import Door
from queueing.lines import dot

ASSETS = Path(__file__).parent.parent / "assets"
GONE = "The server does not answer"
EMPTY: Any = Parameter.empty
FOLDER = Path(get_upload_folder())  # where files lie that Gradio took in, and those people get
PLAIN = 1000  # entries of a list in a call of plain HTTP
PAGE: dict[str, Any] = {
    "api_visibility": "private",
    "show_progress": "hidden",
    "concurrency_limit": None,
}


FILE: dict[str, Any] = {**PAGE, "preprocess": False}  # Gradio's leaves a file behind each time


def script(name: str) -> str:
    return (ASSETS / f"{name}.js").read_text("utf-8")


def current() -> Any:
    """Of the page's queue, the one that is being handled: every call comes through that queue."""
    events = LocalContext.blocks.get()._queue.event_ids_to_events
    return events.get(LocalContext.event_id.get())


def brought(file: Any) -> Path | None:
    """Where a file lies that Gradio took in; None for all else, wherever a caller says it is."""
    if not is_file_obj_with_meta(file) or not is_in_or_equal(file["path"], FOLDER):
        return None
    return Path(file["path"])


def as_file(path: Path) -> dict[str, Any]:
    """A file as programs get it."""
    return gr.FileData(path=str(path), orig_name=path.name).model_dump()


async def _answered(view: View, plain: bool) -> dict[str, Any]:
    """What a program gets: where its call is, at the end the result."""
    if not view.result:
        return {"status": view.line}
    return view.result if plain else await asyncio.to_thread(spared, view.result)


def spared(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result whose lists are JSON already: Gradio walks through all else several times, in the
    loop that serves everybody, for seconds where there are 10,000 vectors.
    """
    return {name: _dumped(v) if isinstance(v, list) else v for name, v in result.items()}


def _dumped(value: list[Any]) -> orjson.Fragment:
    """Entry by entry, so that other threads get their turns."""
    return orjson.Fragment(b"[" + b",".join(map(orjson.dumps, value)) + b"]")


def _check_plain(given: Mapping[str, Any]) -> None:
    """What comes by plain HTTP gets a result that Gradio walks through: a short one."""
    for name, value in given.items():
        if isinstance(value, list) and len(value) > PLAIN:
            raise gr.Error(
                f"There are {len(value):,} entries in {name}; a call by plain HTTP takes at most "
                f"{PLAIN:,}. Send fewer, or call with gradio_client.",
                print_exception=False,
            )


def endpoint(door: Door, form: Form) -> Callable[..., AsyncIterator[Any]]:
    """A task as programs call it, typed and described by its form."""

    async def call(request: gr.Request, *sent: Any) -> AsyncIterator[Any]:
        event, values = current(), dict(zip(takes, sent, strict=True))
        plain = event.data.simple_format
        if plain:
            _check_plain(values)
        asked = form.ask(values)
        caller, shown, due = door.caller(event), "", monotonic() + BEAT
        async with aclosing(door.follow(form.name, asked.payload(), caller)) as views:
            async for view in views:
                if view.phase.terminal and view.phase is not Phase.FINISHED:
                    raise gr.Error(asked.in_fields(view.line), print_exception=False)
                if view.phase.terminal or view.text != shown or monotonic() >= due:
                    shown, due = view.text, monotonic() + BEAT
                    yield shown if form.streams else await _answered(view, plain)

    takes = {f.name: (f.type, EMPTY if f.needed else f.value) for f in form.fields}
    gives = str if form.streams else dict[str, Any]
    return described(call, form.name, form.about, takes, gives)


def described(
    call: Callable[..., AsyncIterator[Any]],
    name: str,
    about: str,
    takes: Mapping[str, tuple[Any, Any]],  # the type and the default of each
    gives: Any,
) -> Callable[..., AsyncIterator[Any]]:
    """What takes all by position, as the API page shows it and gradio_client calls it."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    first = Parameter("request", kind, annotation=gr.Request)
    rest = [Parameter(each, kind, default=d, annotation=t) for each, (t, d) in takes.items()]
    call.__signature__ = Signature([first, *rest], return_annotation=AsyncIterator[gives])  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in (first, *rest)}
    call.__annotations__["return"] = AsyncIterator[gives]
    call.__name__, call.__doc__ = name, about
    return call


def top(name: str) -> None:
    """What stands above every page: all pages, the name, and what the model of this task does."""
    gr.Navbar(main_page_name="Chat")
    with gr.Row(elem_id="top"):
        gr.HTML("<h1>Carpool</h1><p>Many people, one model, one batch</p>", elem_id="name")
        look = {"task": name, "gone": dot("failed", GONE)}
        gr.HTML("", elem_id="badge", js_on_load=script("badge"), **look)
        if os.environ.get("OAUTH_CLIENT_ID"):
            gr.LoginButton(size="sm", min_width=120)


def person(door: Door, blocks: gr.Blocks) -> gr.BrowserState:
    """The signed name that a browser keeps; one that is new here, or has another's, gets one."""
    token = gr.BrowserState(None, storage_key="carpool-person", secret="carpool")

    async def arrive(name: Any):
        return gr.skip() if door.signer.name(name) else door.signer.issue()

    blocks.load(arrive, token, token, queue=False, **PAGE)
    return token


class TaskPage:
    """A form, what happens with it in one line, and its result."""

    def __init__(self, door: Door, blocks: gr.Blocks, form: Form) -> None:
        self._door, self._form = door, form
        top(form.name)
        self.token, self.ride = person(door, blocks), gr.Textbox("", visible=False)
        gr.Markdown(form.intro)
        with gr.Row(elem_id="task"):
            with gr.Column():
                self.fields = [_field(field) for field in form.page]
                with gr.Row():
                    self.go = gr.Button(form.verb, variant="primary", elem_id="go")
                    self.halt = gr.Button("Stop", visible=False, elem_id="halt")
                self.line = gr.HTML(dot("idle", ""), elem_id="line")
            with gr.Column(elem_id="result"):
                self.shows = [_shown(shown) for shown in form.shows]
        gr.Examples([list(each) for each in form.examples], self.fields[: len(form.examples[0])])
        outputs = [self.line, self.ride, self.go, self.halt, *self.shows]
        gr.on(
            [self.go.click, *(f.submit for f in self.fields if isinstance(f, gr.Textbox))],
            self.run,
            [self.token, *self.fields],
            outputs,
            **PAGE,
        )
        self.halt.click(self.stop, self.ride, queue=False, **PAGE)

    async def run(
        self, request: gr.Request, token: Any, *written: Any
    ) -> AsyncIterator[dict[Any, Any]]:
        """One result on the page."""
        asked, caller = self._form.written(written), self._door.caller(current(), token)
        payload = asked.payload()
        blank = dict.fromkeys(self.shows)  # what was before is of another question
        yield {self.ride: caller.id, self.go: _seen(False), self.halt: _seen(True), **blank}
        async with aclosing(self._door.follow(self._form.name, payload, caller)) as views:
            async for view in views:
                line = self._form.in_words(asked.in_fields(view.line))
                update: dict[Any, Any] = {self.line: dot(view.phase, line)}
                result = {"summary": view.text} if self._form.streams else view.result or {}
                seen = {**payload, **result}
                if view.phase is Phase.FINISHED or (self._form.streams and view.text):
                    values = [shown.value(seen) for shown in self._form.shows]
                    update |= dict(zip(self.shows, values, strict=True))
                if view.phase.terminal:
                    update |= {self.go: _seen(True), self.halt: _seen(False)}
                yield update

    async def stop(self, request: gr.Request, ride: str) -> None:
        self._door.desk.stop(ride, request.session_hash)


def _seen(visible: bool) -> Any:
    return gr.update(visible=visible)


def _field(field: Field) -> gr.components.Component:
    """What a person fills in."""
    look = {"label": field.label, "value": field.value}
    match field.kind:
        case "switch":
            return gr.Checkbox(**look)
        case "choice":
            choices = [(str(each) or "as the model was trained", each) for each in field.choices]
            return gr.Dropdown(choices, label=field.label, value=field.value or field.choices[0])
        case "number":
            least, most, step = field.choices
            return gr.Slider(least, most, step=step, **look)
    lines = {"long": 8, "lines": 4}.get(field.kind, 1)
    return gr.Textbox(lines=lines, max_lines=max(lines, 16), placeholder=field.hint, **look)


def _shown(shown: Shown) -> gr.components.Component:
    """Where a result appears."""
    match shown.kind:
        case "bars":
            return gr.Label(label=shown.label, num_top_classes=10)
        case "marked":
            return gr.HighlightedText(label=shown.label, color_map={"answer": "#14b8a6"})
        case "drawing":
            return gr.HTML(label=shown.label, elem_classes="drawing")
        case "data":
            return gr.JSON(label=shown.label, open=False, max_height=160)
    return gr.Textbox(label=shown.label, lines=6, buttons=["copy"], interactive=False)
