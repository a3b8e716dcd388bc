"""Gradio's border: what its routes and blocks would answer badly is answered in a sentence.

It knows shapes and Gradio's inside, but neither tasks nor who calls.
"""

from __future__ import annotations

import logging
from typing import Any

import gradio as gr
from fastapi.exceptions import RequestValidationError
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_function_params
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route

from queueing.payload import Gate, misshapen, shaped
from queueing.work import Invalid

logger = logging.getLogger("carpool.border")
LOST = "There is no such endpoint or session; /gradio_api/info lists what there is."
OVER = "There is no such call, or its answer has been read; a POST without the id starts a new one."
MISFIT = "The body has not the fields that this endpoint takes; the API page shows them."
SHAPE = "data does not have the shape that this endpoint takes; the API page shows it."


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
