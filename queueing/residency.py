"""Which models lie on the device: loaded when asked for, within a number of bytes, those that have
rested longest put away for others.

A model whose rows run is never put away. So that steady use of one cannot keep another out, what is
in the way of rows that have waited long enough takes no new rows until they have had their turn. A
model larger than all there is room for is loaded when nothing else is. It asks no pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from queueing.work import Policy, Row

PATIENCE = 2.0  # seconds that rows wait for a model in use, or as long as its loading took


@dataclass(slots=True)
class Resident:
    """What is known of one model."""

    policy: Policy
    loaded: bool = False
    held: int = 0  # bytes when it is loaded; 0 until it has been
    took: float = 0.0  # seconds of its last loading
    used: float = 0.0  # when it last had rows, or came
    asked: float = math.inf  # since when somebody wants it without rows
    gone: float = -math.inf  # when it was put away
    draining: bool = False  # takes no new rows


@dataclass(frozen=True, slots=True)
class Step:
    """What to do before the next call: put these away, load this one, or look again then."""

    away: tuple[str, ...] = ()
    load: str | None = None
    wake: float = math.inf


class Residency:
    """The models of one device and the bytes they may hold together; None is no bound."""

    def __init__(self, policies: Mapping[str, Policy], budget: int | None) -> None:
        self.models = {task: Resident(policy) for task, policy in policies.items()}
        self._budget = math.inf if budget is None else budget
        self._latest = -math.inf  # when a model last came

    @property
    def held(self) -> int:
        """Bytes of all that are loaded."""
        return sum(model.held for model in self.models.values() if model.loaded)

    def open(self, task: str) -> bool:
        """Whether new rows of a task may begin."""
        model = self.models[task]
        return model.loaded and not model.draining

    def came(self, task: str, held: int, took: float, now: float) -> None:
        """A model was loaded; those that made way may come back."""
        model = self.models[task]
        model.loaded, model.held, model.took, model.used = True, held, took, now
        model.asked, self._latest = math.inf, now
        for each in self.models.values():
            each.draining = False

    def went(self, task: str, now: float) -> None:
        """A model was put away, or could not be loaded; its rows begin to wait anew."""
        model = self.models[task]
        model.loaded, model.draining, model.asked, model.gone = False, False, math.inf, now

    def ask(self, task: str, now: float) -> None:
        """Somebody will come with rows for a model."""
        model = self.models[task]
        model.asked = math.inf if model.loaded else min(model.asked, now)

    def step(self, rows: Iterable[Row], now: float) -> Step:
        """What is to be done for these rows, and about those who rest."""
        waiting, busy = self._look(rows, now)
        if not waiting:  # those for whom others made way have left
            for model in self.models.values():
                model.draining = False
        late = self._idle(busy, lambda model: self._keeps(model) <= now)
        if late:
            return Step(away=tuple(late))
        for task in sorted(waiting, key=waiting.__getitem__):
            away = self._room(task, busy)
            if away is not None:
                return Step(away=tuple(away), load=task)
        over = self._over(busy)
        if over:
            return Step(away=tuple(over))
        due = self._due(waiting)
        if due <= now and self._drain(busy):
            return self.step(rows, now)  # those without open rows are out of the way already
        return Step(wake=min(due if due > now else math.inf, self._rest(busy)))

    def oldest(self, rows: Iterable[Row], now: float) -> str | None:
        """The model without rows that has rested longest."""
        _, busy = self._look(rows, now)
        return next(iter(self._idle(busy)), None)

    def _look(self, rows: Iterable[Row], now: float) -> tuple[dict[str, float], set[str]]:
        """Since when models that are not here are wanted, and which have rows that may run."""
        waiting = {
            task: model.asked
            for task, model in self.models.items()
            if not model.loaded and model.asked < math.inf
        }
        busy = set()
        for row in rows:
            task, model = row.request.task, self.models[row.request.task]
            if not model.loaded:
                since = max(row.arrived, model.gone)
                waiting[task] = min(waiting.get(task, math.inf), since)
            elif row.opened or not model.draining:
                busy.add(task)
                model.used = now
        return waiting, busy

    def _idle(self, busy: set[str], which: Callable[[Resident], bool] | None = None) -> list[str]:
        """Loaded models without rows, the one that has rested longest first."""
        idle = [
            task
            for task, model in self.models.items()
            if model.loaded and task not in busy and (which is None or which(model))
        ]
        return sorted(idle, key=lambda task: self.models[task].used)

    def _keeps(self, model: Resident) -> float:
        """Until when it stays although nobody uses it."""
        return math.inf if model.policy.keep is None else model.used + model.policy.keep

    def _room(self, task: str, busy: set[str]) -> list[str] | None:
        """Whom to put away so that a model may come; None when that is not enough."""
        need, held, away = self._need(task), self.held, list[str]()
        for other in self._idle(busy):
            if held + need <= self._budget:
                break
            held -= self.models[other].held
            away.append(other)
        alone = not any(m.loaded for name, m in self.models.items() if name not in away)
        return away if held + need <= self._budget or alone else None

    def _need(self, task: str) -> int:
        """Bytes that a model takes; as many as the largest known, if it has never been here."""
        return self.models[task].held or max(model.held for model in self.models.values())

    def _over(self, busy: set[str]) -> list[str]:
        """Whom to put away when what has come was larger than thought; not the newest."""
        idle = self._idle(busy)
        newest = max(self.models.values(), key=lambda model: (model.loaded, model.used))
        over, held = list[str](), self.held
        for task in idle:
            if held <= self._budget:
                break
            if self.models[task] is not newest:
                held -= self.models[task].held
                over.append(task)
        return over

    def _due(self, waiting: Mapping[str, float]) -> float:
        """When the longest wait is over, for whatever is in its way; what came meanwhile has its
        time first, so that more of it goes into rows than into loading.
        """
        if not waiting:
            return math.inf
        task = min(waiting, key=waiting.__getitem__)
        return max(waiting[task], self._latest) + max(PATIENCE, self.models[task].took)

    def _drain(self, busy: set[str]) -> bool:
        """Let models in use take no more rows; whether that is news to any."""
        news = [self.models[task] for task in busy if not self.models[task].draining]
        for model in news:
            model.draining = True
        return bool(news)

    def _rest(self, busy: set[str]) -> float:
        """When the next idle model has rested long enough."""
        return min((self._keeps(self.models[task]) for task in self._idle(busy)), default=math.inf)
