r"""Kernel against length: the conditioning of the limit kernel as sequences grow.

For each length T and seed, three cases: a fixed query and i.i.d. tokens; the last token as query
and i.i.d. tokens; a fixed query and sequence-level means. Of each the limit kernel of n samples,
and of that the largest eigenvalue of the centred kernel over n, the smallest eigenvalue, the
effective rank and the mean of the diagonal.

With i.i.d. tokens a head sees of a long sequence what it sees of any other, up to
:math:`O(T^{-1/2})`: the kernel becomes constant, and its centred part falls like 1/T. A query that
differs from sample to sample, or means that do, keep the samples apart. The bands are for
:math:`T \ge 64` and were fixed before any run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import Law, generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    slope_estimate,
    slope_table,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.attention import Query
from attention_dynamics.theory.kernels import spectrum
from attention_dynamics.theory.limit_kernel import limit_kernel

NAME = "kernel_length"
SCHEMA = 1
AGAINST = "length"
SLOPE_FROM = 64  # the rates are those of long sequences


@dataclass(frozen=True)
class Config:
    """Sizes of one cell; only ``length`` (T) has no default."""

    length: int
    samples: int = 24
    dimension: int = 8
    activation: str = "tanh"
    points: int = 256
    randomisations: int = 4


CASES: dict[str, tuple[Literal["fixed", "last"], Law]] = {
    "fixed": ("fixed", "iid"),
    "last": ("last", "iid"),
    "means": ("fixed", "sequence_means"),
}
COLUMNS = columns_of(Config)
_SMOKE = Config(length=1, samples=8, dimension=3, points=64, randomisations=2)
_PAPER = Config(length=1, samples=100, points=1024)
PROFILES = {
    "smoke": Profile(tuple(replace(_SMOKE, length=T) for T in (8, 64, 256)), (100, 101, 102)),
    "book": Profile(tuple(Config(length=T) for T in (4, 16, 64, 256, 1024)), tuple(range(6))),
    "paper": Profile(
        tuple(replace(_PAPER, length=T) for T in (4, 16, 64, 256, 1024, 4096)), tuple(range(10))
    ),
}
BANDS = {
    "top_fixed": Band(-1.15, -0.85, "samples differ by an average of T tokens"),
    "top_last": Band(-0.1, 0.1, "the queries of the samples differ"),
    "top_means": Band(-0.1, 0.1, "the means of the samples differ"),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one length and seed; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range.
    """
    quantities: dict[str, float] = {}
    for case in CASES:
        for name, value in _spectral(_kernel(config, seed, case, device)).items():
            quantities[f"{name}_{case}"] = value
    return rows_of(NAME, config, seed, quantities)


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    r"""The slope of a quantity against T, over :math:`T \ge` ``SLOPE_FROM``, with its interval."""
    return slope_estimate(frame[frame[AGAINST] >= SLOPE_FROM], quantity, AGAINST)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Log-log slopes against the length, mean and 95 % t-interval over seeds, and their bands."""
    return slope_table(BANDS, lambda quantity: estimate(frame, quantity))


def _kernel(config: Config, seed: int, case: str, device: str) -> Tensor:
    kind, law = CASES[case]
    query: Query = "last"
    if kind == "fixed":
        query = query_vector(
            config.dimension, generator=generator(seed, NAME, "query"), dtype=torch.float64
        ).to(device)
    tokens = unit_ball_tokens(
        config.samples, config.length, config.dimension, law=law,
        generator=generator(seed, NAME, "tokens", law, config.length), dtype=torch.float64,
        device=device,
    )  # fmt: skip
    return limit_kernel(
        tokens, query=query, activation=config.activation, points=config.points,
        randomisations=config.randomisations, generator=generator(seed, NAME, "limit", case),
    ).total  # fmt: skip


def _spectral(kernel: Tensor) -> dict[str, float]:
    n = len(kernel)
    centred = kernel - kernel.mean(dim=0) - kernel.mean(dim=1, keepdim=True) + kernel.mean()
    whole = spectrum(kernel)
    return {
        "top": float(torch.linalg.eigvalsh(centred)[-1]) / n,
        "bottom": float(whole.eigenvalues[-1]),
        "effective_rank": whole.effective_rank,
        "diagonal": float(kernel.diagonal().mean()),
    }
