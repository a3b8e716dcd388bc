"""The peer's side of the line: jobs come as JSON on standard input, answers go as JSON lines.

Runs in the environment of any peer, so it needs the standard library alone. It does not know what
computes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt, and how many tokens are wanted after it; `at` is when it comes, in seconds."""

    prompt: list[int]
    tokens: int
    at: float = 0.0


class Peer(Protocol):
    """An engine that has loaded its model."""

    version: str

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        """The tokens of each, all asked at once."""
        ...


def serve(make: Any, answer: Callable[[Any, Any], dict[str, Any]] | None = None) -> None:
    """`make(job)` gives a peer; then an answer for every line that comes, until there are no more;
    a round of tokens, or what `answer` makes of the peer and the line.
    """
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def say(**fields: Any) -> None:
        said.write(json.dumps(fields) + "\n")
        said.flush()

    peer = make(json.loads(sys.stdin.readline()))
    say(version=peer.version)
    for line in sys.stdin:
        say(**(answer or _tokens)(peer, json.loads(line)))


def _tokens(peer: Any, order: Any) -> dict[str, Any]:
    asks = [Ask(**fields) for fields in order["asks"]]
    if order["replay"]:
        return {"times": peer.replay(asks)}
    began, spent = time.perf_counter(), _processor(peer)
    tokens = peer.answer(asks)
    took = time.perf_counter() - began
    return {"seconds": took, "processor": _processor(peer) - spent, "tokens": tokens}


def _processor(peer: Any) -> float:
    """Processor seconds so far, of all threads here and of the server that a peer started."""
    server = getattr(peer, "server", None)
    if server is None:
        return time.process_time()
    with open(f"/proc/{server}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
