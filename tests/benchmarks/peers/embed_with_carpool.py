"""Our own engine on embeddings: front, pipeline, policy and loop of `make run`, without page and
queue.

Run from the repository's root, in its environment. Each text is a request of its own, or all are
one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipelines import encodes, factory
from pipelines.embed import EmbedFront
from queueing.clock import monotonic
from queueing.engine import Engine
from queueing.messages import Load, Loaded, Start, Up
from queueing.work import Card, Request, Status
from tests.benchmarks.peers.vectors import answer
from tests.benchmarks.peers.wire import serve


class Carpool:
    """An engine that is given as many rows as it reports room for, as by a dispatcher."""

    def __init__(self, job: dict[str, Any]) -> None:
        model = encodes("embed")
        path, given = model.pipeline
        pipeline = factory(str(path))(**dict(given), **job["setting"])  # type: ignore[call-overload]
        cards: list[Card] = []
        errors: list[str] = []

        def tell(message: Up) -> None:
            if isinstance(message, Loaded):
                cards.extend([message.card] if message.card else [])
                errors.append(message.error)

        self._engine = Engine({"embed": pipeline}, {"embed": model.policy}, monotonic, tell)
        self._engine.handle(Load("embed"))
        self._engine.tick()
        if not cards:
            raise RuntimeError(f"Error: {errors[-1]}")
        self._card, self._front = cards[0], EmbedFront()
        self._starts = itertools.count()
        self._ids = map(str, itertools.count())
        self.embedding = pipeline._known().encoder.model.get_input_embeddings()
        path = self._card.details["path"]
        self.version = f"{path}, {torch.get_num_threads()} threads"

    def prepare(self, setting: Mapping[str, Any]) -> None:
        """Nothing."""

    def vectors(self, texts: Sequence[str], setting: Mapping[str, Any]) -> list[Any]:
        lists = [list(texts)] if setting["way"] == "list" else [[text] for text in texts]
        requests = [self._request(each) for each in lists]
        results = self._results(requests)
        return [vector for request in requests for vector in results[request.id]]

    def _request(self, texts: list[str]) -> Request:
        checked = self._front.check({"texts": texts}, self._card)
        id = next(self._ids)
        return replace(checked, id=id, session=id)

    def _results(self, requests: Sequence[Request]) -> dict[str, Any]:
        waiting, results = list(requests), dict[str, Any]()
        while waiting or not self._engine.idle:
            room = self._engine.room()["embed"].rows
            count = int(room / waiting[0].share) if waiting else 0
            if count:
                self._start(waiting[:count])
                del waiting[:count]
            report = self._engine.tick()
            for id, output in report.outputs.items() if report else ():
                if output.result is not None:
                    results[id] = output.result
            for end in report.ended.values() if report else ():
                if end.status is not Status.FINISHED:
                    raise RuntimeError(f"a request ended as {end.status}: {end.error}")
        return results

    def _start(self, requests: Sequence[Request]) -> None:
        left = {each.id: 3600.0 for each in requests}
        self._engine.handle(Start(next(self._starts), tuple(requests), {}, {}, left))


if __name__ == "__main__":
    serve(Carpool, answer)
