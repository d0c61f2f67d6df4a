r"""The figure of any experiment: curves against a size where there are some, bands otherwise."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from attention_dynamics.experiments.estimates import geometric_means, select
from attention_dynamics.plotting import COLOURS, figure, plot_scaling, save_svg
from attention_dynamics.plotting.style import SETTINGS
from attention_dynamics.running.verdicts import Verdict, verdicts


def draw(
    experiment: Any, frame: pd.DataFrame, summary: pd.DataFrame, title: str, path: Path
) -> Path:
    """Draw into an .svg or .png file what was measured; the folder is made where it is missing.

    Raises ValueError for a summary without bands.
    """
    names = curves(experiment, frame)
    if names:
        drawn, axes = figure()
        against = experiment.AGAINST
        points = {name: geometric_means(frame, name, against) for name in names}
        plot_scaling(axes, points, against=against, xlabel=against, title=title)
    else:
        drawn = draw_bands(verdicts(summary), title)
    try:
        if path.suffix == ".svg":
            return save_svg(drawn, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(SETTINGS):
            drawn.savefig(path, dpi=150, bbox_inches="tight")
        return path
    finally:
        plt.close(drawn)


def curves(experiment: Any, frame: pd.DataFrame) -> list[str]:
    """The banded quantities that are curves on logarithmic axes: positive, over one size alone.

    Empty where the experiment varies anything else, since a mean over that would be no curve.
    """
    against = getattr(experiment, "AGAINST", None)
    varied = {
        field.name
        for field in fields(type(next(iter(experiment.PROFILES.values())).configs[0]))
        if field.name in frame.columns and frame[field.name].nunique(dropna=False) > 1
    }
    if against is None or varied != {against} or frame["seed"].nunique() < 2:
        return []
    known = set(frame["quantity"])
    positive = [
        name
        for name in experiment.BANDS
        if name in known and (select(frame, name)["value"] > 0).all()
    ]
    return positive[: len(COLOURS)]


def draw_bands(found: dict[str, Verdict], title: str) -> Figure:
    """One line a band: the band grey, the estimate with its interval, each line in its own units.

    Numbers stand beside it; a missed band has another colour and another marker.
    """
    if not found:
        raise ValueError("summary: no band to draw; the experiment's summarise gives none")
    drawn, axes = figure(width=8.0, height=0.9 + 0.32 * len(found))
    for row, verdict in enumerate(found.values()):
        low, high = _limits(verdict)
        place = lambda x, low=low, high=high: (x - low) / (high - low)  # noqa: E731
        left = 0.0 if verdict.band_lower is None else place(verdict.band_lower)
        right = 1.0 if verdict.band_upper is None else place(verdict.band_upper)
        axes.barh(row, right - left, left=left, height=0.7, color="#e4e4e4", zorder=1)
        if left == right:
            axes.plot([left, left], [row - 0.35, row + 0.35], color="#999999", marker="", zorder=1)
        colour = COLOURS["blue"] if verdict.met else COLOURS["orange"]
        ends = [
            place(low if x is None and k == 0 else high if x is None else x)
            for k, x in enumerate((verdict.lower, verdict.upper))
        ]
        axes.plot(ends, [row, row], color=colour, marker="", linewidth=2.2, zorder=2)
        if verdict.estimate is not None:
            marker = "o" if verdict.met else "X"
            axes.plot([place(verdict.estimate)], [row], color=colour, marker=marker, zorder=3)
        text = axes.annotate(
            f"{'met' if verdict.met else 'missed'}: {verdict}", (1.0, row), xytext=(6, 0),
            textcoords="offset points", va="center", fontsize=8, color=colour,
            annotation_clip=False,
        )  # fmt: skip
        text.set_in_layout(False)  # it stands beside the axes, and must not make them narrow
    axes.set(xlim=(0, 1), ylim=(len(found) - 0.4, -0.6), title=title, xticks=[])
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.grid(visible=False)
    return drawn


def _limits(verdict: Verdict) -> tuple[float, float]:
    """The ends of a line: whatever is finite, and a margin around it."""
    numbers = [
        x for x in (*verdict.band, verdict.lower, verdict.upper, verdict.estimate) if x is not None
    ]
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    margin = 0.12 * (high - low) or max(abs(high), 1.0) * 0.12
    return low - margin, high + margin
