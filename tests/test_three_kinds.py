"""Chat, images and embeddings through one engine: each equals its run alone, whatever happens.

A tiny random llama, SDXL and BERT in fp32 under a virtual clock, so that every call is the same in
every run. Calls take pretended seconds; what they compute is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from text_driver import job as chat_request
from text_models import prompts, write_model
from tiny_embed import EmbedJob, TinyEmbedPipeline
from tiny_image import ImageJob, TinyImagePipeline

from pipelines.text import TextPipeline
from queueing.clock import VirtualClock
from queueing.engine import Engine
from queueing.messages import Call, Cancel, End, Load, Park, Start
from queueing.work import (
    Advance,
    Card,
    Pipeline,
    Policy,
    Reason,
    Request,
    Row,
    Status,
    Tell,
    Work,
)

# NumPy 2 on tensors, inside the solvers of diffusers 0.42.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
NEAR = 1e-4
POLICIES = {"chat": Policy(rows=8, units=12), "image": Policy(rows=8), "embed": Policy(rows=8)}
FORWARD = {"chat": 0.02, "image": 0.05, "embed": 0.01}  # pretended seconds
HASTE = 0.05  # alone everything is so much quicker that steps are granted by the handful


@dataclass(slots=True)
class Ride:
    """What one call was given."""

    ids: tuple[str, ...]
    serial: tuple[bool, ...]
    grants: tuple[int, ...]
    done: tuple[int, ...]  # denoise steps before


class Watched:
    """A pipeline already loaded, whose calls are written down and take virtual seconds."""

    def __init__(self, pipeline: Pipeline, card: Card, clock: VirtualClock, forward: float) -> None:
        self._pipeline, self._card, self._clock, self._forward = pipeline, card, clock, forward
        self.rides: list[Ride] = []
        self.fails_every = 0  # so many calls of several rows, one fails once it is computed
        self._several = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def load(self, tell: Tell) -> Card:
        return self._card

    def step(self, rows: Sequence[Row], grants: Sequence[int]) -> Sequence[Advance | Exception]:
        works = [self._pipeline.next(row) for row in rows]
        serial = tuple(work.serial for work in works if work is not None)
        done = tuple(getattr(row.state, "done", 0) for row in rows)
        self.rides.append(Ride(tuple(r.request.id for r in rows), serial, tuple(grants), done))
        states = [row.state for row in rows]
        results = self._pipeline.step(rows, grants)
        assert all(row.state is state for row, state in zip(rows, states, strict=True))
        forwards = max((g for s, g in zip(serial, grants, strict=True) if s), default=1)
        self._clock.advance(self._forward * forwards)
        self._several += len(rows) > 1
        if self.fails_every and len(rows) > 1 and self._several % self.fails_every == 0:
            raise RuntimeError("failed after all was computed")
        return results


@dataclass(slots=True)
class Outcome:
    """All that a request gave."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    result: Any = None
    end: End | None = None
    previews: int = 0


Loaded = Mapping[str, tuple[Pipeline, Card]]


@dataclass(slots=True)
class Bench:
    """A fresh engine over the loaded pipelines, and everything it has said."""

    loaded: Loaded
    pace: float = 1.0
    clock: VirtualClock = field(default_factory=VirtualClock)
    pipelines: dict[str, Watched] = field(init=False)
    engine: Engine = field(init=False)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    parked: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    number: int = 0
    pages: int = field(init=False)  # that were used before

    def __post_init__(self) -> None:
        self.pipelines = {
            task: Watched(*self.loaded[task], self.clock, self.pace * FORWARD[task])
            for task in POLICIES
        }
        self.engine = Engine(self.pipelines, POLICIES, self.clock)
        self.pages = self.pipelines["chat"].pages[1]
        for task in POLICIES:
            self.engine.handle(Load(task))
            self.tick()

    def start(self, *requests: Request, mark: Any = None) -> None:
        self.number += 1
        requests = tuple(replace(request, salt=str(id(self))) for request in requests)
        for request in requests:
            self.outcomes.setdefault(request.id, Outcome())
        marks = {requests[0].id: mark} if mark else {}
        served = dict.fromkeys((request.session for request in requests), 0.0)
        left = dict.fromkeys((request.id for request in requests), 1e6)
        self.engine.handle(Start(self.number, requests, marks, served, left))

    def tick(self) -> bool:
        """Whether there is more to do; waits are jumped over."""
        report = self.engine.tick()
        self.engine.check()
        if report is None:
            self.clock.now = max(self.clock.now, self.engine.wake or 0.0)
            return self.engine.wake is not None
        for id, output in report.outputs.items():
            outcome = self.outcomes[id]
            outcome.text = (
                outcome.text[: output.at] + output.delta if output.delta else outcome.text
            )
            outcome.result = outcome.result if output.result is None else output.result
            outcome.previews += output.preview is not None
        for id, mark in report.marks.items():
            self.outcomes[id].tokens += mark
        for id, end in report.ended.items():
            assert self.outcomes[id].end is None
            self.outcomes[id].end = end
        self.parked.update(report.parked)
        if report.call is not None and report.call.reason is not Reason.LOAD:
            self.calls.append(report.call)
        return True

    def run(self, arrivals: Mapping[int, Sequence[Request]] | None = None) -> Bench:
        """Until there is nothing to do; requests come at their ticks."""
        waiting, tick = dict(arrivals or {}), 0
        more = True
        while more or waiting:
            if tick in waiting:
                self.start(*waiting.pop(tick))
            more = self.tick()
            tick += 1
        return self

    def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            assert self.tick()

    def park(self, request: Request) -> Any:
        """Park a row and start it again from its mark, which is given back."""
        self.engine.handle(Park(request.id))
        self.tick()
        mark = self.parked.pop(request.id)
        self.start(request, mark=mark)
        return mark

    def statuses(self) -> dict[str, Status | None]:
        return {id: one.end.status if one.end else None for id, one in self.outcomes.items()}


def chat(place: int, count: int, **settings: object) -> Request:
    prompt = prompts(8, seed=3)[place]
    request = chat_request(prompt, seed=place, max_tokens=count, **settings)
    plan = Work("text", 1, len(prompt)), Work("text", 1, count, serial=True)
    return replace(request, plan=plan, id=f"chat{place}", session=f"p{place}")


def image(place: int, **fields: Any) -> Request:
    job = ImageJob(tuple(range(2 + place, 9 + 2 * place)), seed=place, **fields)
    return job.request(id=f"image{place}", session=f"p{place}")


def embed(place: int, *lengths: int) -> Request:
    job = EmbedJob(tuple(tuple(range(place + 3, place + 3 + length)) for length in lengths))
    return job.request(id=f"embed{place}", session=f"p{place}")


WARM = {"temperature": 0.9, "top_p": 0.95}
ARRIVALS: dict[int, list[Request]] = {
    0: [
        chat(0, 14), image(0, steps=5, guidance=5.0), image(1, steps=3, guidance=1.0, crop=(8, 0)),
        embed(0, 7), embed(1, 30), embed(2, 4, 11, 2),
    ],
    6: [chat(1, 9, **WARM), image(2, steps=7, guidance=7.5, negative=(9, 9), solver="multistep")],
    16: [chat(2, 20, temperature=1.3), image(3, steps=4, guidance=2.0, width=8), embed(3, 50)],
    18: [embed(4, 1), image(4, steps=6, guidance=0.0, solver="multistep"), chat(3, 6)],
    24: [embed(5, 13), image(5, steps=2, guidance=3.0, negative=(4,))],
}  # fmt: skip
REQUESTS = {request.id: request for come in ARRIVALS.values() for request in come}


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    """Nothing is fetched, and one thread computes."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def loaded(offline: None, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = str(write_model(tmp_path_factory.mktemp("models"), "llama"))
    text = TextPipeline(
        folder, device="cpu", dtype="float32", threads=1, page=4, memory_bytes=4 << 20
    )
    made = {"chat": text, "image": TinyImagePipeline(), "embed": TinyEmbedPipeline()}
    return {task: (each, each.load(lambda fraction, text: None)) for task, each in made.items()}


@pytest.fixture(scope="module")
def together(loaded: Loaded) -> Bench:
    return Bench(loaded).run(ARRIVALS)


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> dict[str, Outcome]:
    """Each in an engine of its own, where steps are granted several at a time."""
    return {id: solo(loaded, request) for id, request in REQUESTS.items()}


def solo(loaded: Loaded, request: Request) -> Outcome:
    return Bench(loaded, HASTE).run({0: [request]}).outcomes[request.id]


def assert_same(one: Outcome, other: Outcome) -> None:
    assert (one.text, one.tokens) == (other.text, other.tokens)
    assert one.end == other.end == End(Status.FINISHED)
    if isinstance(one.result, np.ndarray):
        assert one.result.shape == other.result.shape
        assert np.abs(one.result - other.result).max() <= NEAR
    else:
        assert one.result == other.result


def assert_all_same(bench: Bench, alone: dict[str, Outcome], but: Sequence[str] = ()) -> None:
    for id in bench.outcomes.keys() - set(but):
        assert_same(bench.outcomes[id], alone[id])
    assert bench.engine.idle
    assert bench.pipelines["chat"].pages[1] == bench.pages


@pytest.mark.parametrize("id", REQUESTS)
def test_each_result_equals_its_run_alone(
    together: Bench, alone: dict[str, Outcome], id: str
) -> None:
    assert_same(together.outcomes[id], alone[id])


def test_a_denoise_call_mixes_progress_step_counts_guidance_and_solvers(together: Bench) -> None:
    def traits(ride: Ride) -> list[int]:
        jobs = [REQUESTS[id].payload for id in ride.ids]
        return [
            len(set(ride.done)),
            len({job.steps for job in jobs}),
            len({job.guidance for job in jobs}),
            len({job.weight for job in jobs}),
            len({job.solver for job in jobs}),
        ]

    rides = [ride for ride in together.pipelines["image"].rides if all(ride.serial)]
    assert max(len(ride.ids) for ride in rides) >= 3
    assert any(min(traits(ride)) >= 2 for ride in rides)


def test_a_chat_call_mixes_a_prompt_with_decoding(together: Bench) -> None:
    assert any(len(set(ride.serial)) == 2 for ride in together.pipelines["chat"].rides)


def test_embed_calls_take_several_requests(together: Bench) -> None:
    rides = together.pipelines["embed"].rides
    assert set(rides[0].ids) == {"embed0", "embed1", "embed2"}
    assert len(rides) < len([id for id in REQUESTS if id.startswith("embed")])


def test_only_equal_keys_share_a_call_and_all_three_kinds_take_turns(together: Bench) -> None:
    drawn = [c for c in together.calls if c.task == "image" and c.key != "encode"]
    widths = {(REQUESTS[id].payload.width, call.key[-1]) for call in drawn for id in call.ids}
    assert widths == {(16, 16), (8, 8)}
    tasks = [call.task for call in together.calls]
    turns = [task for task, before in zip(tasks[1:], tasks, strict=False) if task != before]
    assert len(turns) >= 8
    assert set(turns) == set(POLICIES)
    assert not any(call.error for call in together.calls)


def test_alone_steps_were_granted_by_the_handful(loaded: Loaded) -> None:
    bench = Bench(loaded, HASTE).run({0: [REQUESTS["image2"]]})
    assert max(max(ride.grants) for ride in bench.pipelines["image"].rides) >= 3


def test_images_are_previewed_at_every_step(together: Bench) -> None:
    for id, request in REQUESTS.items():
        if request.task == "image":
            assert together.outcomes[id].previews == request.payload.steps


@pytest.mark.parametrize("change", [
    {"seed": 9}, {"steps": 6}, {"guidance": 5.5}, {"guidance": 1.0}, {"crop": (4, 0)},
    {"prompt": (2, 3, 5)}, {"negative": (7,)}, {"solver": "multistep"},
], ids=str)  # fmt: skip
def test_every_setting_of_an_image_shows(
    loaded: Loaded, alone: dict[str, Outcome], change: dict[str, Any]
) -> None:
    """Else equality would prove nothing."""
    base = REQUESTS["image0"]
    other = solo(loaded, replace(base, payload=replace(base.payload, **change)))
    assert np.abs(other.result - alone["image0"].result).max() > 100 * NEAR


def test_two_runs_make_the_same_calls(loaded: Loaded, together: Bench) -> None:
    assert Bench(loaded).run(ARRIVALS).calls == together.calls


def halfway(bench: Bench, id: str) -> Callable[[], bool]:
    """Whether an image has had some of its steps, the last in company, and not all."""

    def so() -> bool:
        rides = bench.pipelines["image"].rides
        last = next((ride for ride in reversed(rides) if id in ride.ids), None)
        if last is None or len(last.ids) == 1 or not last.serial[0]:
            return False
        place = last.ids.index(id)
        return last.done[place] + last.grants[place] < REQUESTS[id].payload.steps

    return so


def test_an_image_cancelled_in_mid_denoise_disturbs_nobody(
    loaded: Loaded, alone: dict[str, Outcome]
) -> None:
    bench = Bench(loaded)
    bench.start(*REQUESTS.values())
    bench.until(halfway(bench, "image2"))
    bench.engine.handle(Cancel("image2"))
    bench.run()
    assert bench.statuses()["image2"] is Status.CANCELLED
    assert bench.outcomes["image2"].result is None
    assert_all_same(bench, alone, but=["image2"])


def test_an_image_cancelled_between_the_forwards_of_one_call_leaves_it(loaded: Loaded) -> None:
    bench = Bench(loaded, HASTE)
    bench.start(REQUESTS["image2"])
    watched = bench.pipelines["image"]
    bench.until(lambda: watched.rides and watched.rides[-1].serial[0])
    forward, forwards = loaded["image"][0]._forward, []

    def cancelled_on_the_way(jobs: Any, states: Any) -> Any:
        forwards.append(len(jobs))
        bench.engine.flag("image2")
        return forward(jobs, states)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaded["image"][0], "_forward", cancelled_on_the_way)
        bench.run()
    assert watched.rides[-1].grants[0] > 1
    assert forwards == [1]
    assert bench.statuses() == {"image2": Status.CANCELLED}


def test_parked_images_and_chats_continue_as_if_nothing_had_been(
    loaded: Loaded, alone: dict[str, Outcome]
) -> None:
    bench = Bench(loaded)
    bench.start(*REQUESTS.values())
    begun = {id: halfway(bench, id) for id in ("image0", "image2", "image4")}
    begun |= {id: lambda id=id: bool(bench.outcomes[id].tokens) for id in ("chat1", "chat2")}
    while begun:
        bench.until(lambda: any(so() for so in begun.values()))
        id = next(id for id, so in begun.items() if so())
        del begun[id]
        done = bench.park(REQUESTS[id])
        if id.startswith("chat"):
            assert done == bench.outcomes[id].tokens
        else:
            assert 0 < done[0] < REQUESTS[id].payload.steps
    bench.run()
    assert_all_same(bench, alone)


def test_rows_parked_before_they_began_start_again(
    loaded: Loaded, alone: dict[str, Outcome]
) -> None:
    bench = Bench(loaded)
    bench.start(*REQUESTS.values())
    for id in REQUESTS:
        bench.engine.handle(Park(id))
    bench.tick()
    assert bench.parked == dict.fromkeys(REQUESTS, ())
    bench.start(*REQUESTS.values())
    bench.run()
    assert_all_same(bench, alone)


def test_calls_that_fail_after_they_were_computed_are_repeated_with_the_same_result(
    loaded: Loaded, alone: dict[str, Outcome]
) -> None:
    bench = Bench(loaded)
    bench.start(*REQUESTS.values())
    for task, every in {"chat": 3, "image": 2, "embed": 1}.items():
        bench.pipelines[task].fails_every = every
    bench.run()
    failed = [call for call in bench.calls if call.error]
    assert {call.task for call in failed} == set(POLICIES)
    assert len(failed) >= 10
    assert_all_same(bench, alone)


def test_poison_in_any_kind_fails_alone(loaded: Loaded, alone: dict[str, Outcome]) -> None:
    bench = Bench(loaded)
    drawn = ImageJob((5, 10**6), steps=5).request(id="bad image", session="bad")
    vector = EmbedJob(((5, 10**6),)).request(id="bad embed", session="bad")
    spoken = replace(chat_request((1, 10**6)), id="bad chat", session="bad")
    bench.start(drawn, vector, spoken, *REQUESTS.values())
    bench.run()
    bad = [id for id, status in bench.statuses().items() if status is Status.FAILED]
    assert bad == ["bad image", "bad embed", "bad chat"]
    assert_all_same(bench, alone, but=bad)


@pytest.mark.parametrize("solver", ["euler", "multistep"])
def test_a_repeated_step_gives_the_same_bits_and_leaves_the_rows_as_they_were(
    loaded: Loaded, solver: str
) -> None:
    pipeline = loaded["image"][0]
    requests = [image(0, steps=4, solver=solver), image(1, steps=6, guidance=1.0, solver=solver)]
    rows = [Row(request, pipeline.open(request), 0, 1e9) for request in requests]
    for grant in (1, 1, 2, 1):
        before = [pipeline.park(row) for row in rows]
        lost = pipeline.step(rows, [grant] * 2)
        assert_equal_marks(before, [pipeline.park(row) for row in rows])
        again = pipeline.step(rows, [grant] * 2)
        for row, first, second in zip(rows, lost, again, strict=True):
            assert torch.equal(first.state.latents, second.state.latents)
            row.state = second.state


def assert_equal_marks(before: Any, after: Any) -> None:
    """Marks hold arrays, deep inside."""
    np.testing.assert_equal(after, before)
