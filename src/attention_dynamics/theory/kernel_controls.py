r"""Tangent kernels of two other attentions: one matrix for all neurons, and a linear one.

Both have the three blocks of :math:`K = K_c + K_u + K_w`, and each takes one thing away from the
model: the first its independent heads, the second its softmax. Sources: the limit-kernel problem of
a single head is that of Hron et al., *Infinite attention* (2020); the formulas are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import attention
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.attention import Query
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.kernels import TangentKernel
from attention_dynamics.validation import require_shape


def shared_attention_kernel(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
) -> TangentKernel:
    r"""
    .. math:: f = m^{-1/2} \sum_i c_i\, \sigma(U_i \cdot a), \qquad
        K_w = \gamma^2 \langle q, q' \rangle\, \langle M g, M' g' \rangle, \quad
        g = m^{-1/2} \sum_i c_i\, \dot\sigma(s_i)\, U_i,

    the kernel of m neurons that look through one attention :math:`a = X\,\mathrm{softmax}(\gamma
    X^\top W q)`; :math:`K_c, K_u` are as with heads of their own. One W, so its gradient is a sum
    over the neurons, and :math:`K_w` is no mean.

    ``parameters`` has c (m,), U (m, d) and a single matrix W (1, d, d); tokens are (n, T, d).
    Returns blocks (n, n). Raises ValueError if W is not single, or what does not fit.
    """
    d = tokens.shape[-1]
    require_shape("W", parameters.W, ("1", "d", "d"), {"1": 1, "d": d}, remedy="one W for all")
    weights = attention.attention_weights(
        attention.logits(tokens, parameters.W, query, scale=scale)
    )
    pooled = attention.pooled_token(weights, tokens)[:, 0]
    covariance = attention.softmax_covariance(weights, tokens)[:, 0]
    sigma, m = get_activation(activation), len(parameters.c)
    value, slope = sigma.value_and_first(pooled @ parameters.U.mT)
    weighted = parameters.c * slope
    g = weighted @ parameters.U / m**0.5
    r = (covariance @ g[..., None])[..., 0]
    return TangentKernel(
        value @ value.mT / m,
        (weighted @ weighted.mT) * (pooled @ pooled.mT) / m,
        scale**2 * _query_products(tokens, query) * (r @ r.mT),
    )


class LinearFeatures(NamedTuple):
    r""":math:`s` (n, m), :math:`a` (n, m, d) and :math:`r = M_0 U` (n, m, d)."""

    s: Tensor
    a: Tensor
    r: Tensor


def linearised_features(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    scale: float = 1.0,
) -> LinearFeatures:
    r"""
    .. math:: a = \bar x + \gamma M_0 W q, \qquad s = U \cdot a, \qquad r = M_0 U, \qquad
        \bar x = \tfrac1T \sum_t x_t, \quad
        M_0 = \tfrac1T \sum_t x_t x_t^\top - \bar x \bar x^\top,

    attention with the softmax replaced by its expansion at equal logits,
    :math:`\alpha_t = \frac1T (1 + \ell_t - \bar\ell)`. The weights sum to 1 and may be negative, so
    :math:`\|a\|` has no bound.
    """
    mean = tokens.mean(dim=1)
    centred = tokens - mean[:, None]
    covariance = centred.mT @ centred / tokens.shape[1]
    queries = attention.resolve_query(tokens, query)
    directions = torch.einsum("mde,ne->nmd", parameters.W, queries)
    a = mean[:, None] + scale * directions @ covariance
    return LinearFeatures((a * parameters.U).sum(-1), a, parameters.U @ covariance)


def linearised_attention_kernel(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
) -> TangentKernel:
    r"""
    .. math:: K_c = \frac1m \sum_i \sigma\sigma', \quad
        K_u = \frac1m \sum_i c_i^2\, \dot\sigma\dot\sigma' \langle a_i, a_i' \rangle, \quad
        K_w = \frac{\gamma^2 \langle q, q' \rangle}m \sum_i
        c_i^2\, \dot\sigma\dot\sigma'\, U_i^\top M_0 M_0' U_i

    with the features of :func:`linearised_features`. Returns blocks (n, n).
    """
    s, a, r = linearised_features(parameters, tokens, query=query, scale=scale)
    value, slope = get_activation(activation).value_and_first(s)
    m = len(parameters.c)
    weighted = (parameters.c * slope)[..., None]
    in_u, in_w = (weighted * a).flatten(1), (weighted * r).flatten(1)
    return TangentKernel(
        value @ value.mT / m,
        in_u @ in_u.mT / m,
        scale**2 * _query_products(tokens, query) * (in_w @ in_w.mT) / m,
    )


def _query_products(tokens: Tensor, query: Query) -> Float[Tensor, "n n"]:
    queries = attention.resolve_query(tokens, query)
    return queries @ queries.mT
