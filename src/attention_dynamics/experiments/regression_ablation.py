r"""Ablation: structure-aware descent on the real softmax loss, with one part taken away at a time.

One shared centred context, condition number 100. A cell reports the first step with a risk of at
most 1.5 times that of least squares (one more than ``steps`` if there is none) and the risk after
the last step over that of least squares; the risk is
:math:`\tfrac12\lVert(A\hat SB^\top-M_\star)\Sigma^{1/2}\rVert_F^2` with the covariance
:math:`\hat S` of the context. Preconditioners are those of the samples. Methods:

- ``"scaled"``: :math:`\eta=\tfrac12`, damping c = 0.2, renormalisation; ``without`` takes away
  ``"damping"`` or ``"renormalisation"``;
- ``"whiten"``: :math:`\eta=\tfrac12/\sigma_1(\hat N)`, balancing regulariser of weight one,
  renormalisation; ``without`` takes away ``"regulariser"``, ``"renormalisation"`` or ``"both"``;
- ``"gradient"``: no preconditioner, renormalisation, step size ``rate`` times ``stable_step_size``;
- ``"adam"``, ``"muon"``: ``rate`` is the learning rate, constant or with linear ``decay`` to zero.

Starts: spectral from a subset; random; ``"large"``, the spectral one with the norm of V at 2;
``"skewed"``, the spectral one in a gauge of condition number 10. The last three methods have the
rates, and the norm ``rho`` of V at the start, of ``TUNED``: the best of the grid of the profile
``tuning`` on seeds of its own, by median steps and then by the median risk at the end.

The band of the end risk was asked of the method before it was built, and was fixed, with the grid
and the seeds, before any run at the profiles ``tuning``, ``book`` and ``paper``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.data.regression import RegressionSample, regression_problem, sample
from attention_dynamics.experiments import estimates
from attention_dynamics.experiments.estimates import Band, Estimate, Profile
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.regression_baselines import Adam, Muon, stable_step_size
from attention_dynamics.training.structure_aware import (
    Descent,
    Rule,
    Scheme,
    descend,
    first_step,
    random_initialisation,
    spectral_initialisation,
)

NAME = "regression_ablation"
SCHEMA = 1
LEVEL = 1.5
Method = Literal["scaled", "whiten", "gradient", "adam", "muon"]
Start = Literal["spectral", "random", "large", "skewed"]
Without = Literal["nothing", "damping", "renormalisation", "regulariser", "both"]


@dataclass(frozen=True)
class Config:
    r"""One method and start; ``rate`` and ``decay`` are read by the three tuned methods only.

    ``block`` seeds are computed together, which changes no number but the rounding.
    """

    method: Method
    start: Start
    without: Without = "nothing"
    rate: float = 1.0
    decay: bool = False
    steps: int = 20
    condition: float = 100.0
    dimension: int = 8
    samples: int = 128
    length: int = 256
    subset: int = 16
    noise: float = 0.3
    rho: float = 0.2
    block: int = 20


COLUMNS = columns_of(Config)
_STARTS: tuple[Start, ...] = ("spectral", "random", "large", "skewed")
_BOTH = _STARTS[:2]
_SCALED: tuple[tuple[Start, Without], ...] = (
    *((start, "nothing") for start in _STARTS), ("spectral", "damping"), ("random", "damping"),
    ("spectral", "renormalisation"), ("random", "renormalisation"), ("large", "renormalisation"),
)  # fmt: skip
_WHITEN: tuple[tuple[Start, Without], ...] = (
    *((start, "nothing") for start in _STARTS), ("spectral", "regulariser"),
    ("skewed", "regulariser"), ("large", "renormalisation"), ("large", "both"), ("skewed", "both"),
)  # fmt: skip
_AWARE = tuple(Config("scaled", start, without) for start, without in _SCALED) + tuple(
    Config("whiten", start, without, steps=60) for start, without in _WHITEN
)
_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
_SEARCHED: tuple[tuple[Method, tuple[bool, ...], tuple[float, ...]], ...] = (
    ("gradient", (False,), (0.25, 0.5, 1.0, 1.5)),
    ("adam", (False, True), _RATES),
    ("muon", (False, True), _RATES),
)
_GRID = tuple(
    Config(method, start, rate=rate, decay=decay, steps=120, rho=rho, block=5)
    for method, decays, rates in _SEARCHED
    for start in _BOTH
    for rho in (0.2, 0.5)
    for decay in decays
    for rate in rates
)
TUNED: tuple[Config, ...] = (
    Config("gradient", "spectral", rate=1.5, rho=0.2, steps=120),
    Config("gradient", "random", rate=1.5, rho=0.2, steps=120),
    Config("adam", "spectral", rate=0.03, rho=0.5, steps=120),
    Config("adam", "random", rate=0.1, rho=0.5, steps=120),
    Config("muon", "spectral", rate=0.03, rho=0.2, decay=True, steps=120),
    Config("muon", "random", rate=0.1, rho=0.2, decay=True, steps=120),
)
"""The best of the grid for each tuned method and start, by the stored results of ``tuning``."""
PROFILES = {
    "smoke": Profile(
        tuple(
            replace(c, steps=4, dimension=3, samples=40, length=60, subset=12, block=2)
            for c in _AWARE + _GRID[:1] + _GRID[16::24]
        ),
        seeds=(1000, 1001),
    ),
    "tuning": Profile(_GRID, seeds=tuple(range(1000, 1005))),
    "book": Profile(_AWARE + TUNED, seeds=tuple(range(20))),
    "paper": Profile(
        tuple(
            replace(c, steps=2 * c.steps, samples=384, length=768, subset=48)
            for c in _AWARE + TUNED
        ),
        seeds=tuple(range(20)),
    ),
}

BANDS = {f"end_{start}": Band(0.9, 1.15, "asked before it was built") for start in _BOTH}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of one seed, which is computed with the others of its block.

    Raises ValueError if a field of the configuration is out of its range.
    """
    block, place = divmod(seed, config.block)
    result = _block(config, block, device)
    return rows_of(NAME, config, seed, {key: float(x[place]) for key, x in result.items()})


class Task(NamedTuple):
    """The samples, what they and a subset say of the problem, and the truth (with S hat)."""

    data: RegressionSample
    known: RegressionProblem
    subset: RegressionProblem
    truth: RegressionProblem

    @property
    def floor(self) -> Tensor:
        """The risk of least squares on all samples."""
        error = (self.known.target - self.truth.target) @ self.truth.query_root
        return error.square().sum(dim=(-2, -1)) / 2


def draw(config: Config, seeds: range, device: str = "cpu") -> Task:
    """The tasks of some seeds, stacked."""
    drawn, targets, covariances = [], [], []
    for seed in seeds:
        problem = regression_problem(
            config.dimension, config.dimension, condition=config.condition, noise=config.noise,
            generator=generator(seed, NAME, "problem"),
        )  # fmt: skip
        stream = generator(seed, NAME, "sample")
        drawn.append(sample(problem, config.samples, config.length, generator=stream))
        targets.append(problem.target)
        covariances.append(problem.query_covariance)
    data = RegressionSample(
        *(torch.stack(blocks).to(device) for blocks in zip(*drawn, strict=True))
    )
    known = RegressionProblem.from_samples(*data)
    truth = RegressionProblem(
        torch.stack(targets).to(device), torch.stack(covariances).to(device),
        known.token_covariance, config.noise,
    )  # fmt: skip
    subset = RegressionProblem.from_samples(*data.first(config.subset))
    return Task(data, known, subset, truth)


def start(config: Config, seeds: range, task: Task) -> Factors:
    """The starting factors of some seeds."""
    if config.start == "random":
        known, found = task.known, []
        for place, seed in enumerate(seeds):
            own = RegressionProblem(
                known.target[place], known.query_covariance[place], known.token_covariance[place]
            )
            stream = generator(seed, NAME, "random start")
            found.append(random_initialisation(own, config.rho, generator=stream))
        return Factors(*(torch.stack(blocks) for blocks in zip(*found, strict=True)))
    rho = 2.0 if config.start == "large" else config.rho
    spectral = spectral_initialisation(task.subset, rho)
    if config.start != "skewed":
        return spectral
    U, V = task.known.whiten(spectral)
    skew = torch.logspace(-0.5, 0.5, config.dimension, dtype=U.dtype, device=U.device)
    return task.known.unwhiten(U * skew, V / skew)


def optimiser(config: Config, task: Task) -> Scheme | Rule:
    """The steps of a configuration. Raises ValueError for an unknown method."""
    rho = None if config.without in ("renormalisation", "both") else config.rho
    if config.method == "scaled":
        damping = 0.0 if config.without == "damping" else 0.2
        return Scheme("scaled", 0.5, damping=damping, rho=rho)
    if config.method == "whiten":
        weight = 0.0 if config.without in ("regulariser", "both") else 1.0
        step_size = 0.5 / task.known.singular_values[..., 0]
        return Scheme("whiten", step_size, regulariser=weight, rho=rho)
    if config.method == "gradient":
        return Scheme("none", config.rate * stable_step_size(task.known), rho=rho)
    if config.method in ("adam", "muon"):
        rule = Adam if config.method == "adam" else Muon
        return rule(config.rate, decay_steps=config.steps if config.decay else None)
    raise ValueError(f"method must be one of the five of Method, got {config.method!r}")


def trace(config: Config, seeds: range, device: str = "cpu") -> tuple[Descent, Tensor]:
    """The runs of some seeds, and the risk of least squares (seeds,)."""
    task = draw(config, seeds, device)
    begin, rule = start(config, seeds, task), optimiser(config, task)
    options: dict[str, Any] = {"sample": task.data, "truth": task.truth, "check": False}
    return descend(begin, task.known, rule, config.steps, **options), task.floor


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The end risk of the whole method over least squares: mean, 95 % t-interval, band."""

    def estimate(quantity: str) -> Estimate | None:
        rows = frame[
            (frame["method"] == "scaled")
            & (frame["without"] == "nothing")
            & (frame["start"] == quantity.removeprefix("end_"))
            & (frame["quantity"] == "end")
        ]
        return None if rows.empty else estimates.t_interval(rows["value"])

    return estimates.band_table(BANDS, estimate)


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median steps and median end risk with their intervals over seeds, a line a configuration."""
    keys = ["method", "without", "start", "rho", "rate", "decay", "steps"]
    wide = frame.pivot_table(index=[*keys, "seed"], columns="quantity", values="value", sort=False)
    records = []
    for values, group in wide.groupby(keys, sort=False):
        steps, end = (
            estimates.median_interval(group["step_reached"]),
            estimates.median_interval(group["end"]),
        )
        records.append(
            {
                **dict(zip(keys, values, strict=True)),
                "median": steps.mean, "lower": steps.lower, "upper": steps.upper,
                "unreached": int((1 - group["reached"]).sum()),
                "failed": int(group["failed"].sum()),
                "end": end.mean, "end_lower": end.lower, "end_upper": end.upper,
                "seeds": len(group),
            }
        )  # fmt: skip
    return pd.DataFrame(records)


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """Of every tuned method and start the line of :func:`table` that the rule chooses."""
    lines = table(frame).sort_values(["median", "end"], kind="stable")
    return lines.groupby(["method", "start"], sort=True).head(1).sort_values(["method", "start"])


@lru_cache(maxsize=1)
def _block(config: Config, block: int, device: str) -> dict[str, Tensor]:
    seeds = range(block * config.block, (block + 1) * config.block)
    descent, floor = trace(config, seeds, device)
    ratio = (descent.risk / floor).clamp_max(1e300).nan_to_num(1e300)
    steps = first_step(ratio, LEVEL)
    return {
        "step_reached": torch.where(steps < 0, config.steps + 1, steps),
        "reached": steps >= 0,
        "failed": descent.rejected,
        "first": ratio[0],
        "end": ratio[-1],
        "least_squares": floor,
        "norm_last": descent.norm[-1].clamp_max(1e300),
        "loss_last": descent.loss[-1].clamp_max(1e300).nan_to_num(1e300),
    }
