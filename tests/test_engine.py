"""The one loop of a device, with fake pipelines under a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipelines.fake import FakeJob, FakePipeline, Kind, expected
from queueing.clock import VirtualClock
from queueing.costs import CLEAN_CALLS
from queueing.engine import Engine
from queueing.messages import (
    Call,
    Cancel,
    End,
    Load,
    Loaded,
    Park,
    Report,
    Start,
    Unload,
    Up,
)
from queueing.turns import QUANTUM
from queueing.work import (
    OutOfMemory,
    Policy,
    Priority,
    Reason,
    Request,
    Status,
    Work,
)


class Bench:
    """An engine, its clock, and everything that it has said, put together."""

    def __init__(self, policy: Policy | None = None, **knobs: Any) -> None:
        self.clock = VirtualClock()
        knobs = {"forward": 0.02, "row": 0.001, "unit": 0.0001, **knobs}
        self.pipelines = {
            "chat": FakePipeline(spend=self.clock.advance, **knobs),
            "image": FakePipeline(spend=self.clock.advance, **knobs),
        }
        self.said: list[Up] = []
        policies = dict.fromkeys(self.pipelines, policy or Policy())
        self.engine = Engine(self.pipelines, policies, self.clock, self.said.append)
        self.number = 0
        self.text: dict[str, str] = {}
        self.result: dict[str, Any] = {}
        self.ended: dict[str, End] = {}
        self.parked: dict[str, Any] = {}
        self.marks: dict[str, list[Any]] = {}
        self.calls: list[Call] = []
        for task in self.pipelines:
            self.engine.handle(Load(task))
            self.tick()

    def start(self, *requests: Request, left: float = 1e6, marks: Any = None) -> None:
        self.number += 1
        ids = {request.id: left for request in requests}
        served = {request.session: 0.0 for request in requests}
        self.engine.handle(Start(self.number, requests, marks or {}, served, ids))

    def tick(self) -> Report | None:
        report = self.engine.tick()
        self.engine.check()
        if report is None:
            return None
        for id, output in report.outputs.items():
            self.text[id] = self.text.get(id, "")[: output.at] + output.delta
            self.result[id] = output.result
        for id, mark in report.marks.items():
            self.marks.setdefault(id, []).extend(mark)
        for id, end in report.ended.items():
            assert id not in self.ended
            self.ended[id] = end
        self.parked.update(report.parked)
        if report.call is not None and report.call.reason is not Reason.LOAD:
            self.calls.append(report.call)
        return report

    def run(self, ticks: int = 10_000) -> None:
        """Until there is nothing to do; waits are jumped over."""
        for _ in range(ticks):
            if self.tick() is None:
                if self.engine.wake is None:
                    return
                self.clock.now = max(self.clock.now, self.engine.wake)
        raise RuntimeError("it never ends")

    def statuses(self) -> dict[str, Status]:
        return {id: end.status for id, end in self.ended.items()}


def request(id: str, job: FakeJob, task: str = "chat", session: str = "", **fields: Any) -> Request:
    return job.request(task=task, id=id, session=session or id, **fields)


def streams(count: int, steps: int = 5, **fields: Any) -> list[Request]:
    return [
        request(f"r{i}", FakeJob(Kind.STREAM, 8, steps, seed=i), **fields) for i in range(count)
    ]


def test_rows_of_one_key_share_calls_and_each_gets_its_own_text():
    bench = Bench()
    bench.start(*streams(8))
    bench.run()
    for one in streams(8):
        assert bench.text[one.id] == expected(one.payload)[0]
    assert len(bench.calls) == 1 + 5
    assert all(call.rows == 8 for call in bench.calls)


def test_a_newcomer_joins_at_the_next_call():
    bench = Bench()
    bench.start(request("first", FakeJob(Kind.STREAM, 8, 20)))
    for _ in range(5):
        bench.tick()
    bench.start(request("second", FakeJob(Kind.STREAM, 8, 3)))
    bench.tick()
    assert set(bench.calls[-1].ids) == {"first", "second"}


def test_prefill_is_divided_by_the_units_of_a_call_and_decodes_ride_along():
    bench = Bench(Policy(rows=4, units=50))
    bench.start(request("short", FakeJob(Kind.STREAM, 4, 30)))
    bench.tick()
    bench.start(request("long", FakeJob(Kind.STREAM, 200, 2)))
    for _ in range(4):
        bench.tick()
    for call in bench.calls[1:]:
        assert call.units <= 50
        assert set(call.ids) == {"short", "long"}
    bench.run()
    assert bench.statuses() == {"short": Status.FINISHED, "long": Status.FINISHED}


def prompts(bench: Bench, sizes: dict[str, int]) -> None:
    """One person's prompts, in the order in which they came."""
    for id, size in sizes.items():
        bench.start(request(id, FakeJob(Kind.STREAM, size, 1), session="one"))
        bench.tick()


def test_a_short_question_passes_the_long_prompt_of_the_same_person():
    bench = Bench(Policy(rows=8, units=50))
    prompts(bench, {"long": 2000, "short": 30})
    bench.run()
    assert list(bench.ended) == ["short", "long"]
    assert [("short" in call.ids) for call in bench.calls[:3]] == [False, True, True]


def test_prompts_of_one_size_and_person_are_read_one_after_the_other():
    bench = Bench(Policy(rows=8, units=50))
    prompts(bench, {"first": 300, "second": 300, "third": 300})
    bench.run()
    assert list(bench.ended) == ["first", "second", "third"]


def test_short_questions_without_end_do_not_stop_a_long_prompt_of_the_same_person():
    bench = Bench(Policy(rows=8, units=50))
    prompts(bench, {"long": 1000})
    for i in range(200):
        prompts(bench, {f"short {i}": 50})
        if "long" in bench.ended:
            break
    assert "long" in bench.ended


def test_the_latency_target_bounds_a_call_once_costs_are_known():
    bench = Bench(Policy(rows=4, units=10_000, target=0.05), unit=0.001)
    for i in range(6):
        bench.start(request(f"warm{i}", FakeJob(Kind.STREAM, 10 * (i + 1), 6)))
        bench.run()
    bench.start(request("long", FakeJob(Kind.STREAM, 2000, 1)))
    before = len(bench.calls)
    bench.run()
    assert max(call.seconds for call in bench.calls[before:-1]) <= 0.06
    assert any(call.reason is Reason.BUDGET for call in bench.calls[before:])


def test_a_policy_without_a_target_takes_the_one_of_the_models_card():
    bench = Bench(Policy(rows=4, units=10_000), unit=0.001, target=0.05)
    bench.start(request("long", FakeJob(Kind.STREAM, 400, 2)))
    bench.run()
    assert max(call.seconds for call in bench.calls[5:]) <= 0.06
    assert any(call.reason is Reason.BUDGET for call in bench.calls)


def test_a_target_never_keeps_decode_rows_apart_and_a_prompt_always_moves_on():
    bench = Bench(Policy(rows=8, units=10_000, target=0.05), forward=0.02, row=0.01, unit=0.001)
    for i in range(6):
        bench.start(*[request(f"w{i}{k}", FakeJob(Kind.STREAM, 9 * i + 9, 6)) for k in range(i)])
        bench.run()
    bench.start(*streams(7, steps=60))
    for _ in range(6):
        bench.tick()
    before = len(bench.calls)
    bench.start(request("long", FakeJob(Kind.STREAM, 200, 2)))
    while "long" not in bench.marks:
        bench.tick()
    prefill = bench.calls[before:-1]
    assert all(call.rows == 8 for call in prefill)
    assert all(call.units >= 7 + 15 for call in prefill[:-1])  # half of the target is 25 units
    assert max(call.seconds for call in prefill) <= 0.108 + 0.03


def test_a_deadline_that_can_be_met_keeps_a_call_small():
    bench = Bench(Policy(rows=8), forward=0.01, row=0.01)
    for i in range(8):
        bench.start(*[request(f"w{i}{k}", FakeJob(Kind.SINGLE)) for k in range(i + 1)])
        bench.run()
    bench.start(request("soon", FakeJob(Kind.SINGLE)), left=0.035)
    bench.start(*[request(f"late{i}", FakeJob(Kind.SINGLE)) for i in range(7)])
    before = len(bench.calls)
    bench.run()
    assert bench.calls[before].reason is Reason.DEADLINE
    assert "soon" in bench.calls[before].ids
    assert bench.statuses()["soon"] is Status.FINISHED


@pytest.mark.parametrize("culprit", range(8))
def test_a_poisoned_row_fails_alone_and_costs_few_extra_calls(culprit):
    bench = Bench()
    jobs = [FakeJob(Kind.SINGLE, seed=i, poison_at=0 if i == culprit else -1) for i in range(8)]
    bench.start(*[request(f"r{i}", job) for i, job in enumerate(jobs)])
    bench.run()
    failed = [id for id, status in bench.statuses().items() if status is Status.FAILED]
    assert failed == [f"r{culprit}"]
    assert len(bench.calls) - 1 <= 2 * math.log2(8) + 1
    assert bench.result["r0" if culprit else "r1"] == expected(jobs[0 if culprit else 1])[1]


def test_a_poisoned_row_pays_for_the_calls_it_spoiled():
    bench = Bench()
    jobs = [FakeJob(Kind.SINGLE, poison_at=0 if i == 3 else -1) for i in range(8)]
    bench.start(*[request(f"r{i}", job) for i, job in enumerate(jobs)])
    seconds: dict[str, float] = {}
    while (report := bench.tick()) is not None or bench.engine.wake is not None:
        for id, share in (report.seconds if report else {}).items():
            seconds[id] = seconds.get(id, 0.0) + share
        bench.clock.now = max(bench.clock.now, bench.engine.wake or 0.0)
    assert seconds["r3"] > 3 * max(share for id, share in seconds.items() if id != "r3")


def test_poison_in_mid_stream_leaves_the_neighbours_text_unchanged():
    bench = Bench()
    jobs = [FakeJob(Kind.STREAM, 8, 9, i, poison_at=4 if i == 2 else -1) for i in range(5)]
    bench.start(*[request(f"r{i}", job) for i, job in enumerate(jobs)])
    bench.run()
    for i, job in enumerate(jobs):
        whole = expected(job)[0]
        assert bench.text[f"r{i}"] == (whole[: 4 * 6] if i == 2 else whole)


def test_out_of_memory_fails_nobody_lowers_the_cap_and_the_cap_regrows():
    bench = Bench(Policy(rows=8), out_of_memory_at=6)
    bench.start(*streams(8, steps=30))
    bench.run()
    assert set(bench.statuses().values()) == {Status.FINISHED}
    oom = [call for call in bench.calls if call.error]
    clean = [call.rows for call in bench.calls if not call.error]
    assert 1 <= len(oom) <= 3
    assert max(clean) <= 5
    for one in streams(8, steps=30):
        assert bench.text[one.id] == expected(one.payload)[0]
    lane = ("chat", "stream")
    cap = bench.engine.caps.limit(lane)
    bench.pipelines["chat"]._out_of_memory_at = 0.0
    bench.start(*[request(f"again{i}", FakeJob(Kind.STREAM, 1, CLEAN_CALLS + 5)) for i in range(8)])
    bench.run()
    assert bench.engine.caps.limit(lane) > cap


def test_a_sole_row_that_outgrows_memory_fails_with_the_size():
    bench = Bench(memory=20)
    bench.start(request("big", FakeJob(Kind.STREAM, 8, 50), bytes=4096))
    bench.run()
    end = bench.ended["big"]
    assert end.status is Status.FAILED
    assert isinstance(end.error, OutOfMemory)
    assert "4,096" in str(end.error)


def test_when_memory_is_short_the_least_deserving_row_is_parked_and_room_shrinks():
    bench = Bench(memory=100)
    bench.start(*streams(3, steps=40))
    room = bench.engine.room()["chat"].rows
    while not bench.parked:
        assert bench.tick() is not None
    assert len(bench.parked) == 1
    assert bench.engine.room()["chat"].rows < room + 1
    bench.run()
    assert set(bench.statuses().values()) == {Status.FINISHED}
    assert not bench.pipelines["chat"].held


@pytest.mark.parametrize("kind", [Kind.STREAM, Kind.STEPPED])
def test_a_parked_row_continues_from_its_mark_as_if_nothing_had_been(kind):
    job = FakeJob(kind, 8, 12, seed=3)
    bench = Bench()
    bench.start(request("r", job))
    for _ in range(6):
        bench.tick()
    bench.engine.handle(Park("r"))
    bench.tick()
    mark = bench.parked["r"]
    bench.start(request("r", job), marks={"r": mark} if mark else {})
    bench.run()
    assert (bench.text.get("r", ""), bench.result["r"]) == expected(job)


def test_marks_add_up_to_what_park_would_give():
    bench = Bench()
    bench.start(request("r", FakeJob(Kind.STREAM, 8, 12)))
    for _ in range(7):
        bench.tick()
    told = tuple(bench.marks["r"])
    bench.engine.handle(Park("r"))
    bench.tick()
    assert bench.parked["r"] == told


@pytest.mark.parametrize("ticks", range(8))
def test_a_cancel_at_any_boundary_ends_once_and_gives_everything_back(ticks):
    bench = Bench(memory=200)
    bench.start(*streams(3))
    for _ in range(ticks):
        bench.tick()
    bench.engine.handle(Cancel("r1"))
    bench.engine.handle(Cancel("r1"))
    bench.engine.handle(Cancel("nobody"))
    bench.run()
    others = {bench.statuses()["r0"], bench.statuses()["r2"]}
    assert others == {Status.FINISHED}
    assert bench.statuses()["r1"] is (Status.FINISHED if ticks > 5 else Status.CANCELLED)
    assert not bench.pipelines["chat"].held
    assert bench.engine.idle


def test_a_cancel_during_a_call_lets_no_output_out():
    bench = Bench()
    bench.start(request("r", FakeJob(Kind.STREAM, 8, 5)))
    pipeline = bench.pipelines["chat"]
    step = pipeline.step

    def cancelled_on_the_way(rows: Sequence[Any], grants: Sequence[int]) -> Any:
        if rows[0].state.done == 2:
            bench.engine.flag("r")
        return step(rows, grants)

    pipeline.step = cancelled_on_the_way  # type: ignore[method-assign]
    bench.run()
    assert bench.statuses() == {"r": Status.CANCELLED}
    assert bench.text["r"] == expected(FakeJob(Kind.STREAM, 8, 5))[0][:12]


def test_a_deadline_ends_a_running_row_at_the_boundary():
    bench = Bench()
    bench.start(request("r", FakeJob(Kind.STREAM, 8, 1000)), left=0.5)
    bench.run()
    assert bench.statuses() == {"r": Status.EXPIRED}
    assert 0.5 < bench.clock.now < 0.6


def test_lanes_share_the_device_by_the_quantum():
    bench = Bench(forward=0.05)
    bench.start(request("text", FakeJob(Kind.STREAM, 8, 60)))
    bench.start(request("image", FakeJob(Kind.STEPPED, steps=60), task="image"))
    bench.run()
    both = bench.calls[: len(bench.calls) // 2]
    turns, held = 0, 0.0
    for before, call in zip(both, both[1:], strict=False):
        held = held + call.seconds if call.task == before.task else 0.0
        turns += call.task != before.task
        assert held <= QUANTUM + 0.06
    assert turns >= 5


def test_a_higher_class_takes_the_device_at_the_next_call():
    bench = Bench(forward=0.01)
    bench.start(request("text", FakeJob(Kind.STREAM, 8, 60)))
    for _ in range(3):
        bench.tick()
    fast = FakeJob(Kind.SINGLE)
    bench.start(request("now", fast, task="image", priority=Priority.INTERACTIVE))
    bench.run()
    ids = [call.ids for call in bench.calls]
    assert ids.index(("now",)) <= 4


def test_background_runs_when_nothing_else_is_ready_beyond_its_floor():
    bench = Bench(forward=0.01, row=0.0, unit=0.0)
    low = [FakeJob(Kind.STREAM, 1, 400).request(task="image", id="low", session="low")]
    bench.start(*[request("low", low[0].payload, "image", priority=Priority.BACKGROUND)])
    bench.tick()
    bench.start(request("r", FakeJob(Kind.STREAM, 1, 200)))
    while "r" not in bench.ended:
        bench.tick()
    spent = sum(call.seconds for call in bench.calls if call.task == "image")
    assert 0.03 <= spent / bench.clock.now <= 0.08


def test_a_single_request_on_an_idle_device_goes_almost_at_once():
    bench = Bench(forward=0.2)
    for i in range(3):
        bench.start(request(f"w{i}", FakeJob(Kind.SINGLE)))
        bench.run()
    began = bench.clock.now
    bench.start(request("r", FakeJob(Kind.SINGLE)))
    bench.run()
    assert bench.calls[-1].seconds == pytest.approx(bench.clock.now - began, abs=0.0025)


def test_a_burst_is_gathered_into_one_call():
    bench = Bench(Policy(rows=16), forward=0.2)
    bench.start(request("warm", FakeJob(Kind.SINGLE)))
    bench.run()
    for i in range(8):
        bench.start(request(f"r{i}", FakeJob(Kind.SINGLE)))
        assert bench.tick() is not None  # the Start was read
        assert bench.tick() is None
        bench.clock.advance(0.0003)
    bench.run()
    assert bench.calls[-1].rows == 8
    assert bench.calls[-1].reason is Reason.BURST_OVER


def test_compiled_sizes_round_up_or_down_by_predicted_cost():
    bench = Bench(Policy(rows=8), forward=0.001, row=0.02)
    bench.pipelines["chat"].compiled = (1, 2, 4, 8)
    for i in range(12):
        bench.start(*[request(f"w{i}{k}", FakeJob(Kind.SINGLE)) for k in range(i % 4 + 1)])
        bench.run()
    bench.start(*[request(f"r{i}", FakeJob(Kind.SINGLE)) for i in range(5)])
    before = len(bench.calls)
    bench.run()
    assert [call.rows for call in bench.calls[before:]] == [4, 1]  # 8 rows would cost twice 4


def test_compiled_sizes_count_weighted_rows():
    bench = Bench(Policy(rows=8), forward=0.001, row=0.02)
    bench.pipelines["image"].compiled = (1, 2, 4, 8)
    for i in range(12):
        warm = FakeJob(Kind.STEPPED, steps=1)
        bench.start(*[request(f"w{i}{k}", warm, "image") for k in range(i % 4 + 1)])
        bench.run()
    guided = FakeJob(Kind.STEPPED, steps=1, weight=2.0)
    bench.start(*[request(f"r{i}", guided, "image") for i in range(3)])
    before = len(bench.calls)
    bench.run()
    denoise = [c.rows for c in bench.calls[before:] if c.key == ("denoise", 0)]
    assert denoise == [4, 2]


def test_a_one_shot_of_many_units_is_one_call_and_takes_half_a_row():
    work = Work("embed", 40, 40)
    assert replace(request("r", FakeJob(Kind.SINGLE)), plan=(work,)).share == 0.5


def test_serial_steps_are_granted_together_when_forwards_are_short():
    bench = Bench(forward=0.001, row=0.0, unit=0.0)
    bench.start(request("r", FakeJob(Kind.STREAM, 1, 100)))
    bench.run()
    assert len(bench.calls) < 40
    assert max(call.forwards for call in bench.calls) <= 10
    assert bench.text["r"] == expected(FakeJob(Kind.STREAM, 1, 100))[0]


def test_room_is_the_credit_and_one_call_work_gets_two_calls_of_it():
    bench = Bench(Policy(rows=4))
    assert bench.engine.room()["chat"].rows == 4
    bench.start(*[request(f"r{i}", FakeJob(Kind.SINGLE)) for i in range(8)])
    assert bench.engine.room()["chat"].rows == 0
    bench.run()
    assert [call.rows for call in bench.calls] == [4, 4]
    assert bench.engine.room()["chat"].rows == 4


def test_promised_bytes_leave_the_room_until_the_row_ends():
    bench = Bench(memory=1000)
    bench.start(request("r", FakeJob(Kind.STREAM, 8, 5), bytes=300))
    assert bench.engine.room()["chat"].bytes == 700
    bench.run()
    assert bench.engine.room()["chat"].bytes == 1000


def test_a_load_that_fails_fails_its_rows_in_words_and_is_tried_again():
    bench = Bench()
    pipeline = bench.pipelines["chat"]
    bench.engine.handle(Unload("chat"))
    load = pipeline.load
    pipeline.load = lambda tell: [][0]  # type: ignore[method-assign]
    bench.start(request("r", FakeJob(Kind.SINGLE)))
    bench.run()
    assert bench.statuses() == {"r": Status.FAILED}
    assert isinstance(bench.said[-1], Loaded)
    assert "IndexError" in bench.said[-1].error
    pipeline.load = load  # type: ignore[method-assign]
    bench.start(request("again", FakeJob(Kind.SINGLE)))
    bench.run()
    assert bench.statuses()["again"] is Status.FINISHED


def test_a_busy_model_is_not_unloaded():
    bench = Bench()
    bench.start(request("r", FakeJob(Kind.STREAM, 8, 5)))
    bench.tick()
    bench.engine.handle(Unload("chat"))
    bench.run()
    assert bench.statuses() == {"r": Status.FINISHED}
    assert Loaded("chat") not in bench.said


@pytest.mark.parametrize("verb", ["open", "next", "reserve"])
def test_a_pipeline_that_raises_anywhere_fails_one_row(verb):
    bench = Bench()
    pipeline = bench.pipelines["chat"]
    honest = getattr(pipeline, verb)

    def raises_for_one(subject: Any, *rest: Any) -> Any:
        owner = subject if isinstance(subject, Request) else subject.request
        if owner.id == "r1":
            raise KeyError("inside")
        return honest(subject, *rest)

    setattr(pipeline, verb, raises_for_one)
    bench.start(*streams(3))
    bench.run()
    assert bench.statuses()["r1"] is Status.FAILED
    assert "inside" not in str(bench.ended["r1"].error)
    assert bench.statuses()["r0"] is bench.statuses()["r2"] is Status.FINISHED


def test_a_step_that_returns_too_few_results_is_a_failed_call():
    bench = Bench()
    pipeline = bench.pipelines["chat"]
    step = pipeline.step
    pipeline.step = lambda rows, grants: step(rows, grants)[:-1]  # type: ignore[method-assign]
    bench.start(*streams(2))
    bench.run()
    assert set(bench.statuses().values()) == {Status.FAILED}


def test_a_step_that_makes_no_progress_does_not_loop_for_ever():
    bench = Bench()
    pipeline = bench.pipelines["chat"]
    step = pipeline.step

    def stuck(rows: Sequence[Any], grants: Sequence[int]) -> Any:
        return [type(a)(a.state, 0) for a in step(rows, grants)]

    pipeline.step = stuck  # type: ignore[method-assign]
    bench.start(*streams(1))
    bench.run()
    assert bench.statuses() == {"r0": Status.FAILED}
