r"""The residual layer's configuration, parameters, activation and checks at the boundary.

Parameters may carry leading axes, one entry a seed. What is computed from them is in
``models.residual``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from attention_dynamics.validation import (
    describe_shape,
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_number,
    require_one_of,
)

BLOCKS = ("Q", "K", "V", "W1", "W2")
_LN2 = math.log(2.0)


@dataclass(frozen=True)
class ResidualConfig:
    r"""Sizes, switches and activation of the layer; n and T are those of the tokens.

    - ``dimension`` d, ``key_dimension`` :math:`d_k`, ``hidden`` m;
    - ``attention_residual`` :math:`r_a`, ``feedforward_residual`` :math:`r_f`;
    - ``slope`` a, the lower slope of :math:`\varphi`, and ``softness`` :math:`\beta`.

    Raises ValueError for a size below 1, a slope outside of (0, 1] or a softness that is not
    positive.
    """

    dimension: int = 32
    key_dimension: int = 8
    hidden: int = 32
    attention_residual: bool = True
    feedforward_residual: bool = True
    slope: float = 0.5
    softness: float = 1.0

    def __post_init__(self) -> None:
        for name in ("dimension", "key_dimension", "hidden"):
            require_integer(name, getattr(self, name), minimum=1)
        require_number("softness", self.softness, positive=True)
        require_number("slope", self.slope, positive=True, remedy="a lower slope of 0 has no rate")
        if self.slope > 1:
            raise ValueError(f"slope: expected a number in (0, 1], got {self.slope}")

    @property
    def logit_factor(self) -> float:
        r""":math:`d_k^{-1/2}`."""
        return self.key_dimension**-0.5

    @property
    def curvature(self) -> float:
        r""":math:`\sup|\varphi''| = (1 - a)\beta/4`."""
        return (1 - self.slope) * self.softness / 4

    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of each block, without leading axes."""
        d, k, m = self.dimension, self.key_dimension, self.hidden
        return {"Q": (d, k), "K": (d, k), "V": (d, d), "W1": (d, m), "W2": (m, d)}


class ResidualParameters(NamedTuple):
    r""":math:`\theta = (W_Q, W_K, W_V, W_1, W_2)`, a point or a direction.

    Shapes (..., d, d_k) twice, (..., d, d), (..., d, m), (..., m, d) with the same leading axes.
    """

    Q: Tensor
    K: Tensor
    V: Tensor
    W1: Tensor
    W2: Tensor

    def plus(self, other: ResidualParameters, factor: float | Tensor = 1.0) -> ResidualParameters:
        r""":math:`\theta + c\,v`; a factor (...) has the leading axes of the parameters."""
        c = factor[..., None, None] if isinstance(factor, Tensor) and factor.ndim else factor
        return ResidualParameters(*(a + c * b for a, b in zip(self, other, strict=True)))

    def inner(self, other: ResidualParameters) -> Float[Tensor, "*batch"]:
        r""":math:`\langle\theta, v\rangle`, one number a seed."""
        parts = [(a * b).sum(dim=(-2, -1)) for a, b in zip(self, other, strict=True)]
        return torch.stack(parts).sum(dim=0)

    def norm(self) -> Float[Tensor, "*batch"]:
        r""":math:`\|\theta\|`, the Euclidean norm of all entries, one number a seed."""
        return self.inner(self).sqrt()

    def only(self, blocks: Sequence[str]) -> ResidualParameters:
        """The same direction with every block not named set to 0."""
        return ResidualParameters(
            *(a if name in blocks else torch.zeros_like(a) for name, a in self._asdict().items())
        )


def phi(u: Tensor, config: ResidualConfig) -> Tensor:
    r"""
    .. math:: \varphi(u) = a u + (1 - a)\,\frac{\log(1 + e^{\beta u}) - \log 2}{\beta},

    elementwise: :math:`\varphi(0) = 0`, :math:`a \le \varphi' \le 1`, and the odd part of
    :math:`\varphi` is exactly :math:`\frac{1+a}2 u`.
    """
    a, beta = config.slope, config.softness
    # Linear from 40 on, where e^-40 is below rounding; torch's default, 20, is 2e-9 off.
    return a * u + (1 - a) * (softplus(u, beta=beta, threshold=40.0) - _LN2 / beta)


def phi_first(u: Tensor, config: ResidualConfig) -> Tensor:
    r""":math:`\varphi'(u) = a + (1 - a)/(1 + e^{-\beta u})`, elementwise."""
    return config.slope + (1 - config.slope) * torch.sigmoid(config.softness * u)


def phi_second(u: Tensor, config: ResidualConfig) -> Tensor:
    r""":math:`\varphi''(u) = (1 - a)\beta\, s(1 - s)`, s the logistic function of :math:`\beta u`;
    at most :math:`(1-a)\beta/4`.
    """
    s = torch.sigmoid(config.softness * u)
    return (1 - config.slope) * config.softness * s * (1 - s)


def init_parameters(
    config: ResidualConfig,
    generator: torch.Generator,
    *,
    scales: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0),
    orthogonal_w2: bool = False,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> ResidualParameters:
    r"""
    .. math:: W_\bullet \sim \mathcal N(0, s_\bullet^2/\text{rows}), \qquad
        \text{or } W_2 = s_2 O \text{ with } O^\top O = I_d.

    ``scales`` are :math:`(s_Q, s_K, s_V, s_1, s_2)`; 0 makes a block zero. Numbers are drawn on
    the CPU in float64 and then moved. For several seeds stack what this returns
    (:func:`stack_parameters`). Raises ValueError for a negative scale, or for ``orthogonal_w2``
    with m < d.
    """
    require_cpu_generator(generator)
    if len(scales) != len(BLOCKS):
        raise ValueError(f"scales: expected 5 numbers (Q, K, V, W1, W2), got {len(scales)}")
    if orthogonal_w2 and config.hidden < config.dimension:
        raise ValueError(
            f"orthogonal_w2: expected hidden >= dimension for orthonormal columns, got m = "
            f"{config.hidden} < d = {config.dimension}; widen the layer"
        )
    blocks = []
    for (name, (rows, columns)), entry in zip(config.shapes().items(), scales, strict=True):
        require_number(f"scales[{name}]", entry)
        scale = float(entry)
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        if name == "W2" and orthogonal_w2:
            drawn = torch.linalg.qr(drawn).Q * rows**0.5
        blocks.append((scale * rows**-0.5 * drawn).to(device=device, dtype=dtype))
    return ResidualParameters(*blocks)


def stack_parameters(points: Sequence[ResidualParameters]) -> ResidualParameters:
    """Several seeds as one point with a leading axis (seeds, ...)."""
    return ResidualParameters(*(torch.stack(blocks) for blocks in zip(*points, strict=True)))


def require_layer_tokens(tokens: Tensor, config: ResidualConfig) -> None:
    """Check that tokens are (..., n, T, d) of the configured d, floating, finite and not empty."""
    if not isinstance(tokens, Tensor) or tokens.ndim < 3 or tokens.shape[-1] != config.dimension:
        got = describe_shape(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(
            f"tokens: expected shape (..., n, T, d) with d = {config.dimension}, got {got}; "
            "tokens are the rows of each sequence"
        )
    if 0 in tokens.shape:
        raise ValueError(f"tokens: expected no empty axis, got {describe_shape(tokens.shape)}")
    require_floating("tokens", tokens)
    require_finite("tokens", tokens)


def require_layer(parameters: ResidualParameters, tokens: Tensor, config: ResidualConfig) -> None:
    """Check tokens and parameters against the configuration and each other."""
    require_layer_tokens(tokens, config)
    require_parameters(parameters, tokens, config)


def require_parameters(
    parameters: ResidualParameters, tokens: Tensor, config: ResidualConfig, *, name: str = ""
) -> None:
    """Check each block's shape, dtype and leading axes, which must broadcast with the tokens'."""
    leading = parameters[0].shape[:-2]
    for (block, shape), value in zip(config.shapes().items(), parameters, strict=True):
        if value.shape[-2:] != shape or value.shape[:-2] != leading:
            raise ValueError(
                f"{name}{block}: expected shape (..., {shape[0]}, {shape[1]}) with the same "
                f"leading axes in all five blocks, got {describe_shape(value.shape)}"
            )
        require_floating(f"{name}{block}", value, tokens.dtype)
    require_broadcast(leading, tokens)


def require_broadcast(leading: tuple[int, ...], tokens: Tensor) -> None:
    """Check that the leading axes of the parameters and those of the tokens broadcast."""
    try:
        np.broadcast_shapes(leading, tokens.shape[:-3])
    except ValueError:
        raise ValueError(
            f"tokens: expected leading axes that broadcast with {describe_shape(leading)} of the "
            f"parameters, got {describe_shape(tokens.shape[:-3])}; use one axis for the seeds"
        ) from None


def require_blocks(blocks: Sequence[str]) -> None:
    """Check names of blocks: at least one, each of Q, K, V, W1, W2."""
    if not blocks or isinstance(blocks, str):
        raise ValueError(f"blocks: expected a list of names out of {BLOCKS}, got {blocks!r}")
    for name in blocks:
        require_one_of("blocks", name, BLOCKS)


def require_targets(targets: Tensor, tokens: Tensor, *, name: str = "targets") -> None:
    """Check targets: an output a token, finite, in the dtype of the tokens."""
    if targets.shape[-3:] != tokens.shape[-3:]:
        raise ValueError(
            f"{name}: expected shape (..., n, T, d) ending in {describe_shape(tokens.shape[-3:])}, "
            f"got {describe_shape(targets.shape)}; one target a token"
        )
    require_floating(name, targets, tokens.dtype)
    require_finite(name, targets)
