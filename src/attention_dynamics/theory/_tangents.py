r"""Tangent features: rows whose inner products are the tangent kernel, in blocks of heads.

With weights :math:`\omega_i` and the unit feature :math:`(s, a, r)` of a head,

.. math:: F_c = \sqrt{\omega^c_i}\, \sigma(s), \qquad F_u = \sqrt{\omega_i}\, \sigma'(s)\, a, \qquad
    F_w = \sqrt{\omega_i}\, \gamma\, \sigma'(s)\, r,

so that :math:`K_c = F_c F_c^\top`, :math:`K_u = F_u F_u^\top` and
:math:`K_w = \langle q, q' \rangle F_w F_w^\top`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import prepare, twin_heads
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.attention import Query
from attention_dynamics.models.engines.selection import choose
from attention_dynamics.models.parameters import Parameters

# Elements of the features held at once: wide enough for fast matrix products.
_CPU_ELEMENTS = 2**22
_ACCELERATOR_ELEMENTS = 2**27


class WeightedHeads(NamedTuple):
    r"""Heads (U, W) with their weights :math:`\omega^c` and :math:`\omega` in the kernel, (h,)."""

    U: Float[Tensor, "h d"]
    W: Float[Tensor, "h d d"]
    in_c: Float[Tensor, " h"]
    in_UW: Float[Tensor, " h"]

    @classmethod
    def of(cls, parameters: Parameters) -> WeightedHeads:
        r""":math:`\omega^c = 1/m` and :math:`\omega = c_i^2/m`, with twin heads taken together.

        Where every head i has a twin i + m/2, equal in U and W bit by bit, as at the symmetric
        initialisation, m/2 heads of weight 2/m and :math:`(c_i^2 + c_{i+m/2}^2)/m` are the same
        kernel.
        """
        c, U, W = parameters
        in_c, squares = torch.full_like(c, 1 / c.shape[0]), c * c / c.shape[0]
        twins = twin_heads(parameters)
        if twins is not None and bool(twins.all()):
            half = U.shape[0] // 2
            return cls(U[:half], W[:half], 2 * in_c[:half], squares[:half] + squares[half:])
        return cls(U, W, in_c, squares)

    def select(self, block: slice) -> WeightedHeads:
        """The heads of one block."""
        return WeightedHeads(*(part[block] for part in self))


class TangentFeatures(NamedTuple):
    """Views (n, h), (n, d h), (n, d h) of one buffer (n, (1 + 2d) h), which ``all`` is."""

    c: Tensor
    U: Tensor
    W: Tensor
    all: Tensor


def head_blocks(samples: int, heads: int, dimension: int, device: torch.device) -> Iterator[slice]:
    """Slices of heads whose features, for all the samples, fit into one buffer."""
    elements = _CPU_ELEMENTS if device.type == "cpu" else _ACCELERATOR_ELEMENTS
    step = max(1, min(heads, elements // (samples * (1 + 2 * dimension))))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


class TangentBuffer:
    """Memory for the features of one block of heads, filled again for each block."""

    def __init__(
        self, inputs: _pass.Inputs, sigma: Activation, scale: float, engine: str, heads: int
    ) -> None:
        self.inputs, self.sigma, self.scale, self.engine = inputs, sigma, scale, engine
        samples, _, dimension = inputs.tokens.shape
        self._memory = inputs.tokens.new_empty(samples * (1 + 2 * dimension) * heads)
        self._length = abs(scale)
        if inputs.query.ndim == 1:
            self._length *= float(torch.linalg.vector_norm(inputs.query, dtype=torch.float64))

    def fill(self, heads: WeightedHeads) -> TangentFeatures:
        r"""The features of these heads; a fixed query's :math:`\|q\|` is part of :math:`F_w`."""
        inputs, (U, W, in_c, in_UW) = self.inputs, heads
        samples, _, d = inputs.tokens.shape
        h, width = U.shape[0], 1 + 2 * d
        features = self._memory[: samples * width * h].view(samples, width, h)
        root_c, root = in_c.sqrt(), in_UW.sqrt()
        engine = choose(self.engine, inputs, h, U, W)
        for block in _pass.blocks(inputs, h, None):
            s, a, r = engine.features(inputs.rows(block), U, W, self.scale)
            value, slope = self.sigma.value_and_first(s)
            slope = (root * slope)[:, None]
            torch.mul(value, root_c, out=features[block, 0])
            torch.mul(a.mT, slope, out=features[block, 1 : 1 + d])
            torch.mul(r.mT, self._length * slope, out=features[block, 1 + d :])
        flat = features.view(samples, width * h)
        return TangentFeatures(flat[:, :h], flat[:, h : h + d * h], flat[:, h + d * h :], flat)


class KernelPair:
    """The two sides of K(X, X'), checked, and their features block of heads by block of heads."""

    def __init__(
        self,
        parameters: Parameters,
        tokens: Tensor,
        other: Tensor | None,
        query: Query,
        other_query: Query | None,
        activation: str | Activation,
        scale: float,
        mask: Tensor | None,
        other_mask: Tensor | None,
        engine: str,
    ) -> None:
        if other is None and not (other_mask is None and other_query is None):
            raise ValueError(
                "other_mask, other_query: expected None without other, whose tokens they belong "
                "to; pass other=, or mask= and query= for the tokens themselves"
            )
        parameters = parameters.detach()
        sides = [prepare(parameters, tokens, query, activation, mask, True)]
        if other is not None:
            second = query if other_query is None else other_query
            sides.append(prepare(parameters, other, second, activation, other_mask, True))
        self.sigma, self.left, parameters = sides[0]
        self.right = sides[-1][1]
        if self.left.tokens.dtype != self.right.tokens.dtype:
            raise TypeError(
                f"other: has dtype {self.right.tokens.dtype} where tokens have "
                f"{self.left.tokens.dtype}; convert one of them"
            )
        if self.left.query.ndim != self.right.query.ndim:
            raise ValueError(
                f"other_query: expected a query of the kind of query, got shapes "
                f"{tuple(self.right.query.shape)} and {tuple(self.left.query.shape)}; give both "
                "sides one fixed query (d,), or both one a sample"
            )
        # The same query on both sides, its length in the features; else <q, q'> a pair of samples.
        self.fixed = self.left.query.ndim == 1 and torch.equal(self.left.query, self.right.query)
        if not self.fixed:
            self.left, self.right = (_query_a_sample(side) for side in (self.left, self.right))
        self.symmetric = other is None
        self.scale, self.engine = scale, engine
        self.heads = WeightedHeads.of(parameters)

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.tokens.shape[0], self.right.tokens.shape[0]

    def features(self) -> Iterator[tuple[TangentFeatures, TangentFeatures | None]]:
        """The features of both sides (None on the right if symmetric), block by block of heads."""
        samples, heads = max(self.shape), self.heads.U.shape[0]
        blocks = list(head_blocks(samples, heads, self.heads.U.shape[1], self.left.tokens.device))
        width = blocks[0].stop
        sides = (self.left,) if self.symmetric else (self.left, self.right)
        buffers = [TangentBuffer(s, self.sigma, self.scale, self.engine, width) for s in sides]
        for block in blocks:
            some = self.heads.select(block)
            filled = [buffer.fill(some) for buffer in buffers]
            yield filled[0], None if self.symmetric else filled[1]

    def weight_by_queries(self, K: Tensor) -> None:
        if not self.fixed:
            step = max(1, 2**20 // K.shape[1])
            for start in range(0, K.shape[0], step):
                K[start : start + step] *= (
                    self.left.query[start : start + step] @ self.right.query.mT
                )


def _query_a_sample(inputs: _pass.Inputs) -> _pass.Inputs:
    query = inputs.query
    if query.ndim == 1:
        query = query.expand(inputs.tokens.shape[0], -1)
    return inputs._replace(query=query)
