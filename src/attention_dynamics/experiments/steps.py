r"""Steps: the loss against their number for two step rules, beside the tangent model's.

A cell is one of four things, told by ``rule``:

1. ``"root"``: :math:`\eta = 1.75/\sqrt\tau`, one descent for each :math:`\tau`;
2. ``"constant"``: one descent at a constant :math:`\eta`, looked at after several :math:`\tau`;
3. ``"edge"``: the smallest step size at which the loss goes up within some steps;
4. ``"untrained"``: what no point of the tangent model can fit, and the error of the comparator.

Losses are over the variance of the targets. Beside each stands that of the tangent model of the
same student, from the kernel at the start alone. Setting: arXiv 2601.16514 (v2). The bands for the
exponents are those of the rate that the theorem bounds, and all bands were fixed before any run
with these seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import pandas as pd

from attention_dynamics.data import Law, generator
from attention_dynamics.experiments._steps_descent import descend, edge
from attention_dynamics.experiments._steps_tangent import Tangent, tangent, tangent_losses
from attention_dynamics.experiments._teacher_problem import TeacherProblem, teacher_problem
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    select,
    slope_estimate,
    slopes_by_seed,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.convergence import fast_form
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii

NAME = "steps"
SCHEMA = 1
AGAINST = "steps"
Rule = Literal["root", "constant", "edge", "untrained"]


@dataclass(frozen=True)
class Config:
    r"""Sizes of one cell; only ``rule`` has no default.

    The numbers of steps :math:`\tau` are ``longest`` over powers of ``spacing``, ``counts`` of them
    (not read by ``edge`` and ``untrained``). ``step_scale`` is :math:`\eta\sqrt\tau` of the rule
    ``root``, ``step_size`` the :math:`\eta` of ``constant``.
    ``edge_steps`` are watched for an increase, at ``edge_halvings`` step sizes. The last
    ``validation_fraction`` of the samples is held out, as in ``width``.
    """

    rule: Rule
    heads: int = 64
    longest: int = 16384
    counts: int = 5
    spacing: int = 4
    step_scale: float = 1.75
    step_size: float = 1.0
    edge_steps: int = 100
    edge_halvings: int = 8
    samples: int = 5000
    validation_fraction: float = 0.2
    length: int = 16
    dimension: int = 8
    token_law: Law = "iid"
    query: Literal["fixed", "last"] = "fixed"
    activation: str = "tanh"
    anchors: int = 16
    teacher_heads: int = 8192
    transport_norm: float = 3.0
    projection_radius: float = 3.0

    @property
    def numbers_of_steps(self) -> tuple[int, ...]:
        r"""All :math:`\tau`, ascending; ValueError if the shortest is no whole number from 1 on."""
        shortest, rest = divmod(self.longest, self.spacing ** (self.counts - 1))
        if rest or shortest < 1:
            multiple = self.spacing ** (self.counts - 1)
            raise ValueError(f"longest={self.longest} must be a multiple of spacing ** (counts - 1)"
                             f" = {multiple}; choose fewer counts")  # fmt: skip
        return tuple(shortest * self.spacing**power for power in range(self.counts))

    def eta(self, steps: int) -> float:
        r""":math:`\eta` for a descent of that many steps."""
        return self.step_scale / math.sqrt(steps) if self.rule == "root" else self.step_size


COLUMNS = (*columns_of(Config), AGAINST)
ITERATES = ("averaged", "best", "final")
RULES = ("root", "constant")


def _configs(
    base: Config, root: tuple[int, int], constant: tuple[int, int],
    trained: Sequence[int], untrained: Sequence[int], samples: int,
) -> tuple[Config, ...]:  # fmt: skip
    steady = replace(base, rule="constant", longest=constant[0], counts=constant[1], spacing=2)
    return (
        replace(base, longest=root[0], counts=root[1]),
        *(replace(steady, heads=m) for m in trained),
        replace(base, rule="edge"),
        *(replace(base, rule="untrained", heads=m, samples=samples) for m in untrained),
    )


_SMOKE = Config("root", heads=8, edge_steps=20, edge_halvings=5, samples=40, length=4, dimension=3,
                anchors=4, teacher_heads=256)  # fmt: skip
_BOOK = Config("root", samples=100)
PROFILES = {
    "smoke": Profile(_configs(_SMOKE, (64, 2), (28, 3), (4, 8), (2, 4), 50), seeds=(200, 201, 202)),
    "book": Profile(
        _configs(_BOOK, (4096, 4), (896, 7), (16, 64), (4, 8, 16, 32), 500), seeds=tuple(range(10))
    ),
    "paper": Profile(
        _configs(Config("root"), (16384, 5), (1792, 8), (16, 64, 256), (8, 16, 32, 64), 1250),
        seeds=tuple(range(10)),
    ),
}

_HALF = Band(-0.6, -0.4, "the rate of the bound, 1/(eta tau), with eta = 1.75/sqrt(tau)")
_ONE = Band(-1.15, -0.85, "the rate of the bound, 1/(eta tau), with a constant eta")
_TANGENT = Band(-0.1, 0.1, "the tangent model, up to O(1/m); closer than the bands are wide")
BANDS = {
    **{f"{iterate}_root": _HALF for iterate in ITERATES},
    **{f"{iterate}_constant": _ONE for iterate in ITERATES},
    **{f"{iterate}_{rule}_gap": _TANGENT for rule in RULES for iterate in ("averaged", "final")},
    "time": Band(0.95, 1.05, "both rules follow the gradient flow to the time eta tau"),
    **{f"averaging_{rule}": Band(1.0, None, "the loss falls along the way") for rule in RULES},
    "edge": Band(0.9, 1.1, "the largest eigenvalue of the Hessian at the start"),
    "floor": Band(None, -0.85, "at most the error of the comparator, which is O(1/m)"),
    "prediction_error": Band(None, 0.0, "more heads are closer to their tangent model"),
    "remaining": Band(None, 0.0, "more heads help; no exponent is predicted"),
}
r"""Exponents against :math:`\tau`; their gap to those of the tangent model; the ratio of the final
losses of the two rules at equal time; averaged over best; the edge over its prediction; and
exponents against m."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value, steps) of one cell, a pure function of its arguments.

    ``steps`` is :math:`\tau`, and 0 where none was taken. Raises ValueError for an unknown rule, an
    odd m or another field that is out of its range.
    """
    measured = {"root": _losses, "constant": _losses, "edge": _edge, "untrained": _untrained}
    if config.rule not in measured:
        raise ValueError(f"rule must be one of {', '.join(measured)}; got {config.rule!r}")
    tables = measured[config.rule](config, seed, device)
    frames = [rows_of(NAME, config, seed, row).assign(steps=k) for k, row in tables.items()]
    return pd.concat(frames, ignore_index=True)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Each estimate with its 95 % t-interval over seeds, beside its band."""
    return band_table(BANDS, lambda name: estimate(frame, name))


def estimate(frame: pd.DataFrame, name: str) -> Estimate:
    """What a band speaks of, by its name in ``BANDS``."""
    if name == "edge":
        return geometric_interval(select(frame, name)["value"])
    if name in ("floor", "remaining", "prediction_error"):
        return slope_estimate(frame, name, "heads")
    if name == "time":
        return geometric_interval(np.exp(time_ratios(frame).groupby("seed").mean()))
    what, rule = name.removesuffix("_gap").rsplit("_", 1)
    rows = main(frame, rule)
    if what == "averaging":
        last = rows[rows[AGAINST] == rows[AGAINST].max()]
        averaged, best = (select(last, key).set_index("seed")["value"] for key in ITERATES[:2])
        return geometric_interval(averaged / best)
    slopes = slopes_by_seed(rows, what, AGAINST)
    if name.endswith("_gap"):
        slopes = slopes - slopes_by_seed(rows, f"predicted_{what}", AGAINST)
    return t_interval(slopes)


def main(frame: pd.DataFrame, rule: str) -> pd.DataFrame:
    """The rows of a rule at the width that both rules were run at."""
    width = frame.loc[frame["rule"] == "root", "heads"].iloc[0]
    return frame[(frame["rule"] == rule) & (frame["heads"] == width)]


def time_ratios(frame: pd.DataFrame) -> pd.Series:
    r"""Log of the final loss of ``root`` over that of ``constant``, by time :math:`\eta\tau` and
    seed, at the times that both have.
    """
    losses = []
    for rule in RULES:
        rows = select(main(frame, rule), "final")
        eta = rows["step_size"]
        if rule == "root":
            eta = rows["step_scale"] / np.sqrt(rows[AGAINST])
        rows = rows.assign(time=(eta * rows[AGAINST]).round(9))
        losses.append(np.log(rows.set_index(["time", "seed"])["value"]))
    ratios = (losses[0] - losses[1]).dropna()
    if not ratios.empty:
        return ratios
    raise ValueError("frame: the two rules have no time step_size * steps in common")


def _losses(config: Config, seed: int, device: str) -> dict[int, dict[str, float]]:
    given, initial = problem(config, seed, device)
    linear, variance = tangent_of(config, seed, device), _variance(given)
    objective, region = descent_problem(config, given, initial)
    numbers = config.numbers_of_steps
    if config.rule == "root":
        found = [descend(objective, region, config.eta(k), [k])[0] for k in numbers]
    else:
        found = descend(objective, region, config.step_size, numbers)
    rows, errors = {}, []
    for point in found:
        eta = config.eta(point.steps)
        predicted = tangent_losses(linear, eta, point.steps)
        bound = fast_form(linear.ingredients, eta, point.steps).average
        averaged = float(objective.loss_and_gradients(point.averaged)[0])
        losses = {
            "averaged": averaged, "best": point.best, "final": point.final, "mean": point.mean,
            **{f"predicted_{name}": value for name, value in predicted.items()}, "bound": bound,
        }  # fmt: skip
        errors.append(math.log(averaged / predicted["averaged"]))
        rows[point.steps] = {name: value / variance for name, value in losses.items()} | {
            "distance": point.distance, "active_heads": float(point.active)
        }  # fmt: skip
    if config.rule == "constant":
        rows[numbers[-1]]["remaining"] = rows[numbers[-1]]["best"]
        rows[numbers[-1]]["prediction_error"] = float(np.sqrt(np.mean(np.square(errors))))
    return rows


def _edge(config: Config, seed: int, device: str) -> dict[int, dict[str, float]]:
    r"""In units of :math:`1/x_1`, the step size at which the loss begins to rise."""
    given, initial = problem(config, seed, device)
    unit = 1 / float(tangent_of(config, seed, device).rates.max())
    watched = config.edge_steps, config.edge_halvings
    found = edge(*descent_problem(config, given, initial), unit, *watched)
    return {0: {"edge": found, "edge_step_size": found * unit}}


def _untrained(config: Config, seed: int, device: str) -> dict[int, dict[str, float]]:
    given, found = problem(config, seed, device)[0], tangent_of(config, seed, device)
    variance = _variance(given)
    if found.floor == 0:
        raise ValueError(f"samples={config.samples} are too few for a floor at heads="
                         f"{config.heads}: the tangent model fits them all; take more")  # fmt: skip
    error = found.comparator_error**2
    return {0: {"floor": found.floor / variance, "comparator": error / variance}}


def problem(config: Config, seed: int, device: str = "cpu") -> tuple[TeacherProblem, Parameters]:
    """Tokens and targets, and the student at its start."""
    given = teacher_problem(
        NAME, seed, samples=config.samples, validation_fraction=config.validation_fraction,
        length=config.length, dimension=config.dimension, token_law=config.token_law,
        query=config.query, activation=config.activation, anchors=config.anchors,
        teacher_heads=config.teacher_heads, norms=TransportNorms(*(config.transport_norm,) * 3),
        device=device,
    )  # fmt: skip
    stream = generator(seed, NAME, "student", config.heads)
    return given, symmetric_initialisation(
        config.heads, config.dimension, generator=stream, device=device
    )


def tangent_of(config: Config, seed: int, device: str = "cpu") -> Tangent:
    """The tangent kernel at the start and the comparator, in float64."""
    # The tangent model does not depend on rule and steps: cells that share it compute it once.
    return _tangent(replace(config, rule="root", longest=1, counts=1, spacing=1), seed, device)


@lru_cache(maxsize=128)
def _tangent(config: Config, seed: int, device: str) -> Tangent:
    return tangent(*problem(config, seed, device), config.activation)


def descent_problem(
    config: Config, given: TeacherProblem, initial: Parameters
) -> tuple[Objective, ProjectionSet]:
    model = ShallowTransformer(initial, query=given.query, activation=config.activation)
    radii = Radii(*(config.projection_radius,) * 3)
    return Objective.of(model, given.tokens, given.targets), ProjectionSet(initial, radii)


def _variance(given: TeacherProblem) -> float:
    return float(given.targets.double().var(correction=0))
