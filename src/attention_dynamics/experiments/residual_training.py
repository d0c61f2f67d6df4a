r"""Training one layer with and without the residual: failures, steps, and rates against theory.

Each cell draws ``runs`` independent starts and data sets and descends all of them in one batch.
Three settings:

1. ``"feedforward"``: :math:`W_1, W_2` learn, the attention output stays what it was;
2. ``"all"``: all five blocks learn;
3. ``"frozen_limit"``: :math:`W_1 = 0`, :math:`W_2 = cO` with large c, all five blocks learn. In
   the limit descent is linear regression on the attention output.

The step size is a fraction of :math:`1/\lambda_{\max}` of the tangent kernel at the start; in the
third setting it is :math:`(\varphi'(0)\,c\,\sigma_{\max}(Z_0))^{-2}`.

The bands were fixed before any run at the book's profile. The ratios of rates are 1 in theory up
to what is left of the curvature at a finite distance; the widths of their bands round what was
measured once before, on other draws.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    select,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.residual import (
    BLOCKS,
    ResidualConfig,
    ResidualParameters,
    attention_output,
    forward,
    init_parameters,
    stack_parameters,
)
from attention_dynamics.theory.conditioning import attention_spectrum
from attention_dynamics.theory.tangent_spectrum import feedforward_kernel, lambda_max
from attention_dynamics.training.residual_descent import (
    WINDOW,
    ResidualRun,
    gradient_descent,
    measured_rate,
    steps_to,
)

NAME = "residual_training"
SCHEMA = 1
Setting = Literal["feedforward", "all", "frozen_limit"]
REACHED = 1e-3
r"""A run that does not bring :math:`L_k/L_0` down to here within its steps has failed."""


@dataclass(frozen=True)
class Config:
    r"""``fraction`` is :math:`\eta\lambda_{\max}`, ``scale`` the c of the frozen limit."""

    setting: Setting
    residual: bool
    runs: int = 20
    steps: int = 1500
    fraction: float = 0.5
    scale: float = 1e3
    samples: int = 2
    length: int = 4
    dimension: int = 32
    key_dimension: int = 8
    hidden: int = 32

    @property
    def layer(self) -> ResidualConfig:
        """The layer of this configuration."""
        return ResidualConfig(
            dimension=self.dimension, key_dimension=self.key_dimension, hidden=self.hidden,
            attention_residual=self.residual,
        )  # fmt: skip


COLUMNS = (*columns_of(Config), "run")

_SMOKE = Config("all", True, runs=3, steps=200, samples=1, length=2, dimension=8,
                key_dimension=2, hidden=8)  # fmt: skip
_BOOK = Config("all", True)


def _settings(base: Config, frozen_steps: int) -> tuple[Config, ...]:
    def of(setting: Setting, residual: bool, steps: int = base.steps) -> Config:
        return replace(base, setting=setting, residual=residual, steps=steps)

    return (
        of("feedforward", True),
        of("feedforward", False),
        of("all", True),
        of("all", False),
        of("frozen_limit", True, frozen_steps),
    )


PROFILES = {
    "smoke": Profile(_settings(_SMOKE, 300), seeds=(100,)),
    "book": Profile(_settings(_BOOK, 600), seeds=(0,)),
    "paper": Profile(_settings(_BOOK, 600), seeds=tuple(range(5))),
}

_RATE = "descent follows its tangent once the loss is small"
BANDS = {
    "predicted_over_observed": Band(0.98, 1.08, _RATE),
    "frozen_law": Band(0.99, 1.02, "descent is linear regression on Z for large W_2"),
    "failures_feedforward_with": Band(None, 0.0, "the rate is that of a well-conditioned Z"),
    "failures_all_with": Band(None, 0.0, "the rate is that of a well-conditioned Z"),
    "slowdown_feedforward": Band(1.0, None, "the condition number of Z is larger"),
    "slowdown_all": Band(1.0, None, "the condition number of Z is larger"),
    "repair_all_without": Band(1.0, None, "attention that learns improves its own output"),
}
r"""Failures are the number of failed runs. A slowdown is the ratio of steps to
:data:`REACHED` without the residual to those with it, on the same data, a failed run counted with
all its steps: a lower bound. The repair is :math:`\kappa(Z)` at the start over that at the end."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of each of ``runs`` runs; a pure function of its arguments.

    Raises ValueError for another setting or a field out of its range.
    """
    if config.setting not in ("feedforward", "all", "frozen_limit"):
        raise ValueError(
            f"setting must be 'feedforward', 'all' or 'frozen_limit'; got {config.setting!r}"
        )
    start, tokens, targets = draw(config, seed, device)
    layer, frozen = config.layer, config.setting == "frozen_limit"
    blocks = ("W1", "W2") if config.setting == "feedforward" else BLOCKS
    spectrum = attention_spectrum(attention_output(start, tokens, layer))
    if frozen:
        first = (1 + layer.slope) / 2
        eta = (first * config.scale * spectrum.largest) ** -2
    else:
        largest = lambda_max(
            start, tokens, layer, generator=generator(seed, NAME, "power"), blocks=blocks
        )
        eta = config.fraction / largest
    found = gradient_descent(
        start, tokens, targets, layer, step_size=eta, steps=config.steps, blocks=blocks
    )
    taken = steps_to(found, REACHED)
    failed = torch.isinf(taken)
    end = attention_spectrum(attention_output(found.final, tokens, layer))
    columns: dict[str, Tensor] = {
        "steps": taken.masked_fill(failed, config.steps),
        "failed": failed.to(tokens.dtype),
        "condition_start": spectrum.condition,
        "condition_end": end.condition,
    }
    if config.setting == "feedforward" and config.residual:
        columns |= _rates(config, start, tokens, targets, eta, found)
    if frozen:
        law = -2 * torch.log1p(-(spectrum.condition**-2))
        columns["frozen_law"] = measured_rate(found) / law
    frames = [
        rows_of(NAME, config, seed, {name: float(x[j]) for name, x in columns.items()}).assign(
            run=j
        )
        for j in range(config.runs)
    ]
    return pd.concat(frames, ignore_index=True)


def draw(
    config: Config, seed: int, device: str = "cpu"
) -> tuple[ResidualParameters, Tensor, Tensor]:
    r"""Starts, tokens (runs, n, T, d) and targets: every entry of the data is standard normal.

    Run j has streams of its own, the same in every setting, with the residual and without.
    """
    shape = (config.samples, config.length, config.dimension)
    frozen = config.setting == "frozen_limit"
    scales = (1.0, 1.0, 1.0, 0.0, config.scale) if frozen else (1.0,) * 5
    starts: list[ResidualParameters] = []
    tokens: list[Tensor] = []
    targets: list[Tensor] = []
    for j in range(config.runs):
        for name, kept in (("tokens", tokens), ("targets", targets)):
            stream = generator(seed, NAME, name, j)
            kept.append(torch.randn(*shape, generator=stream, dtype=torch.float64))
        starts.append(
            init_parameters(
                config.layer, generator(seed, NAME, "start", j), scales=scales,
                orthogonal_w2=frozen, device=device,
            )
        )  # fmt: skip
    return stack_parameters(starts), torch.stack(tokens).to(device), torch.stack(targets).to(device)


def _rates(
    config: Config,
    start: ResidualParameters,
    tokens: Tensor,
    targets: Tensor,
    eta: Tensor,
    found: ResidualRun,
) -> dict[str, Tensor]:
    r"""Predicted over observed rates; the predictions are those of a fixed kernel K,
    :math:`E_{k+1} = (I - \eta K)E_k` from where :math:`L_k/L_0` enters the window, fitted alike.

    K is that of the end, or for comparison that of the start, or only its smallest eigenvalue.
    """
    observed = measured_rate(found)
    kernels = {
        "predicted_over_observed": feedforward_kernel(found.final, tokens, config.layer),
        "from_start_over_observed": feedforward_kernel(start, tokens, config.layer),
    }
    ratios: dict[str, list[Tensor]] = {name: [] for name in (*kernels, "slowest_over_observed")}
    for j in range(config.runs):
        entry = int((found.relative[:, j] <= WINDOW[1]).to(torch.int8).argmax())
        moved = gradient_descent(
            ResidualParameters(*(block[j] for block in start)), tokens[j], targets[j],
            config.layer, step_size=float(eta[j]), steps=max(entry, 1), blocks=("W1", "W2"),
            every=max(entry, 1),
        )  # fmt: skip
        error = (forward(moved.final, tokens[j], config.layer) - targets[j]).flatten()
        for name, kernel in kernels.items():
            values, vectors = torch.linalg.eigh(kernel[j])
            factors = 1 - eta[j] * values
            weights = 0.5 * (vectors.mT @ error).square()
            k = torch.arange(config.steps - entry + 1, dtype=error.dtype, device=error.device)
            losses = factors.square() ** k[:, None] @ weights
            fixed = _with_losses(found, entry, j, losses)
            ratios[name].append(measured_rate(fixed) / observed[j])
            if name == "predicted_over_observed":
                slowest = -2 * torch.log1p(-eta[j] * values[0])
                ratios["slowest_over_observed"].append(slowest / observed[j])
    return {name: torch.stack(values) for name, values in ratios.items()}


def _with_losses(found: ResidualRun, entry: int, j: int, losses: Tensor) -> ResidualRun:
    """The record of run j with its losses from step ``entry`` on replaced."""
    own = torch.cat((found.losses[:entry, j], losses))
    return replace(found, losses=own, distances=found.distances[:, j], diverged=found.diverged[j])


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """What a band is about: a mean, a number of failures, or a geometric mean of ratios.

    Intervals are 95 % t-intervals over runs, independent draws of data and start.
    """
    kind, _, rest = quantity.partition("_")
    if kind == "failures":
        setting, _, residual = rest.rpartition("_")
        failed = _select(frame, "failed", setting, residual == "with")
        total = float(failed.sum())
        return Estimate(total, total, total, len(failed))
    if kind == "slowdown":
        ratio = _select(frame, "steps", rest, False) / _select(frame, "steps", rest, True)
        return geometric_interval(ratio)
    if kind == "repair":
        setting, _, residual = rest.rpartition("_")
        start, end = (
            _select(frame, name, setting, residual == "with")
            for name in ("condition_start", "condition_end")
        )
        return geometric_interval(start / end)
    return t_interval(select(frame, quantity)["value"])


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its interval, beside the band."""
    table = band_table(BANDS, lambda quantity: estimate(frame, quantity))
    return table.rename(columns={"seeds": "runs"})


def _select(frame: pd.DataFrame, quantity: str, setting: str, residual: bool) -> pd.Series:
    rows = frame[(frame["setting"] == setting) & (frame["residual"] == residual)]
    return select(rows, quantity).set_index(["seed", "run"])["value"]
