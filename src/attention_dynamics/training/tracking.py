r"""What a descent keeps besides its last iterate: the best one, the average, the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.models.parameters import Parameters
from attention_dynamics.training.update import Update

if TYPE_CHECKING:
    from attention_dynamics.training.descent import DescentConfig


class BestIterate:
    r""":math:`k^\star = \arg\min_k \ell_k`, and when :math:`\ell` stopped improving.

    Two records are kept apart. The best iterate changes with *every* smaller loss, so it is always
    a step that was taken, with its own parameters. Patience is counted from the last loss below
    (1 - ``relative_improvement``) times the previous such loss: a threshold relative to the loss,
    because losses of a good fit are smaller than any absolute one.
    """

    def __init__(self, patience: int | None, relative_improvement: float) -> None:
        self.step, self.loss = -1, math.inf
        self.parameters: Parameters | None = None
        self._patience, self._relative = patience, relative_improvement
        self._reference, self._reference_step, self._latest = math.inf, 0, 0

    def update(self, step: int, loss: float, parameters: Parameters) -> None:
        r""":math:`k^\star \leftarrow k` if :math:`\ell_k < \ell_{k^\star}`."""
        self._latest = step
        if loss < self.loss:
            self.step, self.loss, self.parameters = step, loss, parameters
        if loss < (1.0 - self._relative) * self._reference:
            self._reference, self._reference_step = loss, step

    @property
    def exhausted(self) -> bool:
        """Whether ``patience`` steps passed since the last sufficient improvement."""
        return self._patience is not None and self._latest - self._reference_step >= self._patience


class KeptIterates:
    r""":math:`\phi_0, \phi_1, \dots` in few slots: the iterates since the last look, and the best.

    ``update`` has ``window`` + 2 slots: for the iterates not looked at yet, the last one before
    them and the best one. Nothing is copied: a slot is free again once its iterate is none of
    these. :math:`\bar\phi = \phi_0 + \frac1\tau \sum_{k<\tau} (\phi_k - \phi_0)` is a sum of
    displacements in float64, so that a frozen block averages to its centre exactly.
    """

    def __init__(self, update: Update, window: int) -> None:
        self.slot, self.steps_taken = 0, 0
        self._update, self._slots = update, range(window + 2)
        self._pending, self._free = [0], list(self._slots[1:])

    @property
    def phi(self) -> Parameters:
        r""":math:`\phi_k`, a view of the memory."""
        return self._update.iterates[self.slot]

    def advance(self, gradients: Parameters) -> None:
        r""":math:`\phi_{k+1} = \Pi(\phi_k - \eta\, g_k)`."""
        target = self._free.pop()
        self._update.step(self.slot, target, gradients)
        self._pending.append(target)
        self.slot = target

    def settle(self, best: int, end: int | None = None) -> None:
        r"""Take the iterates since the last look into the average, and free all but the ``best``.

        ``end`` is the slot where the descent ends: it, and what came after it, is not stepped from.
        """
        if end is not None:
            self._pending, self.slot = self._pending[: self._pending.index(end)], end
        for slot in self._pending:
            self._update.accumulate(slot)
        self.steps_taken += len(self._pending)
        self._pending = []
        self._free = [slot for slot in self._slots if slot not in (self.slot, best)]

    def mean(self) -> Parameters:
        r""":math:`\bar\phi` of the iterates that were stepped from."""
        return self._update.mean(self.steps_taken)


class Evaluation(NamedTuple):
    """What was computed at one iterate, all of it on its device still.

    ``step_loss`` belongs to the gradient that is stepped along, ``loss`` is :math:`L_n`,
    ``validation_loss`` that of held data; the last two are None where they are not looked at.
    """

    step: int
    slot: int
    recorded: bool
    step_loss: Tensor
    loss: Tensor | None
    validation_loss: Tensor | None


class History:
    r"""One row an iterate: losses, gradient norms, distances to the centre, active heads.

    Numbers go to one array that grows as needed, and become a frame at the end.
    """

    def __init__(self, update: Update, rows: int) -> None:
        self._update = update
        self._rows = np.empty((min(rows, 4096), 12))
        self._count = 0

    def extend(self, rows: Sequence[tuple[int, int, float, float]]) -> None:
        r"""Append :math:`(k, \text{slot}, L, \text{validation } L)` with what the slots report."""
        if not rows:
            return
        if self._count + len(rows) > len(self._rows):
            more = max(len(self._rows), len(rows))
            self._rows = np.concatenate((self._rows, np.empty((more, 12))))
        reports = self._update.report([slot for _, slot, _, _ in rows])
        for (step, _, loss, validation_loss), numbers in zip(rows, reports, strict=True):
            self._rows[self._count] = (step, loss, validation_loss, *numbers)
            self._count += 1

    def frame(self) -> pd.DataFrame:
        r"""The rows as a tidy frame; distances are :math:`\sqrt m \max_i \|\phi_i - \phi_{0,i}\|`.

        They were measured before the projection; after it they are cut off at the radius.
        """
        rows = self._rows[: self._count]
        names = ["step", "loss", "validation_loss"]
        names += [f"{q}_{b}" for q in ("gradient", "distance", "active") for b in "cUW"]
        columns = dict(zip(names, rows.T.copy(), strict=True))
        root = math.sqrt(self._update.heads)
        for name, limit in zip("cUW", self._update.limits, strict=True):
            reached = columns[f"distance_{name}"]
            columns[f"distance_{name}"] = root * (
                reached if limit is None else np.minimum(reached, limit)
            )
            columns[f"active_{name}"] = columns[f"active_{name}"].astype(np.int64)
        columns["step"] = columns["step"].astype(np.int64)
        return pd.DataFrame(columns)


class Monitor:
    r"""Looks at losses: are they finite, which iterate is best, is patience exhausted?

    Evaluations are noted as they are made, which on an accelerator waits for nothing, and looked at
    in their order, as if each had been looked at in its turn.
    """

    def __init__(
        self, config: DescentConfig, history: History, iterates: Sequence[Parameters]
    ) -> None:
        self.best = BestIterate(config.patience, config.relative_improvement)
        self.best_slot = 0
        self._config, self._history, self._iterates = config, history, iterates
        self._noted: list[Evaluation] = []

    def note(self, evaluation: Evaluation) -> int:
        """Keep an evaluation for the next look; return how many there are."""
        self._noted.append(evaluation)
        return len(self._noted)

    def look(self) -> Evaluation | None:
        """Return the evaluation at which patience ends the descent before its last step, if any.

        Raises FloatingPointError for the first loss that is not finite.
        """
        noted, self._noted = self._noted, []
        values = iter(_values(noted))
        rows, end = [], None
        for evaluation in noted:
            step, slot, recorded, _, loss, validation_loss = evaluation
            monitored = self._finite(next(values), "loss", step)
            if loss is None:
                continue
            if loss is not evaluation.step_loss:
                monitored = self._finite(next(values), "loss", step)
            training, held = monitored, math.nan
            if validation_loss is not None:
                held = monitored = self._finite(next(values), "validation loss", step)
            self.best.update(step, monitored, self._iterates[slot])
            if self.best.step == step:
                self.best_slot = slot
            stopped = self.best.exhausted and step < self._config.steps
            if recorded or stopped:
                rows.append((step, slot, training, held))
            if stopped:
                end = evaluation
                break
        self._history.extend(rows)
        return end

    def _finite(self, loss: float, name: str, step: int) -> float:
        if not math.isfinite(loss):
            remedy = (
                "the descent diverged: reduce step_size, or bound the parameters with radii"
                if step
                else "it overflows before the first step: rescale the targets, or use float64"
            )
            raise FloatingPointError(
                f"{name}: {loss} at step {step} with step_size = {self._config.eta:.4g}; {remedy}"
            )
        return loss


def _values(evaluations: Sequence[Evaluation]) -> list[float]:
    """Step loss, loss where it is another one, validation loss, evaluation by evaluation."""
    losses = []
    for _, _, _, step_loss, loss, validation_loss in evaluations:
        losses.append(step_loss)
        if loss is not None and loss is not step_loss:
            losses.append(loss)
        if validation_loss is not None:
            losses.append(validation_loss)
    if len(evaluations) == 1:
        return [loss.item() for loss in losses]
    return torch.stack(losses).tolist()  # one transfer from the device
