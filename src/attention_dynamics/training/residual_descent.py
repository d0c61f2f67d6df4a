r"""Gradient descent on the residual layer, all seeds at once; what diverges is flagged and stopped.

.. math:: \theta_{k+1} = \theta_k - \eta\,\nabla L(\theta_k), \qquad L = \tfrac12\|F - Y\|_F^2 .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_dynamics.models.residual import (
    BLOCKS,
    ResidualConfig,
    ResidualParameters,
    loss_and_gradients,
)
from attention_dynamics.models.residual_parameters import (
    require_blocks,
    require_layer,
    require_targets,
)
from attention_dynamics.validation import require_integer, require_number

WINDOW = (1e-18, 1e-2)
r"""Rates are fitted where :math:`L_k/L_0` lies in here. Earlier it is not yet linear, later float64
rounds it, near 1e-24."""


@dataclass(frozen=True)
class ResidualRun:
    r"""What :func:`gradient_descent` did; the recorded steps come first, the seeds after.

    ``steps`` (r,), ``losses`` (r, ...) and ``distances`` :math:`\|\theta_k - \theta_0\|` (r, ...)
    are those of the recorded steps; the losses of a diverged seed are infinite from there on, its
    distances and its ``final`` parameters those of the last step before (of the start where that
    is bad already). ``diverged`` (...) is True where the loss left the limit or was not finite.
    """

    steps: Int[Tensor, " r"]
    losses: Float[Tensor, r * batch]
    distances: Float[Tensor, r * batch]
    final: ResidualParameters
    diverged: Bool[Tensor, "*batch"]

    @property
    def relative(self) -> Float[Tensor, r * batch]:
        r""":math:`L_k/L_0`, 0 where a seed had nothing to learn."""
        return torch.where(self.losses[:1] > 0, self.losses / self.losses[:1], self.losses)


def gradient_descent(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "*batch n T d"],
    targets: Float[Tensor, "*batch n T d"],
    config: ResidualConfig,
    *,
    step_size: float | Float[Tensor, "*batch"],
    steps: int,
    blocks: Sequence[str] = BLOCKS,
    every: int = 1,
    limit: float = 1e6,
) -> ResidualRun:
    r"""
    .. math:: \theta_{k+1} = \theta_k - \eta\,\nabla L(\theta_k), \qquad k < \texttt{steps},

    in the ``blocks`` named, the others fixed. ``step_size`` is one number, or one a seed. A seed
    whose loss is not finite or above ``limit`` times :math:`L_0` is flagged, put back by one step
    and no longer moved, so that it can't spoil the others. Recorded are step 0, each ``every``-th
    step and the last one.

    Raises ValueError for a step size that is not positive, a number of steps or ``every`` below 1,
    an unknown block, shapes that do not fit and data that are not finite.
    """
    require_layer(parameters, tokens, config)
    require_targets(targets, tokens)
    require_blocks(blocks)
    require_integer("steps", steps, minimum=1)
    require_integer("every", every, minimum=1)
    require_number("limit", limit, positive=True)
    batch = np.broadcast_shapes(parameters.Q.shape[:-2], tokens.shape[:-3], targets.shape[:-3])
    eta = torch.as_tensor(step_size, dtype=tokens.dtype, device=tokens.device).expand(batch)
    if not bool(((eta > 0) & torch.isfinite(eta)).all()):
        raise ValueError(
            f"step_size: expected finite numbers > 0, got {eta.flatten().tolist()}; take a "
            "fraction of 1 / lambda_max"
        )
    start = ResidualParameters(*(block.expand(*batch, *block.shape[-2:]) for block in parameters))
    point, frozen = start, torch.zeros(batch, dtype=torch.bool, device=tokens.device)
    before = start
    initial = torch.zeros(batch, dtype=tokens.dtype, device=tokens.device)
    recorded: list[tuple[int, Tensor, Tensor]] = []
    for step in range(steps + 1):
        value, gradient = loss_and_gradients(point, tokens, targets, config, validate=False)
        if step == 0:
            initial = value
        frozen = frozen | ~(torch.isfinite(value) & (value <= limit * initial))
        if bool(frozen.any()):
            point = _where(frozen, before, point)
        if step % every == 0 or step == steps:
            distance = point.plus(start, -1.0).norm()
            recorded.append((step, value.masked_fill(frozen, torch.inf), distance))
        if step < steps:
            before, point = point, point.plus(gradient.only(blocks), -eta)
    count, losses, distances = zip(*recorded, strict=True)
    return ResidualRun(
        torch.tensor(count), torch.stack(losses), torch.stack(distances), point, frozen
    )


def measured_rate(
    run: ResidualRun, *, window: tuple[float, float] = WINDOW
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: -\frac{\Delta\log L_k}{\Delta k},

    the least-squares slope of :math:`\log L_k` over the recorded steps with :math:`L_k/L_0` in the
    ``window``, up to the first step below it. A seed with fewer than three such steps has no rate:
    NaN. Raises ValueError for an empty window.
    """
    low, high = window
    if not 0 < low < high:
        raise ValueError(f"window: expected 0 < low < high, got {window}")
    relative = run.relative
    above = (relative >= low).to(torch.int64).cumprod(dim=0).bool()
    inside = above & (relative <= high)
    weight = inside.to(relative.dtype)
    k = run.steps.to(relative).reshape(-1, *[1] * (relative.ndim - 1))
    logs = torch.where(inside, relative, 1.0).log()
    count = weight.sum(dim=0)
    centred = weight * (k - (weight * k).sum(dim=0) / count)
    slope = (centred * logs).sum(dim=0) / (centred * k).sum(dim=0)
    return torch.where(count >= 3, -slope, torch.nan)


def steps_to(run: ResidualRun, fraction: float) -> Float[Tensor, "*batch"]:
    r""":math:`\min\{k : L_k \le \texttt{fraction} \cdot L_0\}` over the recorded steps, infinite
    where there is none. Raises ValueError unless 0 < fraction.
    """
    require_number("fraction", fraction, positive=True)
    reached = run.relative <= fraction
    first = reached.to(torch.int64).argmax(dim=0)
    found = run.steps.to(first.device)[first].to(run.losses.dtype)
    return torch.where(reached.any(dim=0), found, torch.inf)


def _where(
    frozen: Tensor, kept: ResidualParameters, moved: ResidualParameters
) -> ResidualParameters:
    flag = frozen[..., None, None]
    return ResidualParameters(*(torch.where(flag, a, b) for a, b in zip(kept, moved, strict=True)))
