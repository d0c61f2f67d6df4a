r"""The gradient for few heads: samples innermost, products unrolled over coordinates and tokens.

With m = 8 the matrices of one sample are too small for a matrix library. Here every operator runs
along a block of samples instead, over arrays (T, m, b). Tokens are relative to the first of their
sample and logits in units of log 2, as in ``pooling``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attention_dynamics.models._pass import Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines.workspace import WORKSPACE
from attention_dynamics.models.parameters import Parameters

take = WORKSPACE.take

#: Up to this many heads, and for tokens so few that a block holds this many samples.
MOST_HEADS = 16
LEAST_SAMPLES = 64
BLOCK = 2**18
_SAFE = 60.0


def block_size(inputs: Inputs, heads: int, chunk: int | None) -> int | None:
    """The number of samples a block, or None where this layout doesn't pay."""
    samples, length, dimension = inputs.tokens.shape
    size = BLOCK // (max(length, dimension) * heads) if chunk is None else chunk
    size = min(size, samples)
    return size if heads <= MOST_HEADS and size >= LEAST_SAMPLES else None


def accumulate(
    parameters: Parameters,
    inputs: Inputs,
    sigma: Activation,
    scale: float,
    size: int,
    cotangent: Callable[[Tensor, slice], Tensor],
) -> Parameters:
    r""":math:`\sum_j g_j \nabla f(X_j)`, g read off the activations (b, m) of each block."""
    c, U, W = parameters
    dimension, heads = U.shape[1], c.shape[0]
    scaled_c = c * heads**-0.5
    fixed = inputs.query.ndim == 1
    pooled = _Pooled(inputs, U, W, scale)
    in_c, in_U = torch.zeros_like(c), torch.zeros_like(U)
    in_both, in_W = torch.cat((U, U)).zero_(), U.new_zeros(dimension, dimension * heads)
    for block in _blocks(inputs, size):
        x, first, p, e, Z, s = pooled.of(block)
        sigmas, slopes = sigma.value_and_first(torch.addmm(s, U, first))
        g = cotangent(sigmas.mT, block)
        weight = torch.outer(scaled_c, g).mul_(slopes)
        in_c += sigmas @ g
        in_U += weight @ first.mT
        e *= weight.div_(Z)
        p.sub_(s).mul_(e)
        if fixed:  # p and e are the rows of one array
            in_both += torch.bmm(pooled.both, x.mT).sum(dim=0)
        else:  # the longer side of the product in its columns: several times faster
            in_U += torch.bmm(e, x.mT).sum(dim=0)
            in_W.addmm_(inputs.query[block].mT, _moments(x, p).mT)
    if fixed:
        in_U += in_both[heads:]
        in_W = in_both[:heads, :, None] * (scale * inputs.query)
    else:
        in_W = in_W.view(dimension, dimension, heads).permute(2, 1, 0) * scale
    return Parameters(in_c * heads**-0.5, in_U, in_W.contiguous())


def scores(inputs: Inputs, U: Tensor, W: Tensor, scale: float, size: int, out: Tensor) -> Tensor:
    """Fill ``out`` (n, m) with s and return it."""
    pooled = _Pooled(inputs, U, W, scale)
    for block in _blocks(inputs, size):
        _, first, _, _, _, s = pooled.of(block)
        out[block] = torch.addmm(s, U, first).mT
    return out


def _blocks(inputs: Inputs, size: int) -> list[slice]:
    return [slice(i, i + size) for i in range(0, inputs.tokens.shape[0], size)]


class _Pooled:
    """The weights of a block and their sums, for the directions of one call."""

    def __init__(self, inputs: Inputs, U: Tensor, W: Tensor, scale: float) -> None:
        self.inputs, self.heads, unit = inputs, U.shape[0], scale / math.log(2.0)
        self.fixed = inputs.query.ndim == 1
        # Rows of the products with the tokens: U, and for a fixed query the logits' directions.
        self.rows = torch.cat((U, (W @ inputs.query) * unit)) if self.fixed else U
        self.flat = None if self.fixed else _coordinates_first(W) * unit
        self.both: Tensor  # p and, for a fixed query, e of the block at hand

    def of(self, block: slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return x (T, d, b), x_0 (d, b), p and e (T, m, b), Z and s - U x_0 (m, b)."""
        tokens, query, mask = self.inputs.rows(block)
        count, length, dimension = tokens.shape
        x = take("x", tokens, length, dimension, count)
        x.view(-1, count).copy_(tokens.reshape(count, -1).mT)
        first = x[0].clone()
        x -= first
        rows = self.rows
        both = self.both = take("projected", tokens, length, len(rows), count)
        torch.bmm(rows.expand(length, *rows.shape), x, out=both)
        p = both[:, : self.heads]
        e = both[:, self.heads :] if self.flat is None else _logits(x, self.flat, query)
        Z = _weigh(e, mask)
        s = torch.mul(p, e, out=take("products", tokens, *e.shape)).sum(dim=0).div_(Z)
        return x, first, p, e, Z, s


def _coordinates_first(W: Tensor) -> Tensor:
    """W as rows (coordinate, head), (d m, d)."""
    return W.transpose(0, 1).flatten(0, 1)


def _logits(x: Tensor, flat: Tensor, query: Tensor) -> Tensor:
    """Sum over coordinates of x (T, d, b) times w = W q (d, m, b): (T, m, b)."""
    length, dimension, count = x.shape
    w = torch.mm(flat, query.mT, out=take("w", x, len(flat), count)).view(dimension, -1, count)
    logits = take("logits", x, length, w.shape[1], count)
    return _sum_of_products(x[:, :, None].unbind(1), w.unbind(0), logits)


def _moments(x: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of x (T, d, b) times weights (T, m, b): rows (coordinate, head), (d m, b)."""
    out = take("moments", x, x.shape[1], *weights.shape[1:])
    return _sum_of_products(x[:, :, None].unbind(0), weights.unbind(0), out).flatten(0, 1)


def _sum_of_products(left: Sequence[Tensor], right: Sequence[Tensor], out: Tensor) -> Tensor:
    torch.mul(left[0], right[0], out=out)
    for one, two in zip(left[1:], right[1:], strict=True):
        out.addcmul_(one, two)
    return out


def _weigh(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Turn logits (T, m, b) into weights 2^(l - top) in place; return their sum Z (m, b)."""
    moderate = False
    if logits.device.type == "cpu":  # a look at another device would wait for it
        smallest, largest = torch.aminmax(logits)
        moderate = bool(-_SAFE < smallest and largest < _SAFE)
    if mask is not None:
        logits.masked_fill_(~mask.mT[:, None], -torch.inf)
    if not moderate:
        logits -= logits.amax(dim=0)
    return logits.exp2_().sum(dim=0)
