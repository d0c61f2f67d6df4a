r"""Laws of growth: which width an error needs, and whether it grows like a power or a logarithm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import integrate, optimize, stats

from attention_dynamics.experiments.estimates import loglog_slope
from attention_dynamics.validation import require_integer


def width_needed(heads: Sequence[float], errors: Sequence[float], tolerance: float) -> float:
    r"""The width from which on the error stays at or below ``tolerance``.

    Piecewise linear in :math:`(\log m, \log\text{error})`, and of slope -1/2 beyond the widths.
    Raises ValueError for a tolerance or an error that is not positive.
    """
    if not tolerance > 0 or not min(errors) > 0:
        raise ValueError(f"tolerance and errors must be positive, got {tolerance} and {errors}")
    above = np.flatnonzero(np.asarray(errors) > tolerance)
    if above.size == 0 or above[-1] == len(errors) - 1:
        end = 0 if above.size == 0 else -1
        return float(heads[end] * (errors[end] / tolerance) ** 2)
    i = int(above[-1])
    share = math.log(errors[i] / tolerance) / math.log(errors[i] / errors[i + 1])
    return float(heads[i] * (heads[i + 1] / heads[i]) ** share)


class GrowthFits(NamedTuple):
    r"""Fits of :math:`\log m` by :math:`p\log n + \text{const}` and by :math:`\log(a + b\log n)`,
    two parameters each; residuals are mean squares in (per cent)\ :sup:`2`.
    """

    power: float
    power_residual: float
    log_residual: float


def growth_fits(samples: Sequence[float], widths: Sequence[float]) -> GrowthFits:
    r"""Both fits by least squares in :math:`\log m`; b is not negative.

    The two have as many parameters, so the smaller residual has the smaller AIC too. Raises
    ValueError for fewer than three sizes, or a value that is not positive.
    """
    if len(samples) < 3:
        raise ValueError(f"samples: expected at least 3 sizes, got {len(samples)}; two fit exactly")
    power = loglog_slope(samples, widths)
    x, y = np.log(samples) - math.log(min(samples)), np.log(widths)

    def residual(curve: np.ndarray) -> float:
        return float(1e4 * (y - curve).var())

    def of_offset(t: float) -> float:  # a + b log n = b (x + exp(t)), b by the mean
        return residual(np.log(x + math.exp(t)))

    grid = np.linspace(-8.0, 14.0, 89)
    best = grid[int(np.argmin([of_offset(t) for t in grid]))]
    near = optimize.minimize_scalar(of_offset, bounds=(best - 0.5, best + 0.5), method="bounded")
    return GrowthFits(power, residual(power * x), min(float(near.fun), of_offset(best)))


def expected_maximum(samples: int) -> float:
    r""":math:`\mathbb E \max_{j \le n} |G_j| = \int_0^\infty 1 - (1 - 2 \bar\Phi(x))^n\,dx` for
    independent standard normal variables.
    """
    require_integer("samples", samples, minimum=1)
    x = np.linspace(0.0, 10.0, 20001)
    below = np.append(0.0, np.exp(samples * np.log1p(-2 * stats.norm.sf(x[1:]))))
    return float(integrate.simpson(1 - below, x=x))


def independent_power(samples: Sequence[float]) -> float:
    r"""The exponent that a fit of :math:`n^p` gives if the errors of all samples are independent
    normal variables: the log-log slope of ``expected_maximum`` squared.
    """
    return loglog_slope(samples, [expected_maximum(int(n)) ** 2 for n in samples])
