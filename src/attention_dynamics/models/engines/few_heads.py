r"""The gradient for few heads: samples innermost, products unrolled over coordinates and tokens.

With m = 8 the matrices of one sample are too small for a matrix library. Here every operator runs
along a block of samples instead, over arrays (T, m, b). Tokens are relative to the first of their
sample and logits in units of log 2, as in ``pooling``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

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
    samples, length, dimension = inputs.tokens.shape
    heads = c.shape[0]
    scaled_c, unit = c * heads**-0.5, scale / math.log(2.0)
    fixed = inputs.query.ndim == 1
    # Rows of the products with the tokens: U, and for a fixed query the directions of the logits.
    rows = torch.cat((U, (W @ inputs.query) * unit)) if fixed else U
    flat = W.mT.reshape(heads * dimension, dimension) if fixed else _coordinates_first(W) * unit
    in_c, in_U = torch.zeros_like(c), torch.zeros_like(U)
    in_W = torch.zeros_like(U if fixed else flat)
    for start in range(0, samples, size):
        block = slice(start, start + size)
        tokens, query, mask = inputs.rows(block)
        count = tokens.shape[0]
        x = take("x", c, length, dimension, count)
        x.view(-1, count).copy_(tokens.reshape(count, -1).mT)
        first = x[0].clone()
        x -= first
        out = take("projected", c, length, len(rows), count)
        projected = torch.bmm(rows.expand(length, *rows.shape), x, out=out)
        p = projected[:, :heads]
        e = projected[:, heads:] if fixed else _logits(x, flat, query)
        Z = _weigh(e, mask)
        s = torch.mul(p, e, out=take("products", c, *e.shape)).sum(dim=0).div_(Z)
        sigmas, slopes = sigma.value_and_first(torch.addmm(s, U, first))
        g = cotangent(sigmas.mT, block)
        weight = torch.outer(scaled_c, g).mul_(slopes)
        in_c += sigmas @ g
        in_U += weight @ first.mT
        e *= weight.div_(Z)
        p.sub_(s).mul_(e)
        in_U += torch.bmm(e, x.mT).sum(dim=0)
        in_W += torch.bmm(p, x.mT).sum(dim=0) if fixed else _moments(x, p) @ query
    if fixed:
        in_W = in_W[:, :, None] * (scale * inputs.query)
    else:
        in_W = in_W.view(dimension, heads, dimension).transpose(0, 1) * scale
    return Parameters(in_c * heads**-0.5, in_U, in_W.contiguous())


def _coordinates_first(W: Tensor) -> Tensor:
    """W as rows (coordinate, head), (d m, d)."""
    return W.transpose(0, 1).flatten(0, 1)


def _logits(x: Tensor, flat: Tensor, query: Tensor) -> Tensor:
    """Sum over coordinates of x (T, d, b) times w = W q (d, m, b): (T, m, b)."""
    length, dimension, count = x.shape
    w = torch.mm(flat, query.mT, out=take("w", x, len(flat), count)).view(dimension, -1, count)
    logits = torch.mul(x[:, 0, None], w[0], out=take("logits", x, length, w.shape[1], count))
    for k in range(1, dimension):
        logits.addcmul_(x[:, k, None], w[k])
    return logits


def _moments(x: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of x (T, d, b) times weights (T, m, b): rows (coordinate, head), (d m, b)."""
    out = take("moments", x, x.shape[1], *weights.shape[1:])
    moments = torch.mul(x[0][:, None], weights[0], out=out)
    for t in range(1, x.shape[0]):
        moments.addcmul_(x[t][:, None], weights[t])
    return moments.flatten(0, 1)


def _weigh(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Turn logits (T, m, b) into weights 2^(l - top) in place; return their sum Z (m, b)."""
    smallest, largest = torch.aminmax(logits)
    safe = -_SAFE < smallest and largest < _SAFE
    if mask is not None:
        logits.masked_fill_(~mask.mT[:, None], -torch.inf)
    if not safe:
        logits -= logits.amax(dim=0)
    return logits.exp2_().sum(dim=0)
