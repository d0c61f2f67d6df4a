r"""Plain torch operators on blocks of samples, outside of autograd: what runs without a compiler.

Two layouts, chosen by measurement: heads innermost (``pooling``), where products with the tokens
are left to the matrix library, and samples innermost (``few_heads``) for few heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines import few_heads
from attention_dynamics.models.engines.base import ByScores, plainly
from attention_dynamics.models.engines.pooling import Directions, Pooling
from attention_dynamics.models.engines.workspace import WORKSPACE
from attention_dynamics.models.parameters import Parameters


class Eager(ByScores):
    r""":math:`(s, a, r)` in blocks that stay in the cache; memory does not grow with T."""

    name = "eager"

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """None: torch itself is all it needs."""
        return None

    @plainly
    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        r""":math:`(s, a, r)`: (n, m), (n, m, d), (n, m, d)."""
        samples, new = inputs.tokens.shape[0], inputs.tokens.new_empty
        out = HeadFeatures(new(samples, len(U)), new(samples, *U.shape), new(samples, *U.shape))
        pooling = Pooling(inputs, U, W, scale, chunk)
        for block in pooling.blocks():
            sums, first = pooling.sums(block)
            assert sums.s is not None
            assert sums.R is not None
            torch.addmm(sums.s, first, pooling.UT, out=out.s[block])
            Z = sums.Z[:, None]
            torch.add(sums.A.div_(Z).mT, first[:, None], out=out.a[block])
            out.r[block] = sums.R.div_(Z).mT
        return out

    @plainly
    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        r""":math:`s`."""
        out = inputs.tokens.new_empty(inputs.tokens.shape[0], U.shape[0])
        size = few_heads.block_size(inputs, len(U), chunk)
        if size is not None:
            return few_heads.scores(inputs, U, W, scale, size, out)
        pooling = Pooling(inputs, U, W, scale, chunk)
        for block in pooling.blocks():
            sums, first = pooling.sums(block, spread=False)
            s = sums.A.mul_(pooling.UT).sum(dim=1).div_(sums.Z)
            torch.addmm(s, first, pooling.UT, out=out[block])
        return out

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
        r""":math:`s` and :math:`s' = V \cdot a + r \cdot \gamma Z q`."""
        s = inputs.tokens.new_empty(inputs.tokens.shape[0], U.shape[0])
        slope = torch.empty_like(s)
        VT = V.mT.contiguous()
        pooling, tangents = (
            Pooling(inputs, U, W, scale, chunk),
            Directions(Z, inputs.query, scale, "Z"),
        )
        for block in pooling.blocks():
            sums, first = pooling.sums(block)
            assert sums.s is not None
            assert sums.R is not None
            torch.addmm(sums.s, first, pooling.UT, out=s[block])
            p = tangents.of(inputs.rows(block).query)
            along = sums.A.mul_(VT).addcmul_(sums.R, p).sum(dim=1).div_(sums.Z)
            torch.addmm(along, first, VT, out=slope[block])
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
        r""":math:`f(X_j)` and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`."""
        factor, norm = 2.0 / targets.shape[0], parameters.heads**-0.5
        twins = twin_heads(parameters)
        values = torch.empty_like(targets)

        def cotangent(sigmas: Tensor, block: slice) -> Tensor:
            f = values[block]
            if twins is None:
                torch.mv(sigmas, parameters.c, out=f).mul_(norm)
            else:
                f.copy_(head_sum(parameters.c, sigmas, twins))
            return (f - targets[block]).mul_(factor)

        return values, _accumulate(parameters, inputs, sigma, scale, chunk, cotangent)

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
    """Sum g_j grad f(X_j) block by block, where g is read off the activations (b, m) of a block."""
    c, U, W = parameters
    heads, dimension = U.shape
    size = few_heads.block_size(inputs, heads, chunk)
    if size is not None:
        return few_heads.accumulate(parameters, inputs, sigma, scale, size, cotangent)
    scaled_c = c * heads**-0.5
    fixed = inputs.query.ndim == 1
    pooling = Pooling(inputs, U, W, scale, chunk)
    in_c, in_U = torch.zeros_like(c), torch.zeros_like(pooling.UT)
    in_W = c.new_zeros(dimension, heads) if fixed else c.new_zeros(dimension, dimension * heads)
    for block in pooling.blocks():
        sums, first = pooling.sums(block)
        assert sums.s is not None
        assert sums.R is not None
        sigmas, slopes = sigma.value_and_first(torch.addmm(sums.s, first, pooling.UT))
        g = cotangent(sigmas, block)
        weight = torch.outer(g, scaled_c).mul_(slopes)
        in_c.addmv_(sigmas.mT, g)
        in_U.addmm_(first.mT, weight)
        weight = weight.div_(sums.Z)[:, None]
        in_U += sums.A.mul_(weight).sum(dim=0)
        if fixed:
            in_W += sums.R.mul_(weight).sum(dim=0)
        else:
            R = torch.mul(sums.R, weight, out=WORKSPACE.take("weighted", weight, *sums.R.shape))
            in_W.addmm_(inputs.query[block].mT, R.flatten(1))
    if fixed:
        in_W = in_W.mT[:, :, None] * (scale * inputs.query)
    else:
        in_W = in_W.view(dimension, dimension, heads).permute(2, 1, 0) * scale
    return Parameters(in_c * heads**-0.5, in_U.mT.contiguous(), in_W.contiguous())
