r"""How fast the residual layer can change on a ball of parameters: every constant in closed form.

All bounds hold for every attention matrix that the ball allows, and all are crude on purpose: each
is one line of the triangle inequality. Derived here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.residual import ResidualConfig, ResidualParameters
from attention_dynamics.validation import require_number


class BallConstants(NamedTuple):
    r"""Bounds on the ball :math:`\|\theta - \theta_0\| \le \rho`, for directions of norm 1.

    ``output`` :math:`\bar z \ge \|Z\|_2`; ``zeta``, ``zeta_2`` of the first and second derivative
    of Z; ``e``, ``e_2`` of those of H; ``beta``, ``lam`` of those of F; ``S`` of the Hessian of L.
    """

    output: float
    zeta: float
    zeta_2: float
    e: float
    e_2: float
    beta: float
    lam: float
    S: float


def ball_constants(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "n T d"],
    config: ResidualConfig,
    *,
    rho: float,
    error: float,
) -> BallConstants:
    r"""With :math:`w_\bullet = \|W_\bullet^0\|_2 + \rho`, :math:`x = \max_i\|X_i\|_2`,
    :math:`x_s` the norm of the stacked tokens, :math:`c_x = d_k^{-1/2}(\sum_i\|X_i\|_2^4)^{1/2}`,
    :math:`q = \sqrt{w_Q^2 + w_K^2}` and :math:`b = \sup|\varphi''|`,

    .. math:: \zeta &= \sqrt{(\tfrac12 x w_V c_x q)^2 + T x_s^2}, &
        \bar z &= x_s(r_a + \sqrt T w_V), \\
        \zeta_2 &= x w_V(c_x^2q^2 + \tfrac{c_x}2) + \tfrac12 x c_x q, &
        e &= w_1\zeta + \bar z, \\
        e_2 &= b e^2 + w_1\zeta_2 + 2\zeta, &
        \beta &= w_2 e + \bar z(\|W_1^0\|_F + \rho) + r_f\zeta, \\
        \lambda &= w_2 e_2 + 2e + r_f\zeta_2, &
        S &= \beta^2 + (r_0 + \beta\rho)\lambda .

    Ingredients: :math:`\|\mathrm{diag}(p) - pp^\top\| \le \frac12`, the second derivative of
    softmax is at most 1 in a unit direction, and the rows of A have norm at most 1, so
    :math:`\|A\|_2 \le \sqrt T`. ``rho`` is the radius, ``error`` is :math:`r_0`. Nothing but
    numbers is checked.
    """
    require_number("rho", rho)
    require_number("error", error)
    largest = torch.linalg.matrix_norm(tokens, ord=2)
    x, stacked = float(largest.max()), _norm(tokens.flatten(-3, -2))
    c = config.logit_factor * float(largest.pow(4).sum().sqrt())
    Q, K, V, W1, W2 = (_norm(block) + rho for block in parameters)
    q, r_a = math.hypot(Q, K), float(config.attention_residual)
    r_f = float(config.feedforward_residual)
    spread = math.sqrt(tokens.shape[-2])
    zeta = math.hypot(x * V * c * q / 2, spread * stacked)
    output = stacked * (r_a + spread * V)
    zeta_2 = x * V * (c * c * q * q + c / 2) + x * c * q / 2
    e = W1 * zeta + output
    e_2 = config.curvature * e * e + W1 * zeta_2 + 2 * zeta
    hidden = output * (float(torch.linalg.matrix_norm(parameters.W1)) + rho)
    beta = W2 * e + hidden + r_f * zeta
    lam = W2 * e_2 + 2 * e + r_f * zeta_2
    S = beta * beta + (error + beta * rho) * lam
    return BallConstants(output, zeta, zeta_2, e, e_2, beta, lam, S)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, ord=2))
