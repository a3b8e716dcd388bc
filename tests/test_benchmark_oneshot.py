"""The one-shot benchmark's own machinery: what it asks, how it counts, compares and says it."""

from __future__ import annotations

import base64
import random
import statistics

import numpy
import pytest
import torch
from torch import nn

from queueing.messages import Call
from queueing.metrics import CallRecord
from queueing.work import Reason, Status
from tests.benchmarks import oneshot_draw, oneshot_file, oneshot_load, oneshot_ways
from tests.benchmarks.oneshot_file import Beside
from tests.benchmarks.oneshot_house import Outcome, seconds
from tests.benchmarks.oneshot_load import Point
from tests.benchmarks.oneshot_texts import Source, arrivals, lines, mixed, short, uniform
from tests.benchmarks.oneshot_ways import Measured
from tests.benchmarks.peers.embedders import OURS, SINGLE, SORTED, embedders, ways
from tests.benchmarks.peers.vectors import Tokens, answer

SERVED, LATE = Status.FINISHED, Status.CANCELLED


class Words:
    """A tokenizer of words, each of which is two tokens if it has more than three letters."""

    def plain(self, text):
        spans, place = [], 0
        for word in text.split(" "):
            cuts = [place, place + 3] if len(word) > 3 else [place]
            ends = [*cuts[1:], place + len(word)]
            spans += zip(cuts, ends, strict=True)
            place += len(word) + 1
        return list(range(len(spans))), spans


@pytest.fixture
def source(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.benchmarks.oneshot_texts.texts", lambda folder, limit: Words())
    return Source.read(tmp_path, " ".join(["aaaaa", "bb", "cc"] * 400))


def tokens(text):
    return len(Words().plain(text)[0]) + 2


@pytest.mark.parametrize(
    ("draw", "low", "high"), [(uniform, 4, 512), (short, 8, 32), (mixed, 4, 512)]
)
def test_lengths_lie_where_they_are_said_to_and_stay_the_same(draw, low, high):
    drawn = [draw(random.Random(seed)) for seed in range(2000)]
    assert low <= min(drawn) <= low + 2
    assert high - 12 <= max(drawn) <= high
    assert drawn == [draw(random.Random(seed)) for seed in range(2000)]


def test_uniform_lengths_are_long_and_mixed_ones_mostly_short():
    dice = random.Random(1)
    assert 240 < statistics.mean(uniform(dice) for _ in range(2000)) < 275
    drawn = [mixed(dice) for _ in range(2000)]
    assert statistics.median(drawn) <= 20
    assert 50 < statistics.mean(drawn) < 75


@pytest.mark.parametrize("wanted", [4, 5, 17, 100, 512])
def test_a_text_begins_with_a_word_and_has_the_tokens_that_were_drawn_or_one_less(source, wanted):
    for seed in range(20):
        text = source.piece(wanted, random.Random(seed))
        assert text[:2] in ("aa", "bb", "cc")
        assert wanted - 1 <= tokens(text) <= wanted


def test_pieces_are_always_the_same_and_lines_repeat_them(source):
    pieces = source.pieces(3, short)
    assert pieces == source.pieces(3, short)
    assert pieces != source.pieces(3, short, seed=9)
    assert [line.text for line in lines(pieces, 5)] == [*pieces, *pieces[:2]]


def test_arrivals_come_at_their_rate_in_order_and_are_the_same_for_everybody():
    moments = arrivals(100.0, 20.0, seed=2)
    assert moments == arrivals(100.0, 20.0, seed=2)
    assert moments != arrivals(100.0, 20.0, seed=3)
    assert moments == sorted(moments)
    assert 1850 < len(moments) < 2150
    gaps = [b - a for a, b in zip(moments, moments[1:], strict=False)]
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)


class Padding:
    """A model of nothing but its embeddings, whose batches are filled up to four tokens."""

    version = "0"

    def __init__(self):
        self.embedding = nn.Embedding(10, 2)
        self.prepared = []

    def prepare(self, setting):
        self.prepared.append(setting)

    def vectors(self, texts, setting):
        rows = torch.zeros(len(texts), setting["width"], dtype=torch.long)
        return self.embedding(rows).detach().mean(1).numpy()


def test_computed_tokens_are_those_that_went_through_the_model_with_padding():
    peer, order = Padding(), {"texts": ["a", "bc", "d"], "setting": {"width": 4}}
    found = answer(peer, {**order, "shown": True})
    vectors = oneshot_ways.decoded(found["vectors"], 3)
    assert found["computed"] == 12
    assert vectors == pytest.approx(peer.vectors(order["texts"], order["setting"]))
    assert set(answer(peer, {**order, "shown": False})) == {"seconds", "processor"}
    assert len(peer.prepared) == 2


def test_tokens_are_counted_only_while_they_are_asked_to_be():
    count, layer = Tokens(), nn.Embedding(10, 2)
    with count.counted(layer):
        layer(torch.zeros(1, 7, dtype=torch.long))
    layer(torch.zeros(1, 7, dtype=torch.long))
    assert count.count == 7


def test_likeness_is_that_of_the_least_alike_pair():
    truth = numpy.eye(2, dtype=numpy.float32)
    turned = numpy.array([[1.0, 0.0], [0.6, 0.8]], numpy.float32)
    assert oneshot_ways.likeness(truth, truth) == (1.0, 0.0)
    assert oneshot_ways.likeness(turned, truth) == pytest.approx((0.8, 0.6))
    packed = base64.b64encode(turned.tobytes()).decode()
    assert (oneshot_ways.decoded(packed, 2) == turned).all()


def measured(name, *rounds, computed=100, cosine=1.0):
    way = next(way for way in ways() if way.name == name)
    timed = dict(enumerate(rounds))
    return Measured(way, "1", way.settings[0], timed, list(rounds), computed, cosine)


def test_ways_are_compared_turn_by_turn_and_every_target_has_a_verdict():
    ours = measured(OURS, 1.0, 4.0, 1.0, computed=101)
    results = [ours, measured(SORTED, 1.5, 6.0, 1.2), measured(SINGLE, 4.0, cosine=0.5)]
    assert results[1].times(ours) == 1.5
    said = oneshot_ways.verdicts(results, 100)
    assert said == [
        "computed/real 1.010, target at most 1.02: met",
        f"1.50 times {SORTED}, target 1.3: met",
        f"4.00 times {SINGLE}, target 5.0: MISSED",
        f"all vectors alike (cosine >= 0.999): MISSED {SINGLE}",
    ]
    lost = Measured(ways()[-1], reason="no such package")
    shown = oneshot_ways.table([*results, lost], 10, 100)
    assert f"| {SORTED} | 6.7 (6.7, 1.7, 8.3) | 67 | 1.50 |" in shown
    assert "does not run" in shown
    assert "no such package" in shown


def test_every_way_belongs_to_somebody_who_is_started():
    assert {way.key for way in ways()} == {entrant.key for entrant in embedders()}
    assert len({way.name for way in ways()}) == len(ways())


def test_who_was_refused_has_no_wait_and_who_gave_up_has_one():
    found = [Outcome(0.1, SERVED), Outcome(0.0, Status.REFUSED), Outcome(3.0, LATE)]
    assert seconds(found) == [0.1, 3.0]
    point = Point.of("Carpool", 0.5, 10.0, found, 2.0)
    assert point.mean == pytest.approx(1.55)
    assert point.refused == pytest.approx(1 / 3)
    assert point.late == 1


def point(name, share, mean, worst, refused=0.0, late=0):
    return Point(name, share, 100 * share, mean, mean, (worst, worst), 3.0, refused, late)


def test_policies_are_shown_side_by_side_with_ours_beside_the_best_of_the_others():
    points = [
        point("Carpool", 0.3, 0.010, 0.020),
        point("window of 10 ms", 0.3, 0.015, 0.020),
        point("no batching", 0.3, 0.012, 0.050, late=2),
        point("Carpool", 0.5, 0.020, 0.040),
    ]
    shown = oneshot_load.latencies(points)
    assert "| 30% | 30 | 10.0 / 20.0 (3.0) | 15.0 / 20.0 (3.0) |" in shown
    assert "12.0 / 50.0 (3.0, 2 gave up)" in shown
    assert "overloaded before" in shown
    (line,) = oneshot_load.compared(points)
    assert "mean 1.20 times ours (no batching), p99 1.00 times ours (window of 10 ms)" in line


def test_a_promise_is_met_by_those_who_were_served():
    shown = oneshot_load.promised(
        [point("Carpool", 0.9, 0.1, 0.2, 0.05), point("Carpool", 1.5, 0.1, 0.21, 0.4)]
    )
    assert "| 90% | 90 | 100 / 200 / 200 | 5.0% | 86 | 3.0 | met |" in shown
    assert "| 40.0% | 90 | 3.0 | MISSED |" in shown


def test_beside_a_file_the_bound_is_idle_and_one_step_and_5_percent():
    found = Beside([0.010] * 9, [0.115] * 9, [0.1] * 5 + [0.2], [5000.0])
    median, worst = oneshot_file.verdicts(found)
    assert "bound 115.5 ms (idle p95 10.0 + one step, median, 100.0 + 5 %): met" in median
    assert worst.endswith("+ 5 %): met")
    found.busy = [0.116] * 9
    assert oneshot_file.verdicts(found)[0].endswith("MISSED")
    assert "5,000" in oneshot_file.table(found, 8.0)


def test_a_files_calls_are_those_in_which_its_requests_ride():
    def record(*ids):
        call = Call("embed", "encode", Reason.IDLE, ids, 1, 1.0, 9.0, 0.1, 8.0)
        return CallRecord(0.0, 0, call)

    found = oneshot_file.own([record("a"), record("file", "b"), record()], {"file"})
    assert [call.ids for call in found] == [("file", "b")]


def test_the_plot_is_a_picture(tmp_path):
    results = [measured(OURS, 1.0), measured(SORTED, 2.0)]
    points = [point(name, share, 0.01, 0.02) for name in ("Carpool", "x") for share in (0.3, 0.7)]
    oneshot_draw.draw(results, points, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
