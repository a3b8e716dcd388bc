"""Throughput of embeddings: all ways on the same texts, in turns in one run.

Says texts and tokens a second, tokens computed over real ones, and how far each way's vectors are
from those of the model alone. It does not know what a way does.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy

from tests.benchmarks import report
from tests.benchmarks.oneshot_texts import Source, mixed, short, uniform
from tests.benchmarks.peers.embedders import OURS, SINGLE, SORTED, Way, embedders, ways
from tests.benchmarks.peers.entrants import Setting
from tests.benchmarks.peers.homes import Missing
from tests.benchmarks.peers.running import Process

Say: TypeAlias = Callable[[str], None]
Found: TypeAlias = "dict[str, Process | Missing]"

MIXES = {
    "uniform": (uniform, 64),
    "mixed": (mixed, 192),
    "short": (short, 384),
}
ALIKE = 0.999  # cosine of every vector to that of the model alone, at least
WASTE = 1.02  # computed tokens over real ones, of ours, at most
FASTER = {SORTED: 1.3, SINGLE: 5.0}  # times, ours at least


@dataclass(slots=True)
class Measured:
    """One way on one mix."""

    way: Way
    version: str = ""
    setting: Setting = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)  # seconds by turn
    processor: list[float] = field(default_factory=list)
    computed: int = 0
    cosine: float = 0.0
    difference: float = 0.0
    reason: str = ""

    @property
    def seconds(self) -> list[float]:
        return list(self.rounds.values())

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("inf")

    def times(self, other: Measured) -> float:
        """How many times as long as another it takes: the median over rounds, each against the
        other's of the same turn, so that a slow minute is in both.
        """
        pairs = [
            self.rounds[turn] / other.rounds[turn] for turn in self.rounds if turn in other.rounds
        ]
        return statistics.median(pairs) if pairs else float("nan")


@contextmanager
def running(folder: Path, setting: Setting, say: Say) -> Iterator[Found]:
    """Every entrant's process, or why there is none."""
    with ExitStack() as stack:
        found: Found = {}
        for entrant in embedders():
            try:
                process = Process(entrant, setting, folder)
                stack.callback(process.stop)
                found[entrant.key] = process
            except Missing as error:
                say(f"- {entrant.name} does not run: {error}")
                found[entrant.key] = error
        yield found


def compare(found: Found, texts: Sequence[str], rounds: int, say: Say) -> list[Measured]:
    """All ways, each with its best setting."""
    results = [prepared(way, found[way.key], texts, say) for way in ways()]
    agree(results, found, texts)
    for turn in range(rounds):
        for each in results:
            if not each.reason and not (each.way.slow and turn % 2):
                timed(each, turn, found[each.way.key], texts)
    return results


def prepared(way: Way, process: Process | Missing, texts: Sequence[str], say: Say) -> Measured:
    """With the setting that is quickest on every second text."""
    if isinstance(process, Missing):
        return Measured(way, reason=str(process))
    tried: dict[int, float] = {}
    for place, setting in enumerate(way.settings if len(way.settings) > 1 else ()):
        try:
            ask(process, texts[:8], setting)
            tried[place] = ask(process, texts[::2], setting)["seconds"]
        except Missing as error:
            return Measured(way, process.version, reason=str(error))
    if tried:
        shown = ", ".join(
            f"{way.settings[place]['rows']}: {len(texts[::2]) / took:.0f}"
            for place, took in tried.items()
        )
        say(f"- {way.name}, texts/s by rows: {shown}")
    best = min(tried, key=tried.__getitem__, default=0)
    return Measured(way, process.version, way.settings[best])


def ask(
    process: Process, texts: Sequence[str], setting: Setting, shown: bool = False
) -> dict[str, Any]:
    return process.ask({"texts": list(texts), "setting": dict(setting), "shown": shown})


def agree(results: Sequence[Measured], found: Found, texts: Sequence[str]) -> None:
    """One round that is not timed: vectors compared to the model's alone, and tokens counted."""
    vectors: dict[str, Any] = {}
    for each in results:
        process = found[each.way.key]
        if isinstance(process, Process) and not each.reason:
            try:
                answer = ask(process, texts, each.setting, shown=True)
            except Missing as error:
                each.reason = str(error)
                continue
            each.computed = answer["computed"]
            vectors[each.way.name] = decoded(answer["vectors"], len(texts))
    truth = vectors.get(SINGLE)
    for each in results:
        if truth is not None and each.way.name in vectors:
            each.cosine, each.difference = likeness(vectors[each.way.name], truth)


def decoded(text: str, count: int) -> Any:
    """[texts, width]"""
    return numpy.frombuffer(base64.b64decode(text), numpy.float32).reshape(count, -1)


def likeness(found: Any, truth: Any) -> tuple[float, float]:
    """The least cosine of any two vectors of a text, and the largest difference of two numbers."""
    lengths = numpy.linalg.norm(found, axis=1) * numpy.linalg.norm(truth, axis=1)
    return float(((found * truth).sum(1) / lengths).min()), float(abs(found - truth).max())


def timed(each: Measured, turn: int, process: Process | Missing, texts: Sequence[str]) -> None:
    if isinstance(process, Missing):
        return
    try:
        answer = ask(process, texts, each.setting)
    except Missing as error:
        each.reason = str(error)
        return
    each.rounds[turn] = answer["seconds"]
    each.processor.append(answer["processor"])


def table(results: Sequence[Measured], texts: int, tokens: int) -> str:
    """A row for everybody."""
    ours = next(each for each in results if each.way.name == OURS)
    rows = []
    for each in results:
        version = "; ".join(part for part in (each.version, each.way.note) if part)
        if each.reason or not each.seconds:
            rows.append([each.way.name, "does not run", *[""] * 6, each.reason])
            continue
        every = ", ".join(f"{texts / took:.1f}" for took in each.seconds)
        rows.append(
            [
                each.way.name,
                f"{texts / each.median:.1f} ({every})",
                f"{tokens / each.median:,.0f}",
                f"{each.times(ours):.2f}",
                f"{statistics.median(each.processor):.2f}",
                f"{each.computed / tokens:.3f}",
                f"{each.cosine:.6f} / {each.difference:.1e}",
                str(each.setting.get("rows", "")),
                version,
            ]
        )
    heads = (
        "way",
        "embeddings/s, median (rounds)",
        "tokens/s",
        "ours to it, by turns",
        "processor s",
    )
    more = ("computed/real tokens", "least cosine / largest difference", "rows", "version, notes")
    return report.table([*heads, *more], rows)


def verdicts(results: Sequence[Measured], tokens: int) -> list[str]:
    """Each target, met or missed."""
    run = {each.way.name: each for each in results if each.seconds}
    said, ours = list[str](), run.get(OURS)
    if ours is None:
        return ["ours did not run: MISSED"]
    waste = ours.computed / tokens
    said.append(f"computed/real {waste:.3f}, target at most {WASTE}: {word(waste <= WASTE)}")
    for name, times in FASTER.items():
        if name in run:
            found = run[name].times(ours)
            said.append(f"{found:.2f} times {name}, target {times}: {word(found >= times)}")
    unlike = [name for name, each in run.items() if each.cosine < ALIKE]
    said.append(f"all vectors alike (cosine >= {ALIKE}): {word(not unlike)} {', '.join(unlike)}")
    return said


def word(met: bool) -> str:
    return "met" if met else "MISSED"


def throughput(folder: Path, setting: Setting, rounds: int, only: str, say: Say) -> list[Measured]:
    """The part: each mix of texts; returns what came of the first."""
    source, first = Source.read(folder), list[Measured]()
    with running(folder, setting, say) as found:
        for name, (draw, count) in MIXES.items():
            if only and name != only:
                continue
            texts = source.pieces(count, draw)
            tokens = source.tokens(texts)
            say(f"\n### {count} texts, {tokens:,} tokens, lengths {name}: {draw.__doc__}\n")
            results = compare(found, texts, rounds, say)
            say("\n" + table(results, count, tokens))
            say("\n".join(f"- {line}" for line in verdicts(results, tokens)))
            first = first or results
    return first
