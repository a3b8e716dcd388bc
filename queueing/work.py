"""The words of the house: requests, work, rows, outputs, messages, errors.

Everybody imports this file and it imports nobody. It holds no logic beyond small derived facts,
and it does not know what a task computes, on which device, or for which page.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from operator import attrgetter
from typing import Any, Protocol, TypeAlias, TypeVar, dataclass_transform

Key: TypeAlias = Hashable
Mark: TypeAlias = tuple[Any, ...]
Tell: TypeAlias = Callable[[float, str], None]


T = TypeVar("T")

SHARE = 0.25  # of a promised latency: one call runs, one waits for company, one is one's own


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """A frozen, slotted dataclass that pickles by its constructor: four times as fast as else."""
    made = dataclass(frozen=True, slots=True)(cls)
    names = tuple(made.__dataclass_fields__)  # type: ignore[attr-defined]
    values = attrgetter(*names) if len(names) > 1 else None

    def reduce(self: T) -> tuple[type[T], tuple[Any, ...]]:
        return made, values(self) if values else tuple(getattr(self, name) for name in names)

    made.__reduce__ = reduce  # type: ignore[assignment, method-assign]
    return made


class Priority(IntEnum):
    """Interactive and standard are weights; background runs when nothing else is ready, above a
    floor.
    """

    INTERACTIVE = 0
    STANDARD = 1
    BACKGROUND = 2

    @property
    def weight(self) -> float:
        """How many device-seconds cost as much as one standard device-second."""
        return 8.0 if self is Priority.INTERACTIVE else 1.0


class Status(StrEnum):
    """Where a request is in its life; the last five are terminal and exactly one of them is
    reached.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    REFUSED = "refused"

    @property
    def terminal(self) -> bool:
        return self not in (Status.WAITING, Status.RUNNING, Status.PARKED)


class Reason(StrEnum):
    """Why a device call went when it went, with the rows it had."""

    FULL = "full"  # the policy's rows or units
    MEMORY = "memory"  # the learned memory cap
    BUDGET = "budget"  # the policy's latency target
    DEADLINE = "deadline"  # the earliest deadline that can still be met
    IDLE = "idle"  # the device was free, and nothing more was ready
    BURST_OVER = "burst over"  # a burst was awaited and has ended
    RETRY = "retry"  # half of a call that failed
    LOAD = "load"


class CarpoolError(Exception):
    """The family of refusals and failures that callers may see; its text is written for people."""


class Invalid(CarpoolError):
    """Raised by a front when a payload breaks a rule; names the field and the limit."""


class Full(CarpoolError):
    """Raised at submit when a limit is reached; says which one and when to come back."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds

    def __reduce__(self) -> tuple[type[Full], tuple[str, float]]:
        return Full, (str(self), self.retry_after)


class Expired(CarpoolError):
    """The request's time limit passed before it ended."""


class Cancelled(CarpoolError):
    """The caller, or its absence, ended the request."""


class OutOfMemory(CarpoolError):
    """Raised by a pipeline's step when the device has no memory for this call."""


class WorkerLost(CarpoolError):
    """The worker that ran the request died, and the request died again when it ran alone."""


@message
class Work:
    """The next unit of a row: only equal keys share a device call.

    `serial` units are consecutive forwards (decode tokens, denoise steps); other units are done in
    one forward (a prefill chunk). `weight` is how many rows it counts for (2 with guidance).
    """

    key: Key
    least: int = 1
    most: int = 1
    weight: float = 1.0
    serial: bool = False
    behind: int = 0  # units on which its units look back

    @property
    def divisible(self) -> bool:
        """A forward may take any part of it."""
        return self.most > self.least and not self.serial


@message
class Request:
    """A checked payload with its plan of work; `id` and `session` are given by the dispatcher."""

    task: str
    payload: Any
    plan: tuple[Work, ...]
    bytes: int = 0
    id: str = ""
    session: str = ""
    salt: str = ""  # narrows whom caches take for the same person, where an address is all we know
    priority: Priority = Priority.STANDARD
    weight: float = 1.0  # of its person: 2 gets twice the device-seconds of 1

    @property
    def pace(self) -> float:
        """Device-seconds that count as one in its session's number."""
        return self.weight * self.priority.weight

    @property
    def single(self) -> bool:
        """One forward is the whole request, so a worker should hold two calls of its kind."""
        return len(self.plan) == 1 and not self.plan[0].serial

    @property
    def share(self) -> float:
        """The rows of a worker's room that it takes."""
        weight = max(work.weight for work in self.plan)
        return weight / 2 if self.single and self.priority is not Priority.BACKGROUND else weight


@message
class Output:
    """Host data for the reader, that unpickles without torch, like marks and results do: `delta`
    appends at offset `at` (a stream skips what it has), the rest replaces.
    """

    at: int = 0
    delta: str = ""
    preview: Any = None
    progress: float | None = None  # 0 to 1
    result: Any = None


@message
class Advance:
    """What a step made of one row; `units` may be fewer than granted; `mark` extends the row's
    mark; `reused` units, said once, needed no computing because a cache had them.
    """

    state: Any
    units: int
    output: Output | None = None
    mark: Mark = ()
    reused: int = 0


@dataclass(slots=True, eq=False)
class Row:
    """A running request in an engine.

    Pipelines read `request`, `state`, `work` and `cancelled`, and write nothing.
    """

    request: Request
    state: Any
    order: int
    deadline: float
    arrived: float = 0.0
    share: float = 1.0  # of its request, kept because it is summed after every call
    mark: Mark | None = None  # to continue from, until it is opened
    opened: bool = False
    work: Work | None = None
    cancelled: bool = False
    computed: int = 0  # units committed since it was opened
    blame: float = 0.0  # device-seconds of failed calls it may have caused


@message
class Policy:
    """How one task is batched. The defaults suit a model nobody has measured yet."""

    rows: int = 8  # weighted rows in one device call
    units: int = 4096  # units in one forward
    wait: float = 0.0  # seconds an incomplete first call is held back; hurts nearly always
    target: float | None = None  # seconds one device call may take; None: as the card says
    timeout: float = 600.0  # seconds from submit to end, time spent parked not counted
    priority: Priority = Priority.STANDARD
    overcommit: float = 1.0  # bytes promised over bytes there are
    latency: float | None = None  # seconds to the end that are promised; who would wait longer is
    # refused, and calls are kept to a share of it. None promises nothing
    preload: bool = True  # before anybody asks
    keep: float | None = None  # seconds that an idle model stays; None: until room is needed

    def within(self, card: Card | None) -> float | None:
        """Seconds that a call may take: as this says, or as suits the device, and no more than a
        share of what is promised. None: as long as it takes.
        """
        own = card.target if card and self.target is None else self.target
        promised = None if self.latency is None else SHARE * self.latency
        return min((each for each in (own, promised) if each is not None), default=None)


@message
class Card:
    """What a loaded task tells the application: limits for its front, memory, and words for
    people.
    """

    limits: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0  # device memory for rows; 0 means rows need none
    bytes_per_unit: float = 0.0
    details: Mapping[str, str] = field(default_factory=dict)
    target: float | None = None  # seconds that suit a call on this device, where people watch
    held: int = 0  # bytes of the whole model on its device, rows' included; 0: not told


@message
class TaskState:
    """A model as the application sees it; `card` is None until it has been loaded."""

    card: Card | None = None
    fraction: float = 0.0
    text: str = "The worker is starting."
    error: str = ""
    away: bool = False  # put away, or on its way back: `card` is what it was


@message
class Room:
    """The credit for the next Start, per task; a bytes of None means no limit."""

    rows: float
    bytes: int | None = None


class Front(Protocol):
    """In the application process: host libraries only, no torch, no weights."""

    def check(self, payload: Any, card: Card) -> Request:
        """Validate and tokenise; raises Invalid."""
        ...


class Pipeline(Protocol):
    """In a worker process: tensors; no sessions, no clock. Every output is a function of (request,
    progress).
    """

    def sizes(self, key: Key) -> tuple[int, ...] | None:
        """Weighted rows that this key is compiled for: the engine rounds, the pipeline pads."""
        ...

    def load(self, tell: Tell) -> Card:
        """Bring the model up; may call `tell(fraction, sentence)` as it goes."""
        ...

    def unload(self) -> None: ...

    def open(self, request: Request, mark: Mark | None = None) -> Any:
        """A new state, host only; `mark` continues a row that lived elsewhere."""
        ...

    def next(self, row: Row) -> Work | None:
        """Pure; None means finished."""
        ...

    def reserve(self, row: Row, units: int) -> int:
        """Host only, before step: the units there is memory for; fewer than asked when short."""
        ...

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        """One device call; never mutates rows; a repeat of the same call gives the same."""
        ...

    def park(self, row: Row) -> Mark:
        """Give memory back, reading the device if need be; returns the whole mark from which
        `open` continues, which may say more than the marks of its advances together.
        """
        ...

    def close(self, row: Row) -> None:
        """Idempotent; never touches the device."""
        ...
