r"""Encoder scaling: what the factor :math:`m^{-p}` of the logits does to a single wide head.

For each width m, exponent p and seed, with tokens and targets shared by all cells of a seed:

1. at initialisation, the mean diagonal of the four tangent kernel blocks, the share of the query
   and key blocks in the largest eigenvalue, and the root mean square of the logits;
2. after descent with the same relative step size :math:`\eta = \text{step\_fraction} \cdot n / (2
   \lambda_{\max}(K))`, how far the attention matrices moved, and the loss.

The entries of :math:`W_Q^\top W_K` are sums of m independent products, of size
:math:`\sqrt m/d`, hence logits of size :math:`m^{1/2-p}`. A gradient in :math:`W_Q` is
:math:`m^{-p} W_K C^\top` with C free of m: its square grows like :math:`m^{1-2p}`, and so does what
a step changes in the logits. The bands say so and were fixed before any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd
import torch

from attention_dynamics.data import generator
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    slope_estimate,
    slope_table,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import wu_encoder

NAME = "encoder_scaling"
SCHEMA = 1
AGAINST = "width"


@dataclass(frozen=True)
class Config:
    """Sizes of one cell; ``logit_exponent`` is p, and descent runs where m <= ``trained_width``."""

    width: int
    logit_exponent: float
    samples: int = 6
    length: int = 5
    dimension: int = 8
    steps: int = 400
    step_fraction: float = 0.5
    trained_width: int = 1024


COLUMNS = columns_of(Config)
_EXPONENTS = (0.5, 1.0)
_WIDTHS = (16, 64, 256, 1024, 4096)


def _configs(widths: tuple[int, ...], base: Config) -> tuple[Config, ...]:
    return tuple(replace(base, width=m, logit_exponent=p) for p in _EXPONENTS for m in widths)


_BASE = Config(width=16, logit_exponent=0.5)
PROFILES = {
    "smoke": Profile(_configs((8, 32), replace(_BASE, steps=5)), seeds=(100, 101, 102)),
    "book": Profile(_configs(_WIDTHS, _BASE), seeds=tuple(range(20))),
    "paper": Profile(
        _configs((*_WIDTHS, 16384), replace(_BASE, steps=4000, trained_width=4096)),
        seeds=tuple(range(20)),
    ),
}

_FLAT = "a mean over the width"
BANDS = {
    "query_key_trace_half": Band(-0.1, 0.1, "m^(1-2p) at p = 1/2"),
    "query_key_trace_one": Band(-1.1, -0.9, "m^(1-2p) at p = 1"),
    "logit_size_half": Band(-0.1, 0.1, "m^(1/2-p) at p = 1/2"),
    "logit_size_one": Band(-0.6, -0.4, "m^(1/2-p) at p = 1"),
    "value_trace_half": Band(-0.1, 0.1, _FLAT),
    "value_trace_one": Band(-0.1, 0.1, _FLAT),
    "output_trace_half": Band(-0.1, 0.1, _FLAT),
    "output_trace_one": Band(-0.1, 0.1, _FLAT),
    "query_key_share_one": Band(-1.1, -0.9, "the kernel's other blocks do not shrink"),
    "attention_change_half": Band(-0.15, 0.15, "a step moves the logits by m^(1-2p)"),
    "attention_change_one": Band(-1.15, -0.85, "a step moves the logits by m^(1-2p)"),
}
_SUFFIX = {0.5: "_half", 1.0: "_one"}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one width, exponent and seed.

    Raises ValueError for a size below 1.
    """
    shape = (config.samples, config.length, config.dimension)
    stream = generator(seed, NAME, "data", *shape)
    tokens = torch.randn(shape, generator=stream, dtype=torch.float64).to(device)
    targets = torch.randn(config.samples, generator=stream, dtype=torch.float64).to(device)
    parameters = wu_encoder.initial_parameters(
        config.width, config.dimension, generator=generator(seed, NAME, "weights", config.width),
        device=device,
    )  # fmt: skip
    p = config.logit_exponent
    kernel = wu_encoder.tangent_kernel(parameters, tokens, logit_exponent=p)
    largest = _largest(kernel.total())
    core = config.width**-p * parameters.Q.mT @ parameters.K
    quantities = {
        "query_key_trace": _mean_diagonal(kernel.Q + kernel.K),
        "value_trace": _mean_diagonal(kernel.V),
        "output_trace": _mean_diagonal(kernel.O),
        "query_key_share": _largest(kernel.Q + kernel.K) / largest,
        "logit_size": float((tokens @ core @ tokens.mT).square().mean().sqrt()),
    }
    if config.width <= config.trained_width:
        quantities |= _trained(config, parameters, tokens, targets, largest)
    return rows_of(NAME, config, seed, quantities)


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """The slope against m of a quantity at one exponent, named ``quantity_half`` or ``_one``."""
    name, _, suffix = quantity.rpartition("_")
    exponents = {ending: p for p, ending in _SUFFIX.items()}
    rows = frame[frame["logit_exponent"] == exponents[f"_{suffix}"]]
    return slope_estimate(rows, name, AGAINST)


def summarise(frame: pd.DataFrame, bands: Mapping[str, Band] = BANDS) -> pd.DataFrame:
    """Log-log slopes against m, mean and 95 % t-interval over seeds, and their bands."""
    return slope_table(bands, lambda quantity: estimate(frame, quantity))


def _trained(
    config: Config,
    parameters: wu_encoder.EncoderParameters,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    largest: float,
) -> dict[str, float]:
    r"""Relative change :math:`\|A_\tau - A_0\| / \|A_0\|` and loss after descent.

    The Hessian of :math:`L_n` has largest eigenvalue :math:`2 \lambda_{\max}(K) / n` in the
    tangent regime.
    """
    p = config.logit_exponent
    step = config.step_fraction * config.samples / (2 * largest)
    before = wu_encoder.attention_matrices(parameters, tokens, logit_exponent=p)
    start, _ = wu_encoder.loss_and_gradients(parameters, tokens, targets, logit_exponent=p)
    for _ in range(config.steps):
        _, gradients = wu_encoder.loss_and_gradients(parameters, tokens, targets, logit_exponent=p)
        parameters = parameters.moved(gradients, -step)
    loss, _ = wu_encoder.loss_and_gradients(parameters, tokens, targets, logit_exponent=p)
    after = wu_encoder.attention_matrices(parameters, tokens, logit_exponent=p)
    return {
        "attention_change": float((after - before).norm() / before.norm()),
        "loss_ratio": float(loss / start),
    }


def _mean_diagonal(kernel: torch.Tensor) -> float:
    return float(kernel.diagonal().mean())


def _largest(kernel: torch.Tensor) -> float:
    return float(torch.linalg.eigvalsh(kernel)[-1])
