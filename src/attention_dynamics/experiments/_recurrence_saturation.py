r"""Why a recurrent gradient does not explode on long tokens: the expected logarithm of a factor.

Back-propagation multiplies :math:`\delta_t` by :math:`u\,\sigma'(z_t)`,
:math:`z_t = w\cdot x_t + u\,h_{t-1}`, one factor a step. The product grows where the mean of
:math:`\log|u\,\sigma'(z_t)|` is positive. For tanh, :math:`\sigma' = \operatorname{sech}^2`.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from scipy import integrate
from torch import Tensor

from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.validation import require_number, require_shape


def log_slope(z: Tensor) -> Tensor:
    r""":math:`\log\tanh'(z) = 2\log\operatorname{sech} z`, without underflow for large z."""
    return 2.0 * (math.log(2.0) - z.abs() - torch.log1p(torch.exp(-2.0 * z.abs())))


def saturation_bound(u: float, norm: float) -> float:
    r"""
    .. math:: \lambda(u, r) = \log|u| + \mathbb E\,
        2\log\operatorname{sech}\bigl((r|g| - |u|)_+\bigr), \qquad g \sim \mathcal N(0, 1).

    For :math:`w \sim \mathcal N(0, I)`, a token with :math:`\|x_t\| \ge r` and whatever came before
    it, :math:`\mathbb E \log|u\,\sigma'(z_t)| \le \lambda(u, r)`: since :math:`|h_{t-1}| \le 1`,
    :math:`|z_t| \ge (|w\cdot x_t| - |u|)_+`. By quadrature. Raises ValueError for u = 0, a norm
    below 0 or one that is not finite.
    """
    require_number("abs(u)", abs(u), positive=True)
    require_number("norm", norm)
    size = abs(float(u))
    if norm == 0.0:
        return math.log(size)

    def weighted(g: float) -> float:
        beyond = norm * g - size
        slope = 2.0 * (math.log(2.0) - beyond - math.log1p(math.exp(-2.0 * beyond)))
        return slope * math.sqrt(2.0 / math.pi) * math.exp(-0.5 * g * g)

    start = size / norm
    # the density has its mass below 12, where what is left is far below rounding
    tail = integrate.quad(weighted, start, start + 12.0, epsabs=1e-12, epsrel=1e-11)[0]
    return math.log(size) + float(tail)


def mean_log_factor(
    parameters: RecurrentParameters, tokens: Float[Tensor, "n T d"]
) -> Float[Tensor, " m"]:
    r"""
    .. math:: \frac{1}{nT} \sum_{j,t} \log\bigl|u_i\,\sigma'(z_{i,j,t})\bigr|

    of each unit, (m,): the rate a step at which its gradients grow (> 0) or fade (< 0) along the
    tokens, for tanh. Minus infinity for u = 0. Raises ValueError for shapes that do not fit.
    """
    parameters.require_valid()
    require_shape("tokens", tokens, ("n", "T", "d"), {"d": parameters.dimension})
    w, u, _ = (block.double() for block in parameters)
    state = torch.zeros(len(tokens), parameters.units, dtype=torch.float64, device=u.device)
    total = torch.zeros_like(state)
    for x in tokens.double().unbind(dim=1):
        z = x @ w.mT + u * state
        total += log_slope(z)
        state = torch.tanh(z)
    return u.abs().log() + total.mean(dim=0) / tokens.shape[1]
