r"""The verdict of every band: met or missed, as published, and as the stored table gives it today.

A summary has one row a band with the column ``inside``, an estimate in ``estimate``, ``slope`` or
``mean``, its interval in ``lower`` and ``upper``, the band in ``band_lower`` and ``band_upper``.
The columns left of the estimate name the band.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from attention_dynamics.experiments.shape import Experiment

ESTIMATES = ("estimate", "slope", "mean")


@dataclass(frozen=True)
class Verdict:
    r"""Met if :math:`[\text{lower}, \text{upper}] \subseteq [\text{band}]`; None is an open end."""

    met: bool
    estimate: float | None
    lower: float | None
    upper: float | None
    band_lower: float | None
    band_upper: float | None

    @property
    def band(self) -> tuple[float | None, float | None]:
        """The two ends of the band."""
        return self.band_lower, self.band_upper

    def __str__(self) -> str:
        band = " to ".join("open" if end is None else f"{end:g}" for end in self.band)
        interval = ", ".join("open" if x is None else f"{x:.4g}" for x in (self.lower, self.upper))
        estimate = "none" if self.estimate is None else f"{self.estimate:.4g}"
        return f"{estimate} [{interval}], band {band}"


def estimate_column(summary: pd.DataFrame) -> str | None:
    """The column that holds the estimates, None if the summary has no bands."""
    if "inside" not in summary.columns:
        return None
    return next((name for name in ESTIMATES if name in summary.columns), None)


def verdicts(summary: pd.DataFrame) -> dict[str, Verdict]:
    """Band to verdict; rows without a band are left out.

    Raises ValueError if two rows have one name.
    """
    column = estimate_column(summary)
    if column is None:
        return {}
    names = list(summary.columns[: list(summary.columns).index(column)])
    found: dict[str, Verdict] = {}
    for row in summary.to_dict("records"):
        if row["inside"] is None or row["inside"] != row["inside"]:
            continue
        name = ", ".join(
            str(row[key]) if key == "quantity" else f"{key} {_shown(row[key])}" for key in names
        )
        if name in found:
            raise ValueError(f"summary: two rows are named {name!r}; name each band once")
        numbers = (row[key] for key in (column, "lower", "upper", "band_lower", "band_upper"))
        found[name] = Verdict(bool(row["inside"]), *(_finite(number) for number in numbers))
    return found


def published(experiment: Experiment, frame: pd.DataFrame) -> dict[str, Any]:
    """What a manifest says of the bands: ``verdicts``, or why there are none.

    A sweep that cannot be summarised (one seed has no interval) is stored all the same.
    """
    try:
        found = verdicts(experiment.summarise(frame))
    except Exception as reason:  # whatever it is: the cells are computed, and must not be lost
        return {"verdicts": None, "no_verdicts_because": f"{type(reason).__name__}: {reason}"}
    return recorded(found)


def recorded(found: Mapping[str, Verdict]) -> dict[str, Any]:
    """The verdicts as a manifest holds them."""
    return {"verdicts": {name: asdict(verdict) for name, verdict in found.items()}}


def stored(manifest: Mapping[str, Any]) -> dict[str, Verdict] | None:
    """The verdicts a manifest was published with, None if it has none."""
    found = manifest.get("verdicts")
    if found is None:
        return None
    return {name: Verdict(**verdict) for name, verdict in found.items()}


def differences(before: Mapping[str, Verdict], now: Mapping[str, Verdict]) -> list[str]:
    """In words, how verdicts differ from those published; moved bands count, estimates do not."""
    found = []
    for name, old in before.items():
        new = now.get(name)
        if new is None:
            found.append(f"{name}: {_word(old)} when published, no such band today")
            continue
        if old.band != new.band:
            found.append(f"{name}: the band was moved after the run: {old} became {new}")
        if old.met != new.met:
            found.append(f"{name}: {_word(old)} when published, {_word(new)} today: {new}")
    new_names = (name for name in now if name not in before)
    return found + [f"{name}: not published, {_word(now[name])} today" for name in new_names]


def _word(verdict: Verdict) -> str:
    return "met" if verdict.met else "missed"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _finite(number: Any) -> float | None:
    value = math.nan if number is None else float(number)
    return value if math.isfinite(value) else None
