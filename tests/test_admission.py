"""The synchronous half of the dispatcher: limits, places, displacement, deaths."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipelines.fake import FakeJob, Kind, expected
from queueing.admission import Admission
from queueing.limits import Limits
from queueing.messages import Calling, Ready
from queueing.simulate import Simulation
from queueing.stream import Stream
from queueing.work import Cancelled, Expired, Full, Policy, Priority, Room, Status
from tests.worlds import world

LONG = FakeJob(Kind.STREAM, 20, 200)


def chat(rows: int = 4, limits: Limits | None = None, **knobs: float) -> Simulation:
    """A world of one chat model that has been loaded."""
    policy = Policy(rows=rows, units=256, timeout=knobs.pop("timeout", 600.0))
    simulation = world({"chat": policy}, limits or Limits(), **knobs)
    submit(simulation, FakeJob(Kind.STREAM, 1, 1), "warm")
    simulation.run()
    return simulation


def submit(simulation: Simulation, job: FakeJob, session: str, **fields: object) -> Stream:
    request = job.request(task="chat", **fields)
    return simulation.submit(request, session)


def test_the_total_limit_sheds_whoever_is_furthest_over_and_refuses_the_rest():
    simulation = chat(limits=Limits(total=6))
    flood = [submit(simulation, LONG, "many") for _ in range(10)]
    with pytest.raises(Full, match="6 requests wait and the limit is 6"):
        submit(simulation, LONG, "many")
    modest = submit(simulation, LONG, "one")
    assert flood[-1].status is Status.REFUSED
    assert isinstance(flood[-1].error, Full)
    assert modest.status is Status.WAITING


def test_a_refusal_says_when_to_come_back():
    simulation = chat(limits=Limits(total=2))
    for _ in range(6):
        submit(simulation, LONG, "many")
    with pytest.raises(Full, match="Try again in") as refusal:
        submit(simulation, LONG, "many")
    assert 1 <= refusal.value.retry_after <= 600


def test_one_person_may_have_only_so_many_waiting():
    simulation = chat(limits=Limits(waiting=3))
    for _ in range(7):
        submit(simulation, LONG, "many")
    with pytest.raises(Full, match="the limit is 3 for one person"):
        submit(simulation, LONG, "many")


def test_an_address_is_never_capped_as_a_person():
    simulation = chat(limits=Limits(waiting=1, running=1))
    request = LONG.request(task="chat")
    streams = [simulation.submit(request, "proxy", capped=False) for _ in range(9)]
    simulation.run(until=simulation.clock.now + 0.1)
    assert [stream.status for stream in streams].count(Status.RUNNING) == 4


def test_one_person_may_run_only_so_many():
    simulation = chat(limits=Limits(running=2))
    many = [submit(simulation, LONG, "many") for _ in range(4)]
    other = submit(simulation, LONG, "other")
    simulation.run(until=simulation.clock.now + 0.1)
    assert [stream.status for stream in many].count(Status.RUNNING) == 2
    assert other.status is Status.RUNNING


def test_a_newcomer_who_would_wait_too_long_is_refused_and_a_new_person_is_not():
    simulation = chat(limits=Limits(wait=20.0))
    with pytest.raises(Full, match="the limit is 20 s"):
        for _ in range(100):
            submit(simulation, LONG, "many")
    assert submit(simulation, LONG, "one").status is Status.WAITING


def test_what_can_never_fit_is_refused_at_once():
    simulation = chat(memory=1000)
    with pytest.raises(Full, match=r"2,000 bytes of memory and there are 1,000"):
        submit(simulation, LONG, "one", bytes=2000)
    with pytest.raises(Full, match="5 rows"):
        submit(simulation, FakeJob(Kind.SINGLE, weight=5.0), "one")


def test_positions_follow_the_fair_order_and_times_grow_with_them():
    simulation = chat()
    running = [submit(simulation, LONG, "many") for _ in range(4)]
    waiting = [submit(simulation, LONG, "many") for _ in range(3)]
    one = submit(simulation, LONG, "one")
    simulation.run(until=simulation.clock.now + 0.2)
    assert simulation.admission.place(running[0].id) is None
    places = [simulation.admission.place(stream.id) for stream in [one, *waiting]]
    assert [place.position for place in places if place] == [1, 2, 3, 4]
    seconds = [place.seconds for place in places if place and place.seconds is not None]
    assert len(seconds) == 4
    assert seconds == sorted(seconds)


def test_the_predicted_wait_is_near_the_truth():
    simulation = chat(rows=2)
    for i in range(6):
        submit(simulation, LONG, f"p{i}")
    simulation.run()
    streams = [submit(simulation, LONG, f"q{i}") for i in range(8)]
    simulation.run(until=simulation.clock.now + 1.0)
    place = simulation.admission.place(streams[-1].id)
    asked = simulation.clock.now
    simulation.run()
    assert place is not None
    assert place.seconds is not None
    truth = (streams[-1].times.started or 0.0) - asked
    assert truth / 2 <= place.seconds <= 2 * truth


def test_a_cancel_is_final_for_the_caller_at_once_and_the_row_closes_behind():
    simulation = chat()
    stream = submit(simulation, LONG, "one")
    simulation.run(until=simulation.clock.now + 0.5)
    text = stream.text
    stream.cancel()
    assert stream.status is Status.CANCELLED
    assert isinstance(stream.error, Cancelled)
    assert simulation.admission.inside()
    simulation.run()
    assert stream.text == text
    assert not simulation.admission.inside()


@pytest.mark.parametrize("times", [1, 3])
def test_cancelling_again_or_after_the_end_is_nothing(times):
    simulation = chat()
    stream = submit(simulation, FakeJob(Kind.STREAM, 2, 2), "one")
    simulation.run()
    for _ in range(times):
        stream.cancel()
    assert stream.status is Status.FINISHED
    assert not simulation.admission.cancel("somebody else's")


def test_a_request_that_waits_past_its_time_expires_in_words():
    simulation = chat(rows=1, timeout=5.0)
    first, second, third = [submit(simulation, replace(LONG, steps=180), "a") for _ in range(3)]
    simulation.run(until=simulation.clock.now + 5.5)
    simulation.admission.expire()
    assert first.status is Status.FINISHED
    assert second.status is third.status is Status.EXPIRED
    assert isinstance(third.error, Expired)
    assert "waited 5 s, the limit" in str(third.error)
    assert "while it ran" in str(second.error)


def test_a_displaced_row_does_not_expire_for_being_polite():
    simulation = chat(rows=2, timeout=9.0)
    many = [submit(simulation, LONG, "many") for _ in range(2)]
    simulation.run(until=simulation.clock.now + 1.0)
    ones = [submit(simulation, replace(LONG, steps=60), f"p{i}") for i in range(4)]
    for _ in range(20):
        simulation.run(until=simulation.clock.now + 1.0)
        simulation.admission.expire()
    simulation.run()
    assert simulation.admission.metrics.parked >= 1
    assert [stream.status for stream in [*many, *ones]] == [Status.FINISHED] * 6


def test_only_a_session_with_two_rows_is_displaced():
    simulation = chat(rows=3)
    for i in range(3):
        submit(simulation, LONG, f"p{i}")
    simulation.run(until=simulation.clock.now + 1.0)
    submit(simulation, LONG, "late")
    simulation.run()
    assert simulation.admission.metrics.parked == 0


def test_a_row_is_not_displaced_before_it_had_its_quantum():
    simulation = chat(rows=4)
    for _ in range(4):
        submit(simulation, LONG, "many")
    late = submit(simulation, LONG, "late")
    simulation.run(until=simulation.clock.now + 0.15)
    assert simulation.admission.metrics.parked == 0
    simulation.run(until=simulation.clock.now + 0.3)
    assert simulation.admission.metrics.parked == 1
    assert late.status is Status.RUNNING


def test_a_displaced_row_resumes_and_its_text_is_whole():
    simulation = chat(rows=4)
    jobs = [replace(LONG, seed=i) for i in range(4)]
    streams = [submit(simulation, job, "many") for job in jobs]
    simulation.run(until=simulation.clock.now + 1.0)
    submit(simulation, LONG, "late")
    simulation.run()
    assert simulation.admission.metrics.parked >= 1
    assert [stream.text for stream in streams] == [expected(job)[0] for job in jobs]


def test_background_leaves_one_row_free_and_yields_its_rows():
    simulation = chat(rows=4)
    low = [submit(simulation, LONG, "low", priority=Priority.BACKGROUND) for _ in range(8)]
    simulation.run(until=simulation.clock.now + 1.0)
    assert [stream.status for stream in low].count(Status.RUNNING) == 3
    others = [submit(simulation, LONG, f"p{i}") for i in range(3)]
    simulation.run(until=simulation.clock.now + 0.3)
    assert [stream.status for stream in others] == [Status.RUNNING] * 3
    simulation.run()
    assert {stream.status for stream in low} == {Status.FINISHED}


def test_a_request_takes_its_class_from_the_policy_unless_it_says_otherwise():
    simulation = world({"chat": Policy(rows=4, priority=Priority.INTERACTIVE)}, Limits())
    streams = [
        submit(simulation, LONG, f"p{i}", priority=priority)
        for i, priority in enumerate([Priority.STANDARD, Priority.BACKGROUND])
    ]
    tickets = {ticket.stream: ticket for ticket in simulation.admission.queue.tickets()}
    classes = [tickets[stream].request.priority for stream in streams]
    assert classes == [Priority.INTERACTIVE, Priority.BACKGROUND]


def test_a_start_that_was_never_read_is_no_death():
    simulation = chat()
    stream = submit(simulation, FakeJob(Kind.STREAM, 2, 4), "one")
    simulation.kill(0)
    assert stream.status is Status.WAITING
    simulation.run()
    assert stream.status is Status.FINISHED


def test_a_call_whose_report_was_lost_is_as_suspect_as_the_one_that_ran():
    """A report that could not be sent may be what its worker died of."""
    admission = Admission({"chat": Policy(rows=4)}, Limits(), 1, lambda: 0.0, lambda *_: None)
    admission.receive(0, Ready({"chat": Room(4.0)}))
    for id in "abc":
        request = LONG.request(task="chat", id=id, session=id)
        admission.submit(request, False, lambda: None)
    admission.receive(0, Calling(("a",), 0.1))
    admission.receive(0, Calling(("b",), 0.1))
    admission.lost(0)
    assert [admission.place(id) is None for id in "abc"] == [True, True, False]


def test_a_cancelled_request_pays_for_what_it_used_and_gets_its_advance_back():
    simulation = chat()
    ledger = simulation.admission.ledger
    ledger.enter("watcher")
    stream = submit(simulation, LONG, "one")
    stay = submit(simulation, LONG, "one")
    simulation.run(until=simulation.clock.now + 0.5)
    stream.cancel()
    stay.cancel()
    simulation.run()
    used = stream.times.device + stay.times.device
    assert ledger.served("one") == pytest.approx(ledger.level())
    ledger.enter("one")
    assert ledger.served("one") - ledger.served("watcher") == pytest.approx(used, rel=0.01)
