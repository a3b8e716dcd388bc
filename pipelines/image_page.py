"""The page and the endpoint where pictures are drawn: seen as they come, then kept as files.

Like app.py it knows both Gradio and the queue; what may be asked for is on the model's card.
"""

from __future__ import annotations

import asyncio
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from time import monotonic
from typing import Any

import gradio as gr

from pipelines.drawn import STEPS, Drawn, Picture
from pipelines.forms import Field, Form
from pipelines.image_front import Offer
from pipelines.pictures import png
from pipelines.task_page import (
    EMPTY,
    FILE,
    FOLDER,
    PAGE,
    as_file,
    brought,
    current,
    described,
    person,
    top,
)
from queueing.desk import BEAT, Caller, Phase, View
from queueing.door import Door
from queueing.lines import dot
from queueing.shelf import make_room

OFFERED = ("negative", "width", "height", "steps", "guidance", "solver", "adapter", "weight")
KEPT = 24  # pictures in a gallery
DICE = "() => String(crypto.getRandomValues(new Uint32Array(1))[0])"
AGAIN = "Again with seed {seed}"


class Drawings:
    """Pictures for a page or a program, from what was asked to files."""

    def __init__(self, door: Door, blocks: gr.Blocks) -> None:
        self._door, self._blocks = door, blocks

    async def run(
        self, caller: Caller, asked: Mapping[str, Any]
    ) -> AsyncIterator[tuple[View, list[Path | None]]]:
        """Views to the end, the last with a file for each picture that may be shown."""
        payload = {name: value for name, value in asked.items() if value is not None}
        if "image" in payload:
            payload["image"] = brought(payload["image"]) or payload["image"]
        async with aclosing(self._door.follow("image", payload, caller)) as views:
            async for view in views:
                done = view.phase is Phase.FINISHED
                yield view, await asyncio.to_thread(self._saved, view.result) if done else []

    def kept(self, names: Any) -> list[str]:
        """Of files by their names, a line each, those that are there."""
        lines = names.splitlines() if isinstance(names, str) else []
        held = self._blocks.upload_file_set
        return [line for line in lines if line in held and Path(line).is_file()]

    def _saved(self, drawn: Drawn) -> list[Path | None]:
        """Gradio deletes them when their time is over."""
        make_room(self._blocks.upload_file_set)
        pairs = zip(drawn.images, drawn.seeds, strict=True)
        return [None if image is None else self._file(image, seed) for image, seed in pairs]

    def _file(self, image: Picture, seed: int) -> Path:
        path = FOLDER / secrets.token_hex(16) / f"carpool {seed}.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(png(image))
        self._blocks.upload_file_set.add(str(path))
        return path


def image_endpoint(door: Door, blocks: gr.Blocks, form: Form) -> Callable[..., Any]:
    """Pictures as programs ask for them."""
    takes = {
        field.name: (
            gr.FileData | None if field.kind == "picture" else field.type,
            EMPTY if field.needed else field.value,
        )
        for field in form.fields
    }
    drawings = Drawings(door, blocks)

    async def call(request: gr.Request, *sent: Any) -> AsyncIterator[dict[str, Any]]:
        asked, fraction, due = dict(zip(takes, sent, strict=True)), None, 0.0
        async with aclosing(drawings.run(door.caller(current()), asked)) as views:
            async for view, files in views:
                if view.phase.terminal and view.phase is not Phase.FINISHED:
                    raise gr.Error(view.line, print_exception=False)
                if view.phase.terminal:
                    yield _told(view, files)
                elif view.fraction != fraction or monotonic() >= due:
                    fraction, due = view.fraction, monotonic() + BEAT
                    yield {"status": view.line, "progress": fraction}

    return described(call, form.name, form.about, takes, dict[str, Any])


class ImagePage:
    """What to draw, how it comes along, and a gallery of what has been drawn."""

    def __init__(self, door: Door, blocks: gr.Blocks, form: Form) -> None:
        self._door, self._form = door, form
        self._drawings = Drawings(door, blocks)
        top(form.name)
        self.token, self.ride = person(door, blocks), gr.Textbox("", visible=False)
        self.known = gr.Checkbox(False, visible=False)  # whether the model has said what it takes
        gr.Markdown(form.intro)
        self._lay_out()
        self._connect(blocks)

    def _lay_out(self) -> None:
        made = {field.name: _component(field) for field in self._form.fields}
        self.fields = made
        with gr.Row(elem_id="task"):
            with gr.Column():
                made["prompt"].render()
                with gr.Row():
                    self.go = gr.Button(self._form.verb, variant="primary", elem_id="go")
                    self.halt = gr.Button("Stop", visible=False, elem_id="halt")
                self.line = gr.HTML(dot("idle", ""), elem_id="line")
                with gr.Accordion("Settings", open=False, visible=False, elem_id="settings") as all:
                    self.settings = all
                    made["negative"].render()
                    _row(made, "count", "steps", "guidance")
                    with gr.Row(equal_height=True):
                        made["seed"].render()
                        self.dice = gr.Button("Throw dice", size="sm", elem_id="dice", scale=0)
                    _row(made, "width", "height")
                    made["solver"].render()
                    _row(made, "adapter", "weight")
                with gr.Accordion("Draw over a picture", open=False, elem_id="over"):
                    _row(made, "image", "strength")
            with gr.Column(elem_id="result"):
                self.live = gr.HTML("", elem_id="live")
                self.gallery = gr.Gallery(
                    label="Drawn", columns=3, object_fit="contain", interactive=False,
                    height="auto", elem_id="gallery", buttons=["download", "fullscreen"],
                )  # fmt: skip
                self.hung = gr.Textbox("", visible=False)  # the files in the gallery, a line each
                self.chosen = gr.Textbox("", visible=False)  # the seed of a picture in the gallery
                self.again = gr.Button("", visible=False, elem_id="again")
        gr.Examples([list(each) for each in self._form.examples], [made["prompt"]])

    def _connect(self, blocks: gr.Blocks) -> None:
        inputs = [self.token, self.hung, self.known, *self.fields.values()]
        outputs = [
            self.line, self.ride, self.go, self.halt, self.live, self.gallery, self.hung,
            self.chosen, self.again,
        ]  # fmt: skip
        run: dict[str, Any] = {"fn": self.run, "inputs": inputs, "outputs": outputs, **FILE}
        gr.on([self.go.click, self.fields["prompt"].submit], **run)
        self.halt.click(self.stop, self.ride, queue=False, **PAGE)
        seed = self.fields["seed"]
        self.dice.click(None, None, seed, js=DICE, **PAGE)
        self.again.click(None, self.chosen, seed, js="(seed) => seed", **PAGE).then(**run)
        self.gallery.select(self.choose, None, [self.chosen, self.again], queue=False, **PAGE)
        blocks.load(self.offer, None, [self.known, self.settings, *self.fields.values()], **PAGE)

    async def offer(self) -> AsyncIterator[dict[Any, Any]]:
        """What the model takes and suggests, as soon as it is there; a visit brings it."""
        self._door.desk.want("image")
        async with aclosing(self._door.desk.states("image")) as states:
            async for state in states:
                if state.card is not None:
                    offered = _offered(Offer.of(state.card)).items()
                    looks = {self.fields[name]: gr.update(**how) for name, how in offered}
                    yield {self.known: True, self.settings: _seen(True), **looks}
                if state.card is not None or state.error:
                    return
                yield gr.skip()  # which notices that nobody looks any more

    async def run(
        self, request: gr.Request, token: Any, hung: Any, known: Any, *written: Any
    ) -> AsyncIterator[dict[Any, Any]]:
        """Some pictures on the page."""
        caller, shown = self._door.caller(current(), token), None
        fields = zip(self._form.fields, written, strict=True)
        asked = {f.name: _read(f, value) for f, value in fields if known or f.name not in OFFERED}
        yield {self.ride: caller.id, self.go: _seen(False), self.halt: _seen(True), self.live: ""}
        async with aclosing(self._drawings.run(caller, asked)) as views:
            async for view, files in views:
                update: dict[Any, Any] = {
                    self.line: dot(view.phase, self._form.in_words(view.line))
                }
                if view.preview is not None and view.preview is not shown:
                    shown = view.preview
                    update[self.live] = await asyncio.to_thread(_drawn, shown)
                if view.phase.terminal:
                    update |= {self.go: _seen(True), self.halt: _seen(False), self.live: ""}
                if view.phase is Phase.FINISHED:
                    update |= self._hung(view.result, files, hung)
                yield update

    async def stop(self, request: gr.Request, ride: str) -> None:
        self._door.desk.stop(ride, request.session_hash)

    async def choose(self, event: gr.SelectData) -> tuple[Any, Any]:
        """The seed of a picture that was clicked."""
        caption = event.value.get("caption") if isinstance(event.value, dict) else None
        seed = str(caption or "").rpartition(" ")[2]
        return (seed, _again(seed)) if seed.isdecimal() and len(seed) <= 20 else (gr.skip(),) * 2

    def _hung(self, drawn: Drawn, files: Sequence[Path | None], hung: Any) -> dict[Any, Any]:
        """The new pictures before those that hung there, as far as they are kept."""
        new = [str(path) for path in files if path is not None]
        kept = [*new, *self._drawings.kept(hung)][:KEPT]
        first = str(drawn.seeds[0])
        return {
            self.gallery: [(path, f"Seed {Path(path).stem.rpartition(' ')[2]}") for path in kept],
            self.hung: "\n".join(kept),
            self.chosen: first,
            self.again: _again(first),
        }


def _offered(offer: Offer) -> dict[str, dict[str, Any]]:
    """How each field looks for a model."""
    facts = offer.facts
    side: dict[str, Any] = {"value": facts.size, "visible": facts.least < facts.most}
    if facts.least < facts.most:  # a slider has two ends
        side |= {"minimum": facts.least, "maximum": facts.most, "step": facts.multiple}
    adapted = bool(offer.adapters)
    names = [("none", ""), *((name, name) for name in offer.adapters)]
    return {
        "negative": {"visible": facts.negatives},
        "width": side,
        "height": side,
        "steps": {"maximum": min(max(100, facts.steps), offer.steps, STEPS), "value": facts.steps},
        "guidance": {"value": facts.guidance},
        "solver": {
            "choices": list(offer.solvers), "value": offer.solvers[0],
            "visible": len(offer.solvers) > 1,
        },
        "adapter": {"choices": names, "value": "", "visible": adapted},
        "weight": {"visible": adapted},
    }  # fmt: skip


def _component(field: Field) -> Any:
    """What a person fills in; without a value until the model says what it suggests."""
    look: dict[str, Any] = {"label": field.label, "render": False, "elem_id": field.name}
    match field.kind:
        case "picture":
            return gr.Image(
                type="filepath", image_mode=None, sources=["upload", "clipboard"], **look
            )
        case "choice":
            return gr.Dropdown([], value=None, **look)
        case "number" if field.choices:
            least, most, step = field.choices
            return gr.Slider(least, most, field.value, step=step, min_width=160, **look)
    return gr.Textbox(placeholder=field.hint, max_lines=4, **look)


def _row(made: Mapping[str, Any], *names: str) -> None:
    with gr.Row():
        for name in names:
            made[name].render()


def _read(field: Field, written: Any) -> Any:
    """What is on the page, as an endpoint would have got it; what is wrong is left to the front."""
    if field.name == "seed":
        seed = str(written or "").strip()
        return int(seed) if seed.removeprefix("-").isdecimal() and len(seed) < 40 else seed or None
    return field.read(written)


def _told(view: View, files: Sequence[Path | None]) -> dict[str, Any]:
    """Pictures as programs get them."""
    drawn: Drawn = view.result
    return {
        "images": [None if path is None else as_file(path) for path in files],
        "seeds": list(drawn.seeds),
        "cut": drawn.cut,
        "cut_negative": drawn.cut_negative,
        "status": view.line,
        "progress": 1.0,
    }


def _drawn(pictures: Sequence[Picture]) -> str:
    """Previews, which are kept nowhere."""
    sources = [b64encode(png(each, 1)).decode() for each in pictures]
    return "".join(f'<img src="data:image/png;base64,{each}" alt="Preview">' for each in sources)


def _again(seed: str) -> Any:
    return gr.update(value=AGAIN.format(seed=seed), visible=True)


def _seen(visible: bool) -> Any:
    return gr.update(visible=visible)
