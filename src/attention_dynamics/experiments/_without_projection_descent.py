r"""One loop for four ways to stay near the start: a ball, a spring, a clock, or nothing at all.

:math:`\phi_{k+1} = \Pi_\rho\bigl(\phi_k - \eta\,(\nabla L_k + \lambda(\phi_k - \phi_0))\bigr)`,
and the certificate of a run with decay, whose weights forget early steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.trajectory import Trajectory
from attention_dynamics.theory.weight_decay import effective_steps
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii
from attention_dynamics.training.update import update_for

FREE = Radii(None, None, None)


@dataclass(frozen=True)
class Path:
    r"""What a descent of :math:`\tau` steps left behind, one row for each k from 0 to tau.

    ``loss`` (tau + 1,) is :math:`L_k`; ``farthest`` (tau + 1, 3) is
    :math:`\sqrt m\max_i\|\phi_i - \phi_{0,i}\|` of the blocks c, U, W, after the projection;
    ``reached`` the same before it; ``active`` (tau + 1,) counts the balls (one for each head and
    block) that the step to k left; ``norm`` (tau + 1,) is :math:`\|\phi_k - \phi_0\|`; ``held``
    has a row of losses on other data every ``look`` steps and for the last k.
    """

    loss: np.ndarray
    farthest: np.ndarray
    reached: np.ndarray
    active: np.ndarray
    norm: np.ndarray
    held: np.ndarray
    looks: np.ndarray
    final: Parameters

    @property
    def distance(self) -> np.ndarray:
        """The farthest head of any block so far, (tau + 1,): the ball that would just not act."""
        return np.maximum.accumulate(self.reached.max(axis=1))

    def first_exit(self, radius: float) -> int:
        """The first step whose candidate is outside of the balls of ``radius``; tau + 1 if none."""
        outside = np.flatnonzero(self.reached.max(axis=1) > radius)
        return int(outside[0]) if len(outside) else len(self.loss)

    @property
    def first_action(self) -> int:
        """The first step at which a projection acted; tau + 1 if none."""
        acted = np.flatnonzero(self.active)
        return int(acted[0]) if len(acted) else len(self.loss)


def descend(
    objective: Objective,
    start: Parameters,
    step_size: float,
    steps: int,
    *,
    radii: Radii = FREE,
    decay: float = 0.0,
    held: tuple[Objective, ...] = (),
    look: int = 10,
) -> Path:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k
        - \eta\,(\nabla L_n(\phi_k) + \lambda(\phi_k - \phi_0))\bigr), \quad k < \tau.

    Raises ValueError if the decay would pass the start, :math:`\eta\lambda \ge 1`, or fewer than
    one step is asked for; FloatingPointError if a loss is not finite.
    """
    effective_steps(step_size, steps, decay)  # checks the three of them
    limits = ProjectionSet(start, radii).limits()
    update = update_for(start, limits, step_size, 2)
    rows, other, looks = [], [], []
    for k in range(steps + 1):
        slot, phi = k % 2, update.iterates[k % 2]
        loss, gradient = objective.loss_and_gradients(phi)
        moved = phi.minus(start)
        rows.append([float(loss), *update.report([slot])[0][3:], float(moved.inner(moved))])
        if not math.isfinite(rows[-1][0]):
            raise FloatingPointError(
                f"loss: {rows[-1][0]} at step {k} with step_size = {step_size:.4g}; reduce it"
            )
        if held and (k % look == 0 or k == steps):
            other.append([float(some.loss(phi)) for some in held])
            looks.append(k)
        if k < steps:
            if decay:
                gradient = gradient.plus(moved.scaled(decay))
            update.step(slot, 1 - slot, gradient)
    table, root = np.array(rows), math.sqrt(start.heads)
    balls = [math.inf if limit is None else limit for limit in limits]
    return Path(
        loss=table[:, 0],
        farthest=root * np.minimum(table[:, 1:4], balls),
        reached=root * table[:, 1:4],
        active=table[:, 4:7].sum(axis=1),
        norm=np.sqrt(table[:, 7]),
        held=np.array(other).reshape(len(looks), len(held)),
        looks=np.array(looks, dtype=int),
        final=update.iterates[steps % 2].clone(),
    )


class Certified(NamedTuple):
    r"""A loss that was reached, its upper bound, and the :math:`\epsilon` in the bound.

    The loss and :math:`\epsilon^2` are means over the steps, weighted under decay.
    """

    loss: float
    bound: float
    epsilon: float


def prefix_certificates(run: Trajectory) -> list[Certified]:
    r"""The certificate of every prefix of a recorded run, :math:`\tau' = 1..\tau`.

    A descent that is stopped early is a shorter run, whatever made one stop. The last entry is
    :meth:`~attention_dynamics.theory.trajectory.Trajectory.certificate`.
    """
    history, eta = run.history, run.step_size
    count = np.arange(1, run.steps + 1)
    D = np.append(history["distance_squared"], run.final_distance_squared)
    squares = eta**2 * history["step_squared"].cumsum() - 2 * eta * history["noise"].cumsum()
    budget = D[0] - D[1:] + squares.to_numpy()
    losses = history["loss"].cumsum().to_numpy() / count
    epsilon = np.sqrt(history["epsilon"].pow(2).cumsum().to_numpy() / count)
    root = (epsilon + np.sqrt(np.maximum(0.0, epsilon**2 + budget / (eta * count)))) / 2
    rows = zip(losses.tolist(), (root**2).tolist(), epsilon.tolist(), strict=True)
    return [Certified(*row) for row in rows]


def decayed_certificate(
    model: ShallowTransformer,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    comparison: Parameters,
    *,
    step_size: float,
    steps: int,
    decay: float,
) -> Certified:
    r"""
    .. math:: x_\lambda \le \tfrac12\Bigl(\epsilon_\lambda + \sqrt{\epsilon_\lambda^2
        + H_\lambda/(\eta\tau_\lambda)}\Bigr), \qquad
        x_\lambda^2 = \tfrac1{\tau_\lambda}\sum_{k<\tau} w_k L_k, \quad
        \epsilon_\lambda^2 = \tfrac1{\tau_\lambda}\sum_{k<\tau} w_k \epsilon_k^2, \\
        H_\lambda = D_0 - D_\tau + \tfrac{\eta^2}{1-t}\sum_{k<\tau} w_k\|\nabla L_k\|^2
        - t(1-t)\sum_{k<\tau} w_k\|\psi_k - \phi_0\|^2,

    for plain descent with decay toward the start, with :math:`t = \eta\lambda`,
    :math:`w_k = (1-t)^{\tau-1-k}` and
    :math:`\psi_k = \phi_k - \frac{\eta}{1-t}\nabla L_k`. Derived in the chapter on descent without
    projection; at :math:`\lambda = 0` it is the trajectory certificate. No radius enters.

    Raises TypeError unless the model is in float64, ValueError as :func:`descend` does.
    """
    if model.U.dtype != torch.float64:
        raise TypeError(
            f"model: expected float64 parameters, got {model.U.dtype}; a certificate is made of "
            "small differences: convert it with model.double(), and the data with .double()"
        )
    tau = effective_steps(step_size, steps, decay)
    t, objective = step_size * decay, Objective.of(model, tokens, targets)
    options: dict[str, Any] = {
        "query": model.query,
        "activation": model.activation,
        "scale": model.scale,
    }
    start = phi = model.snapshot()
    loss = epsilon = squares = pulled = 0.0
    first = gap = phi.minus(comparison)
    for _ in range(steps):
        L, gradient = objective.loss_and_gradients(phi)
        gap = phi.minus(comparison)
        tangent = shallow.forward(phi, tokens, **options) - shallow.jvp(phi, tokens, gap, **options)
        ahead = phi.minus(gradient.scaled(step_size / (1 - t)))
        out = ahead.minus(start)
        forget = 1 - t
        loss = forget * loss + float(L)
        epsilon = forget * epsilon + float((tangent - targets).square().mean())
        squares = forget * squares + float(gradient.inner(gradient))
        pulled = forget * pulled + float(out.inner(out))
        phi = start.plus(out.scaled(1 - t))
    last = phi.minus(comparison)
    budget = (
        float(first.inner(first)) - float(last.inner(last))
        + step_size**2 / (1 - t) * squares - t * (1 - t) * pulled
    )  # fmt: skip
    mean = epsilon / tau
    root = (math.sqrt(mean) + math.sqrt(max(0.0, mean + budget / (step_size * tau)))) / 2
    return Certified(loss / tau, root**2, math.sqrt(mean))


def equal_radii(radius: float) -> Radii:
    """One radius for the three blocks."""
    return Radii(float(radius), float(radius), float(radius))
