"""What the next report of a worker will say, gathered while an engine ticks.

It does not know why anything happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from queueing.messages import Call, End, Report
from queueing.work import (
    Mark,
    Output,
    Room,
)


@dataclass(slots=True)
class Draft:
    """By request id, like the Report it becomes."""

    outputs: dict[str, Output] = field(default_factory=dict)
    marks: dict[str, Mark] = field(default_factory=dict)
    ended: dict[str, End] = field(default_factory=dict)
    parked: dict[str, Mark] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    call: Call | None = None
    reused: int = 0  # units that a cache had
    news: bool = False  # a Start was read

    @property
    def empty(self) -> bool:
        return not (self.ended or self.parked or self.call or self.news)

    def report(self, room: Mapping[str, Room], seen: int) -> Report:
        return Report(
            self.outputs,
            self.marks,
            self.ended,
            self.parked,
            self.seconds,
            self.call,
            room,
            seen,
        )
