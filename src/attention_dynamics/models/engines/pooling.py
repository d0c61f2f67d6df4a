r"""Sums over the tokens of a block of samples, heads innermost, in buffers that are used again.

Tokens are taken relative to the first of their sample, :math:`x'_t = x_t - x_0`: the softmax does
not see the difference, and a common offset, however large, costs no accuracy. Logits are in units
of log 2, because ``exp2`` is the faster function. On a CPU only logits outside of what ``exp2`` can
hold pay for a maximum; elsewhere all do, as a look at them would wait for the device. A sequence
too long for the buffers is summed in blocks of tokens, which :func:`merged` joins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.engines.workspace import WORKSPACE

#: Elements (samples x tokens x heads) of a buffer: the few that are in use stay in the cache.
BLOCK = 2**17
_LEAST_TOKENS = 16
_SAFE = 2.0**60


class Sums(NamedTuple):
    r"""
    .. math:: Z = \sum_t e_t, \quad s' = \frac1Z \sum_t e_t s'_t, \quad A = \sum_t e_t x'_t, \quad
        R = \sum_t e_t (s'_t - s')\, x'_t, \qquad e_t = 2^{\ell_t - top}, \; s'_t = U \cdot x'_t.

    Shapes (b, m) for ``top``, Z and s, (b, d, m) for A and R; a ``top`` of None is 0, and s and R
    are None where only the weights were asked for.
    """

    top: Tensor | None
    Z: Tensor
    A: Tensor
    s: Tensor | None
    R: Tensor | None

    def copied(self) -> Sums:
        """The same numbers outside of the workspace."""
        top, s, R = (None if t is None else t.clone() for t in (self.top, self.s, self.R))
        return Sums(top, self.Z.clone(), self.A.clone(), s, R)


class _Buffers:
    """Memory for one block and the views of it that a pass needs, made once a call, not a block."""

    def __init__(self, like: Tensor, count: int, length: int, dimension: int, heads: int) -> None:
        def take(name: str, *shape: int) -> Tensor:
            return WORKSPACE.take(name, like, *shape)

        x = take("tokens", count, length, dimension + 1)
        x[..., dimension] = 1.0  # this coordinate of the sums over x is Z
        self.centred, self.xT = x[..., :dimension], x.mT
        self.rows = x.view(-1, dimension + 1)[:, :dimension]
        self.e = take("weights", count, length, heads)
        self.p = take("projections", count, length, heads)
        self.e_rows, self.p_rows = self.e.view(-1, heads), self.p.view(-1, heads)
        self.A_and_Z = take("A", count, dimension + 1, heads)
        self.R_and_s = take("R", count, dimension + 1, heads)
        self.Z, self.A = self.A_and_Z[:, dimension], self.A_and_Z[:, :dimension]
        self.s, self.R = self.R_and_s[:, dimension], self.R_and_s[:, :dimension]
        self.s_between = self.s[:, None]


class Pooling:
    """The sums of one call: directions of the heads and sizes of the blocks."""

    def __init__(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, chunk: int | None
    ) -> None:
        samples, length, dimension = inputs.tokens.shape
        heads = U.shape[0]
        self.length = min(length, max(_LEAST_TOKENS, BLOCK // heads))
        if chunk is None:
            chunk = BLOCK // (max(self.length, dimension) * heads)
        self.samples = max(1, min(chunk, samples))
        self.inputs, self.UT = inputs, U.mT.contiguous()
        self.directions = Directions(W, inputs.query, scale / math.log(2.0), "w")
        self._buffers: dict[tuple[int, int], _Buffers] = {}

    def blocks(self) -> list[slice]:
        """The slices of samples to pool one after the other."""
        count = self.inputs.tokens.shape[0]
        return [slice(i, i + self.samples) for i in range(0, count, self.samples)]

    def sums(self, block: slice, *, spread: bool = True) -> tuple[Sums, Tensor]:
        """Return the sums of a block, with s and R if ``spread``, and its x_0 (b, d).

        They lie in the workspace: the next call overwrites them.
        """
        tokens, query, mask = self.inputs.rows(block)
        start = tokens[:, :1]
        first = start[:, 0]
        w = self.directions.of(query)
        if self.length == tokens.shape[1]:
            return self._part(tokens, start, w, mask, spread), first
        total = None
        for i in range(0, tokens.shape[1], self.length):
            part = slice(i, i + self.length)
            kept = None if mask is None else mask[:, part]
            sums = self._part(tokens[:, part], start, w, kept, spread)
            total = (sums if total is None else merged(total, sums)).copied()
        assert total is not None
        return total, first

    def _part(
        self, tokens: Tensor, start: Tensor, w: Tensor, mask: Tensor | None, spread: bool
    ) -> Sums:
        count, length, dimension = tokens.shape
        own = self._buffers.get((count, length))
        if own is None:
            # Blocks of another size share the memory, so only one is set up at any time.
            self._buffers = {}
            own = _Buffers(tokens, count, length, dimension, self.UT.shape[1])
            self._buffers[count, length] = own
        torch.sub(tokens, start, out=own.centred)
        top = None
        # Another device would have to be waited for before its numbers can be looked at.
        look = tokens.device.type == "cpu"
        if look:
            _weigh(own, w, mask, own.e, None)
        if not (look and _moderate(own.Z)):
            top = own.e.new_empty(count, own.e.shape[2])
            _weigh(own, w, mask, own.e, top)
        if not spread:
            return Sums(top, own.Z, own.A, None, None)
        torch.mm(own.rows, self.UT, out=own.p_rows)
        torch.bmm(own.xT, own.p.mul_(own.e), out=own.R_and_s)
        own.s.div_(own.Z if top is None else own.Z.clamp_min(1.0))
        return Sums(top, own.Z, own.A, own.s, own.R.addcmul_(own.A, own.s_between, value=-1.0))


class Directions:
    """The directions scale W q of the logits: (d, m) for a fixed query, else (b, d, m)."""

    def __init__(self, W: Tensor, query: Tensor, scale: float, name: str) -> None:
        self.name = name
        self.shape = W.shape[1], W.shape[0]
        self.fixed = (W @ (scale * query)).mT.contiguous() if query.ndim == 1 else None
        self.flat = W.permute(2, 1, 0).mul(scale).flatten(1) if query.ndim == 2 else None
        self.rows = query.new_empty(0, 0)
        self.out = self.rows

    def of(self, query: Tensor) -> Tensor:
        """The directions of a block with these queries, (d,) or (b, d)."""
        if self.fixed is not None:
            return self.fixed
        assert self.flat is not None
        if self.rows.shape[0] != query.shape[0]:
            self.rows = WORKSPACE.take(self.name, query, query.shape[0], self.flat.shape[1])
            self.out = self.rows.view(-1, *self.shape)
        torch.mm(query, self.flat, out=self.rows)
        return self.out


def merged(first: Sums, second: Sums) -> Sums:
    r"""
    .. math:: Z = Z_1 + Z_2, \quad A = A_1 + A_2, \quad s = (Z_1 s_1 + Z_2 s_2)/Z, \quad
        R = R_1 + R_2 + \frac{Z_1 Z_2}{Z} (s_1 - s_2) \Bigl(\frac{A_1}{Z_1} - \frac{A_2}{Z_2}\Bigr)

    after both are brought to the larger ``top``. Only differences enter, so nothing cancels.
    """
    top: Tensor | None = None
    weights = [first.Z, second.Z]
    factors: list[Tensor] = []
    if first.top is not None or second.top is not None:
        tops = [torch.zeros_like(first.Z) if t.top is None else t.top for t in (first, second)]
        top = torch.maximum(*tops)
        factors = [torch.exp2(own - top) for own in tops]
        weights = [f * z for f, z in zip(factors, weights, strict=True)]
    Z = weights[0] + weights[1]

    def joined(one: Tensor, two: Tensor) -> Tensor:
        if not factors:
            return one + two
        return one * factors[0][:, None] + two * factors[1][:, None]

    A = joined(first.A, second.A)
    if first.s is None or second.s is None or first.R is None or second.R is None:
        return Sums(top, Z, A, None, None)
    tiny = torch.finfo(Z.dtype).tiny
    share = weights[1] / Z.clamp_min(tiny)
    s = first.s + share * (second.s - first.s)
    # A part without a kept token has Z = 0 and A = 0: any positive number stands in for its Z.
    means = [t.A / t.Z.clamp_min(tiny)[:, None] for t in (first, second)]
    between = (weights[0] * share * (first.s - second.s))[:, None] * (means[0] - means[1])
    return Sums(top, Z, A, s, joined(first.R, second.R).add_(between))


def _weigh(own: _Buffers, w: Tensor, mask: Tensor | None, e: Tensor, top: Tensor | None) -> None:
    """Fill e with 2^(l - top), A and Z with its sums, and top with the largest l if asked for."""
    if w.ndim == 3:
        torch.bmm(own.centred, w, out=e)
    else:
        torch.mm(own.rows, w, out=own.e_rows)
    if mask is not None:
        e.masked_fill_(~mask[..., None], -torch.inf)
    if top is not None:
        torch.amax(e, dim=1, out=top)
        e.sub_(top.clamp_min_(torch.finfo(e.dtype).min)[:, None])
    torch.bmm(own.xT, e.exp2_(), out=own.A_and_Z)


def _moderate(Z: Tensor) -> bool:
    smallest, largest = torch.aminmax(Z)
    return 1 / _SAFE < float(smallest) and float(largest) < _SAFE
