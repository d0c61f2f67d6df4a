r"""The two networks on real sequences: a certified descent, and recurrent units by one rule."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attention_dynamics.data import RealTask, generator, query_vector, real_task
from attention_dynamics.experiments._real_predictors import largest_step
from attention_dynamics.models.indrnn import final_state_gradients
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.bounds import (
    indrnn_gradient_bounds,
    input_bounds,
    network_constants,
)
from attention_dynamics.theory.kernels import empirical_kernel_total
from attention_dynamics.theory.limit_kernel import limit_kernel
from attention_dynamics.theory.trajectory import record_trajectory
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii
from attention_dynamics.training.recurrent_descent import RecurrentRun


class Prepared(NamedTuple):
    """What all initialisations share: the task, the query and the limit kernel."""

    task: RealTask
    query: Tensor
    kernel: Tensor
    held_kernel: Tensor
    kernel_error: float


@lru_cache(maxsize=6)
def prepared(
    name: str, ball: bool, training: int, held: int, points: int, randomisations: int
) -> Prepared:
    r"""The task and :math:`K_\infty` of the training samples, and of held out against them.

    Both kernels average over the same heads. ``kernel_error`` is the largest standard error of an
    entry over the mean of the diagonal.
    """
    task = real_task(name, training=training, held=held, ball=ball)
    query = query_vector(
        task.tokens.shape[-1], generator=generator(0, "real", "query"), dtype=torch.float64
    )

    def kernel(other: Tensor | None) -> tuple[Tensor, Tensor]:
        found = limit_kernel(
            task.tokens, other, query=query, generator=generator(0, "real", "kernel", name),
            points=points, randomisations=randomisations,
        )  # fmt: skip
        return found.total, found.standard_error

    (own, errors), (across, _) = kernel(None), kernel(task.held_tokens)
    share = float(errors.max() / own.diagonal().mean())
    return Prepared(task, query, own, across.mT.contiguous(), share)


def comparison_point(
    model: ShallowTransformer, task: RealTask, radii: Radii, penalty: float
) -> Parameters:
    r"""
    .. math:: \phi^\star = \Pi\bigl(\phi_0 + \textstyle\sum_j \alpha_j \nabla f(X_j; \phi_0)\bigr),
        \qquad \alpha = (K_0 + \lambda I)^{-1} y,

    with the tangent kernel :math:`K_0` at :math:`\phi_0`: ridge regression in the tangent model.
    The sum is the gradient of a loss with the targets :math:`-n\alpha/2`, since f = 0.
    """
    initial = model.snapshot()
    tokens = task.tokens.to(model.U.device)
    kernel = empirical_kernel_total(initial, tokens, query=model.query, activation=model.activation)
    size = len(kernel)
    eye = torch.eye(size, dtype=kernel.dtype, device=kernel.device)
    alpha = torch.linalg.solve(kernel + penalty * eye, task.targets.to(kernel))
    _, step = Objective.of(model, tokens, -0.5 * size * alpha).loss_and_gradients(initial)
    return ProjectionSet(initial, radii).project(initial.plus(step))


def certified(
    model: ShallowTransformer, task: RealTask, *, ball: bool, descent: DescentConfig
) -> tuple[Parameters, dict[str, float]]:
    r"""The final parameters of a recorded descent, and its bounds over what they bound.

    ``average_ratio`` and ``averaged_ratio`` are those of the certificate; ``gradient_ratio`` the
    least of :math:`2 G \sqrt{L_k}/\|\nabla L_k\|` over the steps.
    """
    radii = descent.radii
    assert radii is not None
    initial, tokens = model.snapshot(), task.tokens.to(model.U.device)
    penalty = len(tokens) / (2 * descent.eta * descent.steps)  # steps and penalty trade places
    star = comparison_point(model, task, radii, penalty)
    run = record_trajectory(model, tokens, task.targets.to(tokens), descent, star)
    longest = None if ball else 1.0001 * float(tokens.norm(dim=-1).max())
    constants = network_constants(
        initial, radii, inputs=input_bounds(tokens, model.query, token_bound=longest),
        activation=model.activation,
    )  # fmt: skip
    bound, history = run.certificate(), run.history
    limit = 4 * constants.gradient_squared * history["loss"]
    return run.final, {
        "average_ratio": bound.average / run.average_loss,
        "averaged_ratio": bound.total / run.averaged_loss,
        "gradient_ratio": math.sqrt(float((limit / history["gradient_squared"]).min())),
        "gradient_start": math.sqrt(float(history["gradient_squared"].iloc[0])),
        "gradient_bound": math.sqrt(float(limit.iloc[0])),
        "active_steps": float((history["active"] > 0).mean()),
    }


def recurrent_kernel(start: RecurrentParameters, tokens: Tensor) -> Tensor:
    r"""
    .. math:: K_{jl} = \frac1m \sum_i \bigl(h_i h_i' + c_i^2 \langle \partial_w h_i, \partial_w h_i'
        \rangle + c_i^2\, \partial_u h_i\, \partial_u h_i'\bigr)

    for paired units, :math:`c_i^2 = 1`; only the first half is looked at, the second repeats it.
    """
    half = len(start.c) // 2
    kernel = tokens.new_zeros(len(tokens), len(tokens))
    for w, u in zip(start.w[:half], start.u[:half], strict=True):
        h = torch.zeros_like(tokens[:, 0, 0])
        for token in tokens.unbind(dim=1):
            h = torch.tanh(token @ w + u * h)
        by_w, by_u = final_state_gradients(w, u, tokens)
        part = torch.cat((h[:, None], by_w, by_u[:, None]), dim=1)
        kernel += part @ part.mT / half
    return kernel


def recurrent_step(start: RecurrentParameters, tokens: Tensor, fraction: float) -> float:
    """The step size of recurrent units by the rule of the Transformer: from their own kernel."""
    return largest_step(recurrent_kernel(start, tokens), fraction)


def recurrent_gradients(run: RecurrentRun, tokens: Tensor) -> dict[str, float]:
    r"""The norm of the gradient at the start and its bound for :math:`|u| = \max_i |u_i|`, which
    grows with T; :math:`\log_{10}` of the bound.
    """
    first = run.history.iloc[0]
    start = math.sqrt(sum(float(first[f"gradient_{block}"]) ** 2 for block in "wuc"))
    found = indrnn_gradient_bounds(
        float(run.initial.u.abs().max()), tokens.shape[1],
        token_bound=float(tokens.norm(dim=-1).max()),
    )  # fmt: skip
    bound = 2 * math.sqrt(float(first["loss"])) * math.hypot(1.0, found.w, found.u)
    return {"recurrent_gradient_start": start, "recurrent_bound_log10": math.log10(bound)}
