"""What stands before the page's own routes: sentences where it would break off, hang, or answer
with internals.

It knows HTTP requests and the page's own queue of events by their ids and tabs; it knows no page
and no task.
"""

from __future__ import annotations

import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Match, Route

from queueing.payload import misshapen

logger = logging.getLogger("carpool.guards")
LOST = "There is no such endpoint or session; /gradio_api/info lists what there is."
OVER = "There is no such call, or its answer has been read; a POST without the id starts a new one."
MISFIT = "The body has not the fields that this endpoint takes; the API page shows them."


def refusal(status: int, text: str) -> JSONResponse:
    """A sentence as JSON."""
    return JSONResponse({"detail": text}, status)


async def lost(_: Request, error: Exception) -> JSONResponse:
    """For what names something that is not there."""
    return refusal(404, LOST)


async def unfit(_: Request, error: Any) -> JSONResponse:
    """For a body whose fields are wrong."""
    return refusal(422, misshapen(error.errors()))


async def misfit(_: Request, error: Exception) -> JSONResponse:
    """For a body that a route cannot take."""
    logger.info("a request did not fit a route", exc_info=error)
    return refusal(422, MISFIT)


async def over(_: Request) -> JSONResponse:
    """For a stream in which nothing is left."""
    return refusal(404, OVER)


class Over(Route):
    """Stands before a stream that would break off or never end: nothing is left in it.

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


CALLS = ("/gradio_api/call/{name}/{id}", "/gradio_api/call/v2/{name}/{id}")
ENDS = [Over(path, over) for path in ("/gradio_api/queue/data", *CALLS)]
