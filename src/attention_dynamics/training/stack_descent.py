r"""Projected gradient descent on a stack: every head of every layer in a ball around its start.

.. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k - \eta\,\nabla L_n(\phi_k)\bigr), \qquad
    \Omega_\rho = \{\phi : \|\theta^{(l)}_i - \theta^{(l)}_{0,i}\| \le \rho/\sqrt m
    \text{ block by block}, \; l \le L,\; i \le m\}.

For L = 1 and the output of the last token it takes the steps of ``training.descent``.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import shallow_stack
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow_stack import Output
from attention_dynamics.models.stack_parameters import StackParameters, TokenLayer
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.projection import Radii, project_block


@dataclass(frozen=True)
class StackRun:
    r"""
    .. math:: \phi_0,\quad \phi_\tau,\quad \bar\phi = \frac1\tau \sum_{k<\tau} \phi_k.

    ``best_loss`` is the smallest loss of all iterates. ``history`` has a row for each of the steps
    0..:math:`\tau`: ``step``, ``loss``, and for each layer l = 1..L, the read-out last,
    ``gradient_l`` (norm of the gradient of the loss), ``distance_l``
    (:math:`\|\theta^{(l)}_k - \theta^{(l)}_0\|`) and ``active_l`` (blocks of heads that the step to
    this iterate took out of their ball).
    """

    initial: StackParameters
    final: StackParameters
    averaged: StackParameters
    best_loss: float
    history: pd.DataFrame


@torch.no_grad()
def stack_descent(
    parameters: StackParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, "n ..."],
    config: DescentConfig,
    *,
    outputs: Output = "last",
    activation: str | Activation = "tanh",
    chunk: int | None = None,
) -> StackRun:
    r"""
    .. math:: \phi_{k+1} = \Pi_{\Omega_\rho}\bigl(\phi_k - \eta\,\nabla L_n(\phi_k)\bigr),
        \quad k < \tau.

    ``targets`` (n,), or (n, T) for the outputs ``"each"``. Of ``config`` the steps, the step size
    and the radii are read, the same for every layer; the start is the centre of the balls and is
    not changed. Everything is checked once, before the first step.

    Raises ValueError for a ``config`` with ``batch_size`` or ``patience``, and what
    :func:`~attention_dynamics.models.shallow_stack.loss_and_gradients` raises;
    FloatingPointError when the loss stops being finite.
    """
    if config.batch_size is not None or config.patience is not None:
        raise ValueError(
            f"config: expected batch_size and patience to be None, got {config.batch_size} and "
            f"{config.patience}; a stack descends on all samples, for all steps"
        )
    radii = Radii(None, None, None) if config.radii is None else config.radii
    phi = initial = parameters.map(lambda block: block.detach().clone())
    moved = initial.map(lambda block: torch.zeros_like(block, dtype=torch.float64))
    active, rows = [0] * initial.depth, []
    for k in range(config.steps + 1):
        loss, gradients = shallow_stack.loss_and_gradients(
            phi, tokens, targets, outputs=outputs, activation=activation, chunk=chunk,
            validate=k == 0,
        )  # fmt: skip
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"loss: {loss.item()} at step {k} with step_size = {config.eta:.4g}; reduce "
                "step_size, or bound the parameters with radii"
            )
        away = phi.zip(initial, torch.sub)
        norms = zip(gradients.layer_norms().tolist(), away.layer_norms().tolist(), strict=True)
        row: dict[str, float] = {"step": k, "loss": loss.item()}
        for place, (gradient, distance) in enumerate(norms, start=1):
            row[f"gradient_{place}"], row[f"distance_{place}"] = gradient, distance
            row[f"active_{place}"] = active[place - 1]
        rows.append(row)
        if k < config.steps:
            moved = moved.zip(away, torch.add)
            phi = phi.zip(gradients, lambda block, g: torch.sub(block, g, alpha=config.eta))
            phi, active = project(phi, initial, radii)
    history = pd.DataFrame(rows)
    averaged = initial.zip(
        moved, lambda centre, total: centre + (total / config.steps).to(centre.dtype)
    )
    return StackRun(initial, phi, averaged, float(history["loss"].min()), history)


def project(
    parameters: StackParameters, centre: StackParameters, radii: Radii
) -> tuple[StackParameters, list[int]]:
    r""":math:`\Pi_{\Omega_\rho}\phi`, and in each layer the number of blocks that were outside.

    ``radii`` are over the root of the number of heads. A block inside its ball comes back bit for
    bit; nothing is checked.
    """
    root = centre.heads**0.5
    limits = [None if rho is None else rho / root for rho in (radii.c, radii.U, radii.W)]
    layers, active = [], []
    for layer, start in zip(parameters.layers(), centre.layers(), strict=True):
        found = [project_block(*each) for each in zip(layer, start, limits, strict=True)]
        layers.append([block for block, _ in found])
        active.append(
            sum(
                int((norms > limit).sum())
                for (_, norms), limit in zip(found, limits, strict=True)
                if limit is not None
            )
        )
    inner = tuple(TokenLayer(*layer) for layer in layers[:-1])
    return StackParameters(inner, Parameters(*layers[-1])), active
