r"""Tangent kernel :math:`K = JJ^\top` of the residual layer, J the derivative of F by the blocks.

Rows and columns of K are the nT outputs times d, in the order of ``F.flatten()``; leading axes of
the parameters (seeds) stay in front. Near its end, gradient descent on :math:`\frac12\|F - Y\|^2`
contracts :math:`F - Y` by :math:`I - \eta K` a step: the largest eigenvalue bounds the step size
and the smallest one sets the rate. Derived here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import residual_depth
from attention_dynamics.models.residual import (
    BLOCKS,
    ResidualConfig,
    ResidualParameters,
    layers,
    phi_first,
    pull_back,
    push_forward,
)
from attention_dynamics.models.residual_depth import (
    DepthParameters,
    Wiring,
    require_depth,
    trained_part,
)
from attention_dynamics.models.residual_parameters import require_blocks
from attention_dynamics.validation import require_cpu_generator, require_integer


def feedforward_kernel(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    validate: bool = True,
) -> Float[Tensor, "*batch nTd nTd"]:
    r"""
    .. math:: K[(i,o),(j,p)] = \langle z_i, z_j\rangle
        \sum_{k=1}^m W_2[k,o]\,\varphi'(u_{ik})\,\varphi'(u_{jk})\,W_2[k,p]
        + \delta_{op}\,\langle h_i, h_j\rangle,

    the kernel of :math:`W_1` and :math:`W_2` in closed form, i and j rows of Z, o and p outputs.
    Errors are those of ``models.residual.layers``.
    """
    passed = layers(parameters, tokens, config, validate=validate)
    Z, H = passed.Z.flatten(-3, -2), passed.H.flatten(-3, -2)
    slopes = phi_first(passed.U, config).flatten(-3, -2)
    reach = (slopes[..., None, :] * parameters.W2.mT[..., None, :, :]).flatten(-3, -2)
    rows, d = Z.shape[-2], Z.shape[-1]
    first = (reach @ reach.mT).unflatten(-1, (rows, d)).unflatten(-3, (rows, d))
    first = first * (Z @ Z.mT)[..., :, None, :, None]
    eye = torch.eye(d, dtype=Z.dtype, device=Z.device)
    second = (H @ H.mT)[..., :, None, :, None] * eye[:, None, :]
    return (first + second).flatten(-2).flatten(-3, -2)


def tangent_kernel(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    blocks: Sequence[str] = BLOCKS,
    validate: bool = True,
) -> Float[Tensor, "*batch nTd nTd"]:
    r"""
    .. math:: K = \sum_{B} \frac{\partial F}{\partial W_B}
        \Bigl(\frac{\partial F}{\partial W_B}\Bigr)^{\!\top}, \qquad B \in \texttt{blocks},

    one pull-back an output: the memory is nTd times that of the parameters, so this is for small
    layers. Raises ValueError for an unknown block, and as ``models.residual.layers`` does.
    """
    require_blocks(blocks)
    passed = layers(parameters, tokens, config, validate=validate)
    shape = passed.F.shape[-3:]
    basis = torch.eye(shape.numel(), dtype=passed.F.dtype, device=passed.F.device)
    basis = basis.reshape(-1, *[1] * (passed.F.ndim - 3), *shape)
    pulled = pull_back(parameters, tokens, passed, basis, config)._asdict()
    batch = passed.F.shape[:-3]
    jacobian = torch.cat(
        [
            pulled[name].expand(-1, *batch, *pulled[name].shape[-2:]).flatten(-2)
            for name in BLOCKS
            if name in blocks
        ],
        dim=-1,
    ).movedim(0, -2)
    return jacobian @ jacobian.mT


def lambda_max(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    generator: torch.Generator,
    blocks: Sequence[str] = BLOCKS,
    iterations: int = 60,
    validate: bool = True,
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: v \leftarrow \frac{Kv}{\|Kv\|}, \qquad \lambda_{\max}(K) \approx \|J^\top v\|^2,

    by power iteration, one pull-back and one push-forward each, without forming K. The Rayleigh
    quotient :math:`\|J^\top v\|^2` with :math:`\|v\| = 1` is never above
    :math:`\lambda_{\max}`. One number a seed.

    Raises ValueError for an unknown block or no iteration, TypeError without a generator, and as
    ``models.residual.layers`` does.
    """
    require_blocks(blocks)
    require_cpu_generator(generator)
    require_integer("iterations", iterations, minimum=1)
    passed = layers(parameters, tokens, config, validate=validate)
    drawn = torch.randn(passed.F.shape, generator=generator, dtype=torch.float64)
    v = _normalised(drawn.to(passed.F))
    for _ in range(iterations):
        pulled = pull_back(parameters, tokens, passed, v, config).only(blocks)
        v = _normalised(push_forward(parameters, tokens, passed, pulled, config))
    pulled = pull_back(parameters, tokens, passed, v, config).only(blocks)
    return pulled.inner(pulled)


def depth_lambda_max(
    parameters: DepthParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    wired: Wiring,
    *,
    generator: torch.Generator,
    iterations: int = 60,
    validate: bool = True,
) -> Float[Tensor, "*batch"]:
    r""":func:`lambda_max` of a stack of layers and all it trains, by automatic differentiation.

    One number a seed. Errors as :func:`lambda_max` and ``models.residual_depth.forward``.
    """
    require_cpu_generator(generator)
    require_integer("iterations", iterations, minimum=1)
    if validate:
        require_depth(parameters, tokens, config)
    parameters = DepthParameters(*(block.detach() for block in parameters))

    def output(*point: Tensor) -> Tensor:
        stack = residual_depth.forward(
            DepthParameters(*point), tokens, config, wired, validate=False
        )
        return stack.X[..., -1, :, :, :]

    F, pull = torch.func.vjp(output, *parameters)  # type: ignore[misc]
    drawn = torch.randn(F.shape, generator=generator, dtype=torch.float64)
    v = _normalised(drawn.to(F))
    for _ in range(iterations):
        pulled = trained_part(DepthParameters(*pull(v)), wired)
        v = _normalised(torch.func.jvp(output, tuple(parameters), tuple(pulled))[1])
    pulled = trained_part(DepthParameters(*pull(v)), wired)
    squares = [block.square().flatten(F.ndim - 3).sum(dim=-1) for block in pulled]
    return torch.stack(squares).sum(dim=0)


def _normalised(v: Tensor) -> Tensor:
    tiny = torch.finfo(v.dtype).tiny
    return v / torch.linalg.vector_norm(v, dim=(-3, -2, -1), keepdim=True).clamp_min(tiny)
