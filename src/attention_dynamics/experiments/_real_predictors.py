r"""What forecasts real sequences without a network: kernels after as many steps, ridge, neighbours.

Gradient descent on a model that is linear in its parameters, with tangent kernel K and f = 0 at the
start, predicts :math:`k(X)^\top \alpha_\tau` after :math:`\tau` steps, on any input.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.validation import require_integer, require_number

PENALTIES = tuple(10.0 ** (-j / 2) for j in range(2, 17))
"""Penalties of ridge regression as shares of the trace of the kernel."""


def descent_coefficients(
    kernel: Float[Tensor, "n n"], targets: Float[Tensor, " n"], steps: int, step_size: float
) -> Float[Tensor, " n"]:
    r"""
    .. math:: \alpha_\tau = \frac{2\eta}{n} \sum_{k<\tau} \bigl(I - \tfrac{2\eta}n K\bigr)^k y,
        \qquad K \alpha_\tau = \bigl(I - (I - \tfrac{2\eta}n K)^\tau\bigr)\, y.

    The first form holds for a singular K too. In float64. Raises ValueError for steps below 1 or a
    step size that is not positive.
    """
    require_integer("steps", steps, minimum=1)
    require_number("step_size", step_size, positive=True)
    values, vectors = torch.linalg.eigh(kernel.double())
    pace = 2 * step_size / len(targets)
    decay = pace * values.clamp_min(0)
    small = decay.clamp_max(0.5)  # 1 - (1 - x)^tau without cancellation
    done = torch.where(
        decay < 0.5, -torch.expm1(steps * torch.log1p(-small)), 1 - (1 - decay) ** steps
    )
    weight = pace * torch.where(decay > 0, done / decay, float(steps))
    return vectors @ (weight * (vectors.mT @ targets.double()))


def largest_step(kernel: Float[Tensor, "n n"], fraction: float) -> float:
    r""":math:`\eta = p\,n/\lambda_1(K)` with the ``fraction`` p: descent is stable for p < 1.

    Raises ValueError for a fraction that is not positive or a kernel without a positive eigenvalue.
    """
    require_number("fraction", fraction, positive=True)
    largest = float(torch.linalg.eigvalsh(kernel.double())[-1])
    if not largest > 0:
        raise ValueError(f"kernel: expected a positive eigenvalue, got at most {largest}")
    return fraction * len(kernel) / largest


def ridge_by_leave_one_out(
    kernel: Float[Tensor, "n n"],
    held_kernel: Float[Tensor, "v n"],
    targets: Float[Tensor, " n"],
) -> tuple[Float[Tensor, " v"], float]:
    r"""
    .. math:: \hat f(X) = k(X)^\top (K + \lambda I)^{-1} y, \qquad
        \frac{y_i - \hat y_i}{1 - H_{ii}} \text{ without sample i}, \quad H = K(K + \lambda I)^{-1}.

    Of ``PENALTIES`` times the trace of K the :math:`\lambda` with the least sum of squares of the
    latter is taken: held out samples choose nothing. Returns the forecasts and :math:`\lambda`.
    """
    values, vectors = torch.linalg.eigh(kernel.double())
    values, inside = values.clamp_min(0), vectors.mT @ targets.double()
    found = []
    for share in PENALTIES:
        penalty = share * float(values.sum())
        smoothing = values / (values + penalty)
        left = (targets - vectors @ (smoothing * inside)) / (1 - vectors.square() @ smoothing)
        found.append((float(left.square().sum()), penalty))
    penalty = min(found)[1]
    return held_kernel.double() @ (vectors @ (inside / (values + penalty))), penalty


def linear_ridge(
    features: Float[Tensor, "n k"],
    held_features: Float[Tensor, "v k"],
    targets: Float[Tensor, " n"],
) -> Float[Tensor, " v"]:
    """Linear regression with an intercept, its penalty chosen by leave-one-out of centred samples:
    a sample that is left out still counts in the means.
    """
    centre, mean = features.mean(dim=0), targets.mean()
    x, held = features - centre, held_features - centre
    return ridge_by_leave_one_out(x @ x.mT, held @ x.mT, targets - mean)[0] + mean


def nearest_neighbour(
    features: Float[Tensor, "n k"],
    held_features: Float[Tensor, "v k"],
    targets: Float[Tensor, " n"],
) -> Float[Tensor, " v"]:
    """The target of the training input at the least Euclidean distance."""
    return targets[torch.cdist(held_features, features).argmin(dim=1)]


def block_bootstrap(
    values: Float[Tensor, " v"], block: int, *, draws: int = 400, confidence: float = 0.95
) -> tuple[float, float]:
    r"""Percentile interval of the mean of dependent values: the moving-block bootstrap.

    A draw joins :math:`\lceil v/b \rceil` blocks of b = ``block`` neighbours, which start anywhere,
    and keeps the first v values. Blocks of 1 are the usual bootstrap. The draws are always the
    same. Raises ValueError for a block that is longer than the values.
    """
    size = len(values)
    require_integer("block", block, minimum=1)
    if block > size:
        raise ValueError(f"block: expected at most the {size} values there are, got {block}")
    random = np.random.default_rng(0)
    starts = random.integers(0, size - block + 1, size=(draws, math.ceil(size / block)))
    index = (starts[..., None] + np.arange(block)).reshape(draws, -1)[:, :size]
    means = values.double().cpu().numpy()[index].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
