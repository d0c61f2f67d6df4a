r"""Smooth bounded activations :math:`\sigma`, their derivatives, and the bounds on all three."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ROOT_2 = math.sqrt(2.0)
_TWO_OVER_ROOT_PI = 2.0 / math.sqrt(math.pi)


@dataclass(frozen=True)
class Activation:
    r"""
    .. math:: \sigma, \quad \sigma', \quad \sigma'', \quad
        (s_0, s_1, s_2) = (\sup|\sigma|, \sup|\sigma'|, \sup|\sigma''|).

    ``value``, ``first`` and ``second`` are elementwise functions of tensors; ``bounds`` holds
    :math:`(s_0, s_1, s_2)`, which every constant of the theory is made of. ``first_from_value``,
    optional, is :math:`\sigma'` as a function of :math:`\sigma` and saves an evaluation. Give
    module-level functions, not lambdas, to a model that is to be pickled. Raises ValueError when
    a bound is negative or not finite.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    first: Callable[[Tensor], Tensor]
    second: Callable[[Tensor], Tensor]
    bounds: tuple[float, float, float]
    first_from_value: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if len(self.bounds) != 3 or not all(math.isfinite(b) and b >= 0 for b in self.bounds):
            raise ValueError(
                f"bounds: expected three finite numbers (sup|sigma|, sup|sigma'|, sup|sigma''|), "
                f"got {self.bounds!r}; an unbounded activation is outside the theory"
            )

    def value_and_first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        r""":math:`(\sigma(x), \sigma'(x))`, elementwise."""
        value = self.value(x)
        if self.first_from_value is None:
            return value, self.first(x)
        return value, self.first_from_value(value)


def _tanh_slope(value: Tensor) -> Tensor:
    return 1 - value * value


def _tanh_first(x: Tensor) -> Tensor:
    return _tanh_slope(torch.tanh(x))


def _tanh_second(x: Tensor) -> Tensor:
    value = torch.tanh(x)
    return -2 * value * _tanh_slope(value)


def _erf(x: Tensor) -> Tensor:
    return torch.erf(x / _ROOT_2)


def _erf_first(x: Tensor) -> Tensor:
    return (_TWO_OVER_ROOT_PI / _ROOT_2) * torch.exp(-0.5 * x * x)


def _erf_second(x: Tensor) -> Tensor:
    return -x * _erf_first(x)


def _erf_plain_first(x: Tensor) -> Tensor:
    return _TWO_OVER_ROOT_PI * torch.exp(-x * x)


def _erf_plain_second(x: Tensor) -> Tensor:
    return -2 * x * _erf_plain_first(x)


TANH = Activation(
    "tanh",
    torch.tanh,
    _tanh_first,
    _tanh_second,
    (1.0, 1.0, 4 / (3 * math.sqrt(3))),
    first_from_value=_tanh_slope,
)
r""":math:`\tanh x`; :math:`|\tanh''|` is largest where :math:`\tanh^2 = 1/3`."""

ERF = Activation(
    "erf",
    _erf,
    _erf_first,
    _erf_second,
    (1.0, math.sqrt(2 / math.pi), math.sqrt(2 / (math.pi * math.e))),
)
"""erf(x / sqrt 2), the scaling for which the tangent kernel has a closed form over U."""

ERF_PLAIN = Activation(
    "erf_plain",
    torch.erf,
    _erf_plain_first,
    _erf_plain_second,
    (1.0, _TWO_OVER_ROOT_PI, 2 * _TWO_OVER_ROOT_PI / math.sqrt(2 * math.e)),
)
"""erf(x); its derivatives are those of ``ERF`` at sqrt(2) x, times sqrt(2) and 2."""

_KNOWN = {activation.name: activation for activation in (TANH, ERF, ERF_PLAIN)}


def get_activation(activation: str | Activation) -> Activation:
    r"""
    ``"tanh"``: :math:`\tanh x`; ``"erf"``: :math:`\mathrm{erf}(x/\sqrt2)`;
    ``"erf_plain"``: :math:`\mathrm{erf}(x)`; an :class:`Activation` is returned as it is.

    Raises ValueError for an unknown name.
    """
    if isinstance(activation, Activation):
        return activation
    if activation not in _KNOWN:
        known = ", ".join(repr(name) for name in _KNOWN)
        raise ValueError(
            f"activation: expected one of {known}, got {activation!r}; for another function pass "
            "Activation(name, value, first, second, bounds)"
        )
    return _KNOWN[activation]
