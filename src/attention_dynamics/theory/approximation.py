r"""How well m random heads approximate a target of norm :math:`\nu`: no T, and no n in the mean."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.theory.bounds import InputBounds, require_inputs
from attention_dynamics.theory.constants import Real, block_slope
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.validation import require_integer


def value_radius(heads: int, dimension: int, delta: float, *, paired: bool = True) -> float:
    r""":math:`R_0^2 = F_{\chi^2_d}^{-1}\bigl((1 - \delta')^{1/N}\bigr)`.

    With N = m/2 pairs (N = m unpaired heads), :math:`P(\max_i \|U_i^0\| \le R_0) = 1 - \delta'`
    exactly; ``delta`` is :math:`\delta'`.

    Raises ValueError for sizes below 1, odd m of paired heads, or a delta outside (0, 1).
    """
    N = independent_heads(heads, paired)
    require_integer("dimension", dimension, minimum=1)
    require_probability("delta", delta)
    # Through the upper tail, where (1 - delta)^(1/N) would round to 1.
    tail = -math.expm1(math.log1p(-delta) / N)
    return math.sqrt(float(stats.chi2.isf(tail, dimension)))


def value_radius_bound(heads: int, dimension: int, delta: float, *, paired: bool = True) -> float:
    r""":math:`R_0 \le \sqrt d + \sqrt{2\log(N/\delta')} \le 2\sqrt D`.

    The elementary form, with :math:`D = d + \log(m/\delta')` and N = m/2 for paired heads, from
    the concentration of :math:`\|U\|` and a union bound.

    Raises ValueError for sizes below 1, odd m of paired heads, or a delta outside (0, 1).
    """
    N = independent_heads(heads, paired)
    require_integer("dimension", dimension, minimum=1)
    require_probability("delta", delta)
    return math.sqrt(dimension) + math.sqrt(2 * math.log(N / delta))


class ApproximationBound(NamedTuple):
    r"""Bounds of :math:`\max_j |e_j|` (``sup``, None without n) and of its root mean square.

    ``bias`` is the part of both that comes from cutting :math:`\|U\|` at ``value_radius``
    (:math:`R_0`), ``head_bound`` is B and ``second_moment`` is V.
    """

    sup: float | None
    rms: float
    bias: float
    head_bound: float
    second_moment: float
    value_radius: float


def approximation_bound(
    norms: TransportNorms,
    heads: int,
    dimension: int,
    *,
    delta: float,
    delta_prime: float,
    inputs: InputBounds,
    samples: int | None = None,
    activation: str | Activation = "tanh",
    paired: bool = True,
) -> ApproximationBound:
    r"""
    .. math:: \max_{j \le n} |e_j| \le B\sqrt{2\log(2n/\delta)/N} + \text{bias}, \qquad
        \Bigl(\tfrac1n \sum_j e_j^2\Bigr)^{1/2}
        \le \sqrt{V/N} + B\sqrt{2\log(1/\delta)/N} + \text{bias},

    each with probability at least :math:`1 - \delta - \delta'`, for
    :math:`e_j = \frac1m \sum_i z_i(X_j) - \tilde f(X_j; v)` and N = m/2 pairs (N = m unpaired
    heads). With :math:`g(R) = s_0\nu_c + s_1 P_\nu(R)`, which bounds :math:`|z|` at
    :math:`\|U\| = R`,

    .. math:: B = g(R_0), \quad V = \mathbb E\, g(\|U\|)^2, \quad
        \text{bias} = p\,(s_0\nu_c + s_1 b\,\nu_u)
        + s_1 b^2 b_q \nu_w\, \mathbb E[\|U\|\, 1\{\|U\| > R_0\}], \quad p = P(\|U\| > R_0).

    The maximum is Hoeffding's inequality and a union over the samples; the mean square is
    McDiarmid's inequality in :math:`L^2` of the samples, hence free of n. Both act on
    :math:`z\,1\{\|U\| \le R_0\}`, whose mean misses that of z by the bias. ``norms`` bound the
    transport map, see :meth:`.MultiAnchorTransport.sup_norm_bounds`; ``inputs`` come from
    :func:`~attention_dynamics.theory.bounds.input_bounds`, which checks the tokens.

    Raises ValueError for sizes below 1, odd m of paired heads, or probabilities outside (0, 1),
    TypeError if ``inputs`` is something else.
    """
    N, bounds = independent_heads(heads, paired), require_inputs(inputs)
    require_probability("delta", delta)
    require_probability("delta_prime", delta_prime)
    if samples is not None:
        require_integer("samples", samples, minimum=1)
    s0, s1, _ = get_activation(activation).bounds
    R0 = value_radius(heads, dimension, delta_prime, paired=paired)

    def g(R: Real) -> Real:
        return s0 * norms.c + s1 * block_slope(R, norms.U, norms.W, **bounds)

    B = float(g(np.float64(R0)))
    R, weights, density = _chi_rule(dimension, _kink(norms, inputs))
    V = float(np.sum(weights * density * g(R) ** 2))
    tail_mean = _chi_mean(dimension) * float(special.gammaincc((dimension + 1) / 2, R0**2 / 2))
    p = float(stats.chi.sf(R0, dimension))
    b, b_q = inputs
    bias = p * (s0 * norms.c + s1 * b * norms.U) + s1 * b**2 * b_q * norms.W * tail_mean
    sup = None
    if samples is not None:
        sup = B * math.sqrt(2 * math.log(2 * samples / delta) / N) + bias
    rms = math.sqrt(V / N) + B * math.sqrt(2 * math.log(1 / delta) / N) + bias
    return ApproximationBound(sup, rms, bias, B, V, R0)


def head_second_moment(
    norms: TransportNorms, *, inputs: InputBounds, activation: str | Activation = "tanh"
) -> float:
    r"""
    .. math:: \mathbb E\, z(X)^2 \le V_1 = g(1)^2 = \bigl(s_0\nu_c + s_1 P_\nu(1)\bigr)^2
        \quad\text{for every } X \text{ and every dimension } d.

    M depends on W only and U is independent of W, so
    :math:`\mathbb E_U \|MU\|^2 = \operatorname{tr} M^2 \le (b^2 - \|a\|^2)^2`: on average MU is as
    short as for :math:`\|U\| = 1`. Minkowski's inequality, first over U given W, then over W, gives
    the root. By Jensen :math:`|\tilde f(X; v)| \le g(1)` as well. Units: the target's, squared.
    Derived here; the rate of arXiv 2601.16514 has :math:`D = d + \log(m/\delta')` in its place.

    Raises TypeError if ``inputs`` is something else, ValueError for an unknown activation.
    """
    bounds = require_inputs(inputs)
    s0, s1, _ = get_activation(activation).bounds
    return (s0 * norms.c + s1 * float(block_slope(1.0, norms.U, norms.W, **bounds))) ** 2


class BernsteinBound(NamedTuple):
    r"""Bounds of :math:`\max_j |e_j|` (``sup``, None without n) and of its root mean square."""

    sup: float | None
    rms: float


def bernstein_approximation_bound(
    norms: TransportNorms,
    heads: int,
    *,
    delta: float,
    inputs: InputBounds,
    samples: int | None = None,
    activation: str | Activation = "tanh",
    paired: bool = True,
) -> BernsteinBound:
    r"""
    .. math:: \max_{j \le n} |e_j| \le r\bigl(\log(2n/\delta)\bigr), \qquad
        \Bigl(\tfrac1n \sum_j e_j^2\Bigr)^{1/2} \le r\bigl(\log(2/\delta)\bigr), \\
        r(t) = \inf_{\lambda > 0} \frac1\lambda \Bigl(\frac tN + \frac{\lambda^2 V_1}2
        + \mathbb E\, h\bigl(\lambda(2 g(1) + s_1 b^2 b_q \nu_w \max(\zeta, 0))\bigr)\Bigr)
        = \sqrt{\frac{2 V_1 t}N} + O\Bigl(\frac tN\Bigr), \qquad
        h(x) = e^x - 1 - x - \frac{x^2}2,

    :math:`\zeta` standard normal, each with probability at least :math:`1 - \delta`, for
    :math:`e_j`, g and N of :func:`approximation_bound` and :math:`V_1` of
    :func:`head_second_moment`. No d, no :math:`\log m`, no :math:`R_0`, no bias, no
    :math:`\delta'`.

    Proof: let :math:`\xi_i = z_i - \mathbb E z_i` in :math:`L^2` of the samples. Given W,
    :math:`\|z_i\| \le \bigl(\frac1n\sum_j (s_0\nu_c + s_1(\nu_u\|a_j\| + \nu_w b_q\|M_jU\|))^2
    \bigr)^{1/2}`, which is convex and :math:`s_1 b^2 b_q\nu_w`-Lipschitz in the Gaussian U, with
    mean at most g(1) as for :func:`head_second_moment`. So is its median (Kwapien), and by Borell's
    inequality :math:`\|\xi_i\|` is stochastically below the argument of h over :math:`\lambda`.
    Now :math:`\mathbb E \cosh(\lambda\|\sum_i \xi_i\|) \le \prod_i \bigl(1 +
    \mathbb E[e^{\lambda\|\xi_i\|} - 1 - \lambda\|\xi_i\|]\bigr)` (Pinelis 1994: the Hessian of
    :math:`\cosh\|x\|` is at most :math:`\cosh\|x\|`); Markov's inequality finishes. For one sample
    this is Bernstein's inequality, and a union over 2n signs gives the maximum. Every
    :math:`\lambda` gives a bound: the search for the best one costs no rigour.

    Raises ValueError for heads below 1, odd m of paired heads, or delta outside (0, 1), TypeError
    if ``inputs`` is something else.
    """
    N = independent_heads(heads, paired)
    require_probability("delta", delta)
    if samples is not None:
        require_integer("samples", samples, minimum=1)
    V = head_second_moment(norms, inputs=inputs, activation=activation)
    _, s1, _ = get_activation(activation).bounds
    growth = s1 * inputs.token_bound**2 * inputs.query_bound * norms.W

    def radius(t: float) -> float:
        if V == 0.0:
            return 0.0
        start = math.log(math.sqrt(2 * t / (N * V)))

        def at(log_rate: float) -> float:
            rate = math.exp(log_rate)
            higher = _exponential_remainder(2 * rate * math.sqrt(V), rate * growth)
            return (t / N + rate**2 * V / 2 + higher) / rate

        found = optimize.minimize_scalar(at, bounds=(start - 5.0, start), method="bounded")
        return float(found.fun)

    sup = None if samples is None else radius(math.log(2 * samples / delta))
    return BernsteinBound(sup, radius(math.log(2 / delta)))


def target_bound(
    norms: TransportNorms,
    dimension: int,
    *,
    inputs: InputBounds,
    activation: str | Activation = "tanh",
) -> float:
    r""":math:`|\tilde f(X; v)| \le Y = \mathbb E\, g(\|U\|)`, :math:`g = s_0\nu_c + s_1 P_\nu`.

    ``inputs`` as in :func:`approximation_bound`.

    Raises ValueError for a dimension below 1 or an unknown activation, TypeError if ``inputs`` is
    something else.
    """
    require_integer("dimension", dimension, minimum=1)
    bounds = require_inputs(inputs)
    s0, s1, _ = get_activation(activation).bounds
    R, weights, density = _chi_rule(dimension, _kink(norms, inputs))
    slope = block_slope(R, norms.U, norms.W, **bounds)
    return s0 * norms.c + s1 * float(np.sum(weights * density * slope))


def _chi_mean(dimension: int) -> float:
    return math.sqrt(2) * math.exp(math.lgamma((dimension + 1) / 2) - math.lgamma(dimension / 2))


def _kink(norms: TransportNorms, inputs: InputBounds) -> float:
    """Where the second derivative of P_nu jumps."""
    rise = 2 * inputs.token_bound * inputs.query_bound * norms.W
    return norms.U / rise if rise > 0 else math.inf


def _chi_rule(
    dimension: int, kink: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Nodes, weights and density of R = |U|, U standard Gaussian, with a cell edge at ``kink``."""
    centre = math.sqrt(dimension)
    R, weights = _cells(max(0.0, centre - 9.0), centre + 9.0, kink)
    return R, weights, stats.chi.pdf(R, dimension)


def _cells(
    low: float, high: float, kink: float = math.inf
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Composite Gauss-Legendre nodes and weights on [low, high]."""
    edges = np.linspace(low, high, 33)
    if low < kink < high:
        edges = np.sort(np.append(edges, kink))
    nodes, weights = special.roots_legendre(12)
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (1 + nodes)).ravel(), (half * weights).ravel()


def _exponential_remainder(base: float, growth: float) -> float:
    """Mean of h(base + growth max(zeta, 0)), h(x) = e^x - 1 - x - x^2/2 = x^3/6 1F1(1, 4, x)."""

    def weighted(x: Real, density: Real) -> Real:
        small = x < 1.0
        series = x**3 / 6 * special.hyp1f1(1.0, 4.0, np.where(small, x, 0.0))
        # The exponential is taken with the density, where neither overflows.
        with np.errstate(divide="ignore"):
            direct = np.exp(x + np.log(density)) - (1 + x + x**2 / 2) * density
        return np.where(small, density * series, direct)

    zeta, weights = _cells(0.0, growth + 10.0)
    above = weighted(base + growth * zeta, stats.norm.pdf(zeta))
    return float(np.sum(weights * above) + weighted(np.float64(base), np.float64(0.5)))


def independent_heads(heads: int, paired: bool) -> int:
    r"""N = m/2 for paired heads, N = m otherwise; ValueError for odd m of paired heads."""
    require_integer("heads", heads, minimum=2 if paired else 1)
    if paired and heads % 2:
        raise ValueError(
            f"heads: expected an even number of paired heads, got {heads}; pass paired=False for "
            "independent heads"
        )
    return heads // 2 if paired else heads


def require_probability(name: str, value: float) -> None:
    """Check that ``value`` lies strictly between 0 and 1."""
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name}: expected a probability in (0, 1), got {value}")
