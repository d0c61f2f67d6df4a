r"""The trajectory certificate: the proof of the theorem, carried out on the numbers of one run.

A run is recorded against a comparison point :math:`\phi^\star`, for instance
:math:`\phi_0 + v/\sqrt m`. Each step is checked against the descent inequality, and what is
measured along the way replaces every constant of the theorem. The result is rigorous up to the
rounding of float64, holds for any targets, and is post hoc: it explains a loss and predicts none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.data.streams import generator as named_generator
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory._measured import checked_descent, norm, rms, value_and_slope
from attention_dynamics.theory.convergence import Decomposition, Ingredients
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii


class DescentStep(NamedTuple):
    r""":math:`D_k`, :math:`D_{k+1}`, the bound of the latter, and bound minus :math:`D_{k+1}`."""

    before: float
    after: float
    bound: float
    slack: float


def descent_step(
    before: Parameters,
    after: Parameters,
    gradient: Parameters,
    step_size: float,
    comparison: Parameters,
) -> DescentStep:
    r"""
    .. math:: \|\phi_{k+1} - \phi^\star\|^2 \le \|\phi_k - \phi^\star\|^2
        - 2\eta\langle g_k, \phi_k - \phi^\star\rangle + \eta^2\|g_k\|^2.

    Holds for :math:`\phi_{k+1} = \Pi_\Omega(\phi_k - \eta g_k)` and every :math:`\phi^\star` of the
    convex set :math:`\Omega`, since the projection does not move points apart; for any g.

    Raises ArithmeticError if the inequality fails by more than rounding: the step was no projected
    gradient step with this gradient, or :math:`\phi^\star` lies outside of the set.
    """
    gap, next_gap = before.minus(comparison), after.minus(comparison)
    size = sum(norm(phi) for phi in (before, after, comparison))
    return _checked_step(
        float(gap.inner(gap)),
        float(next_gap.inner(next_gap)),
        float(gradient.inner(gap)),
        float(gradient.inner(gradient)),
        step_size,
        size,
        torch.finfo(before.dtype).eps,
    )


def _checked_step(
    D: float, D_next: float, along: float, squared: float, step_size: float, size: float, eps: float
) -> DescentStep:
    """The inequality from inner products; ``size`` is the sum of the norms of three points."""
    bound = D - 2 * step_size * along + step_size**2 * squared
    stride = step_size * math.sqrt(squared)
    lengths = math.sqrt(D) + math.sqrt(D_next) + stride
    rounding = 64 * eps * (size + stride) * lengths
    if not D_next <= bound + rounding:
        raise ArithmeticError(
            f"descent: |phi_(k+1) - phi*|^2 = {D_next:.12g} exceeds its bound {bound:.12g}; either "
            "the step is not the projection of phi_k - step_size * gradient, or comparison lies "
            "outside of the projection set"
        )
    return DescentStep(D, D_next, bound, bound - D_next)


@dataclass(frozen=True, eq=False)
class Trajectory:
    r"""A run of :math:`\tau` steps with everything its certificate needs.

    ``history`` has a row for each :math:`k < \tau`: ``loss`` :math:`L_k`, ``gradient_squared``
    :math:`\|\nabla L_k\|^2`, ``step_squared`` :math:`\|g_k\|^2`, ``distance_squared``
    :math:`D_k = \|\phi_k - \phi^\star\|^2`, ``descent``
    :math:`\langle\nabla L_k, \phi_k - \phi^\star\rangle`, ``noise``
    :math:`\langle g_k - \nabla L_k, \phi_k - \phi^\star\rangle` (0 for ProjGD), ``epsilon``
    :math:`\epsilon_k`, ``slack`` of the descent inequality and ``active`` (blocks of heads that the
    projection brought back). ``final_distance_squared`` is :math:`D_\tau`, ``averaging`` is
    :math:`\mathrm{rms}(f(\bar\phi) - \frac1\tau\sum_k f(\phi_k))`, ``averaged_loss`` is
    :math:`L_n(\bar\phi)`.
    """

    initial: Parameters
    final: Parameters
    averaged: Parameters
    comparison: Parameters
    history: pd.DataFrame
    step_size: float
    stochastic: bool
    final_distance_squared: float
    averaging: float
    averaged_loss: float

    @property
    def steps(self) -> int:
        r""":math:`\tau`."""
        return len(self.history)

    @property
    def average_loss(self) -> float:
        r""":math:`\frac1\tau\sum_{k<\tau} L_k`."""
        return float(self.history["loss"].mean())

    @property
    def epsilon(self) -> float:
        r""":math:`\epsilon = (\frac1\tau\sum_k \epsilon_k^2)^{1/2}`."""
        return math.sqrt(float(self.history["epsilon"].pow(2).mean()))

    @property
    def tangent_error(self) -> float:
        r""":math:`\epsilon_0 = \mathrm{rms}(f_{\mathrm{lin}}(\phi^\star) - y)`."""
        return float(self.history["epsilon"].iloc[0])

    @property
    def progress(self) -> float:
        r""":math:`D_0 - D_\tau` minus :math:`2\eta` times the sum of the column ``noise``."""
        gained = self.history["distance_squared"].iloc[0] - self.final_distance_squared
        return float(gained - 2 * self.step_size * self.history["noise"].sum())

    def certificate(self) -> Decomposition:
        r"""
        .. math:: x \le \tfrac12\Bigl(\epsilon + \sqrt{\epsilon^2 + H/(\eta\tau)}\Bigr), \qquad
            H = D_0 - D_\tau + \eta^2\sum_k\|g_k\|^2
            - 2\eta\sum_k\langle g_k - \nabla L_k, \phi_k - \phi^\star\rangle, \\
            \tfrac1\tau\sum_k L_k = x^2, \qquad \sqrt{L_n(\bar\phi)} \le x
            + \mathrm{rms}\bigl(f(\bar\phi) - \tfrac1\tau\textstyle\sum_k f(\phi_k)\bigr).

        :math:`\epsilon_k = \mathrm{rms}(f(\phi_k)
        + \langle\nabla f(\phi_k), \phi^\star - \phi_k\rangle - y)` is the error of the tangent
        model *at* :math:`\phi_k`. For ProjSGD the last sum of H, whose expectation is 0, makes the
        bound hold for the very run. It needs neither :math:`\kappa < 1` nor a positive Gram matrix.

        Proof: :math:`\langle\nabla L_k, \phi_k - \phi^\star\rangle \ge
        2 L_k - 2\sqrt{L_k}\epsilon_k`; sum the descent inequality, with
        :math:`\frac1\tau\sum_k\sqrt{L_k}\epsilon_k \le x\epsilon`; then Jensen for the average of
        the residuals. The terms of the result, in the unit of f, are
        :math:`\sqrt{H/(4\eta\tau)}`, :math:`\min(\epsilon_0, \epsilon)` and the rest.
        """
        budget = self.progress + self.step_size**2 * float(self.history["step_squared"].sum())
        head_start = budget / (self.step_size * self.steps)
        epsilon = self.epsilon
        # The true x solves the inequality, so the root is real: only rounding can make it negative.
        x = (epsilon + math.sqrt(max(0.0, epsilon**2 + head_start))) / 2
        approximation = min(self.tangent_error, epsilon)
        return Decomposition(
            optimisation=math.sqrt(max(0.0, head_start) / 4),
            approximation=approximation,
            linearisation=epsilon - approximation + self.averaging,
            average=x**2,
            total=(x + self.averaging) ** 2,
        )

    def ingredients(self) -> Ingredients:
        r"""The measured :class:`~attention_dynamics.theory.convergence.Ingredients`.

        :math:`G^2 = \sum_k\|g_k\|^2/(4\sum_k L_k)` is the one that the proof uses,
        ``distance_squared`` is :attr:`progress` (0 if negative), ``size`` the largest
        :math:`\sqrt{L_n}` met.
        """
        loss = self.history["loss"]
        approximation = min(self.tangent_error, self.epsilon)
        total = float(loss.sum())
        squares = float(self.history["step_squared"].sum())
        return Ingredients(
            distance_squared=max(0.0, self.progress),
            gradient_squared=squares / (4 * total) if total > 0 else 0.0,
            approximation=approximation,
            linearisation=self.epsilon - approximation,
            averaging=self.averaging,
            size=math.sqrt(max(float(loss.max()), self.averaged_loss)),
        )


def record_trajectory(
    model: ShallowTransformer,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    config: DescentConfig,
    comparison: Parameters,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
) -> Trajectory:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}(\phi_k - \eta g_k), \quad k < \tau, \qquad
        \text{each step checked by } \texttt{descent\_step}.

    The same iterates as :func:`~attention_dynamics.training.descent.projected_gradient_descent`,
    ProjSGD included, at about three times its cost, and without early stopping. ``comparison`` is
    :math:`\phi^\star`, any point of the projection set, in the shape of the parameters. The model
    is not changed. The inequality holds for any g; whose gradient g is, the tangent map tells:
    :math:`\langle\nabla L_k, \phi_k - \phi^\star\rangle = \frac2n \sum_j
    r_j \langle\nabla f_j, \phi_k - \phi^\star\rangle` is checked as well.

    Raises TypeError for a model that is not in float64, where the slack would drown in rounding;
    ValueError for a comparison point outside of the projection set, a config with ``patience``, or
    data that do not fit; ArithmeticError if a step violates the inequality or the identity.
    """
    if model.U.dtype != torch.float64:
        raise TypeError(
            f"model: expected float64 parameters, got {model.U.dtype}; a certificate is made of "
            "small differences: convert it with model.double(), and the data with .double()"
        )
    if config.patience is not None:
        raise ValueError(
            f"config.patience: expected None, got {config.patience}; a certificate is about a "
            "fixed number of steps: pass that number as steps"
        )
    training = Objective.of(model, tokens, targets, mask)
    initial = model.snapshot()
    region = ProjectionSet(initial, config.radii or Radii(None, None, None))
    if not region.contains(comparison, atol=1e-12):
        raise ValueError(
            "comparison: expected a point of the projection set around the model, got one outside; "
            "raise the radii to the transport norms, or project it"
        )
    draws = None if config.batch_size is None else _batches(training, config)
    eta, phi, rows = config.eta, initial, []
    outputs, moved = torch.zeros_like(targets), initial.scaled(0.0)
    # Each inner product is taken once: those of the next iterate serve the next step too.
    eps, star_size = torch.finfo(initial.dtype).eps, norm(comparison)
    gap = initial.minus(comparison)
    D, phi_size = float(gap.inner(gap)), norm(initial)
    for k in range(config.steps):
        loss, gradient = training.loss_and_gradients(phi)
        g = gradient if draws is None else next(draws).loss_and_gradients(phi)[1]
        f, slope = value_and_slope(training, phi, gap)
        outputs, moved = outputs + f, moved.plus(phi.minus(initial))
        squared, along = float(gradient.inner(gradient)), float(gradient.inner(gap))
        g_squared, g_along = squared, along
        if draws is not None:
            g_squared, g_along = float(g.inner(g)), float(g.inner(gap))
        after, reached = region.project_with_norms(phi.minus(g.scaled(eta)))
        next_gap, after_size = after.minus(comparison), norm(after)
        D_next, sizes = float(next_gap.inner(next_gap)), phi_size + after_size + star_size
        step = _checked_step(D, D_next, g_along, g_squared, eta, sizes, eps)
        size = math.sqrt(squared * D)
        rows.append(
            {
                "step": k,
                "loss": float(loss),
                "gradient_squared": squared,
                "step_squared": g_squared,
                "distance_squared": D,
                "descent": checked_descent(along, size, f - training.targets, slope),
                "noise": 0.0 if draws is None else float(g.minus(gradient).inner(gap)),
                "epsilon": rms(f - slope - training.targets),
                "slack": step.slack,
                "active": sum(
                    int((norms > limit).sum())
                    for norms, limit in zip(reached, region.limits(), strict=True)
                    if limit is not None
                ),
            }
        )
        phi, gap, D, phi_size = after, next_gap, D_next, after_size
    averaged = initial.plus(moved.scaled(1 / config.steps))
    f_averaged, _ = value_and_slope(training, averaged, gap)
    return Trajectory(
        initial=initial,
        final=phi,
        averaged=averaged,
        comparison=comparison,
        history=pd.DataFrame(rows),
        step_size=eta,
        stochastic=draws is not None,
        final_distance_squared=D,
        averaging=rms(f_averaged - outputs / config.steps),
        averaged_loss=float((f_averaged - training.targets).square().mean()),
    )


def _batches(training: Objective, config: DescentConfig) -> Iterator[Objective]:
    """The batches of ``projected_gradient_descent``: same stream, same draws."""
    stream = named_generator(config.seed, "projected gradient descent", "batches")
    samples, size = training.targets.shape[0], config.batch_size
    while True:
        index = torch.randint(samples, (size,), generator=stream, device="cpu")  # type: ignore[arg-type]
        yield training.rows(index.to(training.targets.device))
