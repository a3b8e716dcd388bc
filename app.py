"""The front door: builds the page over a table of tasks, serves it, follows every call to its end.

The only file that knows both queue and page. Models live in worker processes started by name.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import gradio as gr
from fastapi.exceptions import RequestValidationError
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_function_params
from starlette.middleware import Middleware

from pipelines import FAKE, factory, served
from pipelines.cache import root
from pipelines.catalogue import FORMS
from pipelines.chat_page import ChatPage
from pipelines.file_page import FilePart, file_endpoint
from pipelines.forms import Form
from pipelines.image_page import ImagePage, image_endpoint
from pipelines.models import named
from pipelines.tables import BYTES
from pipelines.task_page import ASSETS, TaskPage, endpoint
from queueing import guards
from queueing.desk import Desk
from queueing.dispatcher import Dispatcher
from queueing.door import Door
from queueing.limits import Limits
from queueing.payload import Gate, shaped
from queueing.people import Signer, secret
from queueing.process import ProcessWorker
from queueing.settings import Settings
from queueing.shelf import AGE, OFTEN, Held, Shelf
from queueing.work import Invalid

logger = logging.getLogger("carpool")
SLOTS = 2 * Limits().total  # Gradio's slots, so that only our queue makes people wait
OWN = "The page does this by itself; there is nothing to call."
SHAPE = "data does not have the shape that this endpoint takes; the API page shows it."
GUARDS = {
    "middleware": [Middleware(Gate), Middleware(Shelf)],
    "exception_handlers": {
        RequestValidationError: guards.unfit,
        FnIndexInferError: guards.lost,
        KeyError: guards.lost,
        TypeError: guards.misfit,
    },
}


class Blocks(gr.Blocks):
    """Blocks that refuse a payload of the wrong shape in words, and keep no conversation."""

    async def preprocess_data(self, block_fn: Any, inputs: Any, state: Any, *rest: Any) -> Any:
        if state is not None:  # where Gradio would keep the last values of a tab for an hour
            state._update_value_in_config = lambda *_: None
        if block_fn.fn is None:
            raise gr.Error(OWN, print_exception=False)
        blocks = block_fn.inputs
        names = [name for name, *_ in get_function_params(block_fn.fn)]
        names += [block.elem_id or str(block._id) for block in blocks[len(names) :]]
        defaults = {name: block.value for name, block in zip(names, blocks, strict=True)}
        try:
            given = shaped(inputs, defaults, self.upload_file_set)
            return await super().preprocess_data(block_fn, given, state, *rest)
        except gr.Error as error:
            error.print_exception = False
            raise
        except Exception as error:
            text = str(error) if isinstance(error, Invalid) else SHAPE
            raise gr.Error(text, print_exception=False) from error


def opened(settings: Settings) -> Door:
    """The way in to the tasks that the settings name, their workers not yet started."""
    tables = FAKE if settings.pipeline == "fake" else served(named(os.environ))
    policies = {name: model.policy for name, model in tables.models.items()}
    policies["chat"] = replace(policies["chat"], rows=settings.rows)
    factories = {name: model.pipeline for name, model in tables.models.items()}
    budget = None if settings.memory is None else int(settings.memory * 1e9)
    dispatcher = Dispatcher(policies, [partial(ProcessWorker, factories, policies, budget)])
    services = {name: factory(front)() for name, front in tables.fronts.items()}
    desk = Desk(dispatcher, services, settings.grace)
    return Door(desk, Signer(secret(settings.secret, root())))


class Pages:
    """All pages and endpoints over one queue."""

    def __init__(self, door: Door) -> None:
        self.blocks = Blocks(
            title="Carpool",
            analytics_enabled=False,
            fill_height=True,
            delete_cache=(OFTEN, AGE),
        )
        forms = [FORMS[name] for name in door.desk.tasks]
        with self.blocks:
            ChatPage(door, self.blocks)
            gr.api(door.identity, api_name="identity", queue=False)
            for form in forms:
                call = self._endpoint(door, form)
                gr.api(call, api_name=form.name, concurrency_limit=None)
                if form.lines:
                    call = file_endpoint(door, self.blocks, form, form.lines)
                    gr.api(call, api_name=call.__name__, concurrency_limit=None)
        for form in forms:
            if form.verb:
                with self.blocks.route(form.title, form.name):
                    self._page(door, form)
        self.blocks.queue(api_open=False, default_concurrency_limit=None, max_size=SLOTS)
        self._shelve()

    def _shelve(self) -> None:
        """One set of names for all files: of Gradio's many, each keeps what another has deleted."""
        held = Held()
        self.blocks.upload_file_set, self.blocks.temp_file_sets = held, [held]
        for block in self.blocks.blocks.values():
            block.temp_files = held

    def _endpoint(self, door: Door, form: Form) -> Any:
        if form.draws:
            return image_endpoint(door, self.blocks, form)
        return endpoint(door, form)

    def _page(self, door: Door, form: Form) -> None:
        if form.draws:
            ImagePage(door, self.blocks, form)
            return
        page = TaskPage(door, self.blocks, form)
        if form.lines:
            FilePart(door, self.blocks, page, form)


def launch(door: Door, page: Pages, settings: Settings) -> None:
    """Open the page and say where it is; raises Invalid where it cannot be."""
    try:
        page.blocks.launch(
            server_port=settings.port,
            share=settings.share,
            max_threads=SLOTS,
            max_file_size=BYTES,
            app_kwargs={
                "lifespan": door.lifespan,
                "routes": [*guards.ENDS, *door.routes()],
                **GUARDS,
            },
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
    page = Pages(door)
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
