"""What a dispatcher and a worker say to each other: down Load to Drain, up Ready to Report.

The only bridge between processes; every message pickles without torch. It holds no logic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from queueing.work import (
    Card,
    CarpoolError,
    Key,
    Mark,
    Output,
    Reason,
    Request,
    Room,
    Status,
    message,
)

# Down: what a dispatcher sends to a worker.


@message
class Load:
    task: str


@message
class Unload:
    task: str


@message
class Start:
    """Open these rows. `served` has the number of every session that the worker holds."""

    number: int
    requests: tuple[Request, ...]
    marks: Mapping[str, Mark]
    served: Mapping[str, float]
    left: Mapping[str, float]  # seconds each request may still take


@message
class Park:
    id: str


@message
class Cancel:
    id: str


@message
class Drain:
    """Finish what runs, then leave."""


Down: TypeAlias = Load | Unload | Start | Park | Cancel | Drain


# Up: what a worker sends to its dispatcher.


@message
class Ready:
    """The worker lives and holds nothing."""

    room: Mapping[str, Room]


@message
class Loading:
    task: str
    fraction: float
    text: str


@message
class Loaded:
    """A task is up (`card`), could not be brought up (`error`), or was put away (neither)."""

    task: str
    card: Card | None = None
    error: str = ""


@message
class Calling:
    """A device call began; `seconds` is how long it should take."""

    ids: tuple[str, ...]
    seconds: float


@message
class Call:
    """One device call that ended. `rows` is weighted; `size` is the policy's largest rows."""

    task: str
    key: Key
    reason: Reason
    ids: tuple[str, ...]
    forwards: int
    rows: float
    units: float
    seconds: float
    size: float
    error: str = ""
    reused: int = 0  # units that a cache had


@message
class End:
    status: Status
    error: CarpoolError | None = None


FINISHED = End(Status.FINISHED)  # one for all, which also pickles once


@message
class Report:
    """What changed since the last one; sent also when no device call was made."""

    outputs: Mapping[str, Output]
    marks: Mapping[str, Mark]
    ended: Mapping[str, End]
    parked: Mapping[str, Mark]
    seconds: Mapping[str, float]  # device-seconds per row
    call: Call | None
    room: Mapping[str, Room]
    seen: int  # number of the last Start read


Up: TypeAlias = Ready | Loading | Loaded | Calling | Report
