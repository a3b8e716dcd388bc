"""Who comes in and what becomes of them: names the caller, follows a call to its end, stops it for
its owner only.

It knows HTTP requests and the events of the page's own queue by their ids and tabs; it knows no
page, no task and no model.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from queueing.desk import Caller, Desk, Phase, View
from queueing.freight import Freight
from queueing.lines import badge
from queueing.people import Person, Signer

logger = logging.getLogger("carpool.door")
HEADER = "x-carpool-token"
OURS = "Something went wrong on our side, and it has been noted. Please try again."


class Door:
    """One application's way in, on the event loop that serves its page."""

    def __init__(self, desk: Desk, signer: Signer) -> None:
        self.desk = desk
        self.signer = signer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: weakref.WeakSet[Any] = weakref.WeakSet()  # cancelled before they ran

    @asynccontextmanager
    async def lifespan(self, _app: Any) -> AsyncIterator[None]:
        """The workers live as long as the loop that serves the page."""
        self._loop = asyncio.get_running_loop()
        await self.desk.dispatcher.start()
        try:
            yield
        finally:
            await self.desk.dispatcher.close()

    def close(self, timeout: float = 10.0) -> None:
        """End every call and every worker; called from another thread than the loop's."""
        if self._loop is not None:
            ending = self.desk.dispatcher.close()
            asyncio.run_coroutine_threadsafe(ending, self._loop).result(timeout)

    def follow(self, task: str, payload: Any, caller: Caller) -> AsyncGenerator[View, None]:
        """The one handler: views of a call to its end."""
        return self._kept(self.desk.follow(task, payload, caller))

    def carry(self, task: str, freight: Freight, caller: Caller) -> AsyncGenerator[View, None]:
        """The same for a file of many lines."""
        return self._kept(self.desk.carry(task, freight, caller))

    async def _kept(self, views: AsyncGenerator[View, None]) -> AsyncGenerator[View, None]:
        """An error of ours becomes a sentence."""
        try:
            async with aclosing(views):
                async for view in views:
                    yield view
        except Exception:
            logger.exception("a call failed in the application")
            yield View(Phase.FAILED, OURS)

    async def identity(self) -> str:
        """A new signed name. Sent as the header x-carpool-token, it is who you are."""
        return self.signer.issue()

    def caller(self, event: Any, token: Any = None) -> Caller:
        """Whose event it is."""
        person = self._person(event.request, event.username, token)
        return Caller(person, event._id, event.session_hash or event._id, event in self._early)

    def routes(self) -> list[Route]:
        """Stand before Gradio's own, which end all calls of a tab and ask for no owner."""
        ends = [f"/gradio_api/{name}" for name in ("cancel", "cancel/", "reset", "reset/")]
        routes = [Route(path, self._end, methods=["POST"]) for path in ends]
        return [*routes, Route("/model", self._watch)]

    async def _watch(self, http: Request) -> StreamingResponse:
        """What a task's model does, told at every change for as long as somebody looks."""
        states = self.desk.states(http.query_params.get("task", "chat"))
        events = (f"data: {badge(state)}\n\n" async for state in states)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _end(self, http: Request) -> JSONResponse:
        """One call, for its owner: its tab, or with /reset, which names no tab, its person."""
        try:
            body = dict(await http.json())
        except (TypeError, ValueError):
            body = {}
        event = http.app.get_blocks()._queue.event_ids_to_events.get(str(body.get("event_id")))
        if event is not None and self._owns(http, event, body.get("session_hash")):
            if not self.desk.stop(event._id, event.session_hash):
                self._early.add(event)
        return JSONResponse({"success": True})

    def _owns(self, http: Request, event: Any, tab: Any) -> bool:
        if "/cancel" in http.url.path:
            return bool(event.session_hash == tab)
        return self._person(http, None, None) == self._person(event.request, event.username, None)

    def _person(self, http: Any, login: str | None, token: Any) -> Person:
        profile = http.scope.get("session", {}).get("oauth_info", {}).get("userinfo", {})
        address = http.client.host if http.client else "unknown"
        login, token = login or profile.get("preferred_username"), http.headers.get(HEADER) or token
        return self.signer.person(login, token, address)
