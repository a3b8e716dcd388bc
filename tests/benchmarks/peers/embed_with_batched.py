"""mixedbread's `batched` around the padded model: single callers at once, or one list of which the
short texts go first.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from batched import aio
from batched.types import PriorityStrategy
from embed_with_transformers import Padded
from vectors import answer
from wire import serve


class Batched:
    """One decorated function for each size of batch, all on one loop."""

    version = importlib.metadata.version("batched")

    def __init__(self, job: dict[str, Any]) -> None:
        self._padded = Padded(job)
        self.embedding = self._padded.embedding
        self._loop = asyncio.new_event_loop()
        self._ways = cache(self._decorated)

    def prepare(self, setting: Mapping[str, Any]) -> None:
        """Nothing."""

    def vectors(self, texts: Sequence[str], setting: Mapping[str, Any]) -> Any:
        return self._loop.run_until_complete(
            self._all(texts, setting["rows"], setting["way"] == "list")
        )

    async def _all(self, texts: Sequence[str], rows: int, listed: bool) -> Any:
        way = self._ways(rows, listed)
        if listed:
            return await way(list(texts))
        return await asyncio.gather(*(way(text) for text in texts))

    def _decorated(self, rows: int, listed: bool) -> Callable[[Any], Any]:
        def embed(texts: list[str]) -> list[Any]:
            return list(self._padded.batch(self._padded.tokens(texts)))

        strategy = PriorityStrategy.LENGTH if listed else PriorityStrategy.NONE
        made: Callable[[Any], Any] = aio.dynamically(
            embed, batch_size=rows, priority_strategy=strategy
        )
        return made


if __name__ == "__main__":
    serve(Batched, answer)
