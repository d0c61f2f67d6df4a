r"""Beyond the kernel regime: movement, generalisation and what is left of the theorem's two rates.

A network with output scale :math:`\alpha` is trained without projection on
:math:`\frac1n\sum_j(\alpha f(X_j) - y_j)^2` with step :math:`\eta/\alpha^2`: the iterates are those
of f on targets :math:`y/\alpha` with step :math:`\eta`, which is what is computed. Everything
depends on the *richness* :math:`\zeta = 1/(\alpha\sqrt m)` and on the empirical measure of the
heads. ``kernel`` keeps :math:`\alpha` as m grows (:math:`\zeta \to 0`), ``rich`` keeps
:math:`\zeta` (the mean-field scaling 1/m). Four axes: width, step at fixed time
:math:`\eta\tau`, length, samples; along the first and the last, a second network with heads of its
own learns the same samples. The bands come from theory and were fixed before any run of the book
profile; sizes were chosen with the seeds 900 to 907.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from attention_dynamics.data import generator
from attention_dynamics.experiments._beyond_kernel_state import (
    TeacherKind,
    descend,
    movements,
    problem_of,
    top,
)
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    select,
    slopes_by_seed,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.validation import require_integer, require_number, require_one_of

NAME = "beyond_kernel"
SCHEMA = 1
Axis = Literal["width", "step", "length", "samples"]
Regime = Literal["kernel", "rich"]
#: The column that varies along each axis.
ALONG = {"width": "heads", "step": "step_size", "length": "length", "samples": "samples"}
REGIMES: tuple[Regime, ...] = ("kernel", "rich")


@dataclass(frozen=True)
class Config:
    r"""One cell. ``strength`` is :math:`\zeta\sqrt m` (``kernel``) or :math:`\zeta` (``rich``).

    ``time`` is :math:`\eta\tau`; ``probe`` of the ``held`` held-out sequences carry the Jacobian.
    ``value_norm`` and ``logit_norm`` are those of the single head of the ``sharp`` teacher,
    ``teacher_heads`` belongs to the ``class`` one.
    """

    axis: Axis
    regime: Regime
    heads: int = 64
    strength: float = 1.0
    step_size: float = 1.0
    time: float = 4000.0
    samples: int = 1024
    length: int = 16
    teacher: TeacherKind = "sharp"
    held: int = 4096
    probe: int = 128
    dimension: int = 8
    value_norm: float = 4.0
    logit_norm: float = 12.0
    teacher_heads: int = 8192

    @property
    def richness(self) -> float:
        r""":math:`\zeta`."""
        return self.strength / math.sqrt(self.heads) if self.regime == "kernel" else self.strength

    @property
    def output_scale(self) -> float:
        r""":math:`\alpha = 1/(\zeta\sqrt m)`."""
        return 1 / (self.richness * math.sqrt(self.heads))

    @property
    def steps(self) -> int:
        r""":math:`\tau`, the nearest whole number."""
        return round(self.time / self.step_size)


COLUMNS = columns_of(Config)
_STRENGTH: dict[Regime, float] = {"kernel": 0.25, "rich": 1.0}
_RIVALS = ("width", "samples")  # the axes on which a second network is trained
_BELOW_EDGE = 2.0  # the slopes in the step size are those of the steps up to this one


def _configs(
    base: Config, *, heads: tuple[int, ...], steps: tuple[float, ...],
    lengths: tuple[int, ...], samples: tuple[int, ...],
) -> tuple[Config, ...]:  # fmt: skip
    cells = [
        *(replace(base, axis="width", heads=m) for m in heads),
        *(replace(base, axis="step", step_size=eta) for eta in steps),
        *(replace(base, axis="length", length=T) for T in lengths),
        *(replace(base, axis="samples", samples=n) for n in samples),
        *(
            replace(base, axis="samples", samples=n, teacher="class")
            for n in (samples[0], samples[-1])
        ),
    ]
    return tuple(
        replace(cell, regime=regime, strength=_STRENGTH[regime])
        for cell in cells for regime in REGIMES
    )  # fmt: skip


_PAPER = Config("width", "kernel", heads=64, step_size=0.5, time=2000.0, samples=256, length=8)
_BOOK = replace(
    _PAPER, heads=32, step_size=2.0, time=256.0, samples=96, held=512, probe=48, teacher_heads=512
)
_SMOKE = replace(
    _BOOK, heads=8, time=16.0, samples=16, held=32, probe=8, length=4, dimension=3, teacher_heads=64
)
_ETA, _T = (1.0, 2.0, 4.0, 6.0), (4, 16, 64, 256)
PROFILES = {
    "smoke": Profile(
        _configs(_SMOKE, heads=(4, 8), steps=_ETA[:3], lengths=(2, 4, 8, 16), samples=(8, 16)),
        seeds=(100, 101),
    ),
    "book": Profile(
        _configs(_BOOK, heads=(32, 64, 128, 256), steps=_ETA, lengths=_T, samples=(32, 128, 512)),
        seeds=tuple(range(8)),
    ),
    "paper": Profile(
        _configs(_PAPER, heads=tuple(2**k for k in range(5, 11)), steps=(0.5, *_ETA), lengths=_T,
                 samples=(64, 256, 1024, 4096)),
        seeds=tuple(range(10)),
    ),
}  # fmt: skip

_FIRST = "a head moves by zeta = 1/(alpha sqrt m)"
_SECOND = "even in the targets: the first order cancels in a pair"
_LIMIT = "zeta is fixed, and m is only the number of particles"
_CLT = "fluctuations of m independent heads"
_FLOW = "Euler steps of one flow"
_FREE = "no T in the motion of a head; 0.05 is a factor 1.2 from T = 4 to 256"
_MOVED = ("head_movement", "feature_movement", "attention_movement")
BANDS = {
    **{f"kernel_width_{name}": Band(-0.6, -0.4, _FIRST) for name in _MOVED},
    "kernel_width_kernel_movement": Band(-1.15, -0.85, _SECOND),
    "kernel_width_linearisation": Band(-1.15, -0.85, _SECOND),
    "kernel_width_deviation_rms": Band(-0.6, -0.4, _CLT),
    **{f"rich_width_{name}": Band(-0.1, 0.1, _LIMIT) for name in (*_MOVED, "kernel_movement")},
    "rich_width_deviation_rms": Band(-0.6, -0.4, _CLT),
    "kernel_step_feature_movement": Band(-0.1, 0.1, _FLOW),
    "rich_step_feature_movement": Band(-0.1, 0.1, _FLOW),
    "rich_step_edge_final": Band(0.75, 1.25, "descent holds the kernel at the edge of stability"),
    "kernel_length_training_loss": Band(None, 0.05, _FREE),
    "rich_length_training_loss": Band(None, 0.05, _FREE),
    "rich_length_training_loss_late": Band(None, 0.05, "long sequences with a mean converge"),
    "rich_length_held_loss": Band(None, 0.05, _FREE),
    "kernel_samples_union": Band(None, 0.4, "a union costs log n; a root law would give 1/2"),
    "rich_samples_union": Band(None, 0.4, "a union costs log n; a root law would give 1/2"),
    "kernel_samples_gap": Band(0.0, None, "descent has seen the training samples"),
    "rich_samples_gap": Band(0.0, None, "descent has seen the training samples"),
}
r"""Named ``regime_axis_quantity``; :func:`estimate` says what each is."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one cell and seed; a pure function of its arguments.

    Raises ValueError if a field is out of its range, FloatingPointError if a descent diverges.
    """
    _require(config)
    problem = problem_of(
        NAME, seed, teacher=config.teacher, samples=config.samples, held=config.held,
        length=config.length, dimension=config.dimension, value_norm=config.value_norm,
        logit_norm=config.logit_norm, teacher_heads=config.teacher_heads, device=device,
    )  # fmt: skip
    X, q, alpha = problem.held_tokens, problem.query, config.output_scale
    descent = DescentConfig(steps=config.steps, step_size=config.step_size)
    initial = _initial(config, seed, "student", device)
    final, path, largest = descend(problem, initial, descent, alpha)
    held = alpha * shallow.forward(final, X, query=q)
    trained = alpha * shallow.forward(final, problem.tokens, query=q)
    train_loss = float(
        (trained - problem.targets).square().mean() / problem.targets.var(correction=0)
    )
    held_loss = float((held - problem.held_targets).square().mean())  # their variance is 1
    probe = X[: config.probe], problem.held_targets[: config.probe]
    moved = movements(initial, final, *probe, q)
    quantities = {
        "training_loss": train_loss,
        "held_loss": held_loss,
        "gap": held_loss - train_loss,
        "largest_loss": largest,
        **moved,
        "alignment_gain": moved["alignment_final"] - moved["alignment_initial"],
        "head_movement_c_largest": float((final.c - initial.c).abs().max()),
        "head_movement_c_bound": 2 * config.step_size * config.richness * path,
        "edge_initial": config.step_size * top(initial, problem),
        "edge_final": config.step_size * top(final, problem),
    }
    if config.axis in _RIVALS:
        start = _initial(config, seed, "other", device)
        rival = alpha * shallow.forward(descend(problem, start, descent, alpha)[0], X, query=q)
        # Held-out sequences are independent of both networks; the training ones are not.
        difference = (held - rival)[: config.samples]
        quantities["deviation_rms"] = float(difference.square().mean().sqrt())
        quantities["deviation_sup"] = float(difference.abs().max())
    return rows_of(NAME, config, seed, quantities)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Each estimate with its 95 % t-interval over seeds, beside its band."""
    return band_table(BANDS, lambda name: estimate(frame, name))


def rows_on(frame: pd.DataFrame, axis: str, regime: str, teacher: str = "sharp") -> pd.DataFrame:
    """The rows of one axis, regime and teacher."""
    kept = (frame["axis"] == axis) & (frame["regime"] == regime) & (frame["teacher"] == teacher)
    return frame[kept]


def estimate(frame: pd.DataFrame, name: str, confidence: float = 0.95) -> Estimate:
    r"""What the band ``regime_axis_quantity`` speaks of: a mean over seeds and its t-interval.

    Slopes in logarithms, ``_late`` over the upper half of the lengths; but ``gap`` is the mean over
    the axis, ``edge_final`` that of the largest step, and ``union`` twice the slope of largest over
    root mean square deviation: the exponent in n of the width that the largest of n samples needs
    beyond their mean square.
    """
    regime, axis, quantity = name.split("_", 2)
    require_one_of("name", regime, REGIMES)
    require_one_of("name", axis, tuple(ALONG))
    rows = rows_on(frame, axis, regime)
    if quantity == "gap":
        return t_interval(select(rows, "gap").groupby("seed")["value"].mean(), confidence)
    if quantity == "edge_final":
        last = rows[rows["step_size"] == rows["step_size"].max()]
        return t_interval(select(last, quantity)["value"], confidence)
    if quantity == "union":
        largest, rms = (
            slopes_by_seed(rows, f"deviation_{kind}", ALONG[axis]) for kind in ("sup", "rms")
        )
        return t_interval(2 * (largest - rms), confidence)
    if axis == "step":
        rows = rows[rows["step_size"] <= _BELOW_EDGE]
    if quantity.endswith("_late"):
        quantity, rows = quantity.removesuffix("_late"), _late(rows)
    return t_interval(slopes_by_seed(rows, quantity, ALONG[axis]), confidence)


def _late(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the upper half of the lengths."""
    lengths = sorted(rows["length"].unique())
    return rows[rows["length"] >= lengths[len(lengths) // 2]]


def held_ratio(frame: pd.DataFrame, teacher: str) -> pd.DataFrame:
    """Held-out loss, rich over kernel, a row a seed and a column a number of samples."""
    logarithms = [
        np.log(
            select(rows_on(frame, "samples", regime, teacher), "held_loss").pivot(
                index="seed", columns="samples", values="value"
            )
        )
        for regime in ("rich", "kernel")
    ]
    return np.exp(logarithms[0] - logarithms[1])


def _require(config: Config) -> None:
    require_one_of("axis", config.axis, tuple(ALONG))
    require_one_of("regime", config.regime, REGIMES)
    for name in ("strength", "step_size", "time", "value_norm", "logit_norm"):
        require_number(name, getattr(config, name), positive=True)
    for name in ("samples", "held", "probe"):
        require_integer(name, getattr(config, name), minimum=2)
    if config.steps < 1:
        raise ValueError(f"time: expected at least step_size={config.step_size}, got {config.time}")
    for name in ("probe", "samples") if config.axis == "samples" else ("probe",):
        if getattr(config, name) > config.held:
            raise ValueError(
                f"{name}: expected at most held = {config.held}, got {getattr(config, name)}"
            )


def _initial(config: Config, seed: int, role: str, device: str) -> Parameters:
    return symmetric_initialisation(
        config.heads, config.dimension, device=device,
        generator=generator(seed, NAME, role, config.heads),
    )  # fmt: skip
