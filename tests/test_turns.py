"""Which lane has the device: turns, quanta, and short calls between them."""

from __future__ import annotations

from queueing.turns import QUANTUM, SHORT, Lane, Turns
from queueing.work import Key, Priority, Request, Row, Work

LONG, MIDDLE, BRIEF = 3 * SHORT, 0.6 * QUANTUM, SHORT / 20
SECONDS = {"read": BRIEF, "step": LONG, "last": BRIEF, "big": LONG, "write": LONG}


class Bench:
    """Lanes of single rows whose calls take known seconds, each charged to its session."""

    def __init__(self) -> None:
        self.seconds = dict(SECONDS)  # of a call, by key
        self.turns = Turns(lambda lane, *sums: self.seconds[str(lane[1])])
        self.rows: dict[Lane, list[Row]] = {}
        self.served: dict[str, float] = {}
        self.now = 0.0

    def add(
        self,
        session: str,
        key: str,
        plan: tuple[Key, ...] = ("write",),
        priority: Priority = Priority.STANDARD,
    ) -> None:
        works = tuple(Work(each) for each in plan)
        request = Request("task", None, works, session=session, priority=priority)
        row = Row(request, None, len(self.rows), 1e9, work=Work(key))
        self.rows.setdefault(("task", key), []).append(row)
        self.served.setdefault(session, 0.0)

    def turn(self) -> str:
        """The key of the lane that is next; its call is made and charged."""
        lanes = dict(
            sorted(self.rows.items(), key=lambda pair: self.served[pair[1][0].request.session])
        )
        lane = self.turns.choose(lanes, self.served, self.now)
        seconds = self.seconds[str(lane[1])]
        self.now += seconds
        self.turns.ran(lane, self.now)
        self.served[self.rows[lane][0].request.session] += seconds
        return str(lane[1])


def turns(bench: Bench, count: int) -> list[str]:
    return [bench.turn() for _ in range(count)]


def test_long_calls_of_people_who_had_nearly_the_same_take_turns() -> None:
    bench = Bench()
    bench.add("a", "write")
    bench.add("b", "step", ("read", "step", "last"))
    bench.add("c", "big", ("big",))
    assert sorted(turns(bench, 3)) == ["big", "step", "write"]
    first, later = turns(bench, 3), turns(bench, 3)
    assert first == later


def test_who_had_much_more_has_no_turn() -> None:
    bench = Bench()
    bench.add("a", "write")
    bench.add("greedy", "big", ("big",))
    bench.served = {"a": 0.0, "greedy": 10 * LONG + 2 * QUANTUM}
    assert turns(bench, 10) == ["write"] * 10


def test_a_lane_keeps_the_device_for_a_quantum() -> None:
    bench = Bench()
    bench.seconds |= {"write": MIDDLE, "big": MIDDLE}
    bench.add("a", "write")
    bench.add("b", "big", ("big",))
    assert turns(bench, 8) == ["write", "write", "big", "big"] * 2


def test_whoever_begins_with_a_short_call_need_not_wait_for_a_quantum() -> None:
    bench = Bench()
    bench.add("a", "write")
    assert turns(bench, 3) == ["write"] * 3
    bench.add("b", "read", ("read", "step", "last"))
    assert bench.turn() == "read"


def test_the_short_end_of_a_request_comes_between_the_calls_of_others() -> None:
    bench = Bench()
    bench.add("a", "write")
    bench.add("b", "last", ("read", "step", "last"))
    bench.served["b"] = 100.0
    assert turns(bench, 4) == ["last", "write", "last", "write"]


def test_a_long_end_waits_for_its_turn() -> None:
    bench = Bench()
    bench.add("a", "write")
    bench.add("b", "big", ("read", "step", "big"))
    bench.served["b"] = 100.0
    assert turns(bench, 4) == ["write"] * 4


def test_many_short_calls_of_one_person_do_not_get_ahead_of_others() -> None:
    bench = Bench()
    bench.add("a", "write")
    bench.add("greedy", "read", ("read",))
    found = turns(bench, 400)
    assert bench.served["greedy"] <= bench.served["a"] + QUANTUM + LONG
    assert {"read", "write"} == set(found)


def test_a_higher_class_does_not_wait_for_a_quantum() -> None:
    bench = Bench()
    bench.seconds |= {"write": MIDDLE, "big": MIDDLE}
    bench.add("a", "write")
    assert bench.turn() == "write"
    bench.add("b", "big", ("big",), Priority.INTERACTIVE)
    assert bench.turn() == "big"
