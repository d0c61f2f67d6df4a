r"""One descent looked at after several numbers of steps, and the step size at which it rises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from attention_dynamics.models.parameters import Parameters
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet
from attention_dynamics.training.update import update_for


class Checkpoint(NamedTuple):
    r"""What is known after k steps; ``mean`` is :math:`\frac1k \sum_{l<k} L_l`, ``active`` the most
    balls that one step left, of three a head.
    """

    steps: int
    averaged: Parameters
    best: float
    final: float
    mean: float
    distance: float
    active: int


def descend(
    objective: Objective, region: ProjectionSet, step_size: float, numbers: Sequence[int]
) -> list[Checkpoint]:
    r"""Projected descent from the centre, looked at after each of the ascending ``numbers``.

    The iterates are those of ``projected_gradient_descent``; here one descent gives the average
    after several numbers of steps. Raises FloatingPointError when the loss stops being finite.
    """
    update = update_for(region.centre, region.limits(), step_size, 2)
    found: list[Checkpoint] = []
    slot, active, total, best = 0, 0, 0.0, math.inf
    for k in range(numbers[-1] + 1):
        loss, gradient = objective.loss_and_gradients(update.iterates[slot])
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(f"loss: {value} at step {k}; reduce step_size={step_size:.4g}")
        best = min(best, value)
        if k in numbers:
            moved = update.iterates[slot].minus(region.centre).block_norms()
            distance = math.sqrt(region.centre.heads) * max(float(norm.max()) for norm in moved)
            averaged = update.mean(k)
            found.append(Checkpoint(k, averaged, best, value, total / k, distance, active))
        if k == numbers[-1]:
            break
        update.accumulate(slot)
        total += value
        update.step(slot, 1 - slot, gradient)
        slot = 1 - slot
        active = max(active, int(sum(update.report([slot])[0][6:])))
    return found


def first_rise(
    objective: Objective, region: ProjectionSet, step_size: float, steps: int
) -> int | None:
    r"""The first k up to ``steps`` with :math:`L_k > L_{k-1}`, None if there is none.

    A rise by 1e-5 of the loss passes for rounding.
    """
    phi, before = region.centre, math.inf
    for k in range(steps + 1):
        loss, gradient = objective.loss_and_gradients(phi)
        if float(loss) > before * (1 + 1e-5):
            return k
        phi, before = region.project(phi.minus(gradient.scaled(step_size))), float(loss)
    return None


def edge(
    objective: Objective, region: ProjectionSet, unit: float, steps: int, halvings: int
) -> float:
    r"""The step size, in units of ``unit``, at which a loss begins to rise within ``steps``.

    Bisection between 1/2 and 2 on a logarithmic scale; the middle of what is left after
    ``halvings``.
    """
    low, high = 0.5, 2.0
    for _ in range(halvings):
        middle = math.sqrt(low * high)
        rises = first_rise(objective, region, middle * unit, steps) is not None
        low, high = (low, middle) if rises else (middle, high)
    return math.sqrt(low * high)
