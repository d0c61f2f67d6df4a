r"""The encoder-only neighbour of the shallow Transformer: one wide head, ReLU, mean pooling.

For sequences :math:`X_j \in \mathbb{R}^{T \times d}` (rows are tokens) and width m,

.. math:: f(X_j) = m^{-1/2}\, w_O \cdot \frac1T \sum_{t} \mathrm{relu}(A_j X_j W_V^\top)_t,
    \qquad A_j = \mathrm{softmax}(m^{-p} X_j W_Q^\top W_K X_j^\top).

The exponent p is the point of the comparison: at p = 1/2 the attention matrix keeps fluctuating as
m grows, at p = 1 the logits vanish and every row tends to the uniform average. Source: the model of
Wu, Liu, Chrysos and Cevher (arXiv 2311.01575) as its abstract and second-hand accounts describe
it; the derivatives are derived here. Parameters may carry leading batch dimensions, written
``*s`` (seeds), over which everything broadcasts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.validation import (
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_number,
    require_shape,
)

__all__ = [
    "EncoderKernel",
    "EncoderParameters",
    "attention_matrices",
    "forward",
    "initial_parameters",
    "loss_and_gradients",
    "tangent_kernel",
]


class EncoderParameters(NamedTuple):
    r"""Query, key and value matrices (\*s, m, d) and output weights (\*s, m)."""

    Q: Float[Tensor, "*s m d"]
    K: Float[Tensor, "*s m d"]
    V: Float[Tensor, "*s m d"]
    O: Float[Tensor, "*s m"]  # noqa: E741 (the symbol of the formula)

    @property
    def width(self) -> int:
        """The width m."""
        return self.O.shape[-1]

    def moved(self, direction: EncoderParameters, factor: float) -> EncoderParameters:
        """Return ``self + factor * direction``, block by block."""
        pairs = zip(self, direction, strict=True)
        return EncoderParameters(*(block + factor * other for block, other in pairs))


class EncoderKernel(NamedTuple):
    r"""The four blocks of :math:`K = K_Q + K_K + K_V + K_O`, each (\*s, n, n)."""

    Q: Float[Tensor, "*s n n"]
    K: Float[Tensor, "*s n n"]
    V: Float[Tensor, "*s n n"]
    O: Float[Tensor, "*s n n"]  # noqa: E741

    def total(self) -> Float[Tensor, "*s n n"]:
        """The sum of the four blocks."""
        return self.Q + self.K + self.V + self.O


def initial_parameters(
    width: int,
    dimension: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> EncoderParameters:
    r"""
    .. math:: (W_Q)_{il}, (W_K)_{il}, (W_V)_{il} \sim \mathcal{N}(0, 1/d), \qquad
        (w_O)_i \sim \mathcal{N}(0, 1).

    With the factor :math:`m^{-1/2}` of the output this is LeCun's initialisation of all four
    layers. Drawn on the CPU in float64, then cast and moved. Raises ValueError for a size below 1
    or a generator that is not on the CPU.
    """
    require_integer("width", width, minimum=1)
    require_integer("dimension", dimension, minimum=1)
    require_cpu_generator(generator)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (scale * drawn).to(dtype=dtype, device=device)

    scale = dimension**-0.5
    return EncoderParameters(
        Q=normal(width, dimension, scale=scale),
        K=normal(width, dimension, scale=scale),
        V=normal(width, dimension, scale=scale),
        O=normal(width),
    )


def attention_matrices(
    parameters: EncoderParameters, tokens: Float[Tensor, "n T d"], *, logit_exponent: float
) -> Float[Tensor, "*s n T T"]:
    r"""
    .. math:: A_j = \mathrm{softmax}(m^{-p} X_j W_Q^\top W_K X_j^\top), \qquad
        p = \text{logit\_exponent}.

    Row t holds the weights with which token t attends; each sums to one. Raises ValueError for
    shapes that do not fit, NaN or infinite tokens.
    """
    _check(parameters, tokens, logit_exponent)
    return _attend(parameters, tokens, logit_exponent)


def forward(
    parameters: EncoderParameters, tokens: Float[Tensor, "n T d"], *, logit_exponent: float
) -> Float[Tensor, "*s n"]:
    r"""
    .. math:: f(X_j) = m^{-1/2}\, w_O \cdot \tfrac1T \sum_t \mathrm{relu}(A_j X_j W_V^\top)_t.

    Differentiable by autograd. Raises ValueError for shapes that do not fit, NaN or infinite
    tokens.
    """
    _check(parameters, tokens, logit_exponent)
    return _Pass.run(parameters, tokens, logit_exponent).output(parameters)


def loss_and_gradients(
    parameters: EncoderParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    *,
    logit_exponent: float,
) -> tuple[Float[Tensor, "*s"], EncoderParameters]:
    r"""
    .. math:: L_n = \tfrac1n \sum_j (f(X_j) - y_j)^2 \quad\text{and}\quad \nabla L_n,

    the gradients in closed form: with :math:`G_{S_j}` the gradient in the logits,
    :math:`C = \sum_j m^{-p} X_j^\top G_{S_j} X_j` gives :math:`\nabla_{W_Q} = W_K C^\top` and
    :math:`\nabla_{W_K} = W_Q C`, whose cost does not hold the product n T m.

    Returns the loss (\*s,) and the gradients in the shape of the parameters. Raises ValueError for
    shapes that do not fit, NaN or infinite tokens.
    """
    _check(parameters, tokens, logit_exponent)
    require_shape("targets", targets, ("n",), {"n": tokens.shape[0]})
    run = _Pass.run(parameters, tokens, logit_exponent)
    residual = run.output(parameters) - targets
    cotangent = 2.0 / tokens.shape[0] * residual
    sample = run.per_sample(parameters, tokens, logit_exponent, values=False)
    core = (cotangent[..., None, None] * sample.core).sum(dim=-3)
    # sum_j g_j (1/T) w_O 1{P > 0} (A X), all samples in one product
    slope = cotangent[..., None, None] * run.active
    weights = (parameters.O * run.norm)[..., None]
    gradients = EncoderParameters(
        parameters.K @ core.mT,
        parameters.Q @ core,
        weights * (slope.flatten(-3, -2).mT @ run.mixed.flatten(-3, -2)),
        run.norm * (cotangent[..., None, :] @ run.summed).squeeze(-2),
    )
    return residual.square().mean(dim=-1), gradients


def tangent_kernel(
    parameters: EncoderParameters, tokens: Float[Tensor, "n T d"], *, logit_exponent: float
) -> EncoderKernel:
    r"""
    .. math:: K_b(X_i, X_j) = \langle \nabla_b f(X_i), \nabla_b f(X_j) \rangle, \qquad
        b \in \{W_Q, W_K, W_V, w_O\}.

    Returns the four blocks (\*s, n, n). Raises ValueError for shapes that do not fit, NaN or
    infinite tokens.
    """
    _check(parameters, tokens, logit_exponent)
    run = _Pass.run(parameters, tokens, logit_exponent)
    sample = run.per_sample(parameters, tokens, logit_exponent, values=True)

    def gram(left: Tensor, right: Tensor) -> Tensor:
        return left.flatten(-2) @ right.flatten(-2).mT

    core, flipped = sample.core, sample.core.mT
    of_keys = (parameters.K.mT @ parameters.K)[..., None, :, :]
    of_queries = (parameters.Q.mT @ parameters.Q)[..., None, :, :]
    return EncoderKernel(
        gram(flipped, of_keys @ flipped),
        gram(core, of_queries @ core),
        gram(sample.values, sample.values),
        run.norm**2 * run.summed @ run.summed.mT,
    )


class _PerSample(NamedTuple):
    """Gradients of f(X_j) in W_Q^T W_K, (*s, n, d, d), and in W_V, (*s, n, m, d)."""

    core: Tensor
    values: Tensor


class _Pass(NamedTuple):
    """What one forward pass leaves: A (*s, n, T, T), A X, relu(A X W_V^T) > 0 and its sum."""

    attention: Tensor
    mixed: Tensor
    active: Tensor
    summed: Tensor
    norm: float

    @classmethod
    def run(cls, parameters: EncoderParameters, tokens: Tensor, exponent: float) -> _Pass:
        attention = _attend(parameters, tokens, exponent)
        mixed = attention @ tokens
        hidden = mixed @ parameters.V.mT[..., None, :, :]
        norm = parameters.width**-0.5 / tokens.shape[1]
        return cls(attention, mixed, (hidden > 0).to(mixed.dtype), hidden.relu().sum(dim=-2), norm)

    def output(self, parameters: EncoderParameters) -> Tensor:
        return self.norm * (self.summed @ parameters.O[..., None]).squeeze(-1)

    def per_sample(
        self, parameters: EncoderParameters, tokens: Tensor, exponent: float, *, values: bool
    ) -> _PerSample:
        weighted = (self.norm * parameters.O)[..., None, None, :] * self.active
        in_attention = weighted @ parameters.V[..., None, :, :] @ tokens.mT
        centred = in_attention - (self.attention * in_attention).sum(dim=-1, keepdim=True)
        in_logits = self.attention * centred
        core = parameters.width**-exponent * tokens.mT @ in_logits @ tokens
        return _PerSample(core, weighted.mT @ self.mixed if values else core.new_empty(0))


def _attend(parameters: EncoderParameters, tokens: Tensor, exponent: float) -> Tensor:
    core = parameters.width**-exponent * parameters.Q.mT @ parameters.K
    return torch.softmax(tokens @ core[..., None, :, :] @ tokens.mT, dim=-1)


def _check(parameters: EncoderParameters, tokens: Tensor, exponent: float) -> None:
    require_shape("tokens", tokens, ("n", "T", "d"))
    require_floating("tokens", tokens)
    require_finite("tokens", tokens)
    require_number("logit_exponent", exponent)
    *seeds, width = parameters.O.shape
    expected = (*seeds, width, tokens.shape[-1])
    for name, block in zip("QKV", parameters[:3], strict=True):
        if tuple(block.shape) != expected:
            raise ValueError(
                f"parameters.{name}: expected shape {expected} (leading dimensions, m, d) for "
                f"O of shape {tuple(parameters.O.shape)} and tokens of dimension "
                f"{tokens.shape[-1]}, got {tuple(block.shape)}; tokens are rows, (n, T, d)"
            )
    for name, block in zip("QKVO", parameters, strict=True):
        require_floating(f"parameters.{name}", block, tokens.dtype)
