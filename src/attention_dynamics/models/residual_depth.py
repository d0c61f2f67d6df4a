r"""A stack of L residual layers and five ways to wire it: none, plain, scaled, ReZero, RMSNorm.

With the carry r, the gain :math:`g_l` of a branch and the normalisation N, layer l maps the tokens
:math:`X^{(l-1)}` to

.. math:: Z^{(l)} = r X^{(l-1)} + g_l\, A_l \tilde X W_V^{(l)}, \quad \tilde X = N(X^{(l-1)}),
    \qquad X^{(l)} = r Z^{(l)} + g_l\, \varphi(N(Z^{(l)}) W_1^{(l)})\, W_2^{(l)},

the attention :math:`A_l` taken of :math:`\tilde X`. One layer with r = g = 1 and no normalisation
is ``models.residual``. All wirings are one formula, so that a batch may hold seeds and wirings
alike along its leading axes. The abstract of arXiv 2506.05249 speaks of a single layer; what stands
here is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.residual_parameters import (
    ResidualConfig,
    ResidualParameters,
    init_parameters,
    phi,
    require_broadcast,
    require_layer_tokens,
    require_targets,
    stack_parameters,
)
from attention_dynamics.validation import (
    describe_shape,
    require_floating,
    require_integer,
    require_one_of,
)

WIRINGS = ("none", "plain", "scaled", "rezero", "rmsnorm")
EPSILON = 1e-8
"""Added to the mean square of a token before RMSNorm divides by its root."""


class Wiring(NamedTuple):
    r"""How a branch meets the stream; numbers, or tensors with the batch's leading axes.

    ``carry`` r is 1 with and 0 without a residual, ``gain`` the initial :math:`g_l`, ``trained``
    1 where gains are trained and 0 where they are constants, ``normalise`` 1 for RMSNorm.
    """

    carry: float | Tensor
    gain: float | Tensor
    trained: float | Tensor
    normalise: float | Tensor


class DepthParameters(NamedTuple):
    r"""The five matrices of each layer and its gain: (..., L, d, d_k), ..., and (..., L)."""

    Q: Tensor
    K: Tensor
    V: Tensor
    W1: Tensor
    W2: Tensor
    gains: Tensor


class Stack(NamedTuple):
    r""":math:`X^{(1)}, \dots, X^{(L)}` and :math:`Z^{(1)}, \dots, Z^{(L)}`: (..., L, n, T, d)."""

    X: Tensor
    Z: Tensor


def wiring(name: str, layers: int) -> Wiring:
    r"""
    ``"none"``: r = 0, g = 1; ``"plain"``: r = g = 1; ``"scaled"``: r = 1 and
    :math:`g = (2L)^{-1/2}`; ``"rezero"``: r = 1, g = 0 at the start and trained, one gain a layer
    for both branches; ``"rmsnorm"``: r = g = 1 and every branch reads
    :math:`N(x) = x/\mathrm{rms}(x)`, without a gain of its own.

    Raises ValueError for another name or less than one layer.
    """
    require_one_of("name", name, WIRINGS)
    require_integer("layers", layers, minimum=1)
    gain = {"scaled": (2 * layers) ** -0.5, "rezero": 0.0}.get(name, 1.0)
    return Wiring(float(name != "none"), gain, float(name == "rezero"), float(name == "rmsnorm"))


def stack_wirings(wirings: Sequence[Wiring], dtype: torch.dtype = torch.float64) -> Wiring:
    """Several wirings as one with tensors (wirings,)."""
    return Wiring(*(torch.tensor(entry, dtype=dtype) for entry in zip(*wirings, strict=True)))


def init_depth(
    config: ResidualConfig,
    wired: Wiring,
    layers: int,
    generator: torch.Generator,
    *,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> DepthParameters:
    r"""
    .. math:: W_\bullet^{(l)} \sim \mathcal N(0, 1/\text{rows}), \qquad g_l = \texttt{wired.gain}.

    Layer by layer as ``models.residual.init_parameters``. The gain of ``wired`` has to be a number.
    """
    require_integer("layers", layers, minimum=1)
    drawn = [init_parameters(config, generator, dtype=dtype, device=device) for _ in range(layers)]
    gains = torch.full((layers,), float(wired.gain), dtype=dtype, device=device)
    return DepthParameters(*stack_parameters(drawn), gains)


def forward(
    parameters: DepthParameters,
    tokens: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    wired: Wiring,
    *,
    validate: bool = True,
) -> Stack:
    r"""The formula at the head of this module. ``config`` gives sizes and activation; its switches
    are those of a single layer and not read.

    Raises ValueError for shapes that do not fit or tokens that are not finite, TypeError for
    another dtype.
    """
    if validate:
        require_depth(parameters, tokens, config)
    r, _, _, normalise = (_column(entry) for entry in wired)
    X, outputs, attended = tokens, [], []
    *blocks, gains = parameters
    matrices = zip(*(block.unbind(-3) for block in blocks), strict=True)
    for (Q, K, V, W1, W2), gain in zip(matrices, gains.unbind(-1), strict=True):
        g = _column(gain)
        read = rms_normalised(X, normalise)
        logits = config.logit_factor * _times(read, Q) @ _times(read, K).mT
        Z = r * X + g * (torch.softmax(logits, dim=-1) @ _times(read, V))
        hidden = phi(_times(rms_normalised(Z, normalise), W1), config)
        X = r * Z + g * _times(hidden, W2)
        outputs.append(X)
        attended.append(Z)
    return Stack(torch.stack(outputs, dim=-4), torch.stack(attended, dim=-4))


def rms_normalised(x: Tensor, normalise: float | Tensor = 1.0) -> Tensor:
    r""":math:`x/\sqrt{\overline{x^2} + \epsilon}` over the last axis, where ``normalise`` is 1, and
    x where it is 0.
    """
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + EPSILON)
    return x * (1 - normalise + normalise * scale)


def loss(
    parameters: DepthParameters,
    tokens: Float[Tensor, "*batch n T d"],
    targets: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    wired: Wiring,
    *,
    validate: bool = True,
) -> Float[Tensor, "*batch"]:
    r""":math:`L = \frac12\|X^{(L)} - Y\|_F^2`, one number a seed. Errors as :func:`forward`."""
    if validate:
        require_targets(targets, tokens)
    stack = forward(parameters, tokens, config, wired, validate=validate)
    last = stack.X[..., -1, :, :, :]
    return 0.5 * (last - targets).square().sum(dim=(-3, -2, -1))


def loss_and_gradients(
    parameters: DepthParameters,
    tokens: Float[Tensor, "*batch n T d"],
    targets: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    wired: Wiring,
    *,
    validate: bool = True,
) -> tuple[Float[Tensor, "*batch"], DepthParameters]:
    r""":math:`L` and :math:`\nabla L` by reverse-mode differentiation; the gradient of a gain that
    is not trained is 0. Parameters need all leading axes. Errors as :func:`forward`.
    """
    leaves = DepthParameters(*(block.detach().requires_grad_() for block in parameters))
    with torch.enable_grad():
        values = loss(leaves, tokens, targets, config, wired, validate=validate)
        gradients = DepthParameters(*torch.autograd.grad(values.sum(), leaves))
    return values.detach(), trained_part(gradients, wired)


def trained_part(direction: DepthParameters, wired: Wiring) -> DepthParameters:
    """The direction with the gains set to 0 where they are constants."""
    trained = wired.trained
    factor = trained[..., None] if isinstance(trained, Tensor) else trained
    return direction._replace(gains=factor * direction.gains)


def require_depth(parameters: DepthParameters, tokens: Tensor, config: ResidualConfig) -> None:
    """Check tokens and parameters against the configuration and each other."""
    require_layer_tokens(tokens, config)
    leading = parameters.gains.shape
    if not leading or leading[-1] == 0:
        raise ValueError(
            f"gains: expected shape (..., L) with L >= 1, got {describe_shape(leading)}"
        )
    require_floating("gains", parameters.gains, tokens.dtype)
    blocks = ResidualParameters(*parameters[:5])._asdict()
    for (name, shape), value in zip(config.shapes().items(), blocks.values(), strict=True):
        if value.shape != (*leading, *shape):
            raise ValueError(
                f"{name}: expected shape {describe_shape((*leading, *shape))}, the leading axes "
                f"those of the gains, got {describe_shape(value.shape)}"
            )
        require_floating(name, value, tokens.dtype)
    require_broadcast(leading[:-1], tokens)


def growth(stack: Stack, tokens: Float[Tensor, "*batch n T d"]) -> Float[Tensor, "*batch L"]:
    r""":math:`\|X^{(l)}\|_F^2/\|X\|_F^2` for l = 1..L."""
    return stack.X.square().sum(dim=(-3, -2, -1)) / tokens.square().sum(dim=(-3, -2, -1))[..., None]


def _column(entry: float | Tensor) -> float | Tensor:
    """A number, or a tensor (...) as (..., 1, 1, 1)."""
    return entry[..., None, None, None] if isinstance(entry, Tensor) else entry


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    return (rows.flatten(-3, -2) @ weights).unflatten(-2, rows.shape[-3:-1])
