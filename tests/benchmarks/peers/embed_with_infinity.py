"""infinity-emb's engine in the process, with its default layers: single callers at once, or one
list.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ |= {"INFINITY_ANONYMOUS_USAGE_STATS": "0", "DO_NOT_TRACK": "1"}

import torch
from infinity_emb import AsyncEmbeddingEngine, EngineArgs
from vectors import answer
from wire import serve


class Infinity:
    """One engine for each size of batch, all on one loop; of these one runs."""

    version = importlib.metadata.version("infinity-emb")

    def __init__(self, job: dict[str, Any]) -> None:
        self._folder, self._setting = job["folder"], job["setting"]
        torch.set_num_threads(self._setting["threads"])
        self._loop = asyncio.new_event_loop()
        self._rows, self._engine = 0, self._made(32)

    @property
    def embedding(self) -> Any:
        """Of the model that runs."""
        return self._engine._model_replicas[0][0].auto_model.get_input_embeddings()

    def prepare(self, setting: Mapping[str, Any]) -> None:
        """An engine with these rows in place of the one before."""
        rows = setting["rows"]
        if rows == self._rows:
            return
        if self._rows:
            self._loop.run_until_complete(self._engine.astop())
        self._rows, self._engine = rows, self._made(rows)
        self._loop.run_until_complete(self._engine.astart())

    def vectors(self, texts: Sequence[str], setting: Mapping[str, Any]) -> Any:
        return self._loop.run_until_complete(self._all(texts, setting["way"] == "list"))

    async def _all(self, texts: Sequence[str], listed: bool) -> Any:
        if listed:
            return (await self._engine.embed(sentences=list(texts)))[0]
        each = await asyncio.gather(*(self._engine.embed(sentences=[text]) for text in texts))
        return [vectors[0] for vectors, _ in each]

    def _made(self, rows: int) -> AsyncEmbeddingEngine:
        return AsyncEmbeddingEngine.from_args(
            EngineArgs(
                model_name_or_path=self._folder,
                engine="torch",
                device="cpu",
                dtype=self._setting["dtype"],
                batch_size=rows,
                model_warmup=False,
            )
        )


if __name__ == "__main__":
    serve(Infinity, answer)
