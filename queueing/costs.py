"""What a device call costs, learned: seconds per key, and how much one call may hold before memory
ends.

seconds = forwards * (a + c * rows) + b * units + d * depth, by recursive least squares with
forgetting and a ridge toward a scaled prior, so that a run of single requests cannot spoil the
split. Depth is what units look back on: without it, a long prompt, whose chunks grow dearer while
they shrink, passes for a dear call of cheap units. It does not know requests or sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from queueing.work import Key

Coefficients: TypeAlias = tuple[float, float, float, float]

# Seconds per forward, per row and forward, per unit, per unit and unit behind it.
PRIOR: Coefficients = (0.02, 0.002, 0.0005, 3e-8)
FORGETTING = 0.98
RIDGE = 0.002
SETTLED = 8  # calls after which only every so many are refitted
CLEAN_CALLS = 50  # at the cap, before it grows again


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Gaussian elimination for a small positive definite system."""
    size = len(vector)
    rows = [[*matrix[i], vector[i]] for i in range(size)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            for k in range(i, size + 1):
                rows[j][k] -= factor * rows[i][k]
    answer = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][k] * answer[k] for k in range(i + 1, size))
        answer[i] = (rows[i][size] - known) / rows[i][i]
    return answer


@dataclass(slots=True)
class _Fit:
    """The model of one key: discounted sums of x x^T and x s, solved when asked."""

    matrix: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    vector: list[float] = field(default_factory=lambda: [0.0] * 4)
    scale: float = 0.0  # observed over prior seconds
    calls: int = 0
    answer: Coefficients | None = PRIOR

    def observe(self, features: Coefficients, seconds: float) -> None:
        self.calls += 1
        ratio = seconds / max(sum(p * x for p, x in zip(PRIOR, features, strict=True)), 1e-9)
        if self.calls == 1:  # a first call warms up: it says the size of things and no more
            self.scale, self.answer = ratio, _scaled(ratio)
            return
        self.scale = ratio if self.calls == 2 else 0.9 * self.scale + 0.1 * ratio
        for i in range(4):
            self.vector[i] = FORGETTING * self.vector[i] + features[i] * seconds
            for j in range(4):
                self.matrix[i][j] = FORGETTING * self.matrix[i][j] + features[i] * features[j]
        if self.calls <= SETTLED or self.calls % SETTLED == 0:
            self.answer = None

    def coefficients(self) -> Coefficients:
        if self.answer is None:
            self.answer = self._refit()
        return self.answer

    def _refit(self) -> Coefficients:
        """Ridge toward the scaled prior; a coefficient that comes out negative is zero and the rest
        refitted.
        """
        prior = _scaled(self.scale)
        size = sum(self.matrix[i][i] * prior[i] ** 2 for i in range(4)) / 3 + 1e-18
        free = [0, 1, 2, 3]
        while free:
            ridge = [RIDGE * size / prior[i] ** 2 for i in range(4)]
            matrix = [
                [self.matrix[i][j] + (ridge[i] if i == j else 0.0) for j in free] for i in free
            ]
            found = _solve(matrix, [self.vector[i] + ridge[i] * prior[i] for i in free])
            worst = min(range(len(free)), key=found.__getitem__)
            if found[worst] >= 0:
                kept = dict(zip(free, found, strict=True))
                return kept.get(0, 0.0), kept.get(1, 0.0), kept.get(2, 0.0), kept.get(3, 0.0)
            del free[worst]
        return prior


def _scaled(scale: float) -> Coefficients:
    factor = max(scale, 1e-6)
    return PRIOR[0] * factor, PRIOR[1] * factor, PRIOR[2] * factor, PRIOR[3] * factor


class Costs:
    """Learned seconds of device calls by key."""

    def __init__(self) -> None:
        self._fits: dict[Key, _Fit] = {}

    def observe(
        self,
        key: Key,
        forwards: int,
        rows: float,
        units: float,
        seconds: float,
        depth: float = 0.0,
    ) -> None:
        """Learn from a call that has ended; `depth` sums for every unit the units behind it."""
        fit = self._fits.setdefault(key, _Fit())
        fit.observe((float(forwards), forwards * rows, float(units), float(depth)), seconds)

    def seconds(
        self, key: Key, forwards: int, rows: float, units: float, depth: float = 0.0
    ) -> float:
        """Predicted seconds of a call."""
        a, c, b, d = self.coefficients(key)
        return forwards * (a + c * rows) + b * units + d * depth

    def known(self, key: Key) -> bool:
        """Calls of this key have been seen, beyond the one that warmed up."""
        fit = self._fits.get(key)
        return fit is not None and fit.calls > 1

    def coefficients(self, key: Key) -> Coefficients:
        """(a, c, b, d), in the order of the prior."""
        fit = self._fits.get(key)
        return PRIOR if fit is None else fit.coefficients()


@dataclass(slots=True)
class _Cap:
    limit: float
    clean: int = 0


class MemoryCaps:
    """The largest load (weighted rows, or units of one forward) per key that memory has been seen
    to hold.
    """

    def __init__(self) -> None:
        self._caps: dict[Key, _Cap] = {}

    def limit(self, key: Key) -> float:
        """Infinite until memory has run out once."""
        cap = self._caps.get(key)
        return math.inf if cap is None else cap.limit

    def failed(self, key: Key, load: float) -> None:
        """A call of this load ran out of memory: cut by a fifth at least, and below what failed."""
        limit = max(min(0.8 * load, load - 1, self.limit(key)), 1.0)
        self._caps[key] = _Cap(limit)

    def passed(self, key: Key, load: float) -> None:
        """A call of this load went well; enough of them at the cap raise it by a twentieth, one at
        least.
        """
        cap = self._caps.get(key)
        if cap is None or load < math.floor(cap.limit):
            return
        cap.clean += 1
        if cap.clean >= CLEAN_CALLS:
            cap.limit, cap.clean = max(cap.limit * 1.05, cap.limit + 1), 0
