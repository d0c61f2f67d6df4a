r"""The state of S descents that step together: all of it on the device until the end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attention_dynamics.models.parameters import Parameters
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.projection import Radii

_LOOK_EVERY = 256  # steps between two looks at the losses, for which an accelerator has to wait


class StackedState:
    r"""
    .. math:: \phi^s_{k+1} = \Pi_{\Omega_{\rho_s}}(\phi^s_k - \eta\, g^s_k), \qquad
        \bar\phi^s, \quad \phi^s_{k^\star}, \qquad s = 1..S.

    ``centre`` holds c (S, M), U (S, M, d), W (S, M, d, d) with heads of coefficient 0 as padding;
    radii are over the root of the number of ``heads`` of each model. A padded head has gradient 0
    and stays where it is.
    """

    phi: Parameters
    best: Parameters
    best_step: Int[Tensor, " S"]
    best_loss: Float[Tensor, " S"]

    def __init__(
        self,
        centre: Parameters,
        heads: Sequence[int],
        radii: Sequence[Radii],
        config: DescentConfig,
    ) -> None:
        self.phi = self.best = self._centre = centre
        self._config, self._heads, self._radii = config, heads, radii
        self._roots = [math.sqrt(m) for m in heads]
        limits = [
            [math.inf if getattr(rho, block) is None else getattr(rho, block) / root
             for rho, root in zip(radii, self._roots, strict=True)]
            for block in "cUW"
        ]  # fmt: skip
        self._limits = centre.U.new_tensor(limits)[:, :, None]
        count, device = len(heads), centre.U.device
        self._moved = list(centre.U.new_zeros((3, count, centre.heads)))
        self._sum = centre.map(lambda block: torch.zeros_like(block, dtype=torch.float64))
        self.best_step = torch.zeros(count, dtype=torch.int64, device=device)
        self.best_loss = torch.full((count,), math.inf, dtype=centre.dtype, device=device)
        self._losses: list[Tensor] = []
        self._looked_at = 0
        self._steps: list[int] = []
        self._rows: list[Tensor] = []

    def note(self, step: int, losses: Float[Tensor, " S"], gradients: Parameters) -> None:
        r"""Compare :math:`L(\phi_k)` with the best, and keep a row of history where one is due.

        Raises FloatingPointError when a loss is not finite, at the next look.
        """
        better = losses < self.best_loss
        self.best_loss = torch.where(better, losses, self.best_loss)
        self.best_step = torch.where(better, step, self.best_step)
        self.best = self.phi.zip(
            self.best, lambda new, old: torch.where(_per_model(better, new), new, old)
        )
        self._losses.append(losses)
        if step % self._config.record_every == 0 or step == self._config.steps:
            norms = [torch.linalg.vector_norm(g.flatten(1), dim=1).double() for g in gradients]
            reached = [moved.amax(dim=1).double() for moved in self._moved]
            active = [
                (moved > limit).sum(dim=1).double()
                for moved, limit in zip(self._moved, self._limits, strict=True)
            ]
            self._steps.append(step)
            self._rows.append(torch.stack([losses.double(), *norms, *reached, *active]))
        if len(self._losses) == _LOOK_EVERY or step == self._config.steps:
            self._look(step)

    def advance(self, gradients: Parameters) -> None:
        r""":math:`\phi \leftarrow \Pi(\phi - \eta\, g)`, with :math:`\phi` into the average.

        A head inside its ball is exactly :math:`\phi_i - \eta\, g_i`.
        """
        for total, block, centre in zip(self._sum, self.phi, self._centre, strict=True):
            total += block.double() - centre.double()
        blocks = []
        for k, (block, gradient, centre) in enumerate(
            zip(self.phi, gradients, self._centre, strict=True)
        ):
            candidate = torch.sub(block, gradient, alpha=self._config.eta)
            delta = candidate - centre
            # (S, M, 1) for c too: the norm of one number.
            self._moved[k] = torch.linalg.vector_norm(delta.flatten(2) if delta.ndim > 2
                                                      else delta[..., None], dim=2)  # fmt: skip
            # 0/0, a frozen head at rest, is 1.
            factor = torch.fmin(self._limits[k] / self._moved[k], torch.ones_like(self._moved[k]))
            factor = factor.reshape(factor.shape + (1,) * (block.ndim - 2))
            blocks.append(torch.where(factor < 1, centre + delta * factor, candidate))
        self.phi = Parameters(*blocks)

    def mean(self) -> Parameters:
        r""":math:`\phi_0 + \frac1\tau \sum_{k<\tau} (\phi_k - \phi_0)`, summed in float64."""
        displacement = self._sum.scaled(1.0 / self._config.steps)
        return self._centre.to(dtype=torch.float64).plus(displacement).to(dtype=self._centre.dtype)

    def histories(self) -> list[pd.DataFrame]:
        """One frame a model, as a single descent has it; the one transfer from the device."""
        rows = torch.stack(self._rows).cpu().numpy()  # (rows, 10, S)
        names = [f"{q}_{b}" for q in ("gradient", "distance", "active") for b in "cUW"]
        frames = []
        for s, root in enumerate(self._roots):
            columns = dict(zip(("loss", *names), rows[:, :, s].T.copy(), strict=True))
            limits = self._limits[:, s, 0].tolist()
            for block, limit in zip("cUW", limits, strict=True):
                reached = np.minimum(columns[f"distance_{block}"], limit)
                columns[f"distance_{block}"] = root * reached
                columns[f"active_{block}"] = columns[f"active_{block}"].astype(np.int64)
            held = np.full(len(rows), math.nan)
            columns = {"step": np.array(self._steps), "loss": columns.pop("loss"),
                       "validation_loss": held, **columns}  # fmt: skip
            frames.append(pd.DataFrame(columns))
        return frames

    def _look(self, step: int) -> None:
        losses, self._losses = torch.stack(self._losses), []
        if not bool(torch.isfinite(losses).all()):
            k, s = (~torch.isfinite(losses)).nonzero()[0].tolist()
            at = step - len(losses) + 1 + k
            remedy = (
                "the descent diverged: reduce step_size, or bound the parameters with radii"
                if at
                else "it overflows before the first step: rescale the targets, or use float64"
            )
            raise FloatingPointError(
                f"loss: {losses[k, s].item()} of models[{s}] at step {at} with step_size = "
                f"{self._config.eta:.4g}; {remedy}"
            )


def _per_model(flags: Tensor, like: Tensor) -> Tensor:
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))
