r"""From the training loss to the loss on new sequences, at every point of the projection set.

With :math:`L(\phi) = \mathbb E(f(X; \phi) - y)^2` over the law of the samples, which are
independent of :math:`\phi_0` and of each other, :math:`\|x_t\| \le b`, :math:`|y| \le Y` and
:math:`S = F + Y`:

.. math:: \sup_{\Omega_\rho} (L - L_n) \le 4S\Bigl(\frac{\mathcal R}{\sqrt n}
    + \frac{E_{\mathrm{lin}}}{\sqrt m}\Bigr) + S^2 \sqrt{\frac{\log(1/\delta)}{2n}}.

Proof: losses lie in :math:`[0, S^2]`, so McDiarmid's inequality leaves the expectation of the
supremum; symmetrisation doubles the Rademacher complexity, and the square, 2S-Lipschitz, is
contracted away (Ledoux and Talagrand); f differs from :math:`f_{\mathrm{lin}}` by
:math:`E_{\mathrm{lin}}/\sqrt m`; and the complexity of :math:`f_{\mathrm{lin}}`, whose parameters
decouple over heads and blocks, is at most :math:`\mathcal R/\sqrt n`. Neither T nor the number of
parameters enters. The bound is uniform: it covers averaged, best, early-stopped and stochastic
iterates. Derived here; arXiv 2601.16514 bounds the training loss only.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.approximation import independent_heads, require_probability
from attention_dynamics.theory.bounds import InputBounds, NetworkConstants, require_inputs
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import require_integer, require_number

_REMEDY = "a free block has infinite complexity: pass the radius it stayed within"


def tangent_complexity(
    initial: Parameters,
    radii: Radii,
    *,
    inputs: InputBounds,
    activation: str | Activation = "tanh",
) -> float:
    r"""
    .. math:: \mathcal R = s_0\rho_c + s_1 b\, \frac1m\sum_i |c_i^0|
        \sqrt{\rho_u^2 + b^2 b_q^2 \rho_w^2 \|U_i^0\|^2}, \qquad
        \mathbb E_\varepsilon \sup_{\Omega_\rho} \frac1n\sum_j \varepsilon_j f_{\mathrm{lin}}(X_j)
        \le \frac{\mathcal R}{\sqrt n},

    at initialisation, for every n sequences. Each block of each head contributes its radius times
    the root of :math:`\sum_j \|\nabla f(X_j)\|^2`; over the samples
    :math:`\rho_u\sqrt{\overline{a^2}} + \rho_w b_q R\sqrt{\overline{(b^2 - a^2)^2}}` is largest
    when :math:`a^2 \in \{0, b^2\}`, which is the square root above and not the sum
    :math:`\rho_u + b b_q \rho_w R`. Unit: that of f.

    Raises ValueError if a radius is None, TypeError if ``radii`` or ``inputs`` is something else.
    """
    rho_c, rho_U, rho_W = bounded_radii(radii, remedy=_REMEDY)
    require_inputs(inputs)
    initial.require_valid("initial")
    b, b_q = inputs
    s0, s1, _ = get_activation(activation).bounds
    norms = initial.to(dtype=torch.float64, device="cpu").block_norms()
    heads = norms.c.numpy() * np.hypot(rho_U, b * b_q * rho_W * norms.U.numpy())
    return s0 * rho_c + s1 * b * float(np.mean(heads))


def expected_tangent_complexity(
    heads: int,
    radii: Radii,
    *,
    delta: float,
    inputs: InputBounds,
    activation: str | Activation = "tanh",
) -> float:
    r"""
    .. math:: \mathcal R = s_0\rho_c + s_1 b \sqrt{\rho_u^2 + b^2 b_q^2 \rho_w^2}
        + s_1 b^2 b_q \rho_w \sqrt{\frac{4\log(1/\delta')}{m}},

    a priori: with probability at least :math:`1 - \delta'` (``delta``) over the symmetric
    initialisation, whatever the law of the samples. **No d**: M depends on W and not on U, so
    :math:`\mathbb E_U\|MU\|^2 = \operatorname{tr} M^2 \le (b^2 - a^2)^2` as if :math:`\|U\| = 1`,
    and the average over the m/2 pairs of heads is a Lipschitz function of Gaussians.

    Raises ValueError for odd heads, a radius that is None, or delta outside (0, 1), TypeError if
    ``radii`` or ``inputs`` is something else.
    """
    N = independent_heads(heads, paired=True)
    require_probability("delta", delta)
    rho_c, rho_U, rho_W = bounded_radii(radii, remedy=_REMEDY)
    require_inputs(inputs)
    b, b_q = inputs
    s0, s1, _ = get_activation(activation).bounds
    deviation = math.sqrt(2 * math.log(1 / delta) / N)
    return s0 * rho_c + s1 * b * (math.hypot(rho_U, b * b_q * rho_W) + b * b_q * rho_W * deviation)


class GeneralisationBound(NamedTuple):
    r""":math:`4S\mathcal R/\sqrt n`, :math:`4SE_{\mathrm{lin}}/\sqrt m`, the deviation, their sum.

    In the unit of the loss; ``total`` bounds :math:`L - L_n` with probability at least
    :math:`1 - \delta` over the samples.
    """

    complexity: float
    linearisation: float
    deviation: float
    total: float


def generalisation_bound(
    constants: NetworkConstants,
    complexity: float,
    samples: int,
    *,
    target_bound: float,
    delta: float,
    clipped: bool = False,
) -> GeneralisationBound:
    r"""
    .. math:: L(\phi) - L_n(\phi) \le 4S\Bigl(\frac{\mathcal R}{\sqrt n}
        + \frac{E_{\mathrm{lin}}}{\sqrt m}\Bigr) + S^2\sqrt{\frac{\log(1/\delta)}{2n}}
        \quad\text{for all } \phi \in \Omega_\rho, \qquad S = F + Y.

    ``constants`` are those of the projection set, a priori or at initialisation, ``complexity`` is
    :math:`\mathcal R` (:func:`tangent_complexity`, :func:`expected_tangent_complexity`),
    ``target_bound`` is Y. With ``clipped`` the prediction is f cut off at :math:`\pm Y`, its
    population loss is compared with the training loss of f itself, and S = 2Y replaces F + Y: the
    cut brings no prediction further from a target. A symmetric initialisation is assumed, so that
    :math:`|f| \le F`.

    Raises ValueError for no samples, delta outside (0, 1) or a negative number.
    """
    require_integer("samples", samples, minimum=1)
    require_probability("delta", delta)
    require_number("complexity", complexity)
    require_number("target_bound", target_bound)
    S = target_bound + (target_bound if clipped else constants.output)
    terms = (
        4 * S * complexity / math.sqrt(samples),
        4 * S * constants.linearisation_error,
        S**2 * math.sqrt(math.log(1 / delta) / (2 * samples)),
    )
    return GeneralisationBound(*terms, sum(terms))
