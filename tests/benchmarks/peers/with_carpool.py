"""Our own engine: the pipeline, the policy and the loop of `make run`, without page and queue.

Run from the repository's root, in its environment. Answers do not end before the tokens that were
asked for; each round is another person's, so no round finds pages of an earlier one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pipelines import CHAT, factory
from pipelines.text import TextPipeline
from queueing.clock import monotonic
from queueing.engine import Engine
from queueing.messages import Load, Loaded, Start, Up
from queueing.settings import Settings as House
from queueing.work import Card, Request, Status
from tests.benchmarks.peers.wire import Ask, serve
from tests.benchmarks.workload import Greedy


class Endless(TextPipeline):
    """The default pipeline, except that no token ends an answer."""

    def load(self, tell: Any) -> Any:
        card = super().load(tell)
        self._words = replace(self._known_words(), ends=frozenset())
        return card


class Carpool:
    """Settings that are not given are those of `make run`."""

    def __init__(self, job: dict[str, Any]) -> None:
        setting = dict(job["setting"])
        task = CHAT
        if factory(task.pipeline) is not TextPipeline:
            raise RuntimeError("the registry's chat is not the text pipeline")
        policy = replace(task.policy, rows=setting.pop("rows", House().rows))
        cards: list[Card] = []

        def tell(message: Up) -> None:
            cards.extend([message.card] if isinstance(message, Loaded) and message.card else [])

        self._engine = Engine({"chat": Endless(**setting)}, {"chat": policy}, monotonic, tell)
        self._engine.handle(Load("chat"))
        self._engine.tick()
        self._greedy = Greedy(cards[0])
        self._rounds = itertools.count()
        self._starts = itertools.count()
        self.version = f"{torch.get_num_threads()} threads, {policy.rows} rows"

    def answer(self, asks: Sequence[Ask]) -> list[list[int]]:
        """A dispatcher gives an engine as many rows as it reports room for; so does this."""
        turn = next(self._rounds)
        ids = [f"{turn}.{place}" for place in range(len(asks))]
        waiting = [
            replace(self._greedy.request(ask), id=id, session=id)
            for id, ask in zip(ids, asks, strict=True)
        ]
        tokens: dict[str, list[int]] = {id: [] for id in ids}
        while waiting or not self._engine.idle:
            room = int(self._engine.room()["chat"].rows)
            if waiting and room:
                self._start(waiting[:room])
                del waiting[:room]
            report = self._engine.tick()
            for id, mark in report.marks.items() if report else ():
                tokens[id] += mark
            for end in report.ended.values() if report else ():
                if end.status is not Status.FINISHED:
                    raise RuntimeError(f"a request ended as {end.status}: {end.error}")
        return [tokens[id] for id in ids]

    def _start(self, requests: Sequence[Request]) -> None:
        left = {each.id: 3600.0 for each in requests}
        self._engine.handle(Start(next(self._starts), tuple(requests), {}, {}, left))


if __name__ == "__main__":
    serve(Carpool)
