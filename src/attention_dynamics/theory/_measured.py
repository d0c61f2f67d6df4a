"""What a recorded step measures: the value and the tangent of f, and inner products."""

from __future__ import annotations

import math

from torch import Tensor

from attention_dynamics.models.parameters import Parameters
from attention_dynamics.training.objective import Objective


def value_and_slope(training: Objective, phi: Parameters, v: Parameters) -> tuple[Tensor, Tensor]:
    r""":math:`f` and :math:`\langle\nabla f, v\rangle` of every sample, in one pass."""
    s, slope = training.engine.slopes(training.inputs, phi.U, phi.W, v.U, v.W, training.scale)
    value, first = training.activation.value_and_first(s)
    terms = v.c * value + phi.c * first * slope
    return ((phi.c * value).sum(-1) * phi.heads**-0.5, terms.sum(-1) * phi.heads**-0.5)


def checked_descent(found: float, size: float, residual: Tensor, slope: Tensor) -> float:
    """<grad L, gap> of the backward pass, checked against the forward pass."""
    expected = 2 * float((residual * slope).mean())
    if not abs(found - expected) <= 1e-9 * (size + 2 * rms(residual) * rms(slope)):
        raise ArithmeticError(
            f"gradient: <grad L, phi_k - phi*> = {found:.12g}, but the tangent map of f gives "
            f"{expected:.12g}; this is the gradient of another function than the loss"
        )
    return found


def rms(values: Tensor) -> float:
    """The root mean square."""
    return math.sqrt(float(values.square().mean()))


def norm(phi: Parameters) -> float:
    r""":math:`\|\phi\|`."""
    return math.sqrt(float(phi.inner(phi)))
