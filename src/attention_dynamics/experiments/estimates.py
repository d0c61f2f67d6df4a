r"""Estimates over seeds: t-intervals and log-log slopes. Knows nothing of any theory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its confidence interval ``(lower, upper)``."""

    mean: float
    lower: float
    upper: float
    seeds: int
    confidence: float = 0.95

    @property
    def interval(self) -> tuple[float, float]:
        """The two ends of the interval."""
        return (self.lower, self.upper)

    def __str__(self) -> str:
        percent = f"{100 * self.confidence:g} %"
        return (
            f"{self.mean:.3f}, {percent} interval [{self.lower:.3f}, {self.upper:.3f}] "
            f"({self.seeds} seeds)"
        )


@dataclass(frozen=True)
class Band:
    """Where a theory says an estimate lies; fixed before the run, None leaves a side open."""

    lower: float | None
    upper: float | None
    source: str

    def contains(self, estimate: Estimate) -> bool:
        """Whether the whole interval of the estimate lies inside."""
        above = self.lower is None or estimate.lower >= self.lower
        below = self.upper is None or estimate.upper <= self.upper
        return above and below

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The two ends, None for an open side."""
        return (self.lower, self.upper)


@dataclass(frozen=True)
class Profile:
    """One size of an experiment: its configurations and its seeds, both fixed in the source."""

    configs: tuple[Any, ...]
    seeds: tuple[int, ...]


def t_interval(values: Iterable[float], confidence: float = 0.95) -> Estimate:
    r""":math:`\bar z \pm t_{k-1}\, s/\sqrt k` for :math:`k` independent values, one a seed.

    Raises ValueError for fewer than two values or a value that is not finite.
    """
    sample = np.asarray(list(values), dtype=float)
    if sample.size < 2:
        raise ValueError(f"values must hold at least 2 seeds for an interval, got {sample.size}")
    if not np.isfinite(sample).all():
        raise ValueError(f"values must be finite, got {sample}")
    half = stats.t.ppf(0.5 + confidence / 2, sample.size - 1) * stats.sem(sample)
    mean = float(sample.mean())
    return Estimate(mean, mean - float(half), mean + float(half), sample.size, confidence)


def median_interval(values: Iterable[float], confidence: float = 0.95) -> Estimate:
    r"""The median, between two order statistics that hold it with that confidence, whatever the
    distribution of the independent values.

    Too few values for the confidence (fewer than 6 at 95 %) give their range. Raises ValueError for
    no value or one that is not finite.
    """
    sample = np.sort(np.asarray(list(values), dtype=float))
    if not sample.size or not np.isfinite(sample).all():
        raise ValueError(f"values must be finite and at least one, got {sample}")
    k = max(0, int(stats.binom.ppf((1 - confidence) / 2, sample.size, 0.5)) - 1)
    ends = float(sample[k]), float(sample[-k - 1])
    return Estimate(float(np.median(sample)), *ends, sample.size, confidence)


def geometric_interval(values: Iterable[float], confidence: float = 0.95) -> Estimate:
    r""":math:`\exp(\overline{\log z} \pm t_{k-1}\, s/\sqrt k)` for positive values, one a seed.

    Raises ValueError for fewer than two values, or one that is not positive and finite.
    """
    sample = np.asarray(list(values), dtype=float)
    if not (sample > 0).all():
        raise ValueError(f"values must be positive for a geometric mean, got {sample}")
    logarithm = t_interval(np.log(sample), confidence)
    mean, lower, upper = np.exp([logarithm.mean, *logarithm.interval]).tolist()
    return Estimate(mean, lower, upper, logarithm.seeds, confidence)


def loglog_slope(x: Sequence[float], y: Sequence[float]) -> float:
    r"""The least-squares slope of :math:`\log y` on :math:`\log x`.

    Raises ValueError for fewer than two different x, or a value that is not positive.
    """
    x_values, y_values = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    for name, values in (("x", x_values), ("y", y_values)):
        if not (values > 0).all():
            raise ValueError(f"{name} must be positive for a log-log slope, got {values}")
    if np.unique(x_values).size < 2:
        raise ValueError(f"x must hold at least two different values, got {x_values}")
    log_x = np.log(x_values) - np.log(x_values).mean()
    return float(log_x @ np.log(y_values) / (log_x @ log_x))


def slopes_by_seed(frame: pd.DataFrame, quantity: str, against: str) -> pd.Series:
    """The log-log slope of one quantity against one column, separately for every seed.

    Raises ValueError if the quantity is absent, or a seed lacks one of the values of
    ``against`` (an unfinished sweep would bias the slopes).
    """
    rows = select(frame, quantity)
    table = rows.pivot(index="seed", columns=against, values="value").sort_index(axis=1)
    if table.isna().any(axis=None):
        seed = table.index[table.isna().any(axis=1)][0]
        raise ValueError(f"seed {seed} lacks {quantity!r} at some {against}; finish the sweep")
    x = [float(value) for value in table.columns]
    return table.apply(lambda row: loglog_slope(x, row), axis=1)


def slope_estimate(
    frame: pd.DataFrame, quantity: str, against: str, confidence: float = 0.95
) -> Estimate:
    """The mean over seeds of :func:`slopes_by_seed`, with its t-interval."""
    return t_interval(slopes_by_seed(frame, quantity, against), confidence)


def slope_table(bands: Mapping[str, Band], slope: Callable[[str], Estimate]) -> pd.DataFrame:
    """The slope of each quantity with its interval, beside its band; an open side is infinite."""
    return band_table(bands, slope, column="slope")


def band_table(
    bands: Mapping[str, Band],
    estimate: Callable[[str], Estimate | None],
    *,
    column: str = "estimate",
) -> pd.DataFrame:
    """The estimate of each quantity with its interval, beside its band; an open side is infinite.

    A quantity without an estimate, None, has no row.
    """
    records = []
    for quantity, band in bands.items():
        found = estimate(quantity)
        if found is None:
            continue
        records.append(
            {
                "quantity": quantity,
                column: found.mean,
                "lower": found.lower,
                "upper": found.upper,
                "seeds": found.seeds,
                "band_lower": -math.inf if band.lower is None else band.lower,
                "band_upper": math.inf if band.upper is None else band.upper,
                "inside": band.contains(found),
            }
        )
    return pd.DataFrame(records)


def geometric_means(
    frame: pd.DataFrame, quantity: str, against: str, confidence: float = 0.95
) -> pd.DataFrame:
    r""":math:`\exp(\overline{\log z} \pm t\,s/\sqrt k)` over seeds at each value of ``against``.

    On logarithmic axes these are the points whose slope :func:`slope_estimate` reports.
    Columns: ``against``, mean, lower, upper, seeds.
    """
    records = []
    for x, group in select(frame, quantity).groupby(against):
        found = geometric_interval(group["value"], confidence)
        records.append(
            {
                against: x,
                "mean": found.mean,
                "lower": found.lower,
                "upper": found.upper,
                "seeds": found.seeds,
            }
        )
    return pd.DataFrame(records)


def select(frame: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """The rows of one quantity. Raises ValueError listing the quantities there are."""
    rows = frame[frame["quantity"] == quantity]
    if rows.empty:
        known = ", ".join(sorted(frame["quantity"].unique()))
        raise ValueError(f"quantity {quantity!r} is not in the frame; it holds {known}")
    return rows
