"""Which lane has the device next: a lane is the rows of one task and key.

The row that had least says which lane is due; quanta and turns keep lanes from cutting one
another's calls into pieces, or from being forgotten. It does not know how rows fill a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from queueing.work import Key, Row, Work

QUANTUM = 0.2  # seconds a lane keeps the device while another waits
SHORT = 0.1  # seconds of a call for which nobody waits until a quantum is over

Lane: TypeAlias = tuple[str, Key]
Lanes: TypeAlias = Mapping[Lane, Sequence[Row]]  # their rows, and they themselves, the best first


class Turns:
    """The lanes of one device."""

    def __init__(self, seconds: Callable[[Lane, int, float, float], float]) -> None:
        self._seconds = seconds  # predicted, of a call: forwards, weighted rows, weighted units
        self._lane: Lane | None = None
        self._since = 0.0
        self._ran: dict[Lane, float] = {}  # when each that is ready had the device

    def ran(self, lane: Lane, now: float) -> None:
        """A call of it ended."""
        self._ran[lane] = now

    def choose(self, lanes: Lanes, served: Mapping[str, float], now: float) -> Lane:
        """Of the lanes that may have the device, the one that had it longest ago.

        A lane keeps it for a quantum, unless a higher class waits elsewhere, but lets short calls
        between its own. After that, those may have it whose best rows had nearly the same.
        """
        self._ran = {lane: at for lane, at in self._ran.items() if lane in lanes}
        current, best = self._lane, next(iter(lanes))
        young = now - self._since < QUANTUM
        short = [lane for lane, rows in lanes.items() if self._ends(rows[0])]
        if self._short(lanes[best][0]):
            short.append(best)
        if current is None or current not in lanes or not young or _outranked(lanes, current):
            may = [*short, *_near(lanes, served)]
        else:
            may = [*short, current]
        lane = min(may, key=lambda lane: self._ran.get(lane, -math.inf))
        if lane not in short and (lane != current or not young):
            self._lane, self._since = lane, now
        return lane

    def _ends(self, row: Row) -> bool:
        """Whether all but a short call of another kind is done, for which it need not wait: what
        was before had its turn, and nobody can have much of it.
        """
        plan, work = row.request.plan, work_of(row)
        return plan[0].key != work.key == plan[-1].key and self._short(row)

    def _short(self, row: Row) -> bool:
        """Whether all of its work of this kind is a short call."""
        work = work_of(row)
        forwards = work.most if work.serial else 1
        units = work.weight * work.most
        lane = row.request.task, work.key
        return self._seconds(lane, forwards, work.weight, units) <= SHORT


def rank(row: Row, served: Mapping[str, float]) -> tuple[float, int, int]:
    """The least is the best: what its session had, its class, when it came."""
    return served.get(row.request.session, 0.0), row.request.priority, row.order


def work_of(row: Row) -> Work:
    """What a row that is ready asks for."""
    if row.work is None:
        raise RuntimeError(f"{row.request.id} has no work in a call. This is a bug.")
    return row.work


def _outranked(lanes: Lanes, current: Lane) -> bool:
    """Whether somebody of a higher class than all of a lane waits elsewhere."""
    mine = min(row.request.priority for row in lanes[current])
    return any(row.request.priority < mine for rows in lanes.values() for row in rows)


def _near(lanes: Lanes, served: Mapping[str, float]) -> list[Lane]:
    """The lanes whose best rows had at most a quantum more than the best of all, none of a lower
    class.
    """
    heads = {lane: rank(rows[0], served) for lane, rows in lanes.items()}
    number, priority, _ = next(iter(heads.values()))
    return [lane for lane, (n, p, _) in heads.items() if n <= number + QUANTUM and p <= priority]
