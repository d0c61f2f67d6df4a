r"""The limit of long contexts: the layer's loss and gradients against the population problem.

For each length T and seed, one random problem. At a global minimum of the population loss, with
:math:`\|V\|_{\mathrm{op}} = \rho_V`, the loss of the layer with a fresh context of T tokens for
each query, minus its limit, and the ratio of this excess to the 1/T term that
``models.population.finite_context_correction`` predicts. At a random point of the same norm, the
relative distance of the layer's gradients from those of the population problem, a root mean square
over contexts that all queries share; the population problem has the second moment of the same
queries, so that the context is the only difference.

The excess is :math:`\tfrac12\mathbb E\|f(x) - M_\star x\|^2`: the fluctuation of the pooled token,
whose square falls like 1/T, so that gradients err like :math:`T^{-1/2}`. The bands were fixed
before any run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd
import torch

from attention_dynamics.data import generator
from attention_dynamics.data.regression import regression_problem, sample
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    select,
    slope_estimate,
    slope_table,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import regression
from attention_dynamics.models.population import (
    RegressionProblem,
    finite_context_correction,
    population_loss_and_gradients,
)
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.structure_aware import (
    random_initialisation,
    spectral_initialisation,
)

NAME = "population_limit"
SCHEMA = 1
AGAINST = "length"


@dataclass(frozen=True)
class Config:
    r"""Sizes of one cell; only ``length`` (T) has no default.

    ``samples`` queries with a context each measure the excess, ``block`` of them at a time;
    ``contexts`` contexts, each with ``queries`` queries, measure the gradients. ``radius`` is
    :math:`\rho_V`.
    """

    length: int
    samples: int = 2048
    contexts: int = 48
    queries: int = 64
    dimension: int = 6
    outputs: int = 4
    condition: float = 10.0
    radius: float = 0.3
    block: int = 128


COLUMNS = columns_of(Config)
_SMOKE = Config(length=1, samples=256, contexts=8, queries=16, dimension=3, outputs=2)
_PAPER = Config(length=1, samples=16384, contexts=256)
PROFILES = {
    "smoke": Profile(tuple(replace(_SMOKE, length=T) for T in (64, 128, 256)), (100, 101, 102)),
    "book": Profile(tuple(Config(length=T) for T in (128, 512, 2048)), tuple(range(8))),
    "paper": Profile(
        tuple(replace(_PAPER, length=T) for T in (128, 256, 512, 1024, 2048)), tuple(range(20))
    ),
}
RATIO_BAND = Band(0.95, 1.05, "the 1/T term, at every length from 128 to 2048")
BANDS = {
    "excess": Band(-1.05, -0.95, "the square of a fluctuation of T tokens"),
    "gradient_error": Band(-0.55, -0.45, "a fluctuation of T tokens"),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one length and seed; a pure function of its arguments.

    The problem and the random point depend on the seed alone. Raises ValueError if a field of the
    configuration is out of its range.
    """
    problem = regression_problem(
        config.outputs, config.dimension, condition=config.condition, noise=0.0,
        generator=generator(seed, NAME, "problem"), device=device,
    )  # fmt: skip
    minimum = spectral_initialisation(problem, config.radius)
    excess = _excess(config, seed, problem, minimum)
    predicted = float(finite_context_correction(minimum, problem, config.length))
    elsewhere = random_initialisation(
        problem, config.radius, generator=generator(seed, NAME, "point")
    )
    quantities = {
        "excess": excess,
        "predicted": predicted,
        "ratio": excess / predicted,
        "gradient_error": _gradient_error(config, seed, problem, elsewhere),
    }
    return rows_of(NAME, config, seed, quantities)


def ratios(frame: pd.DataFrame) -> dict[int, Estimate]:
    """At each length the ratio of measured to predicted excess, with its interval over seeds."""
    rows = select(frame, "ratio")
    return {int(length): t_interval(group["value"]) for length, group in rows.groupby(AGAINST)}


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Log-log slopes against the length, mean and 95 % t-interval over seeds, and their bands."""
    return slope_table(BANDS, lambda quantity: slope_estimate(frame, quantity, AGAINST))


def _excess(config: Config, seed: int, problem: RegressionProblem, factors: Factors) -> float:
    stream = generator(seed, NAME, "contexts", config.length)
    total = 0.0
    for start in range(0, config.samples, config.block):
        size = min(config.block, config.samples - start)
        drawn = sample(problem, size, config.length, shared=False, centred=False, generator=stream)
        total += size * float(regression.loss(factors, *drawn))
    return total / config.samples


def _gradient_error(
    config: Config, seed: int, problem: RegressionProblem, factors: Factors
) -> float:
    stream = generator(seed, NAME, "shared", config.length)
    squares = 0.0
    for _ in range(config.contexts):
        drawn = sample(problem, config.queries, config.length, centred=False, generator=stream)
        moment = drawn.queries.mT @ drawn.queries / config.queries
        limit = RegressionProblem(problem.target, moment, problem.token_covariance)
        _, expected = population_loss_and_gradients(factors, limit)
        _, found = regression.loss_and_gradients(factors, *drawn)
        off = found.zip(expected, torch.sub)
        squares += _square(off) / _square(expected)
    return math.sqrt(squares / config.contexts)


def _square(gradients: Factors) -> float:
    return sum(float(block.square().sum()) for block in gradients)
