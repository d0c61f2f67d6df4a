r"""The losses of the tangent model after any number of steps, from the spectrum of its kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.experiments._teacher_problem import TeacherProblem
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.convergence import Ingredients
from attention_dynamics.theory.kernels import empirical_kernel_total
from attention_dynamics.theory.transport import approximation_error


class Tangent(NamedTuple):
    r"""The kernel at the start, :math:`K u_i = n x_i u_i`, and what of the targets it sees.

    ``rates`` are :math:`x_i`, ascending, ``power`` is :math:`p_i = (u_i \cdot y)^2/n`. Of the
    comparator :math:`\phi^\star`, ``comparator_error`` is the root mean square of
    :math:`f_{\mathrm{lin}}(X_j; \phi^\star) - y_j` and ``comparator_distance`` is
    :math:`\|\phi^\star - \phi_0\|^2`.
    """

    rates: Float[Tensor, " n"]
    power: Float[Tensor, " n"]
    comparator_error: float
    comparator_distance: float

    @property
    def ingredients(self) -> Ingredients:
        r"""Those of the theorem for the tangent model: :math:`x_1` for :math:`G^2`, nothing for
        linearisation.
        """
        return Ingredients(
            distance_squared=self.comparator_distance, gradient_squared=float(self.rates.max()),
            approximation=self.comparator_error, linearisation=0.0, averaging=0.0, size=0.0,
        )  # fmt: skip

    @property
    def floor(self) -> float:
        r""":math:`\frac1n\|(I - P)y\|^2`, P the projection onto the range of K: what stays."""
        null = self.rates <= len(self.rates) * torch.finfo(torch.float64).eps * self.rates.max()
        return float(self.power[null].sum())


def tangent(given: TeacherProblem, initial: Parameters, activation: str) -> Tangent:
    """The spectrum of the student's kernel and the comparator, in float64."""
    query = given.query if isinstance(given.query, str) else given.query.double()
    kernel = empirical_kernel_total(
        initial.to(dtype=torch.float64), given.tokens.double(), query=query, activation=activation
    )
    n = len(given.targets)
    values, vectors = torch.linalg.eigh(kernel.cpu())
    step = given.transport(initial)
    error = approximation_error(given.targets, given.transport, initial, given.tokens)
    return Tangent(
        rates=values.clamp_min(0) / n,
        power=(given.targets.double().cpu() @ vectors).square() / n,
        comparator_error=error.rms,
        comparator_distance=float(step.inner(step)) / initial.heads,
    )


def tangent_losses(of: Tangent, step_size: float, steps: int) -> dict[str, float]:
    r"""
    .. math:: u_i = 2\eta x_i: \quad \sum_i p_i (1-u_i)^{2\tau}, \quad
        \sum_i p_i \Bigl(\frac{1-(1-u_i)^\tau}{\tau u_i}\Bigr)^2, \quad
        \sum_i p_i\, \frac{1-(1-u_i)^{2\tau}}{\tau u_i (2-u_i)},

    the loss ``final`` after :math:`\tau` steps of the tangent model, that of its ``averaged``
    iterate, and the ``mean`` of its losses before. Derived in the chapter on steps.

    Raises ValueError unless :math:`\eta x_1 < 1`: above, the tangent model diverges.
    """
    u = 2 * step_size * of.rates
    if float(u.max()) >= 2:
        limit = 1 / float(of.rates.max())
        raise ValueError(f"step_size: expected less than {limit:.4g}, got {step_size:.4g}; the "
                         "tangent model diverges there, so take smaller steps")  # fmt: skip
    moving = u * steps > 1e-12  # the others stay where they are, to rounding
    safe = torch.where(moving, u, 1.0)
    kept = {
        "final": (1 - u) ** (2 * steps),
        "averaged": torch.where(moving, _gone(u, steps) / (steps * safe), 1.0) ** 2,
        "mean": torch.where(moving, _gone(u, 2 * steps) / (steps * safe * (2 - safe)), 1.0),
    }
    return {name: float(of.power @ factor) for name, factor in kept.items()}


def _gone(u: Tensor, steps: int) -> Tensor:
    r""":math:`1 - (1-u)^k` without cancellation at small u."""
    small = -torch.expm1(steps * torch.log1p(-u.clamp_max(0.5)))
    return torch.where(u < 0.5, small, 1 - (1 - u) ** steps)
