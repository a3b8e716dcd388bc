"""The page of the chat: a conversation that lives in the browser.

Like app.py it knows both Gradio and the queue. What was said is kept by the page alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import gradio as gr

from pipelines.talk import SAMPLING, SLIDERS, Question, begun, drawn, said, sampled
from pipelines.task_page import ASSETS, PAGE, current, person, script, top
from queueing.desk import Phase
from queueing.door import Door
from queueing.lines import dot

GREETING = "### Ask me anything\nOne model for everybody who is here: you share every batch."


class ChatPage:
    """A conversation that lives in the browser."""

    def __init__(self, door: Door, blocks: gr.Blocks) -> None:
        self._door = door
        self._lay_out(blocks)
        self._connect()

    def _lay_out(self, blocks: gr.Blocks) -> None:
        top("chat")
        self.token = person(self._door, blocks)
        self.ride = gr.Textbox("", visible=False)
        self.news = gr.JSON({}, visible="hidden")  # which message was taken, or comes back
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
        talk, inputs = self.chatbot, [self.box, self.chatbot, self.token, *self.settings]
        triggers = [self.box.submit, talk.example_select, talk.retry, talk.edit]
        gr.on(
            triggers, self.turn, inputs, [talk, self.box, self.line, self.ride, self.news], **PAGE
        )
        self.box.stop(self.stop, self.ride, queue=False, **PAGE)
        self.chatbot.clear(self.clear, self.ride, self.line, queue=False, **PAGE)
        self.news.change(None, [self.news, self.box], self.box, js=script("box"), **PAGE)

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
