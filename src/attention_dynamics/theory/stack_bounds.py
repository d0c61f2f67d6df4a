r"""Bounds for a stack of layers at a distance from its paired start, free of the sequence length.

Sequences are measured by their longest token, :math:`\|X\|_\infty = \max_t \|x_t\|`. A layer whose
heads are paired at the start is 0 there; what it is, and what it passes on, is then at most linear
in the distance of its parameters from the start, with constants that are averages over heads and
contain neither T nor m. Derived here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.stack_parameters import StackParameters, TokenLayer
from attention_dynamics.theory.constants import Real
from attention_dynamics.validation import require_number


class LayerConstants(NamedTuple):
    r"""Suprema over :math:`\|X\|_\infty \le b`: ``output`` of :math:`\|G_t\|`, ``lipschitz`` of its
    change by the tokens, ``gradient`` of that by the parameters.
    """

    output: float
    lipschitz: float
    gradient: float


class StackConstants(NamedTuple):
    r"""Of each layer in order: ``tokens`` bounds its input :math:`\|X^{(l-1)}\|_\infty`, ``layers``
    holds its :class:`LayerConstants`, and ``gradients`` bounds
    :math:`\|\nabla_{\theta^{(l)}} f_t(X)\|`.
    """

    tokens: tuple[float, ...]
    layers: tuple[LayerConstants, ...]
    gradients: tuple[float, ...]


def attention_lipschitz(matrix_norm: ArrayLike, *, token_bound: float = 1.0) -> Real:
    r""":math:`\|\dot a\| \le z + \sqrt{1 + z^2}`, :math:`z = b^2 \|W\|_2`, if
    :math:`\|\dot x_s\| \le 1` for all s.

    :math:`a = X\,\mathrm{softmax}(X^\top W x_t)`, the query a token too. No smaller number serves
    every T. Raises ValueError or TypeError for a ``token_bound`` that is not positive.
    """
    import numpy as np

    require_number("token_bound", token_bound, positive=True)
    z = token_bound**2 * np.asarray(matrix_norm, dtype=float)
    return z + np.sqrt(1 + z**2)


def layer_constants(
    start: TokenLayer | Parameters,
    current: TokenLayer | Parameters,
    *,
    token_bound: float,
    activation: str | Activation = "tanh",
) -> LayerConstants:
    r"""With the distances :math:`D_c, D_u, D_w` of the three blocks, :math:`R_i` and :math:`w_i`
    bounds of :math:`\|U_i\|` and :math:`\|W_i\|_2` on the segment from the start,
    :math:`A_i = b^2 w_i + \sqrt{1 + b^4 w_i^2}`, :math:`B_i = 3b^2 + 4b^4 w_i` and
    :math:`\langle y \rangle = (\frac1m \sum_i y_i^2)^{1/2}`,

    .. math:: F &= s_0 D_c + s_1 (b D_u + b^3 \langle R \rangle D_w), \\
        \Lambda &= s_1 D_c \langle R A \rangle + D_u \langle s_2 b R A + s_1 A \rangle
        + D_w \langle s_2 b^3 R^2 A + s_1 R B \rangle, \\
        \Gamma^2 &= s_0^2 + s_1^2 \langle \|C\| \max(b, b^3 R) \rangle^2 .

    Raises ValueError where the heads of ``start`` are not paired.
    """
    C, U, W = (block.double() for block in start)
    if not _paired(C, U, W):
        raise ValueError(
            "start: expected paired heads, U and W equal and the coefficients opposite in the two "
            "halves; without pairs a layer is not small at the start, and nothing here holds"
        )
    s0, s1, s2 = get_activation(activation).bounds
    b = token_bound
    require_number("token_bound", b, positive=True)
    dC, V, Z = (now.double() - then for now, then in zip(current, (C, U, W), strict=True))
    Dc, Du, Dw = (float(block.square().sum().sqrt()) for block in (dC, V, Z))
    R = U.norm(dim=1) + V.norm(dim=1)
    w = torch.linalg.matrix_norm(W, ord=2) + torch.linalg.matrix_norm(Z)
    A = torch.as_tensor(attention_lipschitz(w.cpu().numpy(), token_bound=b)).to(R)
    B = 3 * b**2 + 4 * b**4 * w
    sizes = current[0].double().reshape(len(R), -1).norm(dim=1)
    output = s0 * Dc + s1 * (b * Du + b**3 * _rms(R) * Dw)
    lipschitz = (
        s1 * Dc * _rms(R * A)
        + Du * _rms(s2 * b * R * A + s1 * A)
        + Dw * _rms(s2 * b**3 * R**2 * A + s1 * R * B)
    )
    head = torch.clamp(b**3 * R, min=b)
    return LayerConstants(output, lipschitz, math.hypot(s0, s1 * _rms(sizes * head)))


def stack_constants(
    start: StackParameters,
    current: StackParameters,
    *,
    token_bound: float = 1.0,
    activation: str | Activation = "tanh",
) -> StackConstants:
    r"""
    .. math:: b_l = b_{l-1} + F_l, \qquad \|\nabla_{\theta^{(L)}} f_t\| \le \Gamma_L, \qquad
        \|\nabla_{\theta^{(l)}} f_t\| \le \Gamma_l\, \Lambda_L \prod_{l<k<L} (1 + \Lambda_k), \quad
        l < L,

    for every sequence with :math:`\|X\|_\infty \le b_0` = ``token_bound``, each constant taken at
    the :math:`b_{l-1}` of its layer. Raises ValueError where a layer of ``start`` is not paired.
    """
    tokens, layers = [token_bound], []
    for then, now in zip(start.layers(), current.layers(), strict=True):
        layers.append(layer_constants(then, now, token_bound=tokens[-1], activation=activation))
        tokens.append(tokens[-1] + layers[-1].output)
    gradients = [layers[-1].gradient]
    passed = layers[-1].lipschitz
    for layer in reversed(layers[:-1]):
        gradients.append(layer.gradient * passed)
        passed *= 1 + layer.lipschitz
    return StackConstants(tuple(tokens[:-1]), tuple(layers), tuple(reversed(gradients)))


def _paired(C: Tensor, U: Tensor, W: Tensor) -> bool:
    if len(U) % 2:
        return False
    (c, d), (u, v), (w, z) = (block.chunk(2, dim=0) for block in (C, U, W))
    return torch.equal(c, -d) and torch.equal(u, v) and torch.equal(w, z)


def _rms(values: Float[Tensor, " m"]) -> float:
    return float(values.square().mean().sqrt())
