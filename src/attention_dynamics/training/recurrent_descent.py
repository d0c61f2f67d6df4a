r"""Gradient descent on independent recurrent units, without projection; a divergence is reported.

.. math:: \phi_{k+1} = \phi_k - \eta\,\nabla L_n(\phi_k), \qquad \phi = (w, u, c).

Nothing is clipped and nothing is projected, as in the published comparison, so that a gradient that
explodes is seen and not repaired.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import recurrence
from attention_dynamics.models._pass import require_tokens
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.places import find_places
from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_integer,
    require_number,
    require_shape,
)

COLUMNS = ("loss", "validation_loss", "gradient_w", "gradient_u", "gradient_c")


@dataclass(frozen=True)
class RecurrentRun:
    r"""
    .. math:: \phi_0, \quad \phi_\tau, \quad \phi_{k^\star}, \qquad k^\star = \text{best\_step}.

    ``best`` has the smallest monitored loss (validation loss if there is a validation set, training
    loss otherwise) of all iterates, ``best_loss``. ``history`` has one row for each of the steps
    0..:math:`\tau`: ``step``, ``loss``, ``validation_loss`` (NaN without a validation set) and the
    norms ``gradient_w``, ``gradient_u``, ``gradient_c`` of the blocks of the gradient there.

    ``diverged`` is True where a loss or a gradient left the range of the dtype. The descent stops
    there: the history ends with the last iterate at which all were finite, and ``final`` is it.
    """

    initial: RecurrentParameters
    final: RecurrentParameters
    best: RecurrentParameters
    best_step: int
    best_loss: float
    diverged: bool
    history: pd.DataFrame


@torch.no_grad()
def recurrent_descent(
    parameters: RecurrentParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    *,
    step_size: float,
    steps: int,
    validation: tuple[Float[Tensor, "v T d"], Float[Tensor, " v"]] | None = None,
    activation: str | Activation = "tanh",
    engine: str = "auto",
) -> RecurrentRun:
    r"""
    .. math:: \phi_{k+1} = \phi_k - \eta\,\nabla L_n(\phi_k), \quad k < \tau, \qquad
        L_n(\phi) = \frac1n \sum_j \bigl(f(X_j; \phi) - y_j\bigr)^2,

    with the gradients of :func:`~attention_dynamics.models.recurrence.loss_and_gradients`.
    ``step_size`` is :math:`\eta`, ``steps`` :math:`\tau`, ``validation`` (tokens, targets) held
    out; ``parameters`` are not changed. Everything is checked once, before the first step.

    Raises ValueError for shapes that do not fit, NaN or infinity in the data, a step size that is
    not positive or steps below 1; TypeError for dtypes; FloatingPointError where the loss or its
    gradient is not finite before the first step. Later it is no error: see ``diverged``.
    """
    require_integer("steps", steps, minimum=1, remedy="one step is the least one can take")
    require_number("step_size", step_size, positive=True)
    parameters.require_valid()
    for name, block in parameters._asdict().items():
        require_finite(f"parameters.{name}", block, remedy="start from finite parameters")
    _require_targets("targets", tokens, targets, parameters)
    if validation is not None:
        _require_targets("validation targets", *validation, parameters)
    for data in (tokens, *([] if validation is None else validation[:1])):
        require_tokens(data, parameters.dimension)
    places = find_places(tokens)
    held_places = None if validation is None else find_places(validation[0])

    def evaluate(
        phi: RecurrentParameters, checked: bool
    ) -> tuple[list[float], RecurrentParameters]:
        loss, gradients = recurrence.loss_and_gradients(
            phi, tokens, targets, activation=activation, engine=engine, places=places,
            validate=checked,
        )  # fmt: skip
        numbers = [loss.double()]
        if validation is not None:
            held, wanted = validation
            values = recurrence.forward(
                phi, held, activation=activation, engine=engine, places=held_places,
                validate=checked,
            )  # fmt: skip
            numbers.append((values - wanted).square().mean().double())
        norms = [torch.linalg.vector_norm(block, dtype=torch.float64) for block in gradients]
        found = torch.stack([*numbers, *norms]).tolist()
        if validation is None:
            found.insert(1, math.nan)
        return found, gradients

    monitored = 0 if validation is None else 1
    phi = before = initial = parameters.detach().clone()
    rows: list[list[float]] = []
    best, best_step, best_loss, diverged = phi, -1, math.inf, False
    for k in range(steps + 1):
        row, gradients = evaluate(phi, k == 0)
        if not all(math.isfinite(x) for x in (row if validation else row[:1] + row[2:])):
            if k == 0:
                raise FloatingPointError(
                    f"loss and gradients: {dict(zip(COLUMNS, row, strict=True))} before the first "
                    "step; use float64, shorter sequences or smaller recurrent weights"
                )
            phi, diverged = before, True
            break
        rows.append(row)
        if row[monitored] < best_loss:
            best, best_step, best_loss = phi, k, row[monitored]
        if k < steps:
            before, phi = phi, phi.minus(gradients.scaled(step_size))
    history = pd.DataFrame(np.array(rows), columns=list(COLUMNS))
    history.insert(0, "step", np.arange(len(rows)))
    return RecurrentRun(initial, phi, best, best_step, best_loss, diverged, history)


def _require_targets(
    name: str, tokens: Tensor, targets: Tensor, parameters: RecurrentParameters
) -> None:
    require_shape(name, targets, ("n",), {"n": tokens.shape[0]}, remedy="one number a sample")
    require_floating(name, targets, parameters.dtype)
    require_finite(name, targets)
