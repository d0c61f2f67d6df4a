r"""What a descent keeps besides its last iterate: the best one, the average, the history."""

from __future__ import annotations

import math

import pandas as pd
import torch

from attention_dynamics.models.parameters import BlockNorms, Parameters
from attention_dynamics.training.projection import ProjectionSet


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


class RunningAverage:
    r""":math:`\bar\phi = \phi_0 + \frac1\tau \sum_{k<\tau} (\phi_k - \phi_0)`, summed in float64.

    The displacements are summed, so that a frozen block averages to its centre exactly.
    """

    def __init__(self, centre: Parameters) -> None:
        self._centre, self._count = centre, 0
        self._sum = centre.map(lambda block: torch.zeros_like(block, dtype=torch.float64))

    def add(self, parameters: Parameters) -> None:
        r""":math:`\sum \leftarrow \sum + (\phi_k - \phi_0)`."""
        for total, block, centre in zip(self._sum, parameters, self._centre, strict=True):
            total += block.double() - centre.double()
        self._count += 1

    def mean(self) -> Parameters:
        r""":math:`\bar\phi`, in the dtype of the parameters."""
        displacement = self._sum.scaled(1.0 / self._count)
        return self._centre.to(dtype=torch.float64).plus(displacement).to(dtype=self._centre.dtype)


class History:
    r"""One row an iterate: losses, gradient norms, distances to the centre, active heads."""

    def __init__(self, region: ProjectionSet) -> None:
        self._limits = region.limits()
        self._root = math.sqrt(region.centre.heads)
        self._rows: list[dict[str, float]] = []

    def record(
        self,
        step: int,
        loss: float,
        validation_loss: float | None,
        gradients: Parameters,
        moved: BlockNorms,
    ) -> None:
        r""":math:`(k, L, \|\nabla L\|, \sqrt m \max_i \|\phi_i - \phi_{0,i}\|, \#\text{active})`.

        ``moved`` are the distances to the centre before the projection; after it they are the
        same, cut off at the radius.
        """
        row: dict[str, float] = {
            "step": step,
            "loss": loss,
            "validation_loss": math.nan if validation_loss is None else validation_loss,
        }
        for name, gradient, norms, limit in zip("cUW", gradients, moved, self._limits, strict=True):
            row[f"gradient_{name}"] = float(torch.linalg.vector_norm(gradient))
            reached = float(norms.max())
            row[f"distance_{name}"] = self._root * (
                reached if limit is None else min(reached, limit)
            )
            row[f"active_{name}"] = 0 if limit is None else int((norms > limit).sum())
        self._rows.append(row)

    def frame(self) -> pd.DataFrame:
        """The rows as a tidy frame, columns grouped by quantity."""
        columns = ["step", "loss", "validation_loss"]
        columns += [f"{q}_{b}" for q in ("gradient", "distance", "active") for b in "cUW"]
        return pd.DataFrame(self._rows, columns=columns)
