r"""Constants of the network before the heads are drawn, from the law of the initialisation alone.

The constants of :func:`~attention_dynamics.theory.bounds.network_constants` are averages over the
heads of functions of :math:`\|U_i\|`. Here :math:`\|U_i\|` is replaced by what the Gaussian law
allows with probability :math:`1 - \delta'`, so that nothing has to be drawn, let alone trained.
"""

from __future__ import annotations

import math
from typing import Literal

from scipy import stats

from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.theory.approximation import (
    independent_heads,
    require_probability,
    value_radius,
)
from attention_dynamics.theory.bounds import (
    InputBounds,
    NetworkConstants,
    require_inputs,
    require_radii_above,
)
from attention_dynamics.theory.constants import (
    block_curvature,
    block_slope,
    head_lipschitz,
    third_cumulant_bound,
)
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import require_integer, require_one_of

Concentration = Literal["mean", "largest"]


def mean_square_radius(heads: int, dimension: int, delta: float) -> float:
    r"""
    .. math:: R_2^2 = \frac1N F^{-1}_{\chi^2_{dN}}(1 - \delta')
        \le d + 2\sqrt{\frac{2 d \log(1/\delta')}{m}} + \frac{4\log(1/\delta')}{m},
        \qquad N = m/2.

    :math:`P\bigl(\frac1m \sum_i \|U_i^0\|^2 \le R_2^2\bigr) = 1 - \delta'` exactly, for paired
    heads; ``delta`` is :math:`\delta'`. Returns :math:`R_2`, in the unit of U. Unlike
    :func:`~attention_dynamics.theory.approximation.value_radius` it has no :math:`\log m`. The
    elementary form is Laurent and Massart's (2000), :func:`mean_square_radius_bound`.

    Raises ValueError for odd or no heads, a dimension below 1, or delta outside (0, 1).
    """
    N = _pairs(heads, dimension, delta)
    return math.sqrt(float(stats.chi2.isf(delta, N * dimension)) / N)


def mean_square_radius_bound(heads: int, dimension: int, delta: float) -> float:
    r""":math:`R_2 \le \sqrt{d + 2\sqrt{2 d \log(1/\delta')/m} + 4\log(1/\delta')/m}`.

    Raises ValueError for odd or no heads, a dimension below 1, or delta outside (0, 1).
    """
    _pairs(heads, dimension, delta)
    t = math.log(1 / delta)
    return math.sqrt(dimension + 2 * math.sqrt(2 * dimension * t / heads) + 4 * t / heads)


def a_priori_constants(
    heads: int,
    dimension: int,
    radii: Radii,
    *,
    delta: float,
    inputs: InputBounds,
    transport_norms: TransportNorms | None = None,
    activation: str | Activation = "tanh",
    concentration: Concentration = "mean",
) -> NetworkConstants:
    r"""
    .. math:: C = 1 + \rho_c/\sqrt m, \qquad \bar R = R + \rho_u/\sqrt m, \qquad
        G^2 = s_0^2 + C^2\, \overline{L^2}, \qquad F = s_0 \rho_c + s_1 \overline{P_\rho}, \\
        E_{\mathrm{lin}} = \rho_c s_1 \overline{P_\rho} + \tfrac12 \overline{Q_\rho}, \qquad
        E_{\mathrm{rem}} = (\rho_c + \nu_c) s_1 \overline{P_{\rho+\nu}}
        + \tfrac12 C\, \overline{Q_{\rho+\nu}},

    bounds of the constants of :func:`~attention_dynamics.theory.bounds.network_constants` that hold
    with probability at least :math:`1 - \delta'` (``delta``) over the symmetric initialisation.

    - ``"largest"``: R is ``value_radius``, the largest of the heads, and
      :math:`\overline{L^2} = s_1^2\max(b, b^2 b_q \bar R)^2`,
      :math:`\overline{P} = P(\bar R)`, :math:`\overline{Q} = Q(\bar R)`;
    - ``"mean"``: R is :func:`mean_square_radius`, free of :math:`\log m`, and by Jensen and
      Minkowski, with :math:`P_r(x)^2 \le b^2 r_u^2 + b^4 b_q^2 r_w^2 x^2` (Cauchy and Schwarz,
      since :math:`a^2 + (1-a^2)^2 \le 1`), :math:`\kappa = b^3 b_q^2 \kappa_\star`,

    .. math:: \overline{L^2} = s_1^2 (b^2 + b^4 b_q^2 \bar R^2), \quad
        \overline{P_r} = \sqrt{b^2 r_u^2 + b^4 b_q^2 r_w^2 \bar R^2}, \quad
        \overline{Q_r} = s_2 \overline{P_r}^2 + s_1(2 b^2 b_q r_u r_w + \kappa \bar R r_w^2).

    Units: those of f, as in :class:`~attention_dynamics.theory.bounds.NetworkConstants`. No T.
    Derived here; arXiv 2601.16514 has :math:`D = d + \log(m/\delta')` in the place of
    :math:`\bar R^2`.

    Raises ValueError for odd heads, sizes below 1, delta outside (0, 1), a radius that is None or
    below its transport norm, TypeError if ``radii`` or ``inputs`` is something else.
    """
    require_one_of("concentration", concentration, ("mean", "largest"))
    rho = TransportNorms(
        *bounded_radii(radii, remedy="a block without projection has no a priori bound")
    )
    if transport_norms is not None:
        require_radii_above(rho, transport_norms)
    b = require_inputs(inputs)
    sigma, root = get_activation(activation), math.sqrt(heads)
    s0, s1, s2 = sigma.bounds
    of_heads = value_radius if concentration == "largest" else mean_square_radius
    R = of_heads(heads, dimension, delta) + rho.U / root
    C = 1 + rho.c / root
    kappa = third_cumulant_bound(token_bound=inputs.token_bound) * inputs.query_bound**2
    tokens, heads_bound = inputs.token_bound, inputs.token_bound**2 * inputs.query_bound

    def slope(r: TransportNorms) -> float:
        if concentration == "largest":
            return float(block_slope(R, r.U, r.W, **b))
        return math.hypot(tokens * r.U, heads_bound * r.W * R)

    def curvature(r: TransportNorms) -> float:
        if concentration == "largest":
            return float(block_curvature(R, r.U, r.W, sigma, **b))
        second = 2 * heads_bound * r.U * r.W + kappa * R * r.W**2
        return s2 * slope(r) ** 2 + s1 * second

    if concentration == "largest":
        lipschitz = float(head_lipschitz(R, s1, **b))
    else:
        lipschitz = s1 * math.hypot(tokens, heads_bound * R)
    remainder = None
    if transport_norms is not None:
        nu = transport_norms
        both = TransportNorms(rho.c + nu.c, rho.U + nu.U, rho.W + nu.W)
        remainder = both.c * s1 * slope(both) + 0.5 * C * curvature(both)
    return NetworkConstants(
        gradient_squared=s0**2 + C**2 * lipschitz**2,
        output=s0 * rho.c + s1 * slope(rho),
        linearisation=rho.c * s1 * slope(rho) + 0.5 * curvature(rho),
        remainder=remainder,
        heads=heads,
    )


def _pairs(heads: int, dimension: int, delta: float) -> int:
    N = independent_heads(heads, paired=True)
    require_integer("dimension", dimension, minimum=1)
    require_probability("delta", delta)
    return N
