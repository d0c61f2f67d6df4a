r"""Descent without projection: where the ball binds, what replaces it, and whose bounds survive.

Six studies, a cell each for every strength and seed:

- ``radius``: balls around the start, in units of the distance that plain descent travels;
- ``decay``: weight decay toward the start, beside balls and stopped runs of the same distance;
- ``noise``: noisy labels, with the regulariser chosen on held-out data;
- ``certificate``: certificates of plain, stopped, stochastic and decayed runs;
- ``batch``: ProjSGD over the size of its batches;
- ``covered``: for how many steps the projection cannot act, and when it first does.

Bands and seeds come from theory, see their sources, and were fixed before the first run of the
``book`` profile. Sizes (steps, samples, noise) were chosen for time, on seeds from 1000 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pandas as pd

from attention_dynamics.data import Law
from attention_dynamics.experiments import _without_projection_bounds as bounds
from attention_dynamics.experiments import _without_projection_training as training
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    median_interval,
    slope_estimate,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.validation import require_one_of

NAME = training.NAME
SCHEMA = 1
AGAINST = "strength"


@dataclass(frozen=True)
class Config:
    r"""One study at one strength, with the sizes of its problem.

    ``strength`` is, by ``study``: ``"radius"``, the radius over the farthest distance of the plain
    run; ``"decay"``, :math:`\lambda`; ``"batch"``, the size of a batch; else unused. ``case`` is a
    kind of targets of :class:`.certificates.Config` for ``"certificate"``, and ``"transported"``,
    ``"start"`` or ``"aligned"`` for ``"covered"``. The last ``validation_fraction`` of the
    ``samples`` is held out; ``tests`` more are kept clean. ``step_scale`` is
    :math:`\eta\sqrt\tau`; ``noise`` is the standard deviation of the noise over that of the
    targets. Fields that a study does not use are ignored by it.
    """

    study: Literal["radius", "decay", "noise", "certificate", "batch", "covered"]
    strength: float = 0.0
    case: str = ""
    heads: int = 64
    samples: int = 5000
    validation_fraction: float = 0.2
    length: int = 16
    dimension: int = 8
    token_law: Law = "iid"
    anchors: int = 16
    teacher_heads: int = 8192
    transport_norm: float = 3.0
    steps: int = 4000
    step_scale: float = 1.75
    noise: float = 0.0
    tests: int = 0
    patience: int = 100
    draws: int = 20

    @property
    def step_size(self) -> float:
        r""":math:`\eta`."""
        return self.step_scale / math.sqrt(self.steps)


COLUMNS = columns_of(Config)
_SHARES = (0.0625, 0.125, 0.25, 0.5, 1.25)
_DECAYS = (0.1, 0.8)
_BATCHES = (1.0, 4.0, 16.0)
_TARGETS = ("teacher", "noisy", "labels")
_CASES = ("transported", "start", "aligned")


def _cells(
    sizes: dict[str, Any],
    noise: dict[str, Any],
    small: dict[str, Any],
    batch: dict[str, Any],
    decays: tuple[float, ...] = _DECAYS,
) -> tuple[Config, ...]:
    clean = Config("radius", **sizes)
    batched = Config("batch", anchors=8, teacher_heads=512, token_law="sequence_means", **batch)
    return (
        *(replace(clean, strength=share) for share in _SHARES),
        *(replace(clean, study="decay", strength=strength) for strength in decays),
        replace(clean, study="noise", **noise),
        *(Config("certificate", case=case, **small) for case in _TARGETS),
        *(replace(batched, strength=size) for size in _BATCHES),
        *(Config("covered", case=case) for case in _CASES),
    )  # fmt: skip


_NOISE: dict[str, Any] = {"samples": 96, "validation_fraction": 2 / 3, "tests": 200, "noise": 1.0,
          "steps": 500, "step_scale": 0.8 * 500**0.5}  # fmt: skip
PROFILES = {
    "smoke": Profile(
        _cells(
            {"heads": 8, "samples": 25, "length": 4, "dimension": 3, "teacher_heads": 64,
             "anchors": 4, "steps": 40},
            {**_NOISE, "samples": 24, "tests": 20, "steps": 60, "step_scale": 0.8 * 60**0.5},
            {"heads": 8, "samples": 8, "length": 4, "dimension": 3, "steps": 12},
            {"heads": 4, "samples": 16, "length": 4, "dimension": 3, "steps": 16, "draws": 4},
        ),
        seeds=(500, 501, 502),
    ),
    "book": Profile(
        _cells(
            {"samples": 200, "length": 8, "teacher_heads": 2048, "steps": 300},
            _NOISE,
            {"heads": 32, "samples": 32, "length": 8, "dimension": 6, "steps": 40},
            {"heads": 16, "samples": 32, "length": 8, "dimension": 4, "steps": 32, "draws": 20},
        ),
        seeds=tuple(range(6)),
    ),
    "paper": Profile(
        (
            *(Config("radius", strength=share) for share in (0.25, 1.25)),
            Config("decay", strength=0.1),
            Config("radius", strength=0.25, heads=256),
            Config("noise", **{**_NOISE, "steps": 4000, "step_scale": 0.8 * 4000**0.5}),
        ),
        seeds=tuple(range(10)),
    ),
}  # fmt: skip

_PROVED = "an upper bound is never passed"
_CONVEX = "of convex losses, the constraint that is matched wins"
_TUNED = "tuned ridge and gradient flow differ by at most 1.22 (Ali, Kolter and Tibshirani 2019)"
_MEAN = "a mean of B independent draws"
BANDS = {
    "exit_difference": Band(None, 0.0, "before its first action a projected run is a plain one"),
    "plain_within_norm": Band(None, 1.0, "the width experiment met no boundary at this norm"),
    "binding_loss": Band(1.0, None, "a ball of a quarter of the distance costs loss"),
    "over_ball_farthest": Band(1.0, None, _CONVEX),
    "over_ball_norm": Band(None, 1.0, _CONVEX),
    "stopped_over_decay": Band(1.0, None, _CONVEX),
    "plain_over_ball": Band(1.0, None, "the noise is fitted last"),
    "smallest_over_ball": Band(1.0, None, "too small a ball does not reach the signal"),
    "plain_over_stopped": Band(1.0, None, "the noise is fitted last"),
    "ball_over_stopped": Band(1 / 1.22, 1.22, "nothing tells them apart; the band of decay"),
    "stopped_over_decay_noisy": Band(1 / 1.22, 1.22, _TUNED),
    "covered_least": Band(1.0, None, _PROVED),
    "aligned_tightness": Band(0.9, 1.0, "the lemma on the speed of a head is attained"),
    "plain_ratio": Band(1.0, None, _PROVED),
    "stopped_ratio": Band(1.0, None, _PROVED),
    "stochastic_ratio": Band(1.0, None, _PROVED),
    "decay_ratio": Band(1.0, None, _PROVED),
    "ball_ratio": Band(1.0, None, _PROVED),
    "batch_noise": Band(-1.1, -0.9, _MEAN),
    "batch_output": Band(-1.15, -0.85, "the noise, to first order"),
    "batch_final": Band(None, 0.0, "noise adds loss (Jensen)"),
    "batch_samples": Band(0.0, None, "more steps for the same samples"),
    "batch_certificate": Band(1.0, None, "the bound in expectation"),
}
_RUN: dict[str, Callable[[Config, int, str], dict[str, float]]] = {
    "radius": training.radius, "decay": training.decay, "noise": training.noise,
    "certificate": bounds.certificate, "batch": bounds.batch, "covered": bounds.covered,
}  # fmt: skip
hindsight = training.hindsight


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one study and seed; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range.
    """
    require_one_of("study", config.study, tuple(_RUN))
    return rows_of(NAME, config, seed, _RUN[config.study](config, seed, device))


def table(frame: pd.DataFrame, study: str) -> pd.DataFrame:
    """One row a cell of the study: heads, case, strength and seed, and a column a quantity.

    Raises ValueError if the frame has no such study.
    """
    rows = frame[frame["study"] == study]
    if rows.empty:
        known = ", ".join(sorted(frame["study"].unique()))
        raise ValueError(f"study {study!r} is not in the frame; it holds {known}")
    index = ["heads", "case", "strength", "seed"]
    return rows.pivot(index=index, columns="quantity", values="value").reset_index()


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Estimates beside their bands, of the studies that the frame holds; see :func:`estimate`."""
    present = set(frame["study"])
    return band_table(
        BANDS, lambda name: estimate(frame, name) if _STUDY[name] in present else None
    )


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    r"""One of ``BANDS``.

    Of a proved inequality it is the worst ratio, and the interval is the range over all cells; of
    a slope the mean over seeds with its t-interval; of a ratio the geometric mean over seeds, each
    seed with that over its strengths and widths. ``aligned_tightness`` is a median.
    """
    return _ESTIMATE[quantity](table(frame, _STUDY[quantity]))


def _geometric(column: str, strength: float | None = None) -> Callable[[pd.DataFrame], Estimate]:
    def found(rows: pd.DataFrame) -> Estimate:
        if strength is not None:
            rows = rows[rows["strength"] == strength]
        return geometric_interval(np.exp(np.log(rows[column]).groupby(rows["seed"]).mean()))

    return found


def _slope(column: str) -> Callable[[pd.DataFrame], Estimate]:
    def found(rows: pd.DataFrame) -> Estimate:
        long = rows[["strength", "seed"]].assign(quantity=column, value=rows[column])
        return slope_estimate(long, column, AGAINST)

    return found


def _least(*columns: str) -> Callable[[pd.DataFrame], Estimate]:
    """The smallest of the ratios, and their range."""

    def found(rows: pd.DataFrame) -> Estimate:
        values = rows[list(columns)].to_numpy().ravel()
        low, high = float(values.min()), float(values.max())
        return Estimate(low, low, high, rows["seed"].nunique())

    return found


def _both(name: str) -> Callable[[pd.DataFrame], Estimate]:
    return _least(f"{name}_fixed", f"{name}_last")


def _exit_difference(rows: pd.DataFrame) -> Estimate:
    apart = float((rows["first_action"] - rows["first_exit"]).abs().max())
    return Estimate(apart, apart, apart, rows["seed"].nunique())


def _within(rows: pd.DataFrame) -> Estimate:
    return t_interval(rows.groupby("seed")["distance_over_norm"].max())


def _covered(rows: pd.DataFrame) -> Estimate:
    some = rows[rows["covered"] > 0]
    return _least("ratio")(some.assign(ratio=some["slept"] / some["covered"]))


def _tightness(rows: pd.DataFrame) -> Estimate:
    some = rows[rows["case"] == "aligned"]
    return median_interval(some["covered"] / some["slept"])


_MEASURE: dict[str, dict[str, Callable[[pd.DataFrame], Estimate]]] = {
    "radius": {
        "exit_difference": _exit_difference, "plain_within_norm": _within,
        "binding_loss": _geometric("loss_ratio", 0.25),
    },
    "decay": {
        name: _geometric(name)
        for name in ("over_ball_farthest", "over_ball_norm", "stopped_over_decay")
    },
    "noise": {
        name: _geometric(name)
        for name in ("plain_over_ball", "smallest_over_ball", "plain_over_stopped",
                     "ball_over_stopped", "stopped_over_decay_noisy")
    },
    "covered": {"covered_least": _covered, "aligned_tightness": _tightness},
    "certificate": {
        f"{name}_ratio": _both(f"{name}_ratio")
        for name in ("plain", "stopped", "stochastic", "decay", "ball")
    },
    "batch": {
        "batch_noise": _slope("noise"), "batch_output": _slope("output_variance"),
        "batch_final": _slope("final_loss"), "batch_samples": _slope("same_samples_loss"),
        "batch_certificate": _least("expected_ratio"),
    },
}  # fmt: skip
_STUDY = {name: study for study, names in _MEASURE.items() for name in names}
_ESTIMATE = {name: found for names in _MEASURE.values() for name, found in names.items()}
