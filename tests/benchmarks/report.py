"""What a benchmark prints and draws: the machine, markdown tables, two plots.

It does not know how anything was measured.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, THEIRS = "#0f766e", "#a8a29e"  # colours
SETS = ("avx2", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16")


@dataclass(frozen=True, slots=True)
class Result:
    """One row: an entrant's rounds, or the reason why there are none."""

    name: str
    setting: str = ""
    version: str = ""
    rates: Sequence[float] = ()  # output tokens a second
    processor: float = 0.0  # seconds of a round
    equal: float | None = None  # share of tokens equal to the reference's
    note: str = ""
    reason: str = ""

    @property
    def rate(self) -> float:
        """The median round."""
        return statistics.median(self.rates) if self.rates else 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """One engine at one arrival rate; percentiles p50, p95, p99 in seconds."""

    name: str
    share: float  # of our capacity
    rate: float  # requests a second
    requests: int
    first: tuple[float, float, float]
    gaps: tuple[float, float, float]


def machine() -> str:
    """The processor by name, its cores and those instruction sets that decide."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        known[name.strip()] = value.strip()
    flags = known.get("flags", "").split()
    sets = ", ".join(name for name in SETS if name in flags) or "unknown instruction sets"
    name = known.get("model name", platform.processor() or platform.machine())
    if "cpu family" in known:
        name += f" (family {known['cpu family']}, model {known['model']})"
    busy = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    return f"{name}, {os.cpu_count()} cores, {sets}; load before the run {busy}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def compared(results: Sequence[Result]) -> str:
    """Output tokens a second of everybody, and how often ours that is."""
    ours = max((each.rate for each in results if each.name.startswith("Carpool")), default=0.0)
    rows = []
    for each in results:
        if each.reason:
            rows.append([each.name, "does not run", "", "", each.setting, "", each.reason])
            continue
        every = ", ".join(f"{rate:.0f}" for rate in each.rates)
        rows.append(
            [
                each.name,
                f"{each.rate:.0f} ({every})",
                f"{each.rate / ours:.2f}" if ours else "",
                f"{each.processor:.0f}",
                each.setting,
                "" if each.equal is None else f"{each.equal:.1%}",
                "; ".join(part for part in (each.version, each.note) if part),
            ]
        )
    heads = ("engine", "output tokens/s, median (rounds)", "of our best", "processor s")
    return table([*heads, "best setting", "equal tokens", "version and notes"], rows)


def latencies(loads: Sequence[Load]) -> str:
    """In milliseconds."""

    def shown(values: Sequence[float]) -> str:
        return " / ".join(f"{1000 * value:,.0f}" for value in values)

    rows = [
        [
            f"{each.share:.0%}",
            f"{each.rate:.2f}",
            str(each.requests),
            each.name,
            shown(each.first),
            shown(each.gaps),
        ]
        for each in loads
    ]
    heads = ("load", "requests/s", "requests", "engine")
    return table([*heads, "first token, ms, p50 / p95 / p99", "gaps, ms, p50 / p95 / p99"], rows)


def draw(results: Sequence[Result], loads: Sequence[Load], path: Path) -> None:
    """Rates as bars; first tokens and gaps over load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [draw_rates] * bool(results) + [draw_first, draw_gaps] * bool(loads)
    size = (5 * len(panels), 4.2)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=size, layout="constrained", squeeze=False
    )
    for place, panel in zip(axes[0], panels, strict=True):
        panel(place, results, loads)
        place.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_rates(axes: Any, results: Sequence[Result], loads: Sequence[Load]) -> None:
    run = sorted((each for each in results if each.rates), key=lambda each: each.rate)
    colours = [OURS if each.name.startswith("Carpool") else THEIRS for each in run]
    bars = axes.barh([each.name for each in run], [each.rate for each in run], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_title("Output tokens/s", loc="left")


def draw_first(axes: Any, results: Sequence[Result], loads: Sequence[Load]) -> None:
    lines(axes, loads, "first", "Time to first token, s")


def draw_gaps(axes: Any, results: Sequence[Result], loads: Sequence[Load]) -> None:
    lines(axes, loads, "gaps", "Between two tokens, s")


def lines(axes: Any, loads: Sequence[Load], what: str, title: str) -> None:
    """Medians as lines, p95 dashed; a logarithmic scale, since the worst is far from the usual."""
    for name in sorted({each.name for each in loads}):
        own = [each for each in loads if each.name == name]
        colour = OURS if name.startswith("Carpool") else THEIRS
        shares = [100 * each.share for each in own]
        for place, style, label in ((0, "-", "p50"), (1, "--", "p95")):
            values = [getattr(each, what)[place] for each in own]
            axes.plot(shares, values, style, color=colour, marker="o", label=f"{name}, {label}")
    axes.set_title(title)
    axes.set_xlabel("load, % of Carpool's capacity")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
