r"""The part of an activation that is linear in the projection U . a, averaged over U exactly.

For :math:`s = U \cdot a` with Gaussian U and :math:`\beta = \mathbb E\,\dot\sigma(s)`, the rest
:math:`\sigma(s) - \beta s` is uncorrelated with every linear function of U (Bussgang, Stein), and
:math:`\dot\sigma(s) - \beta` has mean zero. So, with no approximation,

.. math:: \mathbb E\,\sigma\sigma' = \beta\beta'\, a \cdot a'
        + \mathbb E\,(\sigma - \beta s)(\sigma' - \beta' s'), \qquad
    \mathbb E\,\dot\sigma\dot\sigma' = \beta\beta'
        + \mathbb E\,(\dot\sigma - \beta)(\dot\sigma' - \beta'),

and sampling U costs only the error of the last terms, for odd :math:`\sigma` of order
:math:`\|a\|^6` and :math:`\|a\|^4`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models.activations import ERF, ERF_PLAIN, Activation
from attention_dynamics.models.engines.selection import choose
from attention_dynamics.theory._tangents import TangentFeatures, WeightedHeads

_DEGREES = (48, 96, 192, 384)
_TAIL = 1e-11  # the last Chebyshev coefficients that count as resolved, relative
_STEP = 0.05  # of the trapezoidal rule


def mean_slope(sigma: Activation, largest: float, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    r""":math:`v \mapsto \beta(v) = \mathbb E\,\dot\sigma(\sqrt v\, z)`, z standard Gaussian.

    In closed form for ``ERF`` and ``ERF_PLAIN``; else a polynomial for v in [0, ``largest``], as
    exact as ``dtype`` is. What it missed would be a bias of the kernel, seen by no standard error.

    Raises ValueError for an activation whose mean slope such a polynomial does not resolve.
    """
    if sigma is ERF:
        return lambda v: math.sqrt(2 / math.pi) * (1 + v).rsqrt()
    if sigma is ERF_PLAIN:
        return lambda v: 2 / math.sqrt(math.pi) * (1 + 2 * v).rsqrt()
    # In t = (1 + v)^(-1/2), of which beta is a multiple for erf, few terms are enough.
    least = (1 + max(largest, 1e-3)) ** -0.5
    # An integral over y = z / t, a scale that both factors keep for every v. The trapezoidal rule
    # converges geometrically for a function analytic around the line.
    ends = round(9 / (least * _STEP))
    y = torch.arange(-ends, ends + 1, dtype=torch.float64) * _STEP

    def at(t: float) -> float:
        weights = torch.exp(-((t * y) ** 2) / 2)
        slopes = sigma.first(math.sqrt(max(0.0, 1 - t * t)) * y)
        return float((slopes * weights).sum() / weights.sum())

    def exact(t: np.ndarray) -> np.ndarray:
        return np.array([at(x) for x in t])

    for degree in _DEGREES:
        fit = np.polynomial.Chebyshev.interpolate(exact, degree, domain=[least, 1.0])
        sizes = np.abs(fit.coef) / max(np.abs(fit.coef).max(), 1e-300)
        if sizes[-8:].max() < _TAIL:
            break
    else:
        raise ValueError(
            f"activation: the mean slope of {sigma.name!r} is not resolved for tokens of norm up "
            f"to {math.sqrt(largest):.3g}; use method='monte carlo', or shorten the tokens"
        )
    kept = np.flatnonzero(sizes > 8 * torch.finfo(dtype).eps)
    coefficients = [float(c) for c in fit.coef[: kept[-1] + 1]]
    return lambda v: _clenshaw(coefficients, ((1 + v).rsqrt() - least) * (2 / (1 - least)) - 1)


def _clenshaw(coefficients: list[float], x: Tensor) -> Tensor:
    later, latest = torch.zeros_like(x), torch.zeros_like(x)
    for c in coefficients[:0:-1]:
        later, latest = torch.rsub(latest, c).addcmul_(x, later, value=2), later
    return torch.addcmul(coefficients[0] - latest, x, later)


class SplitBuffer:
    r"""Features of a block of heads: those of the rests, and :math:`F_\beta = \beta a`.

    :math:`K_c = F_\beta F_\beta^\top + F_c F_c^\top` and
    :math:`K_u = F_\beta F_\beta^\top + F_u F_u^\top`; :math:`F_w` is as in the empirical kernel.
    """

    def __init__(
        self, inputs: _pass.Inputs, sigma: Activation, scale: float, engine: str, heads: int
    ) -> None:
        self.inputs, self.sigma, self.scale, self.engine = inputs, sigma, scale, engine
        samples, _, dimension = inputs.tokens.shape
        self._memory = inputs.tokens.new_empty(samples * (1 + 3 * dimension) * heads)
        self._length = abs(scale)
        if inputs.query.ndim == 1:
            self._length *= float(torch.linalg.vector_norm(inputs.query, dtype=torch.float64))
        longest = float(inputs.tokens.square().sum(dim=-1).max())
        self._beta = mean_slope(sigma, longest, inputs.tokens.dtype)

    def fill(self, heads: WeightedHeads) -> tuple[Float[Tensor, "n dh"], TangentFeatures]:
        r""":math:`F_\beta` and the features of the rests, for heads of equal weight."""
        inputs, (U, W, in_c, _) = self.inputs, heads
        samples, _, d = inputs.tokens.shape
        h, width = U.shape[0], 1 + 3 * d
        features = self._memory[: samples * width * h].view(samples, width, h)
        root = float(in_c[0]) ** 0.5
        engine = choose(self.engine, inputs, h, U, W)
        for block in _pass.blocks(inputs, h, None):
            s, a, r = engine.features(inputs.rows(block), U, W, self.scale)
            value, slope = self.sigma.value_and_first(s)
            beta = self._beta(a.square().sum(dim=-1))
            rows = features[block]
            torch.mul(a.mT, (root * beta)[:, None], out=rows[:, :d])
            torch.mul(torch.addcmul(value, beta, s, value=-1), root, out=rows[:, d])
            torch.mul(a.mT, (root * (slope - beta))[:, None], out=rows[:, d + 1 : 2 * d + 1])
            torch.mul(r.mT, (root * self._length * slope)[:, None], out=rows[:, 2 * d + 1 :])
        flat = features.view(samples, width * h)
        ends = [d * h, (d + 1) * h, (2 * d + 1) * h]
        linear, c, in_U, in_W = (
            flat[:, start:stop] for start, stop in zip([0, *ends], [*ends, None], strict=True)
        )
        return linear, TangentFeatures(c, in_U, in_W, flat)
