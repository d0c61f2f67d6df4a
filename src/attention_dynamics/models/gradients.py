r"""Derivatives of the shallow Transformer in closed form; none passes backward through softmax.

With :math:`s = U \cdot a`, :math:`a = X\alpha`, :math:`r = M U` and the logit scale :math:`\gamma`,

.. math:: \partial_c f = m^{-1/2} \sigma(s), \quad \partial_U f = m^{-1/2} c\,\sigma'(s)\,a, \quad
    \partial_W f = m^{-1/2} \gamma\, c\,\sigma'(s)\, r q^\top.

The arguments common to all functions, and their errors, are those of ``models.shallow``. Source:
arXiv 2601.16514; the derivatives are derived in the chapter on gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import (
    head_sum,
    like_parameters,
    prepare,
    require_per_sample,
    twin_heads,
)
from attention_dynamics.models._pass import Query
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.parameters import Parameters


def vjp(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    cotangent: Float[Tensor, " n"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    validate: bool = True,
) -> Parameters:
    r"""
    .. math:: \sum_j g_j\, \nabla_\phi f(X_j; \phi), \qquad g = \text{cotangent}.

    Returns c (m,), U (m, d), W (m, d, d) in closed form, in one pass over the tokens.
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    require_per_sample("cotangent", cotangent, inputs.tokens, validate)
    g = cotangent.to(inputs.tokens.dtype)
    return _accumulate(
        parameters, inputs, sigma, scale, chunk, lambda _, block: g[block], with_value=False
    )[1]


def jvp(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    tangent: Parameters,
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, " n"]:
    r"""
    .. math:: \langle \nabla f(X_j; \phi), v \rangle = m^{-1/2} \sum_i v_{c,i}\,\sigma(s_i)
        + c_i\,\sigma'(s_i) \bigl(v_{U,i} \cdot a_i + r_i \cdot \gamma\, v_{W,i}\, q\bigr).

    ``tangent`` holds :math:`v = (v_c, v_U, v_W)` in the shape of the parameters. Returns (n,).
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    tangent = like_parameters("tangent", tangent, parameters)
    parts = []
    for block in _pass.blocks(inputs, parameters.heads, chunk):
        rows = inputs.rows(block)
        attended = _pass.attend(rows, parameters.U, parameters.W, scale)
        slope = _slope(attended, rows, tangent.U, tangent.W, scale)
        head = tangent.c * sigma.value(attended.s)
        parts.append((head + parameters.c * sigma.first(attended.s) * slope).sum(dim=-1))
    return torch.cat(parts) * parameters.heads**-0.5


def per_sample_gradients(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    validate: bool = True,
) -> Parameters:
    r"""
    .. math:: \nabla_\phi f(X_j; \phi), \quad j = 1..n.

    Returns c (n, m), U (n, m, d), W (n, m, d, d): the memory is n times that of the parameters, so
    this is for tests, teaching and small n.
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    alpha, projections, s = _pass.attend(inputs, parameters.U, parameters.W, scale)
    norm = parameters.heads**-0.5
    factor = (norm * parameters.c * sigma.first(s))[..., None]
    r = _pass.average(alpha * (projections - s[:, None]), inputs.tokens)
    q = inputs.query.expand(inputs.tokens.shape[0], -1)
    return Parameters(
        norm * sigma.value(s),
        factor * _pass.average(alpha, inputs.tokens),
        (scale * factor * r)[..., None] * q[:, None, None, :],
    )


def head_second_derivative(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    V: Float[Tensor, "m d"],
    Z: Float[Tensor, "m d d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    validate: bool = True,
) -> Float[Tensor, "n m"]:
    r"""
    .. math:: \frac{d^2}{d\varepsilon^2}\Big|_0\, \sigma\bigl(s(U + \varepsilon V,
        W + \varepsilon Z)\bigr) = \sigma''(s)\,(s')^2 + \sigma'(s)\,s'',

    .. math:: s' = V \cdot \mu + U^\top M p, \qquad
        s'' = 2\,V^\top M p + \kappa_3(U, p, p), \qquad p = \gamma Z q.

    Returns (n, m), one number a sample and head; c plays no part. Source: the head calculus of the
    chapter on gradients.
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    direction = like_parameters("(V, Z)", Parameters(parameters.c, V, Z), parameters)
    attended = _pass.attend(inputs, parameters.U, parameters.W, scale)
    alpha, projections, s = attended
    along_u = projections - s[:, None]
    along_p = _pass.project(inputs.tokens, _pass.head_queries(direction.W, inputs.query, scale))
    along_p = along_p - (alpha * along_p).sum(dim=1, keepdim=True)
    along_v = _pass.project(inputs.tokens, direction.U)
    first = (alpha * (along_v + along_u * along_p)).sum(dim=1)
    second = (alpha * along_p * (2 * along_v + along_u * along_p)).sum(dim=1)
    return sigma.second(s) * first * first + sigma.first(s) * second


def loss_and_gradients(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    validate: bool = True,
) -> tuple[Float[Tensor, ""], Parameters]:
    r"""
    .. math:: L_n = \frac1n \sum_j (f_j - y_j)^2, \qquad
        \nabla L_n = \frac2n \sum_j (f_j - y_j)\, \nabla f(X_j; \phi).

    Returns the loss, 0-d, and the gradients in the shape of the parameters, in closed form and in
    a single pass: each block of samples is attended once and dropped.
    """
    sigma, inputs, parameters = prepare(parameters, tokens, query, activation, mask, validate)
    require_per_sample("targets", targets, inputs.tokens, validate)
    y = targets.to(inputs.tokens.dtype)
    factor = 2.0 / y.shape[0]
    values, gradients = _accumulate(
        parameters, inputs, sigma, scale, chunk, lambda f, block: factor * (f - y[block])
    )
    return (values - y).square().mean(), gradients


def _accumulate(
    parameters: Parameters,
    inputs: _pass.Inputs,
    sigma: Activation,
    scale: float,
    chunk: int | None,
    cotangent: Callable[[Tensor, slice], Tensor],
    *,
    with_value: bool = True,
) -> tuple[Tensor, Parameters]:
    """Sum g_j grad f(X_j) block by block, where g is read off the values f of the block."""
    c, U, W = parameters
    heads, dimension = U.shape
    scaled_c = c * heads**-0.5
    twins = twin_heads(parameters) if with_value else None
    fixed = inputs.query.ndim == 1
    values, totals = [], None
    for block in _pass.blocks(inputs, heads, chunk):
        rows = inputs.rows(block)
        alpha, projections, s = _pass.attend(rows, U, W, scale)
        sigmas, slopes = sigma.value_and_first(s)
        f = head_sum(c, sigmas, twins) if with_value else sigmas[:, 0]
        g = cotangent(f, block)
        weighted = alpha * (slopes * torch.outer(g, scaled_c))[:, None]
        centred = weighted * (projections - s[:, None])
        if fixed:
            in_W = _pass.total_columns(centred, rows.tokens)
        else:
            r = _pass.average_columns(centred, rows.tokens)
            in_W = rows.query.mT @ r.flatten(1)
        part = Parameters(g @ sigmas, _pass.total_columns(weighted, rows.tokens), in_W)
        totals = part if totals is None else totals.plus(part)
        values.append(f)
    assert totals is not None  # prepare() refuses an empty batch
    if fixed:
        in_W = totals.W.mT[:, :, None] * inputs.query
    else:
        in_W = totals.W.reshape(dimension, dimension, heads).permute(2, 1, 0)
    return torch.cat(values), Parameters(
        totals.c * heads**-0.5, totals.U.mT.contiguous(), (scale * in_W).contiguous()
    )


def _slope(
    attended: _pass.Attended, rows: _pass.Inputs, V: Tensor, Z: Tensor, scale: float
) -> Tensor:
    """S' = V . a + r . (scale Z q), (b, m), by projections on the tokens."""
    alpha, projections, s = attended
    along_v = _pass.project(rows.tokens, V)
    along_p = _pass.project(rows.tokens, _pass.head_queries(Z, rows.query, scale))
    return (alpha * (along_v + (projections - s[:, None]) * along_p)).sum(dim=1)
