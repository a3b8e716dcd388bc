"""What may come through the door at all: bounds on bodies and fields, JSON, Unicode.

It knows neither tasks nor pages; what a value means is for a front to judge.
"""

from __future__ import annotations

import json
from collections.abc import (
    Awaitable,
    Callable,
    Container,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Any, TypeAlias

from queueing.work import Invalid

BODY = 16_000_000  # bytes of one HTTP request
AROUND = 65_536  # more where it carries a file, which has names and lines around it
DEEPEST = 100  # lists and objects inside one another
DIGITS = 4300  # of a whole number, the most that Python reads
ASK = 'send an object such as {"data": ["Hello"]} with the header content-type: application/json.'

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


class TooLong(Invalid):
    """Raised for a body over the limit."""


@dataclass(frozen=True, slots=True)
class Gate:
    """ASGI middleware: a JSON body is read whole, and refused in a sentence if nobody could."""

    app: Application
    most: int = BODY

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            kind = headers.get(b"content-type", b"")
            most = self.most + (AROUND if kind.startswith(b"multipart/form-data") else 0)
            body = await self._read(headers.get(b"content-length", b"0"), receive, most)
            if body and b"json" in kind:
                body = opened(body)
        except Invalid as error:
            await _refuse(413 if isinstance(error, TooLong) else 400, str(error), send)
            return
        if body is not None:
            await self.app(scope, _again(body, receive), send)

    async def _read(self, length: bytes, receive: Receive, most: int) -> bytes | None:
        """The whole body, or None of a caller who hung up before its end."""
        _check(int(length) if length.isdigit() else 0, most)
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            _check(size, most)
            more = message.get("more_body", False)
        return b"".join(parts)


def _check(size: int, most: int) -> None:
    if size > most:
        raise TooLong(f"The request body has {size:,} bytes; at most {most:,} are taken.")


async def _refuse(status: int, text: str, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"detail": text}).encode()})


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, to be read once more."""
    parts = iter([body])

    async def again() -> Message:
        for part in parts:
            return {"type": "http.request", "body": part, "more_body": False}
        return await receive()

    return again


def opened(body: bytes) -> bytes:
    """A JSON body as anybody can read it; raises Invalid when it is no object, or too deep.

    A number with more digits than Python reads is cut to the most it does, for a front to refuse
    by the name of its field.
    """
    long: list[str] = []

    def whole(digits: str) -> int:
        if len(digits) > DIGITS:
            long.append(digits)
        return int(digits[:DIGITS])

    try:
        value = json.loads(body, parse_int=whole)
    except RecursionError:
        raise Invalid(_too_deep("")) from None
    except ValueError as error:
        why = error.msg.lower() if isinstance(error, json.JSONDecodeError) else "not UTF-8"
        raise Invalid(f"The body is not JSON ({why}); {ASK}") from None
    if not isinstance(value, dict):
        raise Invalid(f"The body is JSON, but no object; {ASK}")
    for name, item in value.items():
        _check_depth(name, item)
    return json.dumps(value).encode() if long else body


def _check_depth(name: str, value: Any) -> None:
    level, depth = [value], 0
    while level := [one for one in level if isinstance(one, list | dict)]:
        depth += 1
        if depth >= DEEPEST:
            raise Invalid(_too_deep(f" in {name[:40]}"))
        level = [one for outer in level for one in _inside(outer)]


def _inside(value: list[Any] | dict[str, Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def _too_deep(where: str) -> str:
    return f"Lists or objects{where} stand more than {DEEPEST} deep in one another; send fewer."


def misshapen(errors: Sequence[Mapping[str, Any]]) -> str:
    """The first thing that is wrong with the fields of a request, in a sentence."""
    name = ".".join(str(part) for part in errors[0]["loc"][1:])
    if not name:
        return f"The body is not a JSON object; {ASK}"
    if errors[0]["type"] == "missing":
        return f"{name} is missing; {ASK}" if name == "data" else f"{name} is missing."
    text = str(errors[0]["msg"]).replace("Input", name, 1)
    return f"{text}; {ASK}" if name == "data" else f"{text}."


def shaped(
    values: Sequence[Any], defaults: Mapping[str, Any], held: Container[str] = ()
) -> list[Any]:
    """The values in order, missing ones by default; raises Invalid when too many, or for a file
    that is not among those held.
    """
    if len(values) > len(defaults):
        raise Invalid(f"data has {len(values)} values; at most {len(defaults)} are taken.")
    given = (*values, *list(defaults.values())[len(values) :])
    return [_clean(name, value, held) for name, value in zip(defaults, given, strict=True)]


def _clean(name: str, value: Any, held: Container[str]) -> Any:
    """Unpaired surrogates, which no answer could carry, become the replacement character; raises
    Invalid for a file that is not held, wherever it stands: Gradio would take it for one of its
    own, and its cleaning ends for ever at the first that is a folder.
    """
    if isinstance(value, str) and not value.isascii():
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        if "meta" in value and "path" in value and str(value["path"]) not in held:
            raise Invalid(f"{name} is no file that is kept here; send it, also if you did before.")
        items = value.items()
        return {_clean(name, key, held): _clean(name, item, held) for key, item in items}
    return [_clean(name, item, held) for item in value] if isinstance(value, list) else value
