"""Tables and the plot of the benchmark of pictures. It does not know how anything was measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.image_ways import OURS, Point

STYLES = ("--", ":", "-.", "-")


def table(points: Sequence[Point]) -> str:
    """Of one rate."""
    heads = ("requests/s", "way", "mean s, median (rounds)", "p95 s, median")
    rows = []
    for each in points:
        every = ", ".join(f"{mean:.2f}" for mean in each.means)
        rows.append([f"{each.rate:g}", each.name, f"{each.mean:.2f} ({every})", f"{each.p95:.2f}"])
    return report.table(heads, rows)


def draw(points: Sequence[Point], path: Path) -> None:
    """Mean and p95 over the rate of arrivals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for axes, title, value in zip(
        panels, ("Mean wait, s", "p95 wait, s"), ("mean", "p95"), strict=True
    ):
        for style, name in zip(STYLES, dict.fromkeys(each.name for each in points), strict=False):
            own = [each for each in points if each.name == name]
            colour = report.OURS if name == OURS else report.THEIRS
            rates, waits = [each.rate for each in own], [getattr(each, value) for each in own]
            axes.plot(rates, waits, style, color=colour, marker="o", label=name)
        axes.set_title(title, loc="left")
        axes.set_xlabel("requests a second")
        axes.set_yscale("log")
        axes.legend(fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
