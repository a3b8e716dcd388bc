"""The text benchmark's own machinery: what it asks, how peers run and fail, what it prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks.peers import homes
from tests.benchmarks.peers import running as runner
from tests.benchmarks.peers.entrants import Entrant
from tests.benchmarks.peers.homes import Home, Missing, run
from tests.benchmarks.peers.running import Running, tune
from tests.benchmarks.peers.wire import Ask
from tests.benchmarks.replay import Latency, percentiles
from tests.benchmarks.report import Load, Result, compared, draw, latencies
from tests.benchmarks.text import equal
from tests.benchmarks.workload import Text, at_once, paced, trace

TEXT = Text(range(3000))
ASKS = [Ask([1, 2, 3], 2), Ask([4], 1)]
PEER = """
import sys, time
sys.path.insert(0, {wire!r})
from wire import serve

class Peer:
    version = "0.1"

    def __init__(self, job):
        self.setting = job["setting"]
        if "dies" in self.setting:
            print("some chatter")
            raise RuntimeError("no such instruction")

    def answer(self, asks):
        print("chatter that is no answer")
        time.sleep(self.setting.get("sleep", 0))
        return [[len(ask.prompt)] * ask.tokens for ask in asks]

    def replay(self, asks):
        return [[ask.at + 1.0] * ask.tokens for ask in asks]

serve(Peer)
"""


@pytest.fixture
def peer(tmp_path):
    """An entrant made of settings, whose engine is a script of the test."""
    wire = str(Path(runner.__file__).parent)
    (tmp_path / "peer.py").write_text(PEER.format(wire=wire))
    return lambda *settings: Entrant("fake", "Fake", "", str(tmp_path / "peer"), settings)


def test_32_requests_have_the_lengths_that_are_quoted_and_stay_the_same():
    asks = at_once(TEXT)
    assert len(asks) == 32
    assert sum(len(ask.prompt) for ask in asks) == 6289
    assert sum(ask.tokens for ask in asks) == 2593
    assert asks == at_once(TEXT)
    assert {ask.at for ask in asks} == {0.0}


def test_the_trace_is_scaled_down_and_paced_to_a_rate():
    asks = trace(TEXT)
    assert len(asks) == 600
    assert len(asks[0].prompt) == 374 // 8
    assert asks[0].tokens == 44 // 8
    own = paced(asks, rate=2.0, seconds=45.0)
    assert len(own) == 90
    assert own[0].at == 0.0
    assert own[-1].at == pytest.approx(45.0)
    assert [ask.at for ask in own] == sorted(ask.at for ask in own)
    gaps = [b.at - a.at for a, b in zip(own, own[1:], strict=False)]
    assert max(gaps) > 3 * sum(gaps) / len(gaps)  # arrivals stay as uneven as they were


def test_a_peer_answers_rounds_and_replays_whatever_it_prints(peer, tmp_path):
    running = Running(peer({}), {}, tmp_path, ASKS)
    try:
        found = running.round(ASKS)
        times = running.replay([Ask([1], 2, at=0.5)])
    finally:
        running.stop()
    assert running.version == "0.1"
    assert found.tokens == [[3, 3], [1]]
    assert found.rate == pytest.approx(3 / found.seconds)
    assert times == [[1.5, 1.5]]


def test_the_quickest_setting_is_kept_and_one_that_dies_is_only_told(peer, tmp_path):
    told = {}
    settings = ({"sleep": 0.5}, {"dies": 1}, {"sleep": 0.02}, {"sleep": 1.5})
    running = tune(
        peer(*settings),
        tmp_path,
        ASKS,
        lambda entrant, setting, found: told.update({tuple(setting.items()): found}),
    )
    running.stop()
    assert running.setting == {"sleep": 0.02}
    assert told[("dies", 1),] == "does not run: RuntimeError: no such instruction"
    assert told[("sleep", 1.5),].startswith("no answer")


def test_a_peer_whose_settings_all_die_has_a_reason(peer, tmp_path):
    with pytest.raises(Missing, match="no such instruction"):
        tune(peer({"dies": 1}, {"dies": 2}), tmp_path, ASKS, lambda *found: None)


def test_an_environment_is_made_once_and_again_when_it_should_hold_something_else(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("CARPOOL_CACHE", str(tmp_path))
    ran = []
    monkeypatch.setattr(homes, "run", lambda *command, **more: ran.append(command) or made())

    def made():
        (tmp_path / "peers/tiny").mkdir(parents=True, exist_ok=True)

    for home in (Home(("a==1", "b==2"), ("b",)), Home(("a==1", "b==2"), ("b",)), Home(("a==2",))):
        monkeypatch.setitem(homes.HOMES, "tiny", home)
        assert homes.python("tiny") == tmp_path / "peers/tiny/bin/python"
    assert [command[-2:] for command in ran if "install" in command] == [
        ("a==1", "b==2"),
        ("install", "a==2"),
    ]
    assert [command[-1] for command in ran if "uninstall" in command] == ["b"]
    assert str(homes.python("")) == sys.executable


def test_an_installation_that_fails_says_the_error_it_ended_with():
    with pytest.raises(Missing, match="ERROR: no such package"):
        run(sys.executable, "-c", "print('ERROR: no such package\\nbye'); raise SystemExit(1)")


def test_latencies_are_of_first_tokens_and_of_gaps_within_an_answer():
    found = Latency.of([[1.0, 1.5, 3.5], [2.0], []])
    assert found.first == [1.0, 2.0]
    assert found.gaps == [0.5, 2.0]
    assert percentiles(list(range(101))) == (50, 95, 99)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_equality_counts_positions():
    assert equal([[1, 2, 9], [5]], [[1, 2, 3], [5]]) == 0.75


def test_tables_have_a_row_for_everybody_and_the_plot_is_a_picture(tmp_path):
    results = [
        Result("Carpool, all cores", "threads 2", "", [100.0, 50.0, 60.0], 10.0, 1.0),
        Result("Other", "", "1.2", [30.0], 5.0, 0.5, note="4 bits"),
        Result("Third", reason="Illegal instruction"),
    ]
    text = compared(results)
    assert "| Carpool, all cores | 60 (100, 50, 60) | 1.00 |" in text
    assert "| Other | 30 (30) | 0.50 |" in text
    assert "Illegal instruction" in text
    loads = [
        Load(name, share, 1.0, 10, (0.1, 0.2, 0.3), (0.01, 0.02, 0.03))
        for name in ("Carpool", "static batches")
        for share in (0.3, 0.7)
    ]
    assert "| 30% | 1.00 | 10 | Carpool | 100 / 200 / 300 | 10 / 20 / 30 |" in latencies(loads)
    draw(results, loads, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
