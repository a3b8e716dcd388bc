"""A peer in its process: started, asked, ended, and the reason when it cannot."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tests.benchmarks.peers.entrants import Entrant, Setting
from tests.benchmarks.peers.homes import Missing, python
from tests.benchmarks.peers.wire import Ask

Say: TypeAlias = Callable[[Entrant, Setting, str], None]

ROOT = Path(__file__).parents[3]
LONGEST = 1200.0  # seconds of a round
GIVE_UP = 1.3  # times the seconds of the best setting so far
LOAD = 600.0  # seconds to come up; some compile first
WARM = (8, 16)  # requests and tokens of a first round that nobody counts


@dataclass(frozen=True, slots=True)
class Round:
    """What one round took."""

    seconds: float
    processor: float  # seconds of all its threads
    tokens: Sequence[Sequence[int]]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


class Process:
    """An entrant's process, its model loaded: it is told orders and its answers are heard."""

    def __init__(self, entrant: Entrant, setting: Setting, folder: Path) -> None:
        self.entrant, self.setting = entrant, setting
        self._errors = tempfile.TemporaryFile("w+")
        model = entrant.model(folder)
        self._process = subprocess.Popen(
            [str(python(entrant.home)), *entrant.command],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **entrant.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            self._tell({"folder": str(model), "setting": dict(setting)})
            self.version: str = self._hear(LOAD)["version"]
            unless_ready.pop_all()

    def ask(self, order: dict[str, Any], seconds: float = LONGEST) -> dict[str, Any]:
        """The answer to one order."""
        self._tell(order)
        return self._hear(seconds)

    def stop(self) -> None:
        """End it and whatever it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._errors.close()

    def _tell(self, order: dict[str, Any]) -> None:
        if self._process.stdin is None:
            raise Missing("it has no input")
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Missing(self._last_words()) from None

    def _hear(self, seconds: float) -> dict[str, Any]:
        out = self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)  # type: ignore[arg-type]
            if not selector.select(seconds):
                raise Missing(f"no answer in {seconds:.0f} s")
        line = out.readline() if out is not None else ""
        if not line:
            self._process.wait()
            raise Missing(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """The last line of an error that says something, and the signal if one ended it."""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        code = self._process.poll()
        ended = f"signal {signal.Signals(-code).name}: " if code and code < 0 else ""
        return ended + ([*lines, *errors] or ["it ended without a word"])[-1][:240]


class Running(Process):
    """One entrant with one setting, warm."""

    def __init__(
        self, entrant: Entrant, setting: Setting, folder: Path, warm: Sequence[Ask]
    ) -> None:
        super().__init__(entrant, setting, folder)
        with ExitStack() as unless_ready:
            unless_ready.callback(self.stop)
            count, tokens = WARM
            self.round([Ask(ask.prompt, tokens) for ask in warm[:count]])
            unless_ready.pop_all()

    def round(self, asks: Sequence[Ask], seconds: float = LONGEST) -> Round:
        """All of them asked at once."""
        order = {"replay": False, "asks": [asdict(ask) for ask in asks]}
        return Round(**self.ask(order, seconds))

    def replay(self, asks: Sequence[Ask]) -> list[list[float]]:
        """Each asked when it comes; for each token, the seconds since its request came."""
        order = {"replay": True, "asks": [asdict(ask) for ask in asks]}
        times: list[list[float]] = self.ask(order)["times"]
        return times


def tune(entrant: Entrant, folder: Path, asks: Sequence[Ask], say: Say) -> Running:
    """The quickest setting of an entrant, still running; raises Missing when none runs."""
    best: Running | None = None
    least, reason = float("inf"), Missing("it has no settings")
    for setting in entrant.settings:
        try:
            running = Running(entrant, setting, folder, asks)
        except Missing as error:
            say(entrant, setting, f"does not run: {error}")
            reason = error
            continue
        if len(entrant.settings) == 1:
            return running
        seconds = tried(running, asks[::2], GIVE_UP * least, say)
        loser = best if seconds < least else running
        if seconds < least:
            best, least = running, seconds
        if loser is not None:
            loser.stop()
    if best is None:
        raise reason
    return best


def tried(running: Running, asks: Sequence[Ask], seconds: float, say: Say) -> float:
    """Seconds of one round, infinite when it fails or takes longer than `seconds`."""
    try:
        found = running.round(asks, min(seconds, LONGEST))
    except Missing as error:
        say(running.entrant, running.setting, str(error))
        return float("inf")
    say(running.entrant, running.setting, f"{found.rate:.1f}")
    return found.seconds
