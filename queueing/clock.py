"""Time as an argument: a clock is a function that returns seconds.

The core never reads the wall clock by itself, so it runs the same under a virtual clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

Clock: TypeAlias = Callable[[], float]

monotonic: Clock = time.monotonic


class VirtualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
