r"""Condition numbers of the attention output, with a residual and without, by axis.

Each cell draws tokens and weights of variance 1/rows and computes the two condition numbers of
:math:`Z = AXW_V + r_aX`; ``size`` replaces the field that ``axis`` names:

1. ``"defaults"``: two sequences of four tokens in 32 dimensions (``size`` is not read);
2. ``"length"`` T, ``"dimension"`` d, ``"value_scale"`` of :math:`W_V`, ``"logit_scale"``;
3. ``"spread"``: tokens :math:`\sqrt{1-\epsilon}\,g + \sqrt\epsilon\,h_t` with a common part g;
4. ``"angle"``: :math:`\sin\vartheta` over its limit :math:`1 - 2T/d`, one sequence of d/8 tokens;
5. ``"rank"``: :math:`\sigma_2, \sigma_4, \sigma_7` of the attention matrix against the logit scale
   at :math:`d_k = 2`.

The bands were fixed before any run at these profiles. At the defaults they round what was
measured once before, on other draws; the slopes come from theory: A leaves 11'/T in proportion to
the logits, degree by degree; attention passes on the common part of the tokens whole and what
differs at third order, a residual at first order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    select,
    slope_estimate,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.residual import (
    ResidualConfig,
    ResidualParameters,
    init_parameters,
    layers,
)
from attention_dynamics.theory.conditioning import (
    angle_bound,
    attention_spectrum,
    gaussian_sine_limit,
    principal_sine,
)

NAME = "residual_conditioning"
SCHEMA = 1
AGAINST = "size"
Axis = Literal[
    "defaults", "length", "dimension", "value_scale", "logit_scale", "spread", "angle", "rank"
]
AXES: tuple[Axis, ...] = (
    "defaults", "length", "dimension", "value_scale", "logit_scale", "spread", "angle", "rank",
)  # fmt: skip
LARGEST_CONDITION = 1 / torch.finfo(torch.float64).eps
"""A condition number from here on is that of a singular matrix, as far as float64 can tell."""
SMALL_LOGITS = 0.01
"""Slopes against the logit scale are taken up to here."""


@dataclass(frozen=True)
class Config:
    r"""``size`` is the value of the field that ``axis`` names, where there is one.

    Weights have entries of variance 1/rows; ``value_scale`` multiplies :math:`W_V`,
    ``logit_scale`` the logits, whose entries have variance about 1. ``spread`` is
    :math:`\epsilon`, 1 for independent tokens.
    """

    axis: Axis
    size: float
    samples: int = 2
    length: int = 4
    dimension: int = 32
    key_dimension: int = 8
    value_scale: float = 1.0
    logit_scale: float = 1.0
    spread: float = 1.0

    @property
    def effective(self) -> Config:
        """The configuration with ``size`` in its place. Raises ValueError for another axis."""
        if self.axis not in AXES:
            raise ValueError(f"axis must be one of {', '.join(AXES)}; got {self.axis!r}")
        changes: dict[str, Any] = {}
        if self.axis == "angle":
            changes = {"dimension": int(self.size), "length": int(self.size) // 8}
        elif self.axis == "rank":
            changes = {"logit_scale": self.size}
        elif self.axis in ("length", "dimension"):
            changes = {self.axis: int(self.size)}
        elif self.axis != "defaults":
            changes = {self.axis: self.size}
        return replace(self, **changes)


COLUMNS = columns_of(Config)


def _configs(lengths: tuple[int, ...], dimensions: tuple[int, ...], wide: int,
             angles: tuple[int, ...]) -> tuple[Config, ...]:  # fmt: skip
    one = Config("length", 0, samples=1, dimension=wide, key_dimension=16)
    return (
        Config("defaults", 1.0),
        *(replace(one, size=float(T)) for T in lengths),
        *(replace(one, axis="dimension", length=16, size=float(d)) for d in dimensions),
        *(Config("value_scale", scale) for scale in (0.01, 0.1, 1.0, 10.0, 100.0)),
        *(Config("logit_scale", s) for s in (0.001, 0.003, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0)),
        *(Config("spread", epsilon) for epsilon in (1e-5, 1e-4, 1e-3, 1e-2)),
        *(Config("angle", float(d), samples=1) for d in angles),
        *(
            Config("rank", s, samples=1, length=16, key_dimension=2)
            for s in (0.003, 0.01, 0.03, 0.1)
        ),
    )


PROFILES = {
    "smoke": Profile(_configs((4, 8), (16, 32), 32, (32, 64)), seeds=(100, 101, 102)),
    "book": Profile(
        _configs((4, 16, 32, 64), (16, 32, 64, 256), 128, (32, 128, 512)), seeds=tuple(range(20))
    ),
    "paper": Profile(
        _configs((4, 16, 64, 256), (16, 32, 64, 256, 1024), 512, (32, 128, 512, 2048)),
        seeds=tuple(range(100)),
    ),
}

_LIMIT = "limit 1 - 2T/d, deviations of order d^(-2/3)"
_HELPS = "a residual helps at every size"
BANDS = {
    "with_by_defaults": Band(2.0, 4.0, "measured once before, on other draws"),
    "without_by_defaults": Band(9.0, None, "measured once before, on other draws"),
    "least_gain_by_length": Band(1.0, None, _HELPS),
    "least_gain_by_dimension": Band(1.0, None, _HELPS),
    "least_gain_by_value_scale": Band(1.0, None, _HELPS),
    "least_gain_by_logit_scale": Band(1.0, None, _HELPS),
    "with_by_logit_scale": Band(-0.1, 0.1, "A enters the bound by its norm only"),
    "without_by_logit_scale": Band(-1.1, -0.9, "A leaves 11'/T in proportion to the logits"),
    "with_by_spread": Band(-0.55, -0.45, "a residual passes on what differs at first order"),
    "without_by_spread": Band(-1.6, -1.4, "attention passes on what differs at third order"),
    "sine_by_angle": Band(0.97, 1.05, _LIMIT),
    "sigma_2_by_rank": Band(0.9, 1.1, "logits of degree 1"),
    "sigma_4_by_rank": Band(1.9, 2.1, "products of two logits"),
    "sigma_7_by_rank": Band(2.9, 3.1, "products of three logits"),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of one configuration and seed; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range.
    """
    chosen = config.effective
    tokens, parameters, layer = draw(chosen, seed, device)
    stacked = tokens.flatten(0, 1)
    if config.axis == "angle":
        limit = gaussian_sine_limit(len(stacked), chosen.dimension)
        quantities = {"sine": float(principal_sine(stacked, parameters.V)) / limit}
    elif config.axis == "rank":
        values = torch.linalg.svdvals(layers(parameters, tokens, layer).attention[0])
        quantities = {f"sigma_{index}": float(values[index - 1]) for index in (2, 4, 7)}
    else:
        quantities = _conditions(tokens, parameters, layer)
    return rows_of(NAME, config, seed, {f"{k}_by_{config.axis}": x for k, x in quantities.items()})


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    r"""The estimate that a band is about, with its t-interval over seeds.

    A log-log slope for the axes with a predicted exponent; for ``least_gain`` the geometric mean of
    each seed's smallest ratio of the two condition numbers; the mean of the ratio at the largest d
    for the sine; the geometric mean of the condition number at the defaults.
    """
    name, axis = quantity.split("_by_")
    if axis in ("logit_scale", "spread", "rank") and name != "least_gain":
        return slope_estimate(within_range(frame), quantity, AGAINST)
    if name == "sine":
        rows = select(frame, quantity)
        return t_interval(rows[rows[AGAINST] == rows[AGAINST].max()]["value"])
    if name == "least_gain":
        gains = select(frame, f"gain_by_{axis}").groupby("seed")["value"].min()
        return geometric_interval(gains)
    return geometric_interval(select(frame, quantity)["value"])


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its 95 % t-interval, beside the band."""
    return band_table(BANDS, lambda quantity: estimate(frame, quantity))


def within_range(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that slopes are fitted to: all but those of large logits."""
    return frame[(frame["axis"] != "logit_scale") | (frame[AGAINST] <= SMALL_LOGITS)]


def draw(
    config: Config, seed: int, device: str = "cpu"
) -> tuple[Tensor, ResidualParameters, ResidualConfig]:
    r"""Tokens (n, T, d), parameters and layer of an effective configuration.

    Configurations that differ in scales or spread only share their draws.
    """
    n, T, d = config.samples, config.length, config.dimension
    stream = generator(seed, NAME, "tokens", n, T, d)
    own = torch.randn(n, T, d, generator=stream, dtype=torch.float64)
    common = torch.randn(n, 1, d, generator=stream, dtype=torch.float64)
    if not 0 < config.spread <= 1:
        raise ValueError(f"spread: expected a number in (0, 1], got {config.spread}")
    tokens = (1 - config.spread) ** 0.5 * common + config.spread**0.5 * own
    layer = ResidualConfig(dimension=d, key_dimension=config.key_dimension, hidden=1)
    parameters = init_parameters(
        layer, generator(seed, NAME, "parameters", d, config.key_dimension),
        scales=(config.logit_scale, 1.0, config.value_scale, 1.0, 1.0), device=device,
    )  # fmt: skip
    return tokens.to(device), parameters, layer


def _conditions(
    tokens: Tensor, parameters: ResidualParameters, layer: ResidualConfig
) -> dict[str, float]:
    passed = layers(parameters, tokens, layer)
    X, Z = tokens.flatten(0, 1), passed.Z.flatten(0, 1)
    attended = (passed.attention @ tokens).flatten(0, 1) @ parameters.V
    with_residual = attention_spectrum(Z)
    conditions = {
        "tokens": attention_spectrum(X).condition,
        "with": with_residual.condition,
        "without": attention_spectrum(attended).condition,
    }
    quantities = {name: min(float(x), LARGEST_CONDITION) for name, x in conditions.items()}
    quantities["gain"] = quantities["without"] / quantities["with"]
    # At most 1 by the angle lemma; 0 where the angle is.
    bound, smallest = float(angle_bound(X, parameters.V)), float(with_residual.smallest)
    quantities["bound_ratio"] = bound / smallest if bound > 0 else 0.0
    return quantities
