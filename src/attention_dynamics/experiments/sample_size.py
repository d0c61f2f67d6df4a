r"""Sample size: the width that a fixed approximation error needs, as the number of samples grows.

For each case, n and seed, with tokens, teacher and heads shared by all n of a seed:

1. the largest and the root mean square error :math:`e(X_j) = \frac1N \sum_i z_i(X_j) - \tilde
   f(X_j)` over n samples at widths m = 2N = 8, 16, ..., all from one draw of heads;
2. the width at which each of the two reaches a fixed tolerance;
3. what a Gaussian field with the covariance of the head contributions predicts for the largest,
   without a fit: :math:`G(X) = M^{-1/2} \sum_{i \le M} \xi_i (z_i(X) - \bar z(X))`;
4. for some n, the loss that projected descent reaches.

Errors are in units of :math:`\varsigma`, the root mean square over inputs of the standard deviation
of z. The bands come from theory and were fixed before any run of the book profile.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from attention_dynamics.data import Law, generator
from attention_dynamics.experiments._sample_field import (
    FieldSetting,
    Problem,
    problem_of,
    running,
    sample_tokens,
)
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    select,
    slopes_by_seed,
    t_interval,
)
from attention_dynamics.experiments.growth import growth_fits, independent_power, width_needed
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii
from attention_dynamics.validation import require_integer, require_number, require_one_of

NAME = "sample_size"
SCHEMA = 1
AGAINST = "samples"
#: Length, dimension and law of the tokens of each case.
CASES: dict[str, tuple[int, int, Law]] = {
    "ball": (16, 8, "iid"),
    "small": (2, 2, "iid"),
    "sphere": (4, 32, "sphere"),
}
NARROWEST = 8  # heads
_HELD = 512  # samples of the validation loss


@dataclass(frozen=True)
class Config:
    r"""``samples`` (n) are the first n of one endless list. ``case`` is a key of :data:`CASES`.

    ``heads`` (m) is the width that is trained and of the standardised curves; widths go up to
    ``most_heads``, with ``replicas`` networks there and twice as many at each half. The
    tolerances are in units of :math:`\varsigma`. ``steps`` = 0 trains nothing; ``step_scale`` is
    :math:`\eta\sqrt\tau`.
    """

    case: str
    samples: int
    heads: int = 64
    most_heads: int = 1024
    replicas: int = 8
    teacher_heads: int = 8192
    anchors: int = 16
    activation: str = "tanh"
    transport_norm: float = 3.0
    sup_tolerance: float = 0.25
    rms_tolerance: float = 0.125
    gaussian_draws: int = 256
    steps: int = 0
    step_scale: float = 1.75


COLUMNS = columns_of(Config)
_SMOKE = Config("ball", 1, heads=16, most_heads=32, replicas=2, teacher_heads=64, anchors=4,
                sup_tolerance=0.8, rms_tolerance=0.4, gaussian_draws=16)  # fmt: skip
_BOOK = Config("ball", 1, most_heads=256, replicas=4, teacher_heads=512, sup_tolerance=0.5,
               rms_tolerance=0.25, gaussian_draws=128)  # fmt: skip
_PAPER = Config("ball", 1)


def _configs(
    base: Config, sizes: dict[str, range], trained: Iterable[int], steps: int
) -> tuple[Config, ...]:
    return tuple(
        replace(base, case=case, samples=2**k,
                steps=steps if case == "ball" and k in trained else 0)
        for case, exponents in sizes.items() for k in exponents
    )  # fmt: skip


PROFILES = {
    "smoke": Profile(
        _configs(_SMOKE, dict.fromkeys(CASES, range(4, 8)), (4, 6), 10), seeds=(100, 101, 102)
    ),
    "book": Profile(
        _configs(
            _BOOK,
            {"ball": range(7, 14), "small": range(7, 12), "sphere": range(7, 12)},
            (7, 9, 11),
            60,
        ),
        seeds=tuple(range(16)),
    ),
    "paper": Profile(
        _configs(_PAPER, dict.fromkeys(CASES, range(7, 17)), range(7, 14), 1000),
        seeds=tuple(range(20)),
    ),
}

_CLT = "central limit theorem over heads, no fit"
BANDS = {
    "power_ball": Band(None, 0.15, "the paper's rate: log(2n/delta) alone gives 0.09"),
    "power_minus_log_ball": Band(0.0, None, "the growth is logarithmic, not a power"),
    "rms_ball": Band(-0.03, 0.03, "the mean square does not contain n"),
    "small_minus_independent": Band(None, -0.05, "the inputs fill the ball: saturation"),
    "sphere_minus_independent": Band(-0.03, 0.03, "samples decorrelate in high dimension"),
    "over_gaussian_ball": Band(0.9, 1.1, _CLT),
    "over_gaussian_small": Band(0.9, 1.1, _CLT),
    "over_gaussian_sphere": Band(0.9, 1.1, _CLT),
    "growth_minus_gaussian_ball": Band(-0.03, 0.03, _CLT),
    "training_loss": Band(-0.05, 0.05, "a bound without n; log n gives 0.1"),
}
r"""What each band speaks of, as :func:`estimate` computes it.

- ``power_C``: the exponent p of :math:`m \sim n^p` in case C; ``C_minus_independent`` the same,
  less that of independent samples (``independent_power``);
- ``power_minus_log_C``: mean squared residual of the power fit less that of :math:`a + b \log n`;
- ``rms_C``: exponent in n of the width that the root mean square error needs;
- ``over_gaussian_C``: largest error over the Gaussian prediction, geometric mean over n and seeds;
  ``growth_minus_gaussian_C``: exponent of its square in n, less that of the prediction;
- ``training_loss``, ``validation_loss``: exponent in n of the loss over the variance of targets.
"""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one case, n and seed; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range, naming it.
    """
    widths = _require(config)
    # What n does not enter is shared: a cell goes on where the one of fewer samples stopped.
    setting = _setting(config)
    problem = problem_of(setting, seed, device)
    found = running(setting, seed, device, config.samples)
    # A mean of N heads less one of M has the covariance of a mean of 1/(1/N + 1/M) heads.
    pairs = [1 / (1 / N + 1 / config.teacher_heads) for N in setting.pairs]
    heads = [2 * N for N in pairs]
    sup = np.array([float(largest.mean()) for largest in found.largest]) / problem.scale
    rms = np.array([math.sqrt(total / config.samples) for total in found.squares]) / problem.scale
    gaussian = float(found.gaussian.mean()) / problem.scale
    at = widths.index(config.heads)
    quantities = {
        "scale": problem.scale,
        "sup": float(sup[at] * math.sqrt(pairs[at])),
        "rms": float(rms[at] * math.sqrt(pairs[at])),
        "gaussian_sup": gaussian,
        "common_share": found.common_share(config.samples),
        "width_sup": width_needed(heads, list(sup), config.sup_tolerance),
        "width_rms": width_needed(heads, list(rms), config.rms_tolerance),
        "width_gaussian": 2 * (gaussian / config.sup_tolerance) ** 2,
    }
    if config.steps:
        quantities |= _training(config, seed, setting, problem, device)
    return rows_of(NAME, config, seed, quantities)


def fits_by_seed(frame: pd.DataFrame, case: str, quantity: str = "width_sup") -> pd.DataFrame:
    """The :class:`~attention_dynamics.experiments.growth.GrowthFits` of every seed of one case."""
    table = _of(frame, case, quantity).pivot(index="seed", columns=AGAINST, values="value")
    fits = [growth_fits(list(table), list(row)) for row in table.to_numpy()]
    return pd.DataFrame(fits, index=table.index)


def estimate(frame: pd.DataFrame, name: str, confidence: float = 0.95) -> Estimate | None:
    """What the band of that name speaks of: mean and t-interval over seeds.

    None if the frame does not hold the case. Raises ValueError for an unknown name.
    """
    if name in ("training_loss", "validation_loss"):
        return t_interval(slopes_by_seed(frame, name, AGAINST), confidence)
    kind, _, case = name.rpartition("_")
    if case == "independent":
        kind, case = case, name.removesuffix("_minus_independent")
    require_one_of("name", case, tuple(CASES))
    rows = frame[frame["case"] == case]
    if rows.empty:
        return None
    if kind == "rms":
        return t_interval(slopes_by_seed(rows, "width_rms", AGAINST), confidence)
    if kind == "over_gaussian":
        ratio = _log(rows, "sup") - _log(rows, "gaussian_sup")
        return geometric_interval(np.exp(ratio.groupby("seed").mean()), confidence)
    if kind == "growth_minus_gaussian":
        found, predicted = (slopes_by_seed(rows, q, AGAINST) for q in ("sup", "gaussian_sup"))
        return t_interval(2 * (found - predicted), confidence)
    fits = fits_by_seed(rows, case)
    values = {
        "power": fits["power"],
        "power_minus_log": fits["power_residual"] - fits["log_residual"],
        "independent": fits["power"] - independent_power(sorted(rows[AGAINST].unique())),
    }
    require_one_of("name", kind, tuple(values))
    return t_interval(values[kind], confidence)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Each estimate with its 95 % interval over seeds, beside its band."""
    return band_table(BANDS, lambda name: estimate(frame, name))


def _require(config: Config) -> list[int]:
    """The widths of a configuration, once all its fields are in range."""
    require_one_of("case", config.case, tuple(CASES))
    for name in ("samples", "replicas", "gaussian_draws"):
        require_integer(name, getattr(config, name), minimum=1)
    require_integer("steps", config.steps, minimum=0, remedy="0 trains nothing")
    for name in ("sup_tolerance", "rms_tolerance"):
        require_number(name, getattr(config, name), positive=True)
    widths = [NARROWEST]
    while widths[-1] < config.most_heads:
        widths.append(2 * widths[-1])
    if widths[-1] != config.most_heads:
        raise ValueError(
            f"most_heads: expected {NARROWEST} times a power of two, got {config.most_heads}"
        )
    require_one_of("heads", config.heads, tuple(widths))
    return widths


def _setting(config: Config) -> FieldSetting:
    length, dimension, law = CASES[config.case]
    return FieldSetting(
        name=NAME, case=config.case, length=length, dimension=dimension, law=law,
        pairs=tuple(m // 2 for m in _require(config)), replicas=config.replicas,
        teacher_heads=config.teacher_heads, anchors=config.anchors,
        activation=config.activation, transport_norm=config.transport_norm,
        draws=config.gaussian_draws,
    )  # fmt: skip


def _training(
    config: Config, seed: int, setting: FieldSetting, problem: Problem, device: str
) -> dict[str, float]:
    r"""Losses after ``steps`` steps over the variance of the targets, with :math:`\rho = \nu`."""
    norm = config.transport_norm
    model = ShallowTransformer(
        symmetric_initialisation(
            config.heads, setting.dimension, device=device,
            generator=generator(seed, NAME, "student", config.case),
        ),
        query=problem.query,
        activation=config.activation,
    )  # fmt: skip
    tokens = sample_tokens(setting, seed, device, 0, config.samples)
    held = sample_tokens(setting, seed, device, 0, _HELD, role="held")
    targets, held_targets = problem.teacher(tokens), problem.teacher(held)
    result = projected_gradient_descent(
        model, tokens, targets,
        DescentConfig(
            steps=config.steps, step_size=config.step_scale / math.sqrt(config.steps),
            radii=Radii(norm, norm, norm), transport_norms=TransportNorms(norm, norm, norm),
            record_every=config.steps,
        ),
    )  # fmt: skip
    loss = shallow.loss(
        result.final, held, held_targets, query=problem.query, activation=config.activation
    )
    return {
        "training_loss": float(result.history["loss"].iloc[-1] / targets.var(correction=0)),
        "validation_loss": float(loss / held_targets.var(correction=0)),
    }


def _of(frame: pd.DataFrame, case: str, quantity: str) -> pd.DataFrame:
    return select(frame[frame["case"] == case], quantity)


def _log(frame: pd.DataFrame, quantity: str) -> pd.Series:
    return np.log(select(frame, quantity).set_index([AGAINST, "seed"])["value"])
