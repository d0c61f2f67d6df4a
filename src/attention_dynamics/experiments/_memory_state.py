r"""Loss and gradients from a state that does not grow with T, of heads and of recurrent units.

A head keeps :math:`(\ell^\star, Z, a, r)` of the tokens it has read, 2d + 2 numbers, and merges it
with that of the next block. A recurrent unit keeps :math:`(h, \partial_w h, \partial_u h)`, d + 2
numbers, and carries the derivatives forward. Between the two and back-propagation lies the unit
that keeps every :math:`\sqrt T`-th state and computes the others a second time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines.reference import pulled_back
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.recurrence import RecurrentParameters

BLOCK = 64  # tokens read at once


class Summary(NamedTuple):
    r"""
    .. math:: \ell^\star = \max_t \ell_t, \quad Z = \sum_t e^{\ell_t - \ell^\star}, \quad
        a = \sum_t \alpha_t x_t, \quad r = \sum_t \alpha_t (s_t - s)\, x_t.

    What one query needs to know of the tokens read so far. Shapes: ``top`` and ``Z`` (n, m), ``a``
    and ``r`` (n, m, d); the score is :math:`s = U \cdot a`.
    """

    top: Float[Tensor, "n m"]
    Z: Float[Tensor, "n m"]
    a: Float[Tensor, "n m d"]
    r: Float[Tensor, "n m d"]


def block_summary(
    tokens: Float[Tensor, "n T d"], U: Float[Tensor, "m d"], directions: Tensor
) -> Summary:
    r"""The summary of one block of tokens; ``directions`` are :math:`\gamma W q`, (m, d) or
    (n, m, d).
    """
    logits = _pass.project(tokens, directions).mT
    projections = _pass.project(tokens, U).mT
    top = logits.amax(dim=-1)
    e = torch.exp(logits - top[..., None])
    Z = e.sum(dim=-1)
    alpha = e / Z[..., None]
    s = (alpha * projections).sum(dim=-1)
    return Summary(top, Z, alpha @ tokens, (alpha * (projections - s[..., None])) @ tokens)


def merge(one: Summary, two: Summary, U: Float[Tensor, "m d"]) -> Summary:
    r"""
    .. math:: Z = Z_1 + Z_2, \quad \beta_k = Z_k/Z, \quad a = \beta_1 a_1 + \beta_2 a_2, \quad
        r = \beta_1 r_1 + \beta_2 r_2 + \beta_1 \beta_2 (s_1 - s_2)(a_1 - a_2),

    after both Z are brought to the larger maximum. Associative and commutative: the blocks may
    come in any order and any grouping.
    """
    top = torch.maximum(one.top, two.top)
    weights = [part.Z * torch.exp(part.top - top) for part in (one, two)]
    Z = weights[0] + weights[1]
    first, second = ((weight / Z)[..., None] for weight in weights)
    between = one.a - two.a
    across = first * second * (between * U).sum(dim=-1, keepdim=True)
    a = first * one.a + second * two.a
    return Summary(top, Z, a, first * one.r + second * two.r + across * between)


def streamed_summary(
    tokens: Float[Tensor, "n T d"],
    U: Float[Tensor, "m d"],
    W: Float[Tensor, "m d d"],
    query: Tensor,
    *,
    scale: float = 1.0,
    block: int = BLOCK,
) -> Summary:
    r"""The summary of all tokens, read once, ``block`` of them at a time; query (d,) or (n, d)."""
    directions = _pass.head_queries(W, query, scale)
    total = None
    for start in range(0, tokens.shape[1], block):  # split would make all views at once
        part = tokens[:, start : start + block]
        new = block_summary(part, U, directions)
        total = new if total is None else merge(total, new, U)
    assert total is not None  # there is at least one token
    return total


@torch.no_grad()
def streamed_step(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    query: Tensor,
    sigma: Activation,
    *,
    scale: float = 1.0,
    block: int = BLOCK,
) -> tuple[Float[Tensor, ""], Parameters]:
    r""":math:`L_n` and :math:`\nabla L_n` of the shallow Transformer from one pass over tokens."""
    c, U, W = parameters
    total = streamed_summary(tokens, U, W, query, scale=scale, block=block)
    s = (total.a * U).sum(dim=-1)
    error = head_sum(c, sigma.value(s), twin_heads(parameters)) - targets
    g = (2.0 / len(targets)) * error
    features = HeadFeatures(s, total.a, total.r)
    return error.square().mean(), pulled_back(g, features, query, c, sigma, scale)


@torch.no_grad()
def streamed_values(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    query: Tensor,
    sigma: Activation,
    *,
    scale: float = 1.0,
    block: int = BLOCK,
) -> Float[Tensor, " n"]:
    r""":math:`f(X_j)` from :math:`(\ell^\star, Z, s)`, three numbers a head and sample."""
    c, U, W = parameters
    directions = _pass.head_queries(W, query, scale)
    shape = tokens.shape[0], len(U)
    top, Z, s = tokens.new_full(shape, -torch.inf), tokens.new_zeros(shape), tokens.new_zeros(shape)
    for start in range(0, tokens.shape[1], block):
        part = tokens[:, start : start + block]
        logits = _pass.project(part, directions)
        larger = torch.maximum(top, logits.amax(dim=1))
        e = torch.exp(logits - larger[:, None])
        kept, new = Z * torch.exp(top - larger), e.sum(dim=1)
        top, Z = larger, kept + new
        s = (kept * s + (e * _pass.project(part, U)).sum(dim=1)) / Z
    return head_sum(c, sigma.value(s), twin_heads(parameters))


@torch.no_grad()
def forward_sensitivities(
    parameters: RecurrentParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    sigma: Activation,
) -> tuple[Float[Tensor, ""], RecurrentParameters]:
    r"""
    .. math:: \partial_w h_t = \sigma'(z_t)\,(x_t + u\,\partial_w h_{t-1}), \qquad
        \partial_u h_t = \sigma'(z_t)\,(h_{t-1} + u\,\partial_u h_{t-1}).

    :math:`L_n` and :math:`\nabla L_n` without a way back: nothing is kept of the tokens read. The
    units are independent, so each has derivatives in its own d + 1 parameters alone.
    """
    w, u, c = parameters
    h = tokens.new_zeros(tokens.shape[0], len(w))
    in_u, in_w = torch.zeros_like(h), tokens.new_zeros(*h.shape, w.shape[1])
    for t in range(tokens.shape[1]):
        x = tokens[:, t]
        value, slope = sigma.value_and_first(torch.addmm(u * h, x, w.mT))
        in_u.mul_(u).add_(h).mul_(slope)
        in_w.mul_(u[:, None]).add_(x[:, None]).mul_(slope[..., None])
        h = value
    c = c * len(c) ** -0.5
    error = h @ c - targets
    g = (2.0 / len(targets)) * error
    weight = torch.outer(g, c)
    gradients = RecurrentParameters(
        in_w.mul_(weight[..., None]).sum(dim=0), (weight * in_u).sum(dim=0),
        (g @ h) * len(c) ** -0.5,
    )  # fmt: skip
    return error.square().mean(), gradients


@torch.no_grad()
def checkpointed(
    parameters: RecurrentParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    sigma: Activation,
    *,
    cut: int | None = None,
) -> tuple[Float[Tensor, ""], RecurrentParameters]:
    r""":math:`L_n` and :math:`\nabla L_n` by back-propagation that keeps every ``cut``-th state.

    The states between two that are kept are computed again on the way back: T/cut + 2 cut arrays
    (n, m) in place of 2 T. Without ``cut`` it is :math:`\lceil\sqrt T\rceil`.
    """
    w, u, c = parameters
    samples, length, _ = tokens.shape
    cut = math.isqrt(length - 1) + 1 if cut is None else cut
    starts = range(0, length, cut)

    def drive(t: int, h: Tensor) -> Tensor:
        return torch.addmm(u * h, tokens[:, t], w.mT)

    kept = tokens.new_empty(len(starts), samples, len(w))
    h = tokens.new_zeros(samples, len(w))
    for t in range(length):
        if t % cut == 0:
            kept[t // cut] = h
        h = sigma.value(drive(t, h))
    c = c * len(c) ** -0.5
    error = h @ c - targets
    g = (2.0 / len(targets)) * error
    in_c = (g @ h) * len(c) ** -0.5
    in_w, in_u = torch.zeros_like(w), torch.zeros_like(u)
    back = torch.outer(g, c)  # the derivative in h after the part
    states, slopes = (tokens.new_empty(min(cut, length), *h.shape) for _ in range(2))
    for number, start in reversed(list(enumerate(starts))):
        h, stop = kept[number], min(start + cut, length)
        for t in range(start, stop):
            states[t - start] = h
            h, slope = sigma.value_and_first(drive(t, h))
            slopes[t - start] = slope
        for t in range(stop - 1, start - 1, -1):
            delta = slopes[t - start].mul_(back)
            in_w.addmm_(delta.mT, tokens[:, t])
            in_u.add_((delta * states[t - start]).sum(dim=0))
            back = delta * u
    return error.square().mean(), RecurrentParameters(in_w, in_u, in_c)
