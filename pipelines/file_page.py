"""The part of a page, and the endpoint, where a whole file is brought and a CSV comes back.

Like app.py it knows both Gradio and the queue. What is made of the lines is in the task's form.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import gradio as gr

from pipelines.brought import MISSING, Brought
from pipelines.forms import Form, Lines
from pipelines.tables import LINES, SUFFIXES, opened
from pipelines.task_page import (
    EMPTY,
    FILE,
    FOLDER,
    PAGE,
    TaskPage,
    as_file,
    brought,
    current,
    described,
)
from queueing.bulk import Progress
from queueing.desk import Caller, Phase, View
from queueing.door import Door
from queueing.lines import bar, dot
from queueing.shelf import make_room
from queueing.work import Invalid, Status

NONE = Progress(Status.RUNNING, 0, 0, 0, 0.0)
LABEL = 60  # characters of a column's name in the list of them
ABOUT = """Do /{name} with all lines of a CSV or text file, {most:,} at most, while nobody waits.

    file: gradio_client.handle_file("name.csv"). column: the name or number of the column of texts;
    without it, the one that is called text, review or the like, or the only one. header: the first
    line of a CSV names its columns. All else as for /{name}. One file at a time for a person.

    Gives {{"status", "done", "total", "failed", "left": seconds or null, "file": null}} again and
    again. At the end "file" is a CSV with all lines in order, and beside each: {names}; how many
    tokens were cut off it; how many words the model does not know; what is wrong with it. What is
    refused or fails raises; when something was done before, its CSV has come by then. A call that
    is cancelled gets none."""
HINT = 'Programs send one with gradio_client.handle_file("name.csv").'


class Errands:
    """Files through one task, for a page or a program."""

    def __init__(self, door: Door, blocks: gr.Blocks, form: Form, lines: Lines) -> None:
        self._door, self._blocks, self._form, self._lines = door, blocks, form, lines

    async def run(
        self, caller: Caller, file: Any, column: Any, header: Any, asked: Mapping[str, Any]
    ) -> AsyncIterator[tuple[View, str | None]]:
        """Views to the end, the last with the results as far as they came; they are deleted when
        nobody asks for the last.
        """
        await asyncio.to_thread(make_room, self._blocks.upload_file_set)
        given = brought(file), column, header, asked
        with closing(Brought(self._form, self._lines, *given, FOLDER)) as freight:
            async with aclosing(self._door.carry(self._form.name, freight, caller)) as views:
                async for view in views:
                    yield view, self._kept(freight) if view.phase.terminal else None

    def _kept(self, freight: Brought) -> str | None:
        """Gradio deletes it when its time is over."""
        path = freight.keep()
        if path is None:
            return None
        self._blocks.upload_file_set.add(str(path))
        return str(path)


def file_endpoint(door: Door, blocks: gr.Blocks, form: Form, lines: Lines) -> Callable[..., Any]:
    """A task for files, as programs call it."""
    fields = [field for field in form.fields if field.name != lines.field]
    taken = {f.name: (f.type, EMPTY if f.needed else f.value) for f in fields}
    needed = {name: each for name, each in taken.items() if each[1] is EMPTY}
    named = {"column": (str | None, None), "header": (bool, True)}
    takes = {"file": (gr.FileData, EMPTY), **needed, **named, **taken}
    errands = Errands(door, blocks, form, lines)

    async def call(request: gr.Request, *sent: Any) -> AsyncIterator[dict[str, Any]]:
        values = dict(zip(takes, sent, strict=True))
        own = [values.pop(name) for name in ("file", *named)]
        asked = form.ask(values).payload()
        async with aclosing(errands.run(door.caller(current()), *own, asked)) as views:
            async for view, path in views:
                if path or not view.phase.terminal:
                    yield _told(view, path)
                if view.phase.terminal and view.phase is not Phase.FINISHED:
                    line = f"{view.line} {HINT}" if view.line == MISSING else view.line
                    raise gr.Error(line, print_exception=False)

    about = ABOUT.format(name=form.name, most=LINES, names=lines.about)
    return described(call, f"{form.name}_file", about, takes, dict[str, Any])


class FilePart:
    """Below a task's form: a file, its columns, how far it is, and what came of it."""

    def __init__(self, door: Door, blocks: gr.Blocks, page: TaskPage, form: Form) -> None:
        self._door, self._form, self._page = door, form, page
        if form.lines is None:
            raise ValueError(f"{form.name} takes no files.")
        self._errands = Errands(door, blocks, form, form.lines)
        self._label = next(field.label for field in form.fields if field.name == form.lines.field)
        with gr.Accordion("Bring a file", open=False, elem_id="bring"):
            self._lay_out()
        self._connect()

    def _lay_out(self) -> None:
        gr.Markdown(
            f"Each line takes the place of “{self._label}”; all else is as above. "
            f"At most {LINES:,} lines, which run while nobody else waits for an answer."
        )
        self.ride = gr.Textbox("", visible=False)
        with gr.Row():
            types = [*SUFFIXES, ".txt"]
            self.file = gr.File(label="CSV or text file", file_types=types, height=120)
            with gr.Column():
                self.column = gr.Dropdown([], label="Column of texts", interactive=True)
                self.header = gr.Checkbox(True, label="The first line of a CSV names the columns")
        with gr.Row():
            self.go = gr.Button("Start", variant="primary", elem_id="bring-go")
            self.halt = gr.Button("Stop", visible=False, elem_id="bring-halt")
        self.line = gr.HTML(dot("idle", ""), elem_id="bring-line")
        self.results = gr.File(label="Results", visible=False, interactive=False)

    def _connect(self) -> None:
        gr.on(
            [self.file.upload, self.file.clear, self.header.input],
            self.look,
            [self.file, self.header],
            [self.column, self.line],
            **{**FILE, "concurrency_limit": 4},  # each holds a whole file
        )
        self.go.click(
            self.run,
            [self._page.token, self.file, self.column, self.header, *self._page.fields],
            [self.line, self.ride, self.go, self.halt, self.results],
            **FILE,
        )
        self.halt.click(self.stop, self.ride, queue=False, **PAGE)

    async def look(self, file: Any, header: Any) -> dict[Any, Any]:
        """The columns of what was chosen."""
        path = brought(file)
        none = {self.column: gr.update(choices=[], value=None), self.line: dot("idle", "")}
        if path is None:
            return none
        try:
            table = await asyncio.to_thread(opened, path, header is not False)
        except Invalid as error:
            return {**none, self.line: dot("refused", str(error))}
        names, usual = enumerate(table.columns, 1), table.usual()
        choices = [(name[:LABEL], number) for number, name in names]
        if usual is None:
            line = dot("idle", "Choose the column that has the texts.")
            return {self.column: gr.update(choices=choices, value=None), self.line: line}
        return {**none, self.column: gr.update(choices=choices, value=usual + 1)}

    async def run(
        self, request: gr.Request, token: Any, file: Any, column: Any, header: Any, *written: Any
    ) -> AsyncIterator[dict[Any, Any]]:
        """One file on the page."""
        caller = self._door.caller(current(), token)
        asked = self._form.written(written).payload()
        buttons = {self.go: gr.update(visible=False), self.halt: gr.update(visible=True)}
        yield {self.ride: caller.id, self.results: gr.update(value=None, visible=False), **buttons}
        async with aclosing(self._errands.run(caller, file, column, header, asked)) as views:
            async for view, path in views:
                line = dot(view.phase, self._form.in_words(view.line))
                done = view.progress
                update: dict[Any, Any] = {self.line: line + (bar(done.fraction) if done else "")}
                if view.phase.terminal:
                    update[self.go] = gr.update(visible=True)
                    update[self.halt] = gr.update(visible=False)
                if path:
                    label = "Results" if view.phase is Phase.FINISHED else "Results so far"
                    update[self.results] = gr.update(value=path, label=label, visible=True)
                yield update

    async def stop(self, request: gr.Request, ride: str) -> None:
        self._door.desk.stop(ride, request.session_hash)


def _told(view: View, path: str | None) -> dict[str, Any]:
    """Where a file is, for programs."""
    done = view.progress or NONE
    left = None if done.eta is None or view.phase.terminal else round(done.eta, 1)
    counts = {"done": done.done, "total": done.total, "failed": done.failed, "left": left}
    file = as_file(Path(path)) if path else None
    return {"status": view.line, **counts, "file": file}
