r"""Constants of one head :math:`h = \sigma(U \cdot a)`, free of the sequence length T.

Throughout :math:`\|x_t\| \le b` (``token_bound``), :math:`\|q\| \le b_q` (``query_bound``, to be
multiplied by the scale of the logits if that is not 1), :math:`R = \|U\|` (``value_norm``) and
:math:`(s_0, s_1, s_2) = (\sup|\sigma|, \sup|\sigma'|, \sup|\sigma''|)`. Along a direction (V, Z)
of (U, W), with :math:`p = Zq`,

.. math:: s' = V \cdot \mu + U^\top M p, \qquad
    s'' = 2 V^\top M p + \kappa_3(U, p, p), \qquad h'' = \sigma''(s)\, s'^2 + \sigma'(s)\, s''.

Norms may be numbers or arrays; arrays give arrays. Derived here, from the system of
arXiv 2601.16514; the shape of the argument is the paper's, the constants are not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attention_dynamics.models.activations import ERF, ERF_PLAIN, TANH, Activation, get_activation
from attention_dynamics.validation import require_number

Real = NDArray[np.float64] | np.float64

KAPPA_STAR = 4 / (3 * math.sqrt(3))
r""":math:`\kappa_\star = 4/(3\sqrt3)`, the sharp bound of :math:`\kappa_3(u, p, p)` (Lemma 2)."""

_ROUNDING = 1e-6  # how far a computed norm may pass its bound


def covariance_trace_bound(pooled_norm: ArrayLike = 0.0, *, token_bound: float = 1.0) -> Real:
    r""":math:`\|M\|_2 \le \|M\|_F \le \operatorname{tr} M \le b^2 - \|\mu\|^2` (Lemma 1).

    Attained by the tokens :math:`\pm b\,e` with weights :math:`(1 \pm \|\mu\|/b)/2`, for every
    d >= 1 and T >= 2.

    Raises ValueError if ``token_bound`` is not positive, or :math:`\|\mu\|` is negative or, by more
    than the rounding of float32, above b.
    """
    mu = _norms("pooled_norm", pooled_norm)
    require_number("token_bound", token_bound, positive=True)
    if np.any(mu > token_bound * (1 + _ROUNDING)):
        raise ValueError(
            f"pooled_norm: expected at most token_bound = {token_bound}, got {float(np.max(mu))}; "
            "a mean of tokens is no longer than the longest token"
        )
    return token_bound**2 - np.minimum(mu, token_bound) ** 2


def third_cumulant_bound(*, token_bound: float = 1.0) -> float:
    r""":math:`|\kappa_3(u, p, p)| \le b^3 \kappa_\star` (Lemma 2).

    With :math:`\kappa_\star = 4/(3\sqrt3)`, for unit u, p and every T, d. Attained by
    two tokens :math:`\pm b\,e` with :math:`u = p = e` and weights r, 1 - r,
    :math:`r = (3 - \sqrt3)/6`.

    Raises ValueError if ``token_bound`` is not positive.
    """
    require_number("token_bound", token_bound, positive=True)
    return KAPPA_STAR * token_bound**3


def head_lipschitz(
    value_norm: ArrayLike, s1: float = 1.0, *, token_bound: float = 1.0, query_bound: float = 1.0
) -> Real:
    r""":math:`\|\nabla_{U,W} h\| \le s_1 \max(b,\; b^2 b_q R)` (Lemma 3).

    Sharp: :math:`\|\nabla_{U,W} h\|^2 = \sigma'^2 (\|a\|^2 + \|MU\|^2\|q\|^2)` is at most
    :math:`s_1^2 (a^2 + (b^2 - a^2)^2 R^2 b_q^2)`, convex in :math:`a^2`, hence largest at
    :math:`a = b` (equal tokens) or at :math:`a = 0` (antipodal tokens along U).

    Raises ValueError if a norm, a bound or ``s1`` is negative or not finite.
    """
    R = _norms("value_norm", value_norm)
    require_number("token_bound", token_bound, positive=True)
    require_number("query_bound", query_bound)
    require_number("s1", s1)
    return s1 * np.maximum(token_bound, token_bound**2 * query_bound * R)


def activation_curvature(
    first: ArrayLike, second: ArrayLike, activation: str | Activation = "tanh"
) -> Real:
    r""":math:`q_\sigma(A, B) = \sup_s |\sigma''(s)|\, A + |\sigma'(s)|\, B \le s_2 A + s_1 B`.

    ``first`` is A, a bound of :math:`s'^2`, and ``second`` is B, a bound of :math:`|s''|`. Exact
    for the activations of the library; for any other one the right-hand side is returned.

    - tanh: :math:`q = 2t(1-t^2)A + (1-t^2)B` at
      :math:`t = \tanh s = (-B + \sqrt{B^2 + 12A^2})/(6A)`;
    - erf(s/√2): :math:`q = \sqrt{2/\pi}\, e^{-s^2/2}(sA + B)` at
      :math:`s = (-B + \sqrt{B^2 + 4A^2})/(2A)`; erf(s) is erf(√2 s/√2), so
      :math:`q(A, B) = q_{\mathrm{erf}}(2A, \sqrt2 B)`.

    Raises ValueError if A or B is negative or not finite, or the activation is unknown.
    """
    sigma = get_activation(activation)
    A, B = np.broadcast_arrays(_norms("first", first), _norms("second", second))
    if sigma == TANH:
        t = _positive_root(A, B, 12.0)
        return (1 - t**2) * (2 * t * A + B)
    if sigma in (ERF, ERF_PLAIN):
        if sigma == ERF_PLAIN:
            A, B = 2 * A, math.sqrt(2) * B
        s = _positive_root(A, B, 4.0)
        return math.sqrt(2 / math.pi) * np.exp(-(s**2) / 2) * (s * A + B)
    _, s1, s2 = sigma.bounds
    return s2 * A + s1 * B


def head_smoothness(
    value_norm: ArrayLike,
    activation: str | Activation = "tanh",
    *,
    token_bound: float = 1.0,
    query_bound: float = 1.0,
) -> Real:
    r""":math:`|h''| \le q_\sigma(\max(b, b^2 b_q R)^2,\; \lambda(R))` along unit (V, Z) (Lemma 4).

    .. math:: \lambda(R) = \tfrac12\bigl(\kappa R + \sqrt{\kappa^2 R^2 + 4 b^4 b_q^2}\bigr),
        \qquad \kappa = b^3 b_q^2 \kappa_\star,

    the larger eigenvalue of :math:`2 b^2 b_q \|V\|\|Z\| + \kappa R \|Z\|^2`. Not sharp: the two
    terms of h'' are not largest together.

    Raises ValueError if a norm or bound is negative or not finite, or the activation is unknown.
    """
    R = _norms("value_norm", value_norm)
    slope = head_lipschitz(R, token_bound=token_bound, query_bound=query_bound)
    kappa_R = third_cumulant_bound(token_bound=token_bound) * query_bound**2 * R
    curvature = (kappa_R + np.hypot(kappa_R, 2 * token_bound**2 * query_bound)) / 2
    return activation_curvature(slope**2, curvature, activation)


def block_slope(
    value_norm: ArrayLike,
    radius_U: float,
    radius_W: float,
    *,
    token_bound: float = 1.0,
    query_bound: float = 1.0,
) -> Real:
    r""":math:`P_r(R) = \sup_{0 \le a \le b} r_u a + r_w b_q R (b^2 - a^2) \ge |s'|`.

    Over :math:`\|V\| \le r_u`, :math:`\|Z\|_F \le r_w`. With :math:`k = r_w b_q R`:
    :math:`P_r = k b^2 + r_u^2/(4k)` if :math:`2 k b \ge r_u`, and :math:`r_u b` otherwise. Sharp.

    Raises ValueError if a norm, radius or bound is negative or not finite.
    """
    R = _norms("value_norm", value_norm)
    require_number("radius_U", radius_U)
    require_number("radius_W", radius_W)
    require_number("token_bound", token_bound, positive=True)
    require_number("query_bound", query_bound)
    k = radius_W * query_bound * R
    inside = 2 * k * token_bound >= radius_U
    safe = np.where(inside & (k > 0), k, 1.0)
    return np.where(
        inside & (k > 0), k * token_bound**2 + radius_U**2 / (4 * safe), radius_U * token_bound
    )[()]


def block_curvature(
    value_norm: ArrayLike,
    radius_U: float,
    radius_W: float,
    activation: str | Activation = "tanh",
    *,
    token_bound: float = 1.0,
    query_bound: float = 1.0,
) -> Real:
    r"""
    .. math:: Q_r(R) = q_\sigma\bigl(P_r(R)^2,\; 2 b^2 b_q r_u r_w + \kappa R r_w^2\bigr)
        \ge |h''|.

    Over :math:`\|V\| \le r_u`, :math:`\|Z\|_F \le r_w`, with
    :math:`\kappa = b^3 b_q^2 \kappa_\star`.

    Raises ValueError if a norm, radius or bound is negative or not finite, or the activation is
    unknown.
    """
    R = _norms("value_norm", value_norm)
    slope = block_slope(R, radius_U, radius_W, token_bound=token_bound, query_bound=query_bound)
    kappa = third_cumulant_bound(token_bound=token_bound) * query_bound**2
    curvature = 2 * token_bound**2 * query_bound * radius_U * radius_W + kappa * R * radius_W**2
    return activation_curvature(slope**2, curvature, activation)


def _positive_root(A: Real, B: Real, factor: float) -> Real:
    """Positive root of (factor/4) A x^2 + B x - A = 0, without cancellation or overflow."""
    denominator = B + np.hypot(B, math.sqrt(factor) * A)
    return 2 * A / np.where(denominator > 0, denominator, 1.0)


def _norms(name: str, value: ArrayLike) -> Real:
    norms = np.asarray(value, dtype=np.float64)
    if not np.all(np.isfinite(norms) & (norms >= 0)):
        bad = norms[~(np.isfinite(norms) & (norms >= 0))].flat[0]
        raise ValueError(f"{name}: expected finite numbers >= 0, got {bad}; pass a norm or radius")
    return norms[()]
