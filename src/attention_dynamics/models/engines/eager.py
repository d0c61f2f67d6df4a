r"""Plain torch operators on blocks of samples, outside of autograd: what runs without a compiler.

Blocks stay in the cache of a core, and each is attended once and dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.parameters import Parameters


class Eager:
    r""":math:`(s, a, r)` by matrix products on blocks of samples."""

    name = "eager"

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """None: torch itself is all it needs."""
        return None

    @torch.no_grad()
    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        r""":math:`(s, a, r)`: (n, m), (n, m, d), (n, m, d)."""
        parts = []
        for block in _pass.blocks(inputs, U.shape[0], chunk):
            rows = inputs.rows(block)
            alpha, projections, s = _pass.attend(rows, U, W, scale)
            centred = alpha * (projections - s[:, None])
            parts.append(
                (s, _pass.average(alpha, rows.tokens), _pass.average(centred, rows.tokens))
            )
        return HeadFeatures(*(torch.cat(column) for column in zip(*parts, strict=True)))

    @torch.no_grad()
    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        r""":math:`s`."""
        return torch.cat(
            [
                _pass.attend(inputs.rows(block), U, W, scale).s
                for block in _pass.blocks(inputs, U.shape[0], chunk)
            ]
        )

    @torch.no_grad()
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
            alpha, projections, s = _pass.attend(rows, U, W, scale)
            along_v = _pass.project(rows.tokens, V)
            along_p = _pass.project(rows.tokens, _pass.head_queries(Z, rows.query, scale))
            parts.append((s, (alpha * (along_v + (projections - s[:, None]) * along_p)).sum(dim=1)))
        scores, slope = (torch.cat(column) for column in zip(*parts, strict=True))
        return scores, slope

    @torch.no_grad()
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
        factor = 2.0 / targets.shape[0]
        twins = twin_heads(parameters)
        values = []

        def cotangent(sigmas: Tensor, block: slice) -> Tensor:
            values.append(head_sum(parameters.c, sigmas, twins))
            return factor * (values[-1] - targets[block])

        gradients = _accumulate(parameters, inputs, sigma, scale, chunk, cotangent)
        return torch.cat(values), gradients

    @torch.no_grad()
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
        return _accumulate(
            parameters, inputs, sigma, scale, chunk, lambda _, block: cotangent[block]
        )


def _accumulate(
    parameters: Parameters,
    inputs: Inputs,
    sigma: Activation,
    scale: float,
    chunk: int | None,
    cotangent: Callable[[Tensor, slice], Tensor],
) -> Parameters:
    """Sum g_j grad f(X_j) block by block, where g is read off the activations of the block."""
    c, U, W = parameters
    heads, dimension = U.shape
    scaled_c = c * heads**-0.5
    fixed = inputs.query.ndim == 1
    totals = None
    for block in _pass.blocks(inputs, heads, chunk):
        rows = inputs.rows(block)
        alpha, projections, s = _pass.attend(rows, U, W, scale)
        sigmas, slopes = sigma.value_and_first(s)
        g = cotangent(sigmas, block)
        weighted = alpha * (slopes * torch.outer(g, scaled_c))[:, None]
        centred = weighted * (projections - s[:, None])
        if fixed:
            in_W = _pass.total_columns(centred, rows.tokens)
        else:
            r = _pass.average_columns(centred, rows.tokens)
            in_W = rows.query.mT @ r.flatten(1)
        part = Parameters(g @ sigmas, _pass.total_columns(weighted, rows.tokens), in_W)
        totals = part if totals is None else totals.plus(part)
    assert totals is not None  # an empty batch is refused before
    if fixed:
        in_W = totals.W.mT[:, :, None] * inputs.query
    else:
        in_W = totals.W.reshape(dimension, dimension, heads).permute(2, 1, 0)
    return Parameters(totals.c * heads**-0.5, totals.U.mT.contiguous(), (scale * in_W).contiguous())
