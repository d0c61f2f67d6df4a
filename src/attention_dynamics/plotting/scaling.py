r"""Scaling plots: a quantity against a size on logarithmic axes, intervals over seeds, guides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedLocator,
    LogFormatterSciNotation,
    LogLocator,
    NullLocator,
    ScalarFormatter,
    StrMethodFormatter,
)

from attention_dynamics.plotting.style import COLOURS, MARKERS, label_line

_DECADES = 1e4


def plot_scaling(
    axes: Axes,
    curves: Mapping[str, pd.DataFrame],
    *,
    against: str,
    xlabel: str,
    ylabel: str = "",
    title: str = "",
    guides: Mapping[str, float] | None = None,
) -> None:
    r"""Mean and interval over seeds for each curve, labelled at its end, on log-log axes.

    Raises ValueError for no curve, more than six, or a guide without its curve.

    Parameters
    ----------
    curves
        Label to a frame with columns ``against``, mean, lower, upper (as made by
        ``experiments.estimates.geometric_means``), at most six.
    guides
        Label of a curve to the slope that a theory predicts for it: a dashed line through the
        curve's first point, drawn by :func:`add_guide`.

    """
    if not 0 < len(curves) <= len(COLOURS):
        raise ValueError(f"curves must hold 1 to {len(COLOURS)} frames, got {len(curves)}")
    if unknown := set(guides or {}) - set(curves):
        raise ValueError(f"guides name {sorted(unknown)}, which are not among {list(curves)}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for (label, points), colour, marker in zip(
        curves.items(), COLOURS.values(), MARKERS, strict=False
    ):
        x = points[against].to_numpy(dtype=float)
        axes.fill_between(
            x, points["lower"], points["upper"], color=colour, alpha=0.18, linewidth=0
        )
        axes.plot(x, points["mean"], color=colour, marker=marker)
        label_line(axes, x[-1], float(points["mean"].iloc[-1]), label, colour)
        if guides and label in guides:
            add_guide(axes, x, float(points["mean"].iloc[0]), guides[label], colour)
    sizes = sorted({float(x) for points in curves.values() for x in points[against]})
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    lower, upper = axes.get_ylim()
    if upper > _DECADES * lower:  # 1, 2, 5 of every decade would lie over each other
        axes.yaxis.set_major_locator(LogLocator())
        axes.yaxis.set_major_formatter(LogFormatterSciNotation())
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)


def add_guide(axes: Axes, x: Any, start: float, slope: float, colour: str) -> None:
    r"""The dashed line :math:`y = y_0 (x/x_0)^{\text{slope}}` from the first point on."""
    sizes = np.asarray(x, dtype=float)
    axes.plot(
        sizes,
        start * (sizes / sizes[0]) ** slope,
        color=colour,
        linestyle=(0, (4, 3)),
        linewidth=1.0,
        marker="",
        alpha=0.9,
    )
