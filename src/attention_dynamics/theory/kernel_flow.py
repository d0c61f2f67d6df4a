r"""What the tangent kernel predicts for training: gradient flow, and gradient descent with steps.

On :math:`L_n = \frac1n \sum_j (f_j - y_j)^2` a model with a constant kernel K and :math:`f = 0` at
the start has :math:`\dot f = -\frac2n K (f - y)`. Source: Jacot, Gabriel and Hongler (2018).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_number,
    require_shape,
)


def kernel_flow(
    kernel: Float[Tensor, "n n"], targets: Float[Tensor, " n"], times: Sequence[float]
) -> Float[Tensor, "k n"]:
    r"""
    .. math:: f(t) = \bigl(I - e^{-2 K t/n}\bigr)\, y.

    One row a time, in float64. Raises ValueError for a kernel that is not square and finite,
    targets that do not fit, or a negative time.
    """
    moments = [float(t) for t in times]
    for t in moments:
        require_number("times", t)
    return _predicted(
        kernel,
        targets,
        lambda rates: torch.stack([-torch.expm1(-2 * rates * t) for t in moments]),
    )


def kernel_descent(
    kernel: Float[Tensor, "n n"],
    targets: Float[Tensor, " n"],
    steps: int,
    step_size: float,
) -> Float[Tensor, "k n"]:
    r"""
    .. math:: f_k = \bigl(I - (I - \tfrac{2\eta}n K)^k\bigr)\, y, \qquad k = 0, \dots, \tau.

    ``steps`` + 1 rows in float64: gradient descent on a model that is linear in its parameters,
    exactly. It converges if :math:`\eta\, \lambda_1(K) < n`. Raises as :func:`kernel_flow`.
    """
    require_number("step_size", step_size, positive=True)
    powers = torch.arange(steps + 1, dtype=torch.float64)[:, None]
    return _predicted(kernel, targets, lambda rates: 1 - (1 - 2 * step_size * rates) ** powers)


def _predicted(
    kernel: Tensor, targets: Tensor, shares: Callable[[Tensor], Tensor]
) -> Float[Tensor, "k n"]:
    require_shape("kernel", kernel, ("n", "n"), {"n": len(targets)})
    require_floating("kernel", kernel)
    require_finite("kernel", kernel)
    require_shape("targets", targets, ("n",))
    values, vectors = torch.linalg.eigh(kernel.double())
    rates = values.clamp_min(0) / len(targets)
    return shares(rates) * (targets.double() @ vectors) @ vectors.mT
