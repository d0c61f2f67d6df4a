r"""One cell of the recurrent contrast: the two models trained, and what needs no training."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import Forecasting
from attention_dynamics.models.indrnn import IndRNN
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.recurrent_descent import RecurrentRun, recurrent_descent
from attention_dynamics.validation import require_integer


class Trained(NamedTuple):
    """The history of a descent, and the run itself where the model is recurrent."""

    history: pd.DataFrame
    recurrent: RecurrentRun | None


def paired_units(
    units: int,
    dimension: int,
    *,
    recurrent_init: str | float,
    generator: torch.Generator,
    device: str = "cpu",
) -> RecurrentParameters:
    r"""
    .. math:: w_{i+m/2} = w_i, \quad u_{i+m/2} = u_i, \quad c_{i+m/2} = -c_i,

    so that f = 0 at the start, as in the published comparison; the first half is that of
    :class:`~attention_dynamics.models.indrnn.IndRNN`. Raises ValueError for an odd m or an unknown
    ``recurrent_init``.
    """
    require_integer("units", units, minimum=2, remedy="units come in pairs")
    if units % 2:
        raise ValueError(f"units: must be even to be paired, got {units}; take {units + 1}")
    w, u, c = IndRNN(
        units // 2, dimension, recurrent_init=recurrent_init, generator=generator, device=device
    ).snapshot(copy=False)
    return RecurrentParameters(torch.cat((w, w)), torch.cat((u, u)), torch.cat((c, -c)))


def train_recurrent(
    task: Forecasting, start: RecurrentParameters, *, steps: int, step_size: float
) -> Trained:
    """Descent without projection; the history ends early where it diverges."""
    run = recurrent_descent(
        start, task.tokens, task.targets, steps=steps, step_size=step_size,
        validation=(task.held_tokens, task.held_targets),
    )  # fmt: skip
    return Trained(run.history, run)


def train_transformer(
    task: Forecasting,
    heads: int,
    *,
    steps: int,
    step_size: float,
    generator: torch.Generator,
    device: str = "cpu",
) -> Trained:
    """Descent without projection; the last token asks."""
    start = symmetric_initialisation(
        heads, task.tokens.shape[-1], generator=generator, device=device
    )
    result = projected_gradient_descent(
        ShallowTransformer(start, query="last"), task.tokens, task.targets,
        DescentConfig(steps=steps, step_size=step_size),
        validation=(task.held_tokens, task.held_targets),
    )  # fmt: skip
    return Trained(result.history, None)


def measures(history: pd.DataFrame) -> dict[str, float]:
    r"""Errors and norms of the whole gradient, :math:`\|\nabla L_n(\phi_k)\|`, over the steps.

    ``spike`` is the largest norm over the mean one.
    """
    blocks = [name for name in history if name.startswith("gradient_")]
    norms = np.sqrt(history[blocks].pow(2).sum(axis=1))
    held = history["validation_loss"]
    return {
        "validation_minimum": float(held.min()),
        "validation_final": float(held.iloc[-1]),
        "training_final": float(history["loss"].iloc[-1]),
        "best_step": float(history["step"][held.idxmin()]),
        "gradient_start": float(norms.iloc[0]),
        "gradient_mean": float(norms.mean()),
        "gradient_max": float(norms.max()),
        "spike": float(norms.max() / norms.mean()),
    }


def baseline_errors(
    task: Forecasting, lag: int, coefficient: float, *, penalty: float = 1.0
) -> dict[str, float]:
    r"""Validation errors without training by descent, in the units of the targets.

    - ``constant``: the mean training target, :math:`\hat y = 0`;
    - ``naive``: the value one lag back, :math:`x_{a+T-L}`;
    - ``oracle``: :math:`\alpha\,x_{a+T-L}`, the best forecast there is, with the true coefficient;
    - ``ridge``: linear in the T values of the window, squared coefficients times ``penalty`` added
      to the sum of squares, fitted to the training windows.
    """

    def error(forecast: Tensor) -> float:
        return float((forecast - task.held_targets.double().cpu()).square().mean())

    lagged = task.held_values[:, -lag]
    design, held = (task.standardise(x) for x in (task.values, task.held_values))
    centre = design.mean(dim=0)
    design, held = design - centre, held - centre
    gram = design.mT @ design + penalty * torch.eye(design.shape[1], dtype=design.dtype)
    targets = task.targets.double().cpu()  # of mean 0, so that no intercept is needed
    weights = torch.linalg.solve(gram, design.mT @ targets)
    return {
        "constant": error(torch.zeros_like(lagged)),
        "naive": error(task.standardise(lagged)),
        "oracle": error(task.standardise(coefficient * lagged)),
        "ridge": error(held @ weights),
    }
