"""The plot of the benchmark of one-shot tasks: embeddings a second, and waits over load.

It does not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.oneshot_load import OURS as OUR_POLICY
from tests.benchmarks.oneshot_load import Point
from tests.benchmarks.oneshot_ways import Measured
from tests.benchmarks.report import OURS, THEIRS

STYLES = ("-", "--", ":", "-.")


def draw(results: Sequence[Measured], points: Sequence[Point], path: Path) -> None:
    """Bars of those that ran, and two panels of waits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = bool(results) + 2 * bool(points)
    if not count:
        return
    figure, axes = pyplot.subplots(
        1, count, figsize=(5 * count, 4.2), layout="constrained", squeeze=False
    )
    panels = list(axes[0])
    if results:
        bars(panels.pop(0), [each for each in results if each.seconds])
    for panel, title, wait in zip(
        panels,
        ("Mean wait, ms", "p99 wait, ms"),
        (lambda each: each.mean, lambda each: each.worst[1]),
        strict=True,
    ):
        lines(panel, points, title, wait)
    for panel in axes[0]:
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(axes: Any, results: Sequence[Measured]) -> None:
    """Relative to ours, so that all mixes look alike."""
    run = sorted(results, key=lambda each: -each.median)
    colours = [OURS if each.way.name.startswith("Carpool") else THEIRS for each in run]
    rates = [1 / each.median for each in run]
    found = axes.barh([each.way.name for each in run], rates, color=colours)
    axes.bar_label(found, fmt="%.2f", padding=3)
    axes.set_title("Rounds of all texts a second", loc="left")


def lines(axes: Any, points: Sequence[Point], title: str, wait: Any) -> None:
    for style, name in zip(STYLES, dict.fromkeys(each.name for each in points), strict=False):
        own = [each for each in points if each.name == name]
        colour = OURS if name == OUR_POLICY else THEIRS
        shares = [100 * each.share for each in own]
        waits = [1000 * wait(each) for each in own]
        axes.plot(shares, waits, style, color=colour, marker="o", label=name)
    axes.set_title(title, loc="left")
    axes.set_xlabel("load, % of Carpool's capacity")
    axes.set_yscale("log")
    axes.legend(fontsize=8)
