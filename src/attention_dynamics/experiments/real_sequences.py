r"""Real sequences: digits, weekly CO2 and sunspots, which nobody made for the theorem.

A cell trains a Transformer of m paired heads with a fixed query, by projected gradient descent that
is recorded and certified; independent recurrent units for as many steps; and fits, to the same
training samples, the limit kernel (descent for as many steps, and ridge regression) and the
baselines. All are compared on held out samples, after the last step. A seed is an initialisation:
there is one split a data set. Step sizes follow one rule, ``fraction`` times :math:`n/\lambda_1` of
the tangent kernel at the start: the limit kernel for the heads, that of the units for the units.

The bands were fixed before the first run of the ``book`` profile. Those of the bounds are proved;
:math:`m^{-1/2}` is the rate of the empirical kernel; the rest are signs and an expectation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import RealTask, Sequences, generator
from attention_dynamics.experiments._real_models import (
    Prepared,
    certified,
    prepared,
    recurrent_gradients,
    recurrent_step,
)
from attention_dynamics.experiments._real_predictors import (
    block_bootstrap,
    descent_coefficients,
    largest_step,
    linear_ridge,
    nearest_neighbour,
    ridge_by_leave_one_out,
)
from attention_dynamics.experiments._recurrence_cells import paired_units
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    slope_estimate,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import recurrence, shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.recurrent_descent import recurrent_descent

NAME = "real_sequences"
SCHEMA = 1
AGAINST = "heads"


@dataclass(frozen=True)
class Config:
    r"""``ball`` divides the tokens so that they lie in the unit ball. ``contrast`` records and
    certifies the descent and trains m recurrent units too; without it only the network and its
    kernel are compared. ``training`` and ``held`` are the most samples of each side; ``points`` and
    ``randomisations`` are those of the limit kernel.
    """

    sequences: Sequences
    heads: int = 128
    ball: bool = True
    contrast: bool = True
    training: int = 600
    held: int = 500
    steps: int = 600
    fraction: float = 0.25
    projection_radius: float = 10.0
    recurrent_init: str = "1.5"
    points: int = 1024
    randomisations: int = 8


COLUMNS = columns_of(Config)
SEQUENCES: tuple[Sequences, ...] = ("digits", "co2", "sunspots")
NARROW: tuple[Sequences, ...] = ("digits", "sunspots")  # where widths are compared


def _configs(base: Config, widths: tuple[int, ...]) -> tuple[Config, ...]:
    """The contrast in and out of the ball, then other widths in the ball."""
    pairs = [replace(base, sequences=s, ball=ball) for s in SEQUENCES for ball in (True, False)]
    rest = [
        replace(base, sequences=s, heads=m, contrast=False)
        for s in NARROW
        for m in widths
        if m != base.heads
    ]
    return (*pairs, *rest)


_PAPER = Config("digits")
_BOOK = replace(
    _PAPER, heads=32, training=120, held=240, steps=150, points=512, randomisations=4
)  # fmt: skip
_SMOKE = replace(
    _PAPER, heads=4, training=16, held=56, steps=6, points=32, randomisations=2
)  # fmt: skip
PROFILES = {
    "smoke": Profile(_configs(_SMOKE, (2, 4, 8)), seeds=(0, 1, 2)),
    "book": Profile(_configs(_BOOK, (16, 32, 64, 256)), seeds=tuple(range(6))),
    "paper": Profile(_configs(_PAPER, (32, 128, 512, 2048)), seeds=tuple(range(10))),
}

_PROVED = "an upper bound is never passed"
_RATE = "the empirical kernel differs from its limit by m^(-1/2)"
_LINEAR = "a linear autoregression is the textbook model of this series; sign only"
BANDS = {
    "certificate_least": Band(1.0, None, _PROVED),
    "gradient_least": Band(1.0, None, _PROVED),
    "slope_digits": Band(-0.6, -0.4, _RATE),
    "slope_sunspots": Band(-0.6, -0.4, _RATE),
    "correlation": Band(0.9, None, "an expectation: theory gives a rate in m and no constant"),
    "constant": Band(None, 0.0, "there is something to learn; sign only"),
    "ridge_co2": Band(0.0, None, _LINEAR),
    "ridge_sunspots": Band(0.0, None, _LINEAR),
    "neighbour": Band(0.0, None, "a neighbour reads digits well, few steps do not; sign only"),
    "ball": Band(0.0, None, "short tokens leave attention even and heads linear; sign only"),
}
r"""``certificate_least`` and ``gradient_least`` are the least ratio of bound over value of all
runs, with its range as the interval; ``slope`` the log-log slope in m of the distance between
network and kernel descent; ``correlation`` that of their held out predictions, the mean of the
three data sets; ``constant`` the held out error of the Transformer minus that of the constant, the
largest of the three data sets; ``ridge`` the same against ridge regression; ``neighbour`` the share
of digits whose parity the Transformer gets wrong minus that of the nearest neighbour; ``ball``
log10 of the final training loss in the ball over that outside of it, the mean of the three data
sets."""


class Fit(NamedTuple):
    """Held out predictions of what was trained from one start, the parameters of the Transformer
    after its last step, and the quantities of the runs.
    """

    held: dict[str, Tensor]
    final: Parameters
    quantities: dict[str, float]


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one data set, setting and start; pure, all in float64.

    Raises ValueError if a field of the configuration is out of its range.
    """
    found = fit(config, seed, device)
    task = shared(config).task
    held, y = found.held, task.held_targets
    errors = {name: float((values - y).square().mean()) for name, values in held.items()}
    quantities = found.quantities | {f"error_{name}": value for name, value in errors.items()}
    if config.sequences == "digits":
        wrong = {name: (values.sign() != y).double().mean() for name, values in held.items()}
        quantities |= {f"wrong_{name}": float(value) for name, value in wrong.items()}
    losses = {name: (values - y).square() for name, values in held.items()}
    for name in ("transformer", "recurrent", "kernel_descent", "kernel_ridge"):
        if name in losses:
            gap = losses[name] - losses["ridge"]
            low, high = block_bootstrap(gap, min(task.block, len(gap)))
            quantities[f"gap_{name}"] = float(gap.mean())
            quantities |= {f"gap_{name}_lower": low, f"gap_{name}_upper": high}
    apart = held["transformer"] - held["kernel_descent"]
    both = torch.stack((held["transformer"], held["kernel_descent"]))
    return rows_of(NAME, config, seed, quantities | {
        "distance": float(apart.square().mean().sqrt()),
        "distance_relative": float(apart.norm() / both[1].norm()),
        "correlation": float(torch.corrcoef(both)[0, 1]),
        "outside": task.outside,
        "token_norm": float(task.tokens.norm(dim=-1).max()),
        "kernel_error": shared(config).kernel_error,
    })  # fmt: skip


def shared(config: Config) -> Prepared:
    """What all starts of a data set share; computed once."""
    return prepared(
        config.sequences, config.ball, config.training, config.held, config.points,
        config.randomisations,
    )  # fmt: skip


def model_of(config: Config, seed: int, device: str = "cpu") -> ShallowTransformer:
    """The Transformer of a cell at its start."""
    task, query, *_ = shared(config)
    start = symmetric_initialisation(
        config.heads, task.tokens.shape[-1], dtype=torch.float64, device=device,
        generator=generator(seed, NAME, "heads", config.heads),
    )  # fmt: skip
    return ShallowTransformer(start, query=query.to(device))


def descent_of(config: Config) -> DescentConfig:
    """Its descent: the step size by the rule, the number of steps, the radii."""
    eta = largest_step(shared(config).kernel, config.fraction)
    radii = Radii(*(config.projection_radius,) * 3)
    return DescentConfig(config.steps, step_size=eta, radii=radii)


def fit(config: Config, seed: int, device: str = "cpu") -> Fit:
    """Held out predictions of networks, kernels and baselines from one start."""
    task, _, kernel, held_kernel, _ = shared(config)
    model, descent = model_of(config, seed, device), descent_of(config)
    alpha = descent_coefficients(kernel, task.targets, config.steps, descent.eta)
    held = {
        "kernel_descent": held_kernel @ alpha,
        "kernel_ridge": ridge_by_leave_one_out(kernel, held_kernel, task.targets)[0],
        "ridge": linear_ridge(task.features, task.held_features, task.targets),
        "neighbour": nearest_neighbour(task.features, task.held_features, task.targets),
        **task.forecasts,
    }
    quantities = {"step_size": descent.eta}
    if config.contrast:
        final, quantities_of = certified(model, task, ball=config.ball, descent=descent)
        quantities |= quantities_of
    else:
        tokens, targets = task.tokens.to(device), task.targets.to(device)
        final = projected_gradient_descent(model, tokens, targets, descent).final

    def values(tokens: Tensor) -> Tensor:
        return shallow.forward(final, tokens.to(device), query=model.query).cpu()

    held["transformer"] = values(task.held_tokens)
    quantities["training_transformer"] = _error(values(task.tokens), task.targets)
    quantities["training_kernel"] = _error(kernel @ alpha, task.targets)
    if config.contrast:
        held["recurrent"], measured = _recurrent(config, task, seed, device)
        quantities |= measured
    return Fit(held, final, quantities)


def _recurrent(
    config: Config, task: RealTask, seed: int, device: str
) -> tuple[Tensor, dict[str, float]]:
    start = paired_units(
        config.heads, task.tokens.shape[-1], recurrent_init=float(config.recurrent_init),
        generator=generator(seed, NAME, "units", config.heads),
    ).map(lambda block: block.to(dtype=torch.float64, device=device))  # fmt: skip
    tokens = task.tokens.to(device)
    eta = recurrent_step(start, tokens, config.fraction)
    found = recurrent_descent(
        start, tokens, task.targets.to(device), step_size=eta, steps=config.steps
    )
    return recurrence.forward(found.final, task.held_tokens.to(device)).cpu(), {
        "training_recurrent": float(found.history["loss"].iloc[-1]),
        "recurrent_diverged": float(found.diverged),
        "recurrent_step_size": eta,
        **recurrent_gradients(found, tokens),
    }


def _error(values: Tensor, targets: Tensor) -> float:
    return float((values - targets).square().mean())


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """What a band is about: a mean over seeds with its 95 % t-interval, or a least value with the
    range of all runs. Raises ValueError for a quantity without a band.
    """
    if quantity not in BANDS:
        raise ValueError(f"quantity must be one of {', '.join(BANDS)}; got {quantity!r}")
    kind, _, name = quantity.partition("_")
    full = frame[frame["contrast"]]
    if name == "least":
        wanted = {"certificate": ["average_ratio", "averaged_ratio"], "gradient": [
            "gradient_ratio"]}[kind]  # fmt: skip
        values = full[full["quantity"].isin(wanted)]["value"]
        return Estimate(
            float(values.min()), float(values.min()), float(values.max()), full["seed"].nunique()
        )
    if kind == "slope":
        rows = frame[frame["ball"] & (frame["sequences"] == name)]
        return slope_estimate(rows, "distance", AGAINST)
    table = full.pivot_table(
        index=["seed", "sequences"], columns=["ball", "quantity"], values="value"
    )
    inside = table[True]
    if kind == "correlation":
        return t_interval(inside["correlation"].groupby("seed").mean())
    if kind == "constant":
        gap = inside["error_transformer"] - inside["error_constant"]
        return t_interval(gap.groupby("seed").max())
    if kind == "ridge":
        return t_interval(inside["gap_transformer"].xs(name, level="sequences"))
    if kind == "neighbour":
        digits = inside.xs("digits", level="sequences")
        return t_interval(digits["wrong_transformer"] - digits["wrong_neighbour"])
    ratio = inside["training_transformer"] / table[False]["training_transformer"]
    return t_interval(np.log10(ratio).groupby("seed").mean())


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its interval, beside the band."""
    return band_table(BANDS, lambda quantity: estimate(frame, quantity))
