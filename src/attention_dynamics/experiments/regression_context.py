r"""Softmax regression away from its two limits: contexts of T tokens, n samples.

Five parts, told apart by ``part``; ``size`` replaces the field it names:

1. ``"context"``: the sampled excess over fresh contexts of ``size`` tokens, at given factors, over
   its closed forms: the first correction in 1/T and, for the same queries, the exact one;
2. ``"floor"``: training on one shared centred context, with queries of condition number ``size``:
   the risk :math:`\tfrac12\lVert(A\hat SB^\top-M_\star)\Sigma^{1/2}\rVert_F^2` of the trained
   factors, with the covariance :math:`\hat S` of the context, over that of least squares; and what
   the softmax of the layer adds to it, over the part of the centred 1/T correction that is not
   linear in the logits (``distortion``); and, to explain that, added without bands after its first
   run: the same with factors at the truth, the best linear fit of the softmax's nonlinear part,
   and its product with the error of the factors;
3. ``"drift"``: the risk after ``size`` steps, and after a tenth of them;
4. ``"basin"``: the share of draws of ``size`` times :math:`n_\star` samples whose least squares
   starts inside the basin of scaled descent, :math:`\lVert N_\star^{-1}E_0\rVert \le \tfrac12`,
   :math:`n_\star = 4\sigma_\epsilon^2(\sqrt m+\sqrt d)^2/\sigma_{\min}(N_\star)^2`;
5. ``"prompts"``: a context of ``size`` tokens for each sample, of its own.

The bands were fixed before any run at the profiles ``book`` and ``paper``. Closed forms are met
within five per cent at small logits, within ten where a few queries carry the mean, within twenty
for single contexts. The risk is between 0.9 and 1.15 times that of least squares, and stays so.
Gaussian operator norms put the edge of the basin between :math:`n_\star/4` and :math:`n_\star` for
m = d. With contexts of their own the noise of attention is at least as large as the statistical
error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.data.regression import regression_problem
from attention_dynamics.experiments._trained_context import NAME, drift, floor, normal, prompts
from attention_dynamics.experiments.estimates import Band, Profile, t_interval
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.population import RegressionProblem, finite_context_correction
from attention_dynamics.models.regression import Factors
from attention_dynamics.theory.gaussian_context import context_excess, sampled_excess
from attention_dynamics.training.structure_aware import spectral_initialisation

SCHEMA = 2
Part = Literal["context", "floor", "drift", "basin", "prompts"]
_NAMED = {"context": "length", "floor": "condition", "drift": "steps", "prompts": "length"}


@dataclass(frozen=True)
class Config:
    r"""``size`` is the value of the field that ``part`` names (in the basin: of n over its scale).

    ``norm`` is :math:`\lVert V\rVert`, ``shift`` the relative size of a random error of A,
    put in on purpose at :data:`FIRST_ORDER_NORM`; ``subset`` the samples that the spectral start
    sees, ``fresh`` the queries that a risk is measured on, ``draws`` the data sets a seed of the
    basin.
    """

    part: Part
    size: float
    norm: float = 0.2
    shift: float = 0.2
    samples: int = 256
    length: int = 512
    dimension: int = 8
    outputs: int = 8
    condition: float = 10.0
    noise: float = 0.3
    steps: int = 20
    step_size: float = 0.5
    damping: float = 0.2
    subset: int = 48
    fresh: int = 1500
    draws: int = 20

    @property
    def effective(self) -> Config:
        """The configuration with ``size`` in its place. Raises ValueError for another part."""
        if self.part == "basin":
            return self
        if self.part not in _NAMED:
            raise ValueError(f"part must be one of {[*_NAMED, 'basin']}, got {self.part!r}")
        field = _NAMED[self.part]
        value: Any = self.size if field == "condition" else int(self.size)
        return replace(self, **{field: value})


COLUMNS = columns_of(Config)

NORMS = (0.3, 0.5, 0.8, 1.2)
r"""The :math:`\lVert V\rVert` of the contexts; the threshold of the expansion is 0.707."""
FIRST_ORDER_NORM = 0.3
"""The norm at which the first correction has to hold from 128 tokens on."""
_MANY = 20_000  # queries of the exact mean, which stands in for the few that were sampled


def _configs(
    base: Config, lengths: tuple[int, ...], drift: int, conditions: tuple[float, ...],
    shares: tuple[float, ...], prompts: tuple[int, ...],
) -> tuple[Config, ...]:  # fmt: skip
    context = replace(base, part="context", dimension=4, outputs=4, condition=1.0,
                      fresh=base.fresh // 6)  # fmt: skip
    half = replace(base, samples=base.samples // 2, length=base.length // 2)
    return (
        *(replace(context, size=float(length)) for length in lengths),
        *(
            replace(base, size=kappa, step_size=0.25 if kappa >= 1000 else 0.5)
            for kappa in conditions
        ),
        replace(half, part="drift", size=float(drift)),
        *(
            replace(base, part="basin", size=share, noise=1.0, condition=kappa)
            for kappa in (1.0, 10.0)
            for share in shares
        ),
        *(
            replace(half, part="prompts", size=float(length), norm=0.5, condition=1.0)
            for length in prompts
        ),
    )


_SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
_SMOKE = Config("floor", 1.0, samples=64, length=96, dimension=4, outputs=4, steps=4, subset=24,
                fresh=100, draws=4)  # fmt: skip
_BOOK = Config("floor", 1.0)
_PAPER = Config("floor", 1.0, samples=2048, length=4096, steps=60, subset=128, fresh=20000,
                draws=400)  # fmt: skip
_TWENTY = tuple(range(20))
PROFILES = {
    "smoke": Profile(
        _configs(_SMOKE, (64, 128), 10, (1.0, 100.0), (1 / 8, 2.0), (64,)), seeds=(0, 1, 2)
    ),
    "book": Profile(
        _configs(_BOOK, (128, 512, 2048), 100, (1.0, 100.0, 1000.0), _SHARES, (64, 192)), _TWENTY
    ),
    "paper": Profile(
        _configs(_PAPER, (128, 256, 512, 1024, 2048, 4096, 8192), 3000,
                 (1.0, 10.0, 100.0, 1000.0), _SHARES, (64, 256, 1024)), _TWENTY
    ),
}  # fmt: skip

_FLOOR = "the statistical floor: no estimator that fits as many parameters is expected to be better"
_OPERATOR_NORM = "Gaussian operator norms: the edge lies between n*/4 and n* for m = d"
BANDS = {
    "first_order_0.3": Band(0.95, 1.05, "closed form, first order in 1/T, |V| = 0.3"),
    "exact_0.3": Band(0.95, 1.05, "closed form, every T and |V|"),
    **{f"exact_{v}": Band(0.9, 1.1, "as above, with heavier tails") for v in NORMS if v > 0.3},
    "risk": Band(0.9, 1.15, _FLOOR),
    "distortion": Band(0.8, 1.2, "the centred correction without its linear part"),
    "risk_after_drift": Band(0.9, 1.15, _FLOOR),
    "loss_fall": Band(0.0, None, "descent: past the floor the training loss still falls"),
    "inside_small": Band(None, 0.05, _OPERATOR_NORM),
    "inside_large": Band(0.95, None, _OPERATOR_NORM),
    "prompt_loss": Band(0.9, 1.1, "the exact closed form, at the trained factors"),
    "prompt_noise": Band(1.0, None, "contexts of their own: a variance of order 1/T an output"),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of one size and seed; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range.
    """
    chosen = config.effective
    parts = {
        "context": _context,
        "floor": floor,
        "drift": drift,
        "basin": _basin,
        "prompts": prompts,
    }
    stream = generator(seed, NAME, config.part, str(chosen.condition), "problem")
    problem = regression_problem(
        chosen.outputs, chosen.dimension, condition=chosen.condition, noise=chosen.noise,
        generator=stream, device=device,
    )  # fmt: skip
    return rows_of(NAME, config, seed, parts[config.part](chosen, seed, problem))


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Means with 95 % t-intervals over seeds for every quantity and configuration, and bands."""
    records = []
    for keys, group in frame.groupby(["quantity", "norm", "condition", "size"], sort=True):
        found = t_interval(group["value"])
        band = BANDS.get(keys[0])
        records.append(
            {
                **dict(zip(("quantity", "norm", "condition", "size"), keys, strict=True)),
                "mean": found.mean,
                "lower": found.lower,
                "upper": found.upper,
                "seeds": found.seeds,
                "band_lower": None if band is None else band.lower,
                "band_upper": None if band is None else band.upper,
                "inside": None if band is None else band.contains(found),
            }
        )
    return pd.DataFrame(records)


def _context(config: Config, seed: int, problem: RegressionProblem) -> dict[str, float]:
    stream = generator(seed, NAME, "context", "queries")  # the same for every length
    direction = normal((config.outputs, config.dimension), stream, problem)
    queries = normal((config.fresh, config.dimension), stream, problem) @ problem.query_root
    factors = {norm: spectral_initialisation(problem, norm) for norm in NORMS}
    A, B = factors[FIRST_ORDER_NORM]
    size = config.shift * torch.linalg.matrix_norm(A) / torch.linalg.matrix_norm(direction)
    factors[FIRST_ORDER_NORM] = Factors(A + size * direction, B)
    stream = generator(seed, NAME, "context", config.length)
    measured: dict[float, list[Tensor]] = {norm: [] for norm in NORMS}
    for rows in queries.split(max(1, 500_000 // config.length)):
        tokens = normal((len(rows), config.length, config.dimension), stream, problem)
        tokens = tokens @ problem.token_root
        for norm in NORMS:
            measured[norm].append(sampled_excess(factors[norm], problem, rows, tokens))
    many = normal((_MANY, config.dimension), stream, problem) @ problem.query_root
    quantities = {}
    for norm in NORMS:
        chosen, found = (factors[norm], problem), torch.cat(measured[norm])
        both = context_excess(*chosen, torch.cat((queries, many)), config.length)
        exact, mean = both[: len(queries)], both[len(queries) :].mean()
        # each ratio has mean 1; that of the sums would hang on the few queries of largest logits
        quantities[f"exact_{norm}"] = float((found / exact).mean())
        if norm**2 < 0.5:
            first = finite_context_correction(*chosen, config.length)
            quantities[f"first_order_{norm}"] = float(found.sum() / exact.sum() * mean / first)
    return quantities


def _basin(config: Config, seed: int, problem: RegressionProblem) -> dict[str, float]:
    m, d = config.outputs, config.dimension
    smallest = float(problem.singular_values[-1])
    scale = 4 * config.noise**2 * (math.sqrt(m) + math.sqrt(d)) ** 2 / smallest**2
    samples = max(d, round(config.size * scale))
    stream = generator(seed, NAME, "basin", str(config.condition), samples)
    X = normal((config.draws, samples, d), stream, problem)  # whitened: Sigma drops out
    errors = config.noise * normal((config.draws, samples, m), stream, problem)
    start = torch.linalg.solve(X.mT @ X, X.mT @ errors).mT  # N_hat - N
    relative = torch.linalg.solve(problem.whitened_target, start)
    inside = float((torch.linalg.matrix_norm(relative, 2) <= 0.5).double().mean())
    where = "small" if config.size <= 1 / 8 else "large" if config.size >= 2 else "between"
    return {f"inside_{where}": inside, "samples": float(samples)}
