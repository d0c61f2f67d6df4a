r"""One layer in which every query asks: its value, and its derivatives in closed form.

.. math:: G_t = m^{-1/2} \sum_{i=1}^m C_i\, \sigma(s_{i,t}), \quad s_{i,t} = U_i \cdot a_{i,t},
    \quad a_{i,t} = \sum_s \alpha_{i,ts}\, x_s, \quad
    \alpha_{i,t\cdot} = \mathrm{softmax}(X^\top W_i q_t).

With the cotangent :math:`\gamma_t` of :math:`G_t`, :math:`g_{i,t} = m^{-1/2}\sigma'(s_{i,t})\,
C_i \cdot \gamma_t` and :math:`p_{i,s} = U_i \cdot x_s`, the derivative by a logit is
:math:`\beta_{i,ts} = g_{i,t}\, \alpha_{i,ts} (p_{i,s} - s_{i,t})`, and everything else is a sum of
it: along s for the parameters and the queries, along t for the tokens. Neither is formed: each is
one product of :math:`\alpha` with a few columns. Arguments are taken as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.activations import Activation


class Attended(NamedTuple):
    """What the way back needs of a layer; shapes (b, m, P, T), ... for b samples and P queries."""

    tokens: Float[Tensor, "b T d"]
    queries: Float[Tensor, "b P d"]
    keys: Float[Tensor, "b m P d"]
    weights: Float[Tensor, "b m P T"]
    projections: Float[Tensor, "b m T"]
    pooled: Float[Tensor, "b m P d"]
    covariance: Float[Tensor, "b m P d"]
    values: Float[Tensor, "b m P"]
    slopes: Float[Tensor, "b m P"]


class LayerGradients(NamedTuple):
    """The cotangents of C, U, W, and, unless they were not asked for, of the tokens and queries."""

    C: Float[Tensor, "*b m e"]
    U: Float[Tensor, "*b m d"]
    W: Float[Tensor, "*b m d d"]
    tokens: Float[Tensor, "b T d"] | None
    queries: Float[Tensor, "b P d"] | None


def attend(
    U: Float[Tensor, "m d"],
    W: Float[Tensor, "m d d"],
    tokens: Float[Tensor, "b T d"],
    queries: Float[Tensor, "b P d"],
    sigma: Activation,
) -> Attended:
    """One pass over the tokens, for the value and for the way back."""
    samples, length, _ = tokens.shape
    heads, d = U.shape
    asked = queries.shape[1]
    # Few large products: a batch of small ones costs more in dispatch than in arithmetic.
    keys = (queries.flatten(0, 1) @ W.reshape(-1, d).mT).reshape(samples, asked, heads, d)
    keys = keys.transpose(1, 2).contiguous()
    logits = keys.reshape(samples, heads * asked, d) @ tokens.mT
    weights = torch.softmax(logits.reshape(samples, heads, asked, length), dim=-1)
    projections = (tokens @ U.mT).mT.contiguous()
    columns = tokens[:, None].expand(-1, heads, -1, -1)
    columns = torch.cat((columns, projections[..., None] * columns), dim=-1)
    pooled, weighted = (weights @ columns).chunk(2, dim=-1)
    s = (pooled * U[:, None]).sum(dim=-1)
    value, slope = sigma.value_and_first(s)
    covariance = weighted - s[..., None] * pooled
    return Attended(tokens, queries, keys, weights, projections, pooled, covariance, value, slope)


def output(
    C: Float[Tensor, "m e"], values: Float[Tensor, "b m P"], twins: Tensor | None
) -> Float[Tensor, "b P e"]:
    r"""
    .. math:: m^{-1/2} \sum_{i \le m/2} C_i \sigma_i + C_{i+m/2}\, \sigma_{i+m/2}.

    Twins, equal bit by bit in U and W, take the value of their partner: where their C are opposite
    the sum is 0 exactly, since a product and that of the negated numbers round alike.
    """
    norm = len(C) ** -0.5
    if twins is None:
        return norm * (values.mT @ C)
    first, second = values.chunk(2, dim=1)
    second = torch.where(twins[:, None], first.detach() + (second - second.detach()), second)
    one, two = C.chunk(2, dim=0)
    return norm * (first.mT @ one + second.mT @ two)


def pull_back(
    C: Float[Tensor, "m e"],
    U: Float[Tensor, "m d"],
    W: Float[Tensor, "m d d"],
    seen: Attended,
    cotangent: Float[Tensor, "b P e"],
    *,
    inputs: bool,
    each: bool = False,
) -> LayerGradients:
    r""":math:`\sum_t \gamma_t \cdot \partial G_t` by C, U, W, and with ``inputs`` by the tokens.

    The first three are summed over the samples; with ``each`` they are not.
    """
    norm = len(C) ** -0.5
    d = U.shape[1]
    through = norm * (cotangent @ C.mT).mT * seen.slopes  # g, (b, m, P)
    by_C = norm * (seen.values @ cotangent)
    by_U = (through[:, :, None] @ seen.pooled).squeeze(2)
    pushed = through[..., None] * seen.covariance  # g M U, (b, m, P, d)
    if each:
        by_W = pushed.mT @ seen.queries[:, None]
    else:
        rows = pushed.permute(1, 3, 0, 2).flatten(2)  # (m, d, b P)
        by_W = (rows.flatten(0, 1) @ seen.queries.flatten(0, 1)).reshape(W.shape)
        by_C, by_U = by_C.sum(dim=0), by_U.sum(dim=0)
    if not inputs:
        return LayerGradients(by_C, by_U, by_W, None, None)
    by_queries = pushed.transpose(1, 2).flatten(2) @ W.reshape(-1, d)
    s = (seen.pooled * U[:, None]).sum(dim=-1)
    pull = through[..., None] * seen.keys
    columns = torch.cat((pull, s[..., None] * pull, through[..., None]), dim=-1)
    reached = (columns.mT @ seen.weights).mT  # sums over the queries, (b, m, T, 2d + 1)
    by_logits = seen.projections[..., None] * reached[..., :d] - reached[..., d:-1]
    by_tokens = by_logits.sum(dim=1) + reached[..., -1].mT @ U
    return LayerGradients(by_C, by_U, by_W, by_tokens, by_queries)
