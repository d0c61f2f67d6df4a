r"""Attention over T Gaussian tokens: exact moments of the pooled token, for every T.

For tokens :math:`z_t \sim N(0, S)` and logits :math:`z_t^\top b` of variance
:math:`s^2 = b^\top S b`, everything the pooled token does on average is said by two numbers,

.. math::
    \pi_T(s) = \mathbb E\, p_2, \qquad \chi_T(s) = \mathbb E\,[p_3 - p_2^2] \ge 0, \qquad
    p_j = \sum_t \alpha_t^j, \quad \alpha = \mathrm{softmax}(s\,q), \quad q \sim N(0, I_T),

since by Stein's identity (chapter on finite context)

.. math::
    \mathbb E\,\mu = (1 - \pi_T)\,S b, \qquad
    \mathbb E\,(\mu - Sb)(\mu - Sb)^\top
      = \pi_T\,S + (\pi_T - 6\chi_T)\,S b\,b^\top S .

Both numbers are integrals in two variables and are computed here for T up to 1e100.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from torch import Tensor

from attention_dynamics.models import regression
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors
from attention_dynamics.validation import require_matrix

__all__ = [
    "CollisionMoments",
    "collision_moments",
    "context_excess",
    "context_exponent",
    "mean_collision_moments",
    "sampled_excess",
]

LARGEST_LENGTH = 1e100
LARGEST_DEVIATION = 40.0
LARGEST_NORM = 5.0  # eight deviations of the logits' deviation are still in reach
_SPLINE_STEP, _SPLINE_NODES = 0.125, 49  # the largest step, the fewest nodes


class CollisionMoments(NamedTuple):
    r""":math:`\pi_T(s)` and :math:`\chi_T(s)`, one entry a length."""

    second: NDArray[np.float64]
    spread: NDArray[np.float64]


def collision_moments(deviation: float, lengths: Sequence[float]) -> CollisionMoments:
    r"""
    .. math:: \pi_T(s) = T \int_0^\infty \lambda\,\mathbb E[w^2 e^{-\lambda w}]\,
        \psi(\lambda)^{T-1}\,d\lambda, \qquad \psi(\lambda) = \mathbb E\,e^{-\lambda w},
        \quad w = e^{s q}, \quad q \sim N(0, 1),

    from :math:`W^{-2} = \int_0^\infty \lambda e^{-\lambda W} d\lambda` and independence, and
    :math:`\chi_T` alike from :math:`W^{-3}`, :math:`W^{-4}`. ``deviation`` is s, ``lengths`` are T.

    All integrands are positive and smooth in :math:`\log\lambda` and :math:`s q`, where the
    trapezoidal rule converges exponentially; the relative error of :math:`\pi_T` is below 1e-7.

    Raises ValueError for a deviation outside [0, 40] or a length outside [1, 1e100].
    """
    T = np.asarray(lengths, dtype=float)
    if not 0 <= deviation <= LARGEST_DEVIATION:
        raise ValueError(f"deviation must lie in [0, {LARGEST_DEVIATION:g}], got {deviation}")
    if T.ndim != 1 or T.size == 0 or not ((T >= 1) & (T <= LARGEST_LENGTH)).all():
        raise ValueError(f"lengths must be a list of numbers in [1, 1e100], got {lengths}")
    if deviation < 0.01:  # to second order in s
        gain = deviation**2 * (1 - 1 / T)
        return CollisionMoments((1 + gain) / T, gain / T**2)
    return _integrated(deviation, T)


def mean_collision_moments(
    norm: float, lengths: Sequence[float], *, nodes: int = 160
) -> CollisionMoments:
    r"""
    .. math:: \mathbb E\,\pi_T(v\lvert g\rvert), \qquad
        \mathbb E\,\bigl[(v g)^2\,\chi_T(v\lvert g\rvert)\bigr], \qquad g \sim N(0, 1),

    the averages over Gaussian queries when :math:`V` has one singular value v, ``norm``.
    Midpoint rule in :math:`s = v\lvert g\rvert`, as far as nine deviations of the tilted or the
    plain Gaussian reach, and beyond :math:`s^2 = 2\log T`, where one token takes all.

    Raises ValueError for a norm outside (0, 5], or lengths as in :func:`collision_moments`.
    """
    if not 0 < norm <= LARGEST_NORM:
        raise ValueError(f"norm must be positive and at most {LARGEST_NORM:g}, got {norm}")
    saturated = 1.6 * math.sqrt(2 * math.log(max(max(lengths), 2.0)))
    tilted = 9 * norm / math.sqrt(1 - 2 * norm**2) if norm**2 < 0.5 else math.inf
    end = min(tilted, max(9 * norm, saturated), LARGEST_DEVIATION)
    s = (np.arange(nodes) + 0.5) * end / nodes
    weights = np.exp(-((s / norm) ** 2) / 2) * math.sqrt(2 / math.pi) / norm * end / nodes
    table = [collision_moments(float(value), lengths) for value in s]
    second = sum(w * row.second for w, row in zip(weights, table, strict=True))
    spread = sum(w * x**2 * row.spread for w, x, row in zip(weights, s, table, strict=True))
    return CollisionMoments(np.asarray(second), np.asarray(spread))


def context_exponent(norm: float) -> float:
    r"""
    .. math:: \gamma(v) = \begin{cases} 1 & v^2 \le \tfrac12, \\
        \sqrt{\tfrac14 + v^{-2}} - \tfrac12 & v^2 \ge \tfrac12, \end{cases}

    the power of 1/T with which the finite-context excess vanishes at a population optimum, up to
    powers of log T; v is :math:`\lVert V \rVert`. Raises ValueError for a norm that is not
    positive.
    """
    if not 0 < norm < math.inf:
        raise ValueError(f"norm must be positive, got {norm}")
    return 1.0 if norm**2 <= 0.5 else math.sqrt(0.25 + norm**-2) - 0.5


def context_excess(
    factors: Factors,
    problem: RegressionProblem,
    queries: Float[Tensor, "n d"],
    length: int,
    *,
    centred: bool = False,
) -> Float[Tensor, " n"]:
    r"""
    .. math::
        \tfrac12\,\pi_T \operatorname{tr}(A S A^\top)
        + \tfrac12(\pi_T - 6\chi_T)\lVert Cx\rVert^2
        - \pi_T\,\langle (C - M_\star)x,\,Cx\rangle, \qquad C = A S B^\top,

    one value a query: the expected loss at x over fresh contexts of T tokens, less its limit
    :math:`\tfrac12\lVert (C - M_\star) x\rVert^2`. Exact, with :math:`\pi_T` and :math:`\chi_T` at
    :math:`s^2 = x^\top B S B^\top x`, interpolated by a spline (relative error below 1e-4; autograd
    sees constants). ``centred``: each context has its own mean removed, and the first
    :math:`\pi_T` becomes :math:`\pi_T - 1/T`.

    Raises ValueError for shapes that do not fit, batched factors or s above 40.
    """
    factors.require_valid()
    if factors.batch_shape:
        raise ValueError(f"factors must not be batched, got batch shape {factors.batch_shape}")
    require_matrix("queries", queries, ("n", "d"), {"d": factors.B.shape[-2]})
    S, target = problem.token_covariance, problem.target
    b = queries @ factors.B
    s = ((b @ S) * b).sum(dim=-1).clamp_min(0).sqrt()
    moments = _splined(s.detach().cpu().numpy(), length)
    pi, chi = (torch.as_tensor(block, dtype=s.dtype, device=s.device) for block in moments)
    output = b @ S @ factors.A.mT
    error = output - queries @ target.mT
    tokens = torch.trace(factors.A @ S @ factors.A.mT)
    own = pi - 1 / length if centred else pi
    squared, crossed = output.square().sum(dim=-1), (error * output).sum(dim=-1)
    return 0.5 * own * tokens + 0.5 * (pi - 6 * chi) * squared - pi * crossed


def sampled_excess(
    factors: Factors,
    problem: RegressionProblem,
    queries: Float[Tensor, "n d"],
    tokens: Float[Tensor, "n T k"],
) -> Float[Tensor, " n"]:
    r"""
    .. math:: \tfrac12\lVert A\delta\rVert^2 + \langle (C - M_\star)x,\ A(\delta - h)\rangle
        + \mathbb 1_{s^2 < 1}\,\tfrac12\bigl(\mathbb E\lVert Ah\rVert^2 - \lVert Ah\rVert^2\bigr),

    .. math:: \delta = \mu(b) - Sb, \qquad
        h = \tfrac1T \sum_t e^{z_t^\top b - s^2/2}(z_t - Sb), \qquad
        \mathbb E\lVert Ah\rVert^2
          = \tfrac1Te^{s^2}\bigl(\operatorname{tr}(ASA^\top) + \lVert Cx\rVert^2\bigr),

    one value a query with a context of its own: an unbiased sample of :func:`context_excess`, with
    h, whose mean is zero and whose square has the mean above, as a control variate. ``tokens`` are
    N(0, S), not centred.
    """
    S, b = problem.token_covariance, queries @ factors.B
    limit = b @ S
    squared = (limit * b).sum(dim=-1)
    pooled = regression.attend(factors, queries, tokens, validate=False)
    weights = ((tokens @ b[..., None])[..., 0] - squared[..., None] / 2).exp()
    h = (weights[..., None, :] @ tokens)[..., 0, :] / tokens.shape[-2]
    h = (h - weights.mean(dim=-1, keepdim=True) * limit) @ factors.A.mT
    noise, output = (pooled - limit) @ factors.A.mT, limit @ factors.A.mT
    crossed = ((output - queries @ problem.target.mT) * (noise - h)).sum(dim=-1)
    mean = torch.trace(factors.A @ S @ factors.A.mT) + output.square().sum(dim=-1)
    mean = mean * squared.exp() / tokens.shape[-2]
    control = torch.where(squared < 1, mean - h.square().sum(dim=-1), 0.0)
    return 0.5 * (noise.square().sum(dim=-1) + control) + crossed


def _splined(s: NDArray[np.float64], length: int) -> tuple[NDArray[np.float64], ...]:
    """The two moments at many deviations: splines in s of log pi and of chi / pi."""
    logarithm, ratio = _splines(math.ceil(2 * max(float(s.max()), 0.1)) / 2, length)
    pi = np.exp(logarithm(s))
    return pi, pi * ratio(s)


@lru_cache(maxsize=128)
def _splines(largest: float, length: int) -> tuple[CubicSpline, CubicSpline]:
    nodes = np.linspace(0.0, largest, max(_SPLINE_NODES, math.ceil(largest / _SPLINE_STEP) + 1))
    table = [collision_moments(float(node), (length,)) for node in nodes]
    second = np.array([row.second[0] for row in table])
    ratio = np.array([row.spread[0] for row in table]) / second
    even = ((1, 0.0), "not-a-knot")  # both functions are
    return (
        CubicSpline(nodes, np.log(second), bc_type=even),
        CubicSpline(nodes, ratio, bc_type=even),
    )


def _integrated(s: float, T: NDArray[np.float64]) -> CollisionMoments:
    """The trapezoidal rule in l = log(lambda) and u = s q, one step width for both."""
    step = min(0.35, 0.9 * s)
    # tokens matter up to q = 4 s + 9 and as far as T of them reach; beyond, e^{-lambda w} is 1 or 0
    low, high = -math.log(T.max()) - s**2 - 25, 9 * s + 6
    log_rate = np.arange(math.floor(low / step), math.ceil(high / step) + 1) * step
    top = min((4 * s + 9) * s, 6 - low)
    u = np.arange(math.floor(-9 * s / step), math.ceil(top / step) + 1) * step
    density = np.exp(-((u / s) ** 2) / 2) * step / (s * math.sqrt(2 * math.pi))
    y = np.arange(log_rate.size + u.size - 1) * step + log_rate[0] + u[0]
    scaled = np.exp(np.minimum(y, 700.0))  # lambda w

    def averaged(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.convolve(values, density[::-1], "valid")

    # E[(lambda w)^j e^{-lambda w}], and 1 - psi without cancellation
    powers = [averaged(np.exp(np.maximum(j * y - scaled, -745.0))) for j in (2, 3, 4)]
    missing = averaged(-np.expm1(-scaled))
    log_psi = np.log1p(-np.minimum(missing, 1 - 1e-16))[None]
    others, rest = (np.exp(np.maximum(T[:, None] - j, 0.0) * log_psi) for j in (1, 2))
    second = T * step * (others * powers[0]).sum(axis=1)
    third = T * step * (others * powers[1]).sum(axis=1) / 2
    pairs = (others * powers[2]).sum(axis=1) + (T - 1) * (rest * powers[0] ** 2).sum(axis=1)
    return CollisionMoments(second, np.maximum(third - T * step * pairs / 6, 0.0))
