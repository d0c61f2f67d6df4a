r"""The engine of the Triton kernels: features, values and gradients in one pass on a GPU."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines.base import ByScores, plainly
from attention_dynamics.models.engines.triton_launch import Stack, features, pull, refusal, step
from attention_dynamics.models.parameters import Parameters


class Triton(ByScores):
    """The engine of ``triton_kernel.py``: float32 and float64 on a CUDA device, d <= 24.

    Where Triton interprets its kernels (``TRITON_INTERPRET=1``) it takes tensors of the CPU, too.
    """

    name = "triton"

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """Name what is missing: Triton, a GPU, a dtype the kernels know, or registers."""
        return refusal(inputs.tokens)

    @plainly
    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        """Features of all samples."""
        s, a, r = features(_single(inputs), U[None], W[None], scale, sums=True)
        return HeadFeatures(s[0], a[0].mT, r[0].mT)

    @plainly
    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        """Only s: half the work of the features."""
        return features(_single(inputs), U[None], W[None], scale, sums=False)[0][0]

    @plainly
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
        r""":math:`s` and :math:`s' = V \cdot a + r \cdot \gamma Z q`, block by block."""
        parts = []
        for block in _pass.blocks(inputs, U.shape[0], chunk):
            rows = inputs.rows(block)
            s, a, r = features(_single(rows), U[None], W[None], scale, sums=True)
            along = _pass.head_queries(Z, rows.query, scale).mT
            parts.append((s[0], (a[0] * V.mT).sum(dim=1) + (r[0] * along).sum(dim=1)))
        s, slope = (torch.cat(column) for column in zip(*parts, strict=True))
        return s, slope

    @plainly
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
        r""":math:`f(X_j; \phi)` and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`."""
        stacked = parameters.map(lambda block: block[None])
        f, gradients = step(_single(inputs), stacked, sigma, scale, targets[None])
        return f[0], gradients.map(lambda block: block[0])

    @plainly
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
        r""":math:`\sum_j g_j \nabla f(X_j; \phi)`."""
        stack, stacked = _single(inputs), parameters.map(lambda block: block[None])
        s = features(stack, stacked.U, stacked.W, scale, sums=False)[0]
        values, slopes = sigma.value_and_first(s)
        gradients = pull(stack, stacked, scale, values, slopes, cotangent[None])
        return gradients.map(lambda block: block[0])


def _single(inputs: Inputs) -> Stack:
    mask = None if inputs.mask is None else inputs.mask[None]
    return Stack(inputs.tokens[None], inputs.query[None], mask)
