"""What may come through the door at all: bounds on bodies and fields, Unicode, nothing missing.

It knows neither tasks nor pages; what a value means is for a front to judge.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from queueing.work import Invalid

BODY = 16_000_000  # bytes of one HTTP request
FIELD = 1_000_000  # characters of one field, far above what any front accepts

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """ASGI middleware: refuses a request body that is too long before anybody reads it."""

    app: Application
    most: int = BODY

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        length = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if scope["type"] == "http" and length.isdigit() and int(length) > self.most:
            await self._refuse(int(length), send)
        else:
            await self.app(scope, self._counted(receive), send)

    async def _refuse(self, length: int, send: Send) -> None:
        text = f"The request body has {length:,} bytes; at most {self.most:,} are taken."
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"detail": text}).encode()})

    def _counted(self, receive: Receive) -> Receive:
        """For a body that did not say its length: one beyond the limit counts as hung up."""
        left = self.most

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            return message if left >= 0 else {"type": "http.disconnect"}

        return counted


def shaped(values: Sequence[Any], defaults: Mapping[str, Any]) -> list[Any]:
    """The values in order, missing ones by default; raises Invalid when too many or too long."""
    if len(values) > len(defaults):
        raise Invalid(f"data has {len(values)} values; at most {len(defaults)} are taken.")
    for name, value in zip(defaults, values, strict=False):
        if (size := _characters(value)) > FIELD:
            raise Invalid(f"{name} has {size:,} characters; at most {FIELD:,} are taken.")
    return [_clean(value) for value in (*values, *list(defaults.values())[len(values) :])]


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(str(key)) + _characters(item) for key, item in value.items())
    return sum(map(_characters, value)) if isinstance(value, list) else 1


def _clean(value: Any) -> Any:
    """Unpaired surrogates, which no answer could carry, become the replacement character."""
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value
