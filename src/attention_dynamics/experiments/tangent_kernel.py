r"""Tangent kernel: the kernel of m heads against its limit, and what shrinks with m.

For each width m and seed, with tokens, query and limit kernel shared by all widths of a seed, and
several networks a cell:

1. paired heads, as in the paper: the distance of the empirical kernel from the limit kernel;
2. as many heads without pairs: the spread of the kernel over networks; the same neurons behind one
   attention (the single-head control), and with attention made linear (the second control);
3. the paired heads with logits scaled by :math:`m^\beta`: the trace of :math:`K_w`, and the
   distance of the weights from 1/T;
4. descent of one paired network without projection, against the descent of the limit kernel.

The bands come from theory and were fixed before any run. The collapsed W has entries of variance
1; a product of two Gaussian factors of inner dimension m has entries of variance m, so the scale
:math:`m^{-1}` on such a product is :math:`\beta = -1/2` here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import Law, generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    select,
    slope_estimate,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import attention, shallow
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.theory.kernel_controls import (
    linearised_attention_kernel,
    shared_attention_kernel,
)
from attention_dynamics.theory.kernel_flow import kernel_descent
from attention_dynamics.theory.kernels import empirical_kernel_total
from attention_dynamics.theory.limit_kernel import limit_kernel

NAME = "tangent_kernel"
SCHEMA = 1
AGAINST = "heads"


@dataclass(frozen=True)
class Config:
    r"""Sizes of one cell; only ``heads`` (m) has no default.

    ``networks`` are drawn a cell. The limit kernel is the mean of ``randomisations`` times
    ``points`` Sobol heads. Descent takes ``flow_steps`` steps of size ``flow_step_size`` towards
    the values of a random network, where m is at most ``flow_heads``.
    """

    heads: int
    samples: int = 16
    length: int = 16
    dimension: int = 8
    token_law: Law = "iid"
    activation: str = "tanh"
    networks: int = 6
    points: int = 8192
    randomisations: int = 4
    flow_heads: int = 1024
    flow_steps: int = 24
    flow_step_size: float = 0.5


COLUMNS = columns_of(Config)
_WIDTHS = (16, 64, 256, 1024, 4096)
_SMOKE = Config(heads=2, samples=6, length=4, dimension=3, networks=3, points=512, flow_steps=4)
_PAPER = Config(heads=2, samples=64, networks=16, points=16384, flow_heads=4096, flow_steps=100)
PROFILES = {
    "smoke": Profile(tuple(replace(_SMOKE, heads=m) for m in (4, 16, 64)), seeds=(100, 101, 102)),
    "book": Profile(tuple(Config(heads=m) for m in _WIDTHS), seeds=tuple(range(8))),
    "paper": Profile(tuple(replace(_PAPER, heads=m) for m in _WIDTHS), seeds=tuple(range(10))),
}

BANDS = {
    "kernel_error": Band(-0.6, -0.4, "a mean over m/2 independent pairs"),
    "spread_independent": Band(-0.6, -0.4, "a mean over m independent heads"),
    "spread_linear": Band(-0.6, -0.4, "a mean over m independent heads"),
    "spread_shared": Band(0.5, None, "the shared attention stays random"),
    "attention_trace": Band(-0.1, 0.1, "K_w has a limit"),
    "attention_trace_half": Band(-1.15, -0.85, "K_w carries the square of the logit scale"),
    "attention_trace_one": Band(-2.15, -1.85, "K_w carries the square of the logit scale"),
    "uniform_distance_half": Band(-0.6, -0.4, "weights leave 1/T in proportion to the logits"),
    "flow_error": Band(-0.6, -0.4, "the kernel errs by this much, and descent follows it"),
}
#: The band is about the value at the largest width over that at the smallest, not about a slope.
RATIOS = ("spread_shared",)
_SCALES = {"": 0, "_half": -0.5, "_one": -1}  # beta


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one width and seed; a pure function of its arguments.

    Raises ValueError if m is odd or another field of the configuration is out of its range.
    """
    problem = _problem(replace(config, **_IRRELEVANT), seed, device)
    draws = _Draws(config, seed, problem)
    quantities = {
        "limit_standard_error": problem.standard_error,
        **_convergence(config, problem, draws),
        **_spreads(config, problem, draws),
        **_scaled(config, problem, draws),
    }
    if config.heads <= config.flow_heads:
        quantities["flow_error"] = _flow(config, problem, draws)
    return rows_of(NAME, config, seed, quantities)


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """The slope of a quantity against m, or its ratio of ends, with its interval over seeds."""
    if quantity not in RATIOS:
        return slope_estimate(frame, quantity, AGAINST)
    table = select(frame, quantity).pivot(index="seed", columns=AGAINST, values="value")
    smallest, largest = min(table.columns), max(table.columns)
    return geometric_interval(table[largest] / table[smallest])


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Log-log slopes, or ratios of ends, mean and 95 % t-interval over seeds, and their bands."""
    table = band_table(BANDS, lambda quantity: estimate(frame, quantity))
    statistics = ["ratio" if quantity in RATIOS else "slope" for quantity in table["quantity"]]
    table.insert(1, "statistic", statistics)
    return table


class _Problem(NamedTuple):
    """What all widths of a seed share."""

    tokens: Tensor
    query: Tensor
    limit: Tensor
    standard_error: float
    targets: Tensor


# The tokens and the limit of a seed do not depend on these: cells that differ in them share both.
_IRRELEVANT: dict[str, Any] = {
    "heads": 2, "networks": 1, "flow_heads": 0, "flow_steps": 1, "flow_step_size": 1.0,
}  # fmt: skip


@lru_cache(maxsize=32)
def _problem(config: Config, seed: int, device: str) -> _Problem:
    query = query_vector(
        config.dimension, generator=generator(seed, NAME, "query"), dtype=torch.float64
    ).to(device)
    tokens = unit_ball_tokens(
        config.samples, config.length, config.dimension, law=config.token_law,
        generator=generator(seed, NAME, "tokens"), dtype=torch.float64, device=device,
    )  # fmt: skip
    limit = limit_kernel(
        tokens, query=query, activation=config.activation, points=config.points,
        randomisations=config.randomisations, generator=generator(seed, NAME, "limit"),
    )  # fmt: skip
    other = independent_initialisation(
        256, config.dimension, generator=generator(seed, NAME, "targets"), dtype=torch.float64,
        device=device,
    )  # fmt: skip
    targets = shallow.forward(other, tokens, query=query, activation=config.activation)
    error = float(limit.standard_error.norm() / limit.total.norm())
    return _Problem(tokens, query, limit.total, error, targets)


class _Draws:
    """The networks of a cell, each from a stream of its own."""

    def __init__(self, config: Config, seed: int, problem: _Problem) -> None:
        self.config, self.seed, self.device = config, seed, problem.tokens.device

    def __call__(self, role: str, k: int) -> Parameters:
        draw = symmetric_initialisation if role == "paired" else independent_initialisation
        stream = generator(self.seed, NAME, role, self.config.heads, k)
        d = self.config.dimension
        return draw(self.config.heads, d, generator=stream, dtype=torch.float64, device=self.device)


def _convergence(config: Config, problem: _Problem, draws: _Draws) -> dict[str, float]:
    r"""Root mean square over networks of :math:`\|\hat K - K\|_2 / \|K\|_2`."""
    norm = torch.linalg.matrix_norm
    errors = [
        norm(_empirical(config, problem, draws("paired", k)) - problem.limit, 2)
        for k in range(config.networks)
    ]
    rms = torch.stack(errors).norm() / config.networks**0.5
    return {"kernel_error": float(rms / norm(problem.limit, 2))}


def _spreads(config: Config, problem: _Problem, draws: _Draws) -> dict[str, float]:
    options: dict[str, Any] = {"query": problem.query, "activation": config.activation}

    def shared(heads: Parameters) -> Tensor:
        one = heads._replace(W=heads.W[:1])
        return shared_attention_kernel(one, problem.tokens, **options).total

    def linear(heads: Parameters) -> Tensor:
        return linearised_attention_kernel(heads, problem.tokens, **options).total

    kernels: dict[str, Callable[[Parameters], Tensor]] = {
        "independent": lambda heads: _empirical(config, problem, heads),
        "shared": shared,
        "linear": linear,
    }
    networks = [draws("unpaired", k) for k in range(config.networks)]
    return {
        f"spread_{name}": _spread([kernel(heads) for heads in networks])
        for name, kernel in kernels.items()
    }


def _spread(kernels: list[Tensor]) -> float:
    r""":math:`\bigl(\frac1{R-1} \sum_k \|K_k - \bar K\|_F^2\bigr)^{1/2} / \|\bar K\|_F`."""
    variance, mean = torch.var_mean(torch.stack(kernels), dim=0)
    return float(variance.sum().sqrt() / mean.norm())


def _scaled(config: Config, problem: _Problem, draws: _Draws) -> dict[str, float]:
    r"""Mean over samples and networks of :math:`K_w(X, X)`, and of :math:`|T\alpha_t - 1|`."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    tokens, query, sigma = problem.tokens, problem.query, get_activation(config.activation)
    for k in range(config.networks):
        heads = draws("paired", k).half()
        for name, beta in _SCALES.items():
            scale = shallow.logit_scale(config.heads, beta)
            s, _, r = attention.head_features(tokens, heads.W, heads.U, query, scale=scale)
            lengths = sigma.first(s).square() * r.square().sum(dim=-1)
            found[f"attention_trace{name}"].append(scale**2 * query.square().sum() * lengths.mean())
            if beta != 0:
                weights = attention.attention_weights(
                    attention.logits(tokens, heads.W, query, scale=scale)
                )
                distance = (config.length * weights - 1).abs_().mean()
                found[f"uniform_distance{name}"].append(distance)
    return {name: float(torch.stack(values).mean()) for name, values in found.items()}


def _flow(config: Config, problem: _Problem, draws: _Draws) -> float:
    r""":math:`\max_k \|f(\phi_k) - f_k\| / \|y\|`, with :math:`f_k` of the limit kernel."""
    values = descent_values(
        draws("paired", 0), problem.tokens, problem.targets, config.flow_steps,
        config.flow_step_size, query=problem.query, activation=config.activation,
    )  # fmt: skip
    predicted = kernel_descent(
        problem.limit, problem.targets, config.flow_steps, config.flow_step_size
    )
    errors = (values - predicted.to(values.device)).norm(dim=1)
    return float(errors.max() / problem.targets.norm())


def descent_values(
    initial: Parameters, tokens: Tensor, targets: Tensor, steps: int, step_size: float,
    **options: Any,
) -> Tensor:  # fmt: skip
    r""":math:`f(X_j; \phi_k)` for :math:`k = 0..\tau` of plain gradient descent, (steps + 1, n)."""
    phi, values = initial, [shallow.forward(initial, tokens, **options)]
    for _ in range(steps):
        cotangent = 2 * (values[-1] - targets) / len(targets)
        phi = phi.minus(shallow.vjp(phi, tokens, cotangent, **options).scaled(step_size))
        values.append(shallow.forward(phi, tokens, **options))
    return torch.stack(values)


def _empirical(config: Config, problem: _Problem, heads: Parameters) -> Tensor:
    sigma = get_activation(config.activation)
    return empirical_kernel_total(heads, problem.tokens, query=problem.query, activation=sigma)
