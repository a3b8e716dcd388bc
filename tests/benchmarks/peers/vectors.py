"""Embeddings over the peers' line: texts come, and vectors, seconds and counted tokens go.

Runs in the environment of any peer, so it needs the standard library alone. It does not know what
computes.
"""

from __future__ import annotations

import base64
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Embedder(Protocol):
    """A peer with its model; `embedding` is the module that every token goes through first."""

    version: str
    embedding: Any

    def prepare(self, setting: Mapping[str, Any]) -> None:
        """Whatever is done once for a setting, before the clock runs."""
        ...

    def vectors(
        self, texts: Sequence[str], setting: Mapping[str, Any]
    ) -> Sequence[Sequence[float]]:
        """For each text its vector of length 1, in whichever way `setting` names."""
        ...


class Tokens:
    """How many went through a module."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self, module: Any) -> Iterator[None]:
        """All calls within it, read off the module's input of token ids."""

        def see(module: Any, inputs: tuple[Any, ...], found: Any) -> None:
            self.count += inputs[0].numel()

        handle = module.register_forward_hook(see)
        try:
            yield
        finally:
            handle.remove()


def answer(peer: Embedder, order: Any) -> dict[str, Any]:
    """One timed round; or, if `shown`, one with its vectors and the tokens that were computed."""
    texts, setting = order["texts"], order["setting"]
    peer.prepare(setting)
    if order["shown"]:
        tokens = Tokens()
        with tokens.counted(peer.embedding):
            found = peer.vectors(texts, setting)
        numbers = array("f", (float(number) for vector in found for number in vector))
        return {"vectors": base64.b64encode(numbers).decode(), "computed": tokens.count}
    began, spent = time.perf_counter(), time.process_time()
    peer.vectors(texts, setting)
    took = time.perf_counter() - began
    return {"seconds": took, "processor": time.process_time() - spent}
