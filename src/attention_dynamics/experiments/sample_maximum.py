r"""Sample maximum: how the largest and the mean square approximation error grow with n.

The heads of one student are fixed and the error :math:`e(X) = \frac1m \sum_i z_i(X) - \tilde f(X)`
is looked at on the first n samples of one long list, for n = 2^7, ..., 2^14. Theory: a union bound
lets the maximum grow like :math:`\sqrt{\log(2n/\delta)}`, and the expectation of the mean square
does not depend on n. The bands and seeds were fixed before any run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations
from typing import Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import Law, generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    select,
    slope_estimate,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import (
    TransportNorms,
    random_multi_anchor,
    transported_function,
)

NAME = "sample_maximum"
SCHEMA = 1
AGAINST = "samples"


@dataclass(frozen=True)
class Config:
    r"""Sizes of arXiv 2601.16514; ``samples`` (n) are the first n of ``pool`` samples.

    All n of a seed share tokens, teacher and student. ``delta`` is the probability in
    :math:`\log(2n/\delta)`.
    """

    samples: int
    pool: int = 2**14
    heads: int = 64
    length: int = 16
    dimension: int = 8
    token_law: Law = "iid"
    activation: str = "tanh"
    anchors: int = 16
    teacher_heads: int = 8192
    transport_norm: float = 3.0
    delta: float = 0.05


COLUMNS = columns_of(Config)
_SIZES = tuple(2**k for k in range(7, 15))
_SMOKE = Config(samples=1, pool=64, heads=8, length=4, dimension=3, anchors=4, teacher_heads=64)
_BOOK = Config(samples=1, teacher_heads=512)
PROFILES = {
    "smoke": Profile(tuple(replace(_SMOKE, samples=n) for n in (16, 32, 64)), seeds=(0, 1, 2)),
    "book": Profile(tuple(replace(_BOOK, samples=n) for n in _SIZES), seeds=tuple(range(20))),
    "paper": Profile(tuple(Config(samples=n) for n in _SIZES), seeds=tuple(range(20))),
}

BANDS = {
    "sup_normalised": Band(0.0, 0.15, "a union over n samples costs sqrt(log(2n/delta))"),
    "rms": Band(-0.02, 0.02, "the expectation of the mean square does not contain n"),
}
r"""Spread over n of :math:`\max|e|/\sqrt{\log(2n/\delta)}`, and log-log slope in n of the RMS.

The slope of :math:`\sqrt{\log(2n/\delta)}` itself between the ends of the range is 0.046, so the
second band tells a flat curve from a logarithmic one.
"""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value): ``sup``, ``sup_normalised``, ``rms`` over the first n samples.

    Raises ValueError if n exceeds the pool or another field is out of its range.
    """
    if not 1 <= config.samples <= config.pool:
        raise ValueError(
            f"samples: expected 1 to pool = {config.pool}, got {config.samples}; raise pool"
        )
    errors = _errors(replace(config, samples=1, delta=0.5), seed, device)[: config.samples]
    largest = float(errors.abs().max())
    quantities = {
        "sup": largest,
        "sup_normalised": largest / math.sqrt(math.log(2 * config.samples / config.delta)),
        "rms": float(errors.square().mean().sqrt()),
    }
    return rows_of(NAME, config, seed, quantities)


def spread_estimate(frame: pd.DataFrame, quantity: str, confidence: float = 0.95) -> Estimate:
    r""":math:`\max_{n, n'} y_n/y_{n'} - 1`, :math:`y_n` the geometric mean over seeds at n.

    The lower end is that of the t-interval of this ratio, paired by seed; the upper end is the
    largest upper end of any pair of sizes, since the pair was chosen for being the largest.
    """
    rows = select(frame, quantity)
    table = np.log(rows.pivot(index="seed", columns=AGAINST, values="value"))
    ratios = [
        t_interval(table[n] - table[other], confidence) for n, other in permutations(table, 2)
    ]
    widest = max(ratios, key=lambda ratio: ratio.mean)
    mean, lower = math.expm1(widest.mean), math.expm1(max(widest.lower, 0.0))
    upper = math.expm1(max(ratio.upper for ratio in ratios))
    return Estimate(mean, lower, upper, widest.seeds, confidence)


ESTIMATES: dict[str, Literal["spread", "slope"]] = {"sup_normalised": "spread", "rms": "slope"}


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """The number that the band of a quantity speaks of: its spread over n, or its slope in n."""
    if ESTIMATES[quantity] == "spread":
        return spread_estimate(frame, quantity)
    return slope_estimate(frame, quantity, AGAINST)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Spread or slope of each quantity with its 95 % interval over seeds, beside its band."""
    records = []
    for quantity, band in BANDS.items():
        found = estimate(frame, quantity)
        records.append(
            {
                "quantity": quantity,
                "estimates": ESTIMATES[quantity],
                "estimate": found.mean,
                "lower": found.lower,
                "upper": found.upper,
                "seeds": found.seeds,
                "band_lower": band.lower,
                "band_upper": band.upper,
                "inside": band.contains(found),
            }
        )
    return pd.DataFrame(records)


@lru_cache(maxsize=64)
def _errors(config: Config, seed: int, device: str) -> Tensor:
    """The errors on the whole pool: one array a seed, whatever n is."""

    def stream(role: str) -> torch.Generator:
        return generator(seed, NAME, role)

    norms = TransportNorms(*(config.transport_norm,) * 3)
    query = query_vector(config.dimension, generator=stream("query")).to(device)
    transport = random_multi_anchor(
        config.anchors, config.length, config.dimension, generator=stream("anchors"), norms=norms,
        query=query, activation=config.activation, law=config.token_law, device=device,
    )  # fmt: skip
    tokens = unit_ball_tokens(
        config.pool, config.length, config.dimension,
        generator=stream("tokens"), law=config.token_law, device=device,
    )  # fmt: skip
    teacher = Teacher(transport, generator=stream("teacher"), heads=config.teacher_heads)
    student = symmetric_initialisation(
        config.heads, config.dimension, generator=stream("student"), device=device
    )
    return (transported_function(tokens, transport, student) - teacher(tokens)).double()
