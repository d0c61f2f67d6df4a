r"""One Transformer layer with residual switches: :math:`T` queries a sequence, five matrices.

.. math:: A_i = \mathrm{softmax}(d_k^{-1/2} X_i W_Q W_K^\top X_i^\top), \quad
    Z_i = A_i X_i W_V + r_a X_i, \quad H = \varphi(Z W_1), \quad F = H W_2 + r_f Z,

.. math:: L = \tfrac12 \|F - Y\|_F^2.

Tokens are the rows of :math:`X_i \in \mathbb R^{T \times d}`, given as (n, T, d); Z, H and F keep
that layout. Parameters may carry leading axes, one entry a seed: (..., d, d_k) and so on; tokens
and targets are then (n, T, d) for all, or (..., n, T, d). No function loops over them. The softmax
and the covariance product are those of ``models.attention``. The model is that of arXiv 2506.05249
as far as its abstract says; the formulas are derived in the part on residual connections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.residual_parameters import (
    BLOCKS,
    ResidualConfig,
    ResidualParameters,
    init_parameters,
    phi,
    phi_first,
    phi_second,
    require_layer,
    require_parameters,
    require_targets,
    stack_parameters,
)

__all__ = [
    "BLOCKS",
    "Layers",
    "ResidualConfig",
    "ResidualParameters",
    "attention_output",
    "forward",
    "init_parameters",
    "jvp",
    "layers",
    "loss",
    "loss_and_gradients",
    "phi",
    "phi_first",
    "phi_second",
    "pull_back",
    "push_forward",
    "stack_parameters",
    "vjp",
]


class Layers(NamedTuple):
    r"""A, Z, :math:`U = ZW_1`, H, F of one pass: (..., n, T, T), then (..., n, T, d or m)."""

    attention: Tensor
    Z: Tensor
    U: Tensor
    H: Tensor
    F: Tensor


def layers(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> Layers:
    r""":math:`A, Z, U, H, F` of one pass. Raises ValueError for shapes that do not fit or tokens
    that are not finite, TypeError for another dtype.
    """
    if validate:
        require_layer(parameters, tokens, config)
    Q, K, V, W1, W2 = parameters
    logits = config.logit_factor * _times(tokens, Q) @ _times(tokens, K).mT
    A = torch.softmax(logits, dim=-1)
    Z = A @ _times(tokens, V)
    if config.attention_residual:
        Z = Z + tokens
    U = _times(Z, W1)
    H = phi(U, config)
    F = _times(H, W2)
    if config.feedforward_residual:
        F = F + Z
    return Layers(A, Z, U, H, F)


def attention_output(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> Float[Tensor, "*batch nT d"]:
    r"""
    .. math:: Z = \begin{pmatrix} A_1 X_1 W_V + r_a X_1 \\ \vdots \\ A_n X_n W_V + r_a X_n
        \end{pmatrix},

    the stacked rows (..., nT, d), whose singular values set the rate. Errors as :func:`layers`.
    """
    return layers(parameters, tokens, config, validate=validate).Z.flatten(-3, -2)


def forward(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> Float[Tensor, "*batch n T d"]:
    r""":math:`F = \varphi(ZW_1)W_2 + r_fZ`, (..., n, T, d). Errors as :func:`layers`."""
    return layers(parameters, tokens, config, validate=validate).F


def loss(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    targets: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> Float[Tensor, "*batch"]:
    r""":math:`L = \frac12\|F - Y\|_F^2`, one number a seed. Errors as :func:`layers`."""
    if validate:
        require_targets(targets, tokens)
    F = forward(parameters, tokens, config, validate=validate)
    return 0.5 * (F - targets).square().sum(dim=(-3, -2, -1))


def loss_and_gradients(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    targets: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> tuple[Float[Tensor, "*batch"], ResidualParameters]:
    r"""
    .. math:: L = \tfrac12\|E\|_F^2, \qquad \nabla L = \texttt{vjp}(E), \qquad E = F - Y,

    in closed form. Returns the loss, one number a seed, and the five gradients in the shape of the
    parameters. Errors as :func:`layers`.
    """
    if validate:
        require_targets(targets, tokens)
    passed = layers(parameters, tokens, config, validate=validate)
    error = passed.F - targets
    gradients = pull_back(parameters, tokens, passed, error, config)
    return 0.5 * error.square().sum(dim=(-3, -2, -1)), gradients


def vjp(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    cotangent: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> ResidualParameters:
    r""":math:`\nabla_\theta \langle F(\theta), C\rangle` for a cotangent C (..., n, T, d), by
    :func:`pull_back`. Errors as :func:`layers`.
    """
    if validate:
        require_targets(cotangent, tokens, name="cotangent")
    passed = layers(parameters, tokens, config, validate=validate)
    return pull_back(parameters, tokens, passed, cotangent, config)


def pull_back(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    passed: Layers,
    cotangent: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
) -> ResidualParameters:
    r"""
    .. math:: \nabla_{W_2} = H^\top C, \quad G_U = (C W_2^\top) \odot \varphi'(U), \quad
        \nabla_{W_1} = Z^\top G_U, \quad G_Z = G_U W_1^\top + r_f C, \\
        \nabla_{W_V} = (A X)^\top G_Z, \quad
        \nabla_{W_Q} = d_k^{-1/2} X^\top N W_K, \quad \nabla_{W_K} = d_k^{-1/2} N^\top X W_Q,

    summed over the sequences. Row t of N is :math:`M_t W_V g_t`, the covariance product of the
    tokens under the weights of query t with :math:`g_t` the t-th row of :math:`G_Z`: no backward
    pass through the softmax. Nothing is checked.
    """
    Q, K, V, W1, W2 = parameters
    A, Z, U, H, _ = passed
    G_U = _times(cotangent, W2.mT) * phi_first(U, config)
    G_Z = _times(G_U, W1.mT)
    if config.feedforward_residual:
        G_Z = G_Z + cotangent
    along = _times(G_Z, V.mT) @ tokens.mT
    N = (A * (along - (A * along).sum(dim=-1, keepdim=True))) @ tokens
    tau = config.logit_factor
    return ResidualParameters(
        tau * _contract(tokens, _times(N, K)),
        tau * _contract(N, _times(tokens, Q)),
        _contract(A @ tokens, G_Z),
        _contract(Z, G_U),
        _contract(H, cotangent),
    )


def jvp(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    tangent: ResidualParameters,
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> Float[Tensor, "*batch n T d"]:
    r"""
    .. math:: \dot S = d_k^{-1/2} X(\dot W_Q W_K^\top + W_Q \dot W_K^\top)X^\top, \quad
        \dot A = A \odot (\dot S - \mathrm{rowsum}(A \odot \dot S)), \quad
        \dot Z = \dot A X W_V + A X \dot W_V, \\
        \dot F = \bigl(\varphi'(U) \odot (\dot Z W_1 + Z \dot W_1)\bigr) W_2
        + H \dot W_2 + r_f \dot Z.

    The derivative of F along ``tangent``, (..., n, T, d). Errors as :func:`layers`.
    """
    passed = layers(parameters, tokens, config, validate=validate)
    if validate:
        require_parameters(tangent, tokens, config, name="tangent.")
    return push_forward(parameters, tokens, passed, tangent, config)


def push_forward(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    passed: Layers,
    tangent: ResidualParameters,
    config: ResidualConfig,
) -> Float[Tensor, "*batch n T d"]:
    """The formula of :func:`jvp` with the layers already computed. Nothing is checked."""
    A, Z, U, H, _ = passed
    queries, keys = _times(tokens, parameters.Q), _times(tokens, parameters.K)
    along = _times(tokens, tangent.Q) @ keys.mT + queries @ _times(tokens, tangent.K).mT
    dA = A * (along - (A * along).sum(dim=-1, keepdim=True)) * config.logit_factor
    dZ = dA @ _times(tokens, parameters.V) + A @ _times(tokens, tangent.V)
    dH = phi_first(U, config) * (_times(dZ, parameters.W1) + _times(Z, tangent.W1))
    dF = _times(dH, parameters.W2) + _times(H, tangent.W2)
    return dF + dZ if config.feedforward_residual else dF


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    """``rows @ weights`` for rows (..., n, T, a) and weights (..., a, b), as one product a seed."""
    return (rows.flatten(-3, -2) @ weights).unflatten(-2, rows.shape[-3:-1])


def _contract(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over sequences of ``left.T @ right``: (..., rows of left, rows of right)."""
    return left.flatten(-3, -2).mT @ right.flatten(-3, -2)
