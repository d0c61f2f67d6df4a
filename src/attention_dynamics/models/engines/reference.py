r"""The formulas as they are printed, over the materialised weights (n, m, T).

.. math:: \alpha = \mathrm{softmax}(\gamma X^\top W q), \quad s_t = U \cdot x_t, \quad
    s = \sum_t \alpha_t s_t, \quad a = \sum_t \alpha_t x_t, \quad r = \sum_t \alpha_t (s_t - s) x_t.

Nothing is written in place, so that autograd, twice if need be, and every transform of
``torch.func`` differentiate these lines; the other engines are held against them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines.base import ByScores
from attention_dynamics.models.parameters import Parameters


class Attended(NamedTuple):
    """Weights alpha (b, m, T), projections s_t = U.x_t (b, m, T), and s = sum alpha s_t (b, m)."""

    alpha: Tensor
    projections: Tensor
    s: Tensor


class Reference(ByScores):
    r""":math:`(s, a, r)` by einsum; any floating dtype, any device, differentiable."""

    name = "reference"

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """None: the formulas run everywhere."""
        return None

    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        r""":math:`(s, a, r)`: (n, m), (n, m, d), (n, m, d)."""
        parts = [
            _features(inputs.rows(block), U, W, scale)
            for block in _pass.blocks(inputs, U.shape[0], chunk)
        ]
        return parts[0] if len(parts) == 1 else HeadFeatures(*_joined(parts))

    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        r""":math:`s`."""
        parts = [
            attend(inputs.rows(block), U, W, scale).s
            for block in _pass.blocks(inputs, U.shape[0], chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def slopes(
        self,
        inputs: Inputs,
        U: Tensor,
        W: Tensor,
        V: Tensor,
        Z: Tensor,
        scale: float,
        *,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"]]:
        r""":math:`s` and :math:`s' = V \cdot a + r \cdot \gamma Z q`."""
        parts = []
        for block in _pass.blocks(inputs, U.shape[0], chunk):
            rows = inputs.rows(block)
            s, a, r = _features(rows, U, W, scale)
            directions = _pass.head_queries(Z, rows.query, scale)
            parts.append((s, (V * a).sum(dim=-1) + (directions * r).sum(dim=-1)))
        s, slope = _joined(parts)
        return s, slope

    def step(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        targets: Float[Tensor, " n"],
        *,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, " n"], Parameters]:
        r""":math:`f(X_j)` and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`."""
        twins = twin_heads(parameters)
        values, total = [], None
        for block in _pass.blocks(inputs, parameters.heads, chunk):
            rows = inputs.rows(block)
            features = _features(rows, parameters.U, parameters.W, scale)
            f = head_sum(parameters.c, sigma.value(features.s), twins)
            g = (2.0 / targets.shape[0]) * (f - targets[block])
            part = pulled_back(g, features, rows.query, parameters.c, sigma, scale)
            total = part if total is None else total.plus(part)
            values.append(f)
        assert total is not None  # an empty batch is refused before
        return torch.cat(values), total

    def vjp(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        cotangent: Float[Tensor, " n"],
        *,
        chunk: int | None = None,
    ) -> Parameters:
        r""":math:`\sum_j g_j \nabla f(X_j)`."""
        total = None
        for block in _pass.blocks(inputs, parameters.heads, chunk):
            rows = inputs.rows(block)
            features = _features(rows, parameters.U, parameters.W, scale)
            part = pulled_back(cotangent[block], features, rows.query, parameters.c, sigma, scale)
            total = part if total is None else total.plus(part)
        assert total is not None
        return total


def attend(inputs: Inputs, U: Tensor, W: Tensor, scale: float) -> Attended:
    """Attention weights and value projections of all samples: (n, m, T) each, and s (n, m)."""
    directions = _pass.head_queries(W, inputs.query, scale)
    axes = "ntd,md->nmt" if directions.ndim == 2 else "ntd,nmd->nmt"
    logits = torch.einsum(axes, inputs.tokens, directions)
    if inputs.mask is not None:
        logits = logits.masked_fill(~inputs.mask[:, None, :], -torch.inf)
    alpha = torch.softmax(logits, dim=-1)
    projections = torch.einsum("ntd,md->nmt", inputs.tokens, U)
    return Attended(alpha, projections, (alpha * projections).sum(dim=-1))


def pulled_back(
    g: Float[Tensor, " n"],
    features: HeadFeatures,
    query: Tensor,
    c: Float[Tensor, " m"],
    sigma: Activation,
    scale: float,
) -> Parameters:
    r""":math:`m^{-1/2} \sum_j g_j (\sigma,\; c\,\sigma' a,\; \gamma\,c\,\sigma' r q^\top)`."""
    s, a, r = features
    norm = c.shape[0] ** -0.5
    value, first = sigma.value_and_first(s)
    weight = (norm * g)[:, None] * c * first
    if query.ndim == 1:
        in_W = torch.einsum("nm,nmd->md", weight, r)[:, :, None] * (scale * query)
    else:
        in_W = torch.einsum("nm,nmd,ne->mde", weight, r, scale * query)
    return Parameters((norm * g) @ value, torch.einsum("nm,nmd->md", weight, a), in_W)


def _features(inputs: Inputs, U: Tensor, W: Tensor, scale: float) -> HeadFeatures:
    alpha, projections, s = attend(inputs, U, W, scale)
    a = torch.einsum("nmt,ntd->nmd", alpha, inputs.tokens)
    centred = alpha * (projections - s[..., None])
    return HeadFeatures(s, a, torch.einsum("nmt,ntd->nmd", centred, inputs.tokens))


def _joined(parts: list) -> tuple[Tensor, ...]:
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
