"""Who is admitted next: shares, weights, classes, passes, held room."""

from __future__ import annotations

import random
from dataclasses import replace

from pipelines.fake import FakeJob, Kind
from queueing.fairqueue import PASSES, FairQueue, Fit, Ticket
from queueing.ledger import Ledger
from queueing.stream import Stream
from queueing.work import Priority


def nothing() -> None:
    return


def ticket(
    id: str,
    session: str,
    priority: Priority = Priority.STANDARD,
    charge: float = 1.0,
    task: str = "chat",
    weight: float = 1.0,
) -> Ticket:
    request = FakeJob(Kind.SINGLE).request(
        task=task, id=id, session=session, priority=priority, weight=weight
    )
    return Ticket(request, Stream(id, 0.0, nothing), charge, charge, 60.0, 0.0)


def queue_of(*tickets: Ticket) -> FairQueue:
    queue = FairQueue(Ledger())
    for one in tickets:
        queue.ledger.enter(one.request.session)
        queue.push(one)
    return queue


def anything(ticket: Ticket) -> Fit:
    return Fit.YES


def served_order(queue: FairQueue, seconds: float = 1.0) -> list[str]:
    """Ids in the order of pulls when each is charged as it goes."""
    order = []
    while (one := queue.pull(anything)) is not None:
        order.append(one.request.id)
        queue.charge(one.request, seconds)
    return order


def test_two_sessions_alternate_however_much_one_has_waiting():
    queue = queue_of(
        *(ticket(f"a{i}", "a") for i in range(4)), ticket("b0", "b"), ticket("b1", "b")
    )
    assert served_order(queue) == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_a_session_of_weight_two_gets_two_turns_for_one():
    tickets = [ticket(f"a{i}", "a", weight=2.0) for i in range(6)]
    tickets += [ticket(f"b{i}", "b") for i in range(6)]
    first = served_order(queue_of(*tickets))[:6]
    assert sum(id.startswith("a") for id in first) == 4


def test_interactive_goes_before_standard_of_equal_number():
    queue = queue_of(ticket("s", "a"), ticket("i", "b", Priority.INTERACTIVE))
    assert served_order(queue) == ["i", "s"]


def test_background_goes_when_nothing_else_waits():
    queue = queue_of(ticket("low", "a", Priority.BACKGROUND), ticket("s", "b"), ticket("t", "c"))
    assert served_order(queue, seconds=0.0) == ["s", "t", "low"]


def test_background_gets_its_floor_under_endless_load():
    queue = queue_of(*(ticket(f"low{i}", "z", Priority.BACKGROUND) for i in range(50)))
    background = 0
    for i in range(400):
        one = ticket(f"s{i}", f"p{i % 7}")
        queue.ledger.enter(one.request.session)
        queue.push(one)
        pulled = queue.pull(anything)
        assert pulled is not None
        background += pulled.request.priority is Priority.BACKGROUND
        queue.charge(pulled.request, 1.0)
    assert 18 <= background <= 22  # 5 % of 400


def test_a_session_back_from_idle_is_lifted_and_hoards_nothing():
    queue = queue_of(ticket("a0", "a"))
    for _ in range(10):
        queue.charge(ticket("a0", "a").request, 1.0)
    late = ticket("b0", "b")
    queue.ledger.enter("b")
    queue.push(late)
    assert queue.ledger.served("b") == queue.ledger.served("a") == 10.0


def test_a_session_keeps_its_debt_when_it_leaves_and_returns():
    ledger = Ledger()
    ledger.enter("heavy")
    ledger.enter("light")
    ledger.charge("heavy", 5.0)
    ledger.leave("heavy")
    ledger.enter("heavy")
    assert ledger.served("heavy") == 5.0
    assert ledger.level() == 0.0


def test_a_correction_downwards_moves_a_session_forward_again():
    queue = queue_of(ticket("a0", "a"), ticket("b0", "b"))
    queue.adjust("a", 3.0)
    queue.adjust("b", 1.0)
    queue.adjust("a", -2.5)
    pulled = queue.pull(anything)
    assert pulled is not None
    assert pulled.request.id == "a0"


def test_a_large_request_is_passed_eight_times_and_then_room_is_held():
    big = ticket("big", "a")
    queue = queue_of(big, *(ticket(f"s{i:02}", f"p{i}") for i in range(20)))

    def small_only(one: Ticket) -> Fit:
        return Fit.BYTES if one is big else Fit.YES

    pulled = [queue.pull(small_only) for _ in range(PASSES + 3)]
    assert sum(one is not None for one in pulled) == PASSES
    assert queue.pull(anything) is big


def test_a_persons_own_cap_is_no_pass():
    capped = ticket("mine", "a")
    queue = queue_of(capped, *(ticket(f"s{i:02}", f"p{i}") for i in range(20)))
    for _ in range(20):
        assert queue.pull(lambda one: Fit.CAP if one is capped else Fit.YES) is not capped
    assert capped.passes == 0


def test_a_full_task_does_not_hold_up_another():
    queue = queue_of(ticket("chat", "a", task="chat"), ticket("image", "b", task="image"))
    pulled = queue.pull(lambda one: Fit.ROWS if one.request.task == "chat" else Fit.YES)
    assert pulled is not None
    assert pulled.request.id == "image"


def test_a_parked_request_comes_back_before_its_sessions_newcomers():
    first = ticket("a0", "a")
    queue = queue_of(first, ticket("a1", "a"))
    assert queue.pull(anything) is first
    queue.push(first, front=True)
    assert queue.pull(anything) is first


def test_heads_shows_the_order_and_changes_nothing():
    queue = queue_of(*(ticket(f"{s}{i}", s) for s in "abc" for i in range(2)))
    before = [one.request.id for one in queue.heads(3)]
    assert before == ["a0", "b0", "c0"] == [one.request.id for one in queue.heads(3)]
    assert served_order(queue) == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_random_traffic_keeps_counts_and_never_pulls_what_was_removed():
    rng = random.Random(5)
    queue = FairQueue(Ledger())
    alive: dict[str, Ticket] = {}
    for step in range(5000):
        roll = rng.random()
        if roll < 0.5:
            priority = rng.choice(list(Priority))
            one = ticket(f"r{step}", f"p{rng.randrange(40)}", priority, rng.random())
            queue.ledger.enter(one.request.session)
            queue.push(one)
            alive[one.request.id] = one
        elif roll < 0.7 and alive:
            id = rng.choice(list(alive))
            assert queue.remove(id) is alive.pop(id)
        else:
            pulled = queue.pull(lambda one: rng.choice([Fit.YES, Fit.YES, Fit.BYTES, Fit.CAP]))
            if pulled is not None:
                assert alive.pop(pulled.request.id) is pulled
                queue.charge(pulled.request, rng.random())
        assert len(queue) == len(alive)
        assert sum(queue.sessions().values()) == len(alive)
    while (pulled := queue.pull(anything)) is not None:
        del alive[pulled.request.id]
    assert not alive
    assert queue.work == 0.0


def test_removing_an_unknown_id_is_nothing():
    assert queue_of(ticket("a", "a")).remove("b") is None


def test_equal_requests_go_in_order_of_arrival():
    one = ticket("a", "a")
    again = replace(one.request, id="b", session="b")
    queue = queue_of(one, Ticket(again, Stream("b", 0.0, nothing), 1.0, 1.0, 60.0, 0.0))
    assert served_order(queue) == ["a", "b"]
