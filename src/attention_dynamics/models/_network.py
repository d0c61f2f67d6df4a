"""From heads to the network: checked arguments, and the sum over heads that cancels exactly."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._pass import Query, require_tokens
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.validation import (
    known_truth,
    require_finite,
    require_floating,
    require_shape,
)


def head_sum(
    c: Float[Tensor, " m"], sigmas: Float[Tensor, "n m"], twins: Bool[Tensor, " m/2"] | None
) -> Float[Tensor, " n"]:
    r"""
    .. math:: m^{-1/2} \sum_{i \le m/2} \bigl(c_i \sigma_i + c_{i+m/2}\, \sigma_{i+m/2}\bigr).

    The pairs are summed first. Twin heads, equal bit by bit in U and W, are one function, yet a
    matrix product or a vectorised tanh may round column i and column i + m/2 differently. So a
    twin takes the value of its partner (and keeps its own derivative): with opposite coefficients
    the pair then cancels to exactly 0, for any tokens, dtype and device. ``twins`` marks them, or
    is None when there are none. Returns (n,).
    """
    if twins is None:
        return (c * sigmas).sum(dim=-1) * c.shape[-1] ** -0.5
    first, second = sigmas.chunk(2, dim=-1)
    c_first, c_second = c.chunk(2, dim=-1)
    second = torch.where(twins, first.detach() + (second - second.detach()), second)
    return (c_first * first + c_second * second).sum(dim=-1) * c.shape[-1] ** -0.5


def twin_heads(parameters: Parameters) -> Bool[Tensor, "*S m/2"] | None:
    """Mark the i with U_i = U_{i+m/2} and W_i = W_{i+m/2} bit by bit; None if there is none."""
    if parameters.heads % 2:
        return None
    U, W = parameters.U.detach().chunk(2, dim=-2), parameters.W.detach().chunk(2, dim=-3)
    twins = (U[0] == U[1]).all(dim=-1) & (W[0] == W[1]).flatten(-2).all(dim=-1)
    # One look on the CPU saves work in every block; on an accelerator it would wait for the queue.
    return None if twins.device.type == "cpu" and known_truth(twins.any()) is False else twins


def prepare(
    parameters: Parameters,
    tokens: Tensor,
    query: Query,
    activation: str | Activation,
    mask: Tensor | None,
    validate: bool,
    chunk: int | None = None,
) -> tuple[Activation, _pass.Inputs, Parameters]:
    _pass.require_chunk(chunk)
    if validate:
        parameters.require_valid()
    dimension = parameters.dimension
    inputs = _pass.prepare(tokens, query, mask, dimension=dimension, validate=validate)
    if validate:
        require_floating("parameters", parameters.U, inputs.tokens.dtype)
    dtype = inputs.tokens.dtype
    return get_activation(activation), inputs, parameters.map(lambda block: block.to(dtype))


def like_parameters(name: str, tangent: Parameters, parameters: Parameters) -> Parameters:
    for field, block, like in zip(tangent._fields, tangent, parameters, strict=True):
        require_shape(f"{name}.{field}", block, tuple("mde"[: like.ndim]),
                      dict(zip("mde", like.shape, strict=False)))  # fmt: skip
        require_floating(f"{name}.{field}", block, parameters.dtype)
    return tangent.map(lambda block: block.to(parameters.dtype))


def require_per_sample(name: str, value: Tensor, tokens: Tensor, validate: bool) -> None:
    if validate:
        require_tokens(tokens)
        require_shape(name, value, ("n",), {"n": tokens.shape[0]}, remedy="one number a sample")
        require_floating(name, value)
        require_finite(name, value)
