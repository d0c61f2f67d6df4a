r"""Softmax attention as a regression function: :math:`f(x) = A\,\mu(B^\top x)`.

A query :math:`x \in \mathbb R^d` attends to a context :math:`z_1, \dots, z_T \in \mathbb R^k`
with logits :math:`z_t^\top b`, :math:`b = B^\top x`, and the pooled token :math:`\mu(b)` is mapped
to :math:`\mathbb R^m` by :math:`A`. This is the attention of ``models.attention`` with one query a
sample: a context that all samples share is one sequence with n heads, contexts of their own are n
sequences with one head each.

Factors, queries (\*batch, n, d) and contexts may carry leading batch axes, such as one for random
seeds. Contexts with as many axes as the queries, (\*batch, T, k), are shared by the samples;
contexts with one axis more, (\*batch, n, T, k), belong to one sample each. Source of the model:
arXiv 2603.01514; the formulas are derived in the chapters on regression.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import attention
from attention_dynamics.models._regression_inputs import Factors, Inputs, as_heads
from attention_dynamics.validation import require_integer, require_matrix

__all__ = [
    "Factors",
    "attend",
    "effective_sample_size",
    "forward",
    "loss",
    "loss_and_gradients",
    "participation_ratio",
]


def attend(
    factors: Factors,
    queries: Float[Tensor, "*batch n d"],
    contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"],
    *,
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, "*batch n k"]:
    r"""
    .. math:: \mu(b) = \sum_t \alpha_t z_t, \qquad
        \alpha = \mathrm{softmax}_t(z_t^\top b), \quad b = B^\top x.

    Returns (\*batch, n, k). ``chunk`` is the number of samples whose weights are in memory at once.
    Raises ValueError for shapes that do not fit, NaN or infinite entries; TypeError for dtypes.
    """
    inputs = Inputs.prepare(factors, queries, contexts, None, chunk, validate)
    pooled = [_pool(inputs, rows)[-1] for rows in inputs.blocks()]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=-2)


def forward(
    factors: Factors,
    queries: Float[Tensor, "*batch n d"],
    contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"],
    *,
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, "*batch n m"]:
    r"""
    .. math:: f(x) = A\,\mu(B^\top x).

    Returns (\*batch, n, m). Arguments and errors are those of :func:`attend`.
    """
    pooled = attend(factors, queries, contexts, chunk=chunk, validate=validate)
    return pooled @ factors.A.to(pooled.dtype).mT


def loss(
    factors: Factors,
    queries: Float[Tensor, "*batch n d"],
    contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"],
    targets: Float[Tensor, "*batch n m"],
    *,
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: L_n(A, B) = \frac{1}{2n} \sum_{i \le n} \|f(x_i) - y_i\|^2.

    Returns (\*batch,). Arguments and errors are those of :func:`attend`.
    """
    inputs = Inputs.prepare(factors, queries, contexts, targets, chunk, validate)
    parts = [_residuals(inputs, rows)[-1].square().sum(dim=(-2, -1)) for rows in inputs.blocks()]
    return sum(parts[1:], parts[0]) / (2 * inputs.queries.shape[-2])


def loss_and_gradients(
    factors: Factors,
    queries: Float[Tensor, "*batch n d"],
    contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"],
    targets: Float[Tensor, "*batch n m"],
    *,
    chunk: int | None = None,
    validate: bool = True,
) -> tuple[Float[Tensor, "*batch"], Factors]:
    r"""
    .. math:: \nabla_A L_n = \frac1n \sum_i r_i\, \mu_i^\top, \qquad
        \nabla_B L_n = \frac1n \sum_i x_i \bigl(M_i A^\top r_i\bigr)^\top, \qquad
        r_i = A \mu_i - y_i,

    with the softmax covariance :math:`M_i = \sum_t \alpha_t (z_t - \mu_i)(z_t - \mu_i)^\top`, which
    is never formed. Returns the loss (\*batch,) and the gradients in the shape of the factors, in
    closed form: about 8 n T k operations and, for a shared context, nothing but matrix products and
    one softmax. Arguments and errors are those of :func:`attend`.
    """
    inputs = Inputs.prepare(factors, queries, contexts, targets, chunk, validate)
    squares: list[Tensor] = []
    gradients: list[Factors] = []
    for rows in inputs.blocks():
        tokens, weights, pooled, residuals = _residuals(inputs, rows)
        directions = as_heads(residuals @ inputs.factors.A, inputs.shared)
        # M u = sum alpha_t (z_t . u - mu . u) z_t, where mu is known already.
        along_mean = (as_heads(pooled, inputs.shared) * directions).sum(dim=-1, keepdim=True)
        along = torch.baddbmm(along_mean, directions, tokens.mT, beta=-1.0)
        slopes = ((weights * along) @ tokens).reshape(pooled.shape)
        squares.append(residuals.square().sum(dim=(-2, -1)))
        gradients.append(Factors(residuals.mT @ pooled, inputs.queries[..., rows, :].mT @ slopes))
    samples = inputs.queries.shape[-2]
    total = Factors(*(sum(blocks[1:], blocks[0]) for blocks in zip(*gradients, strict=True)))
    return sum(squares[1:], squares[0]) / (2 * samples), total.map(lambda block: block / samples)


def participation_ratio(
    factors: Factors,
    queries: Float[Tensor, "*batch n d"],
    contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"],
    *,
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, "*batch n"]:
    r"""
    .. math:: \Bigl(\sum_t \alpha_t^2\Bigr)^{-1} \in [1, T],

    the number of tokens that a query really averages; for Gaussian tokens and long contexts it
    comes close to :func:`effective_sample_size`. Returns (\*batch, n). Arguments and errors are
    those of :func:`attend`.
    """
    inputs = Inputs.prepare(factors, queries, contexts, None, chunk, validate)
    parts = []
    for rows in inputs.blocks():
        _, weights, pooled = _pool(inputs, rows)
        parts.append(weights.square().sum(dim=-1).reciprocal().reshape(pooled.shape[:-1]))
    return torch.cat(parts, dim=-1)


def effective_sample_size(
    factors: Factors,
    queries: Float[Tensor, "*batch n d"],
    token_covariance: Float[Tensor, "*batch k k"],
    length: int,
) -> Float[Tensor, "*batch n"]:
    r"""
    .. math:: T_{\mathrm{eff}} = T e^{-s^2}, \qquad s^2 = b^\top S b, \quad b = B^\top x,

    the number of tokens N(0, S) whose plain mean is as uncertain as the pooled token of T. Returns
    (\*batch, n). Raises ValueError for shapes that do not fit or a length below 1.
    """
    factors.require_valid()
    dimension, context_dimension = factors.B.shape[-2:]
    require_matrix("queries", queries, ("n", "d"), {"d": dimension})
    require_matrix("token_covariance", token_covariance, ("k", "k"), {"k": context_dimension})
    require_integer("length", length, minimum=1)
    b = queries @ factors.B
    return length * torch.exp(-((b @ token_covariance) * b).sum(dim=-1))


def _pool(inputs: Inputs, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences (s, T, k), weights (s, h, T) of the h queries of each, pooled tokens (*b, n, k)."""
    b = inputs.queries[..., rows, :] @ inputs.factors.B
    tokens = inputs.tokens(rows, b.shape[:-2])
    logits = as_heads(b, inputs.shared) @ tokens.mT
    softmax = attention.attention_weights if inputs.validate else _softmax
    weights = softmax(logits)
    return tokens, weights, (weights @ tokens).reshape(b.shape)


def _softmax(logits: Tensor) -> Tensor:
    """Weights without a look at the logits, for which an accelerator would have to wait."""
    return torch.softmax(logits, dim=-1)


def _residuals(inputs: Inputs, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What :func:`_pool` gives, and the residuals A mu - y, (*b, n, m)."""
    tokens, weights, pooled = _pool(inputs, rows)
    assert inputs.targets is not None
    return tokens, weights, pooled, pooled @ inputs.factors.A.mT - inputs.targets[..., rows, :]
