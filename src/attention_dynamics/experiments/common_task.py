r"""One task for all models: which of them descend geometrically, where, and at a predicted rate.

Tokens (n, T, d) are uniform on the unit sphere, :math:`M_\star` is orthogonal, and what is to be
learned is :math:`M_\star x_T`, linear in the last token. Models:

- ``"shallow"``: the shallow Transformer, query the last token, target the first entry of
  :math:`M_\star x_T`, projected descent;
- ``"encoder"``: the encoder of ``models.wu_encoder`` on the same target;
- ``"regression"``: :math:`A\mu(B^\top x_T)`, the tokens of the sample as context, plain descent;
  ``"aware"`` is the same from the same start with the scaled preconditioner of the population,
  damping 0.1 and step size 0.3;
- ``"residual"``: one layer with both residuals, all five matrices learn, the target of each token
  is :math:`M_\star x_t`; ``"vanilla"`` is the same without the residual around the attention.

Losses differ, so all are relative to their first value. The step size is ``fraction`` over the
largest eigenvalue of the Hessian of a frozen tangent kernel at the start (``"aware"``: its own).
Reported of each run, with :math:`\tau` the number of steps, or the first one with
:math:`L_k/L_0\le10^{-20}`, where a run ends:

- ``end``: :math:`\log_{10}L_\tau/L_0`; ``tenth``: the first step with :math:`L_k\le L_0/10`, or
  the number of steps;
- ``rate``: :math:`-\Delta\log L/\Delta k` over the second half of the run;
- ``retention``: the rate over that of the second quarter: 1 for a geometric sequence, 1/2 for any
  power of k, 0 for a floor;
- ``rate_ratio``: predicted over observed fall of log L over the second half, the prediction being
  that of the tangent kernel at :math:`\tau/2`, kept fixed;
- ``start_ratio``: the same from the kernel of the start and over the whole run;
- ``condition``: :math:`\log_{10}` of the condition number of the kernel at the start, at most 16;
- ``loss_k``: :math:`\log_{10}L_k/L_0` at some steps.

Bands were fixed before any run at the profile ``book``. Theory gives a number for rates in the
tangent regime; everything else is a sign, and 3/4 is the middle between a power and a geometric
sequence. One pilot, of seed 100, which the profile does not use, set the sizes; it also showed
that attention without a residual does not stay near its tangent, as its self-repair says, so that
only a sign is asked of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import pandas as pd
import torch

from attention_dynamics.experiments.common_models import Recorded, descend
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    select,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of

NAME = "common_task"
SCHEMA = 1
Model = Literal["shallow", "encoder", "regression", "aware", "residual", "vanilla"]


@dataclass(frozen=True)
class Config:
    r"""``width`` is m: heads, neurons of the encoder, hidden neurons; regression has none."""

    model: Model
    dimension: int
    samples: int = 6
    length: int = 3
    width: int = 128
    steps: int = 1000
    fraction: float = 0.5


COLUMNS = columns_of(Config)
_EVERY: tuple[Model, ...] = ("shallow", "encoder", "regression", "aware", "residual", "vanilla")
_NARROW = 4
_LONG = 256
_MANY = 64


def _configs(steps: int, wide: int, widths: Mapping[str, int]) -> tuple[Config, ...]:
    def of(model: Model, dimension: int, **sizes: int) -> Config:
        taken = {"width": widths.get(model, 1), "steps": steps // 5 if model == "aware" else steps}
        return Config(model, dimension, **(taken | sizes))

    found = [of(model, d) for d in (wide, _NARROW) for model in _EVERY]
    found += [of(model, _NARROW, length=_LONG) for model in ("shallow", "regression", "aware")]
    found += [of(model, 2, samples=_MANY, width=4) for model in ("shallow", "encoder")]
    return tuple(found)


_BOOK = _configs(1000, 36, {"shallow": 128, "encoder": 256, "residual": 36, "vanilla": 36})
PROFILES = {
    "smoke": Profile(
        _configs(40, 12, dict.fromkeys(("shallow", "encoder", "residual", "vanilla"), 12)),
        seeds=(100, 101, 102),
    ),
    "book": Profile(_BOOK, seeds=tuple(range(10))),
    "paper": Profile(tuple(replace(c, steps=4 * c.steps) for c in _BOOK), seeds=tuple(range(20))),
}

_DESCENT: tuple[Model, ...] = ("shallow", "encoder", "regression", "residual")
_TANGENT = "near its end descent follows its tangent"
_GEOMETRIC = "a positive definite tangent kernel gives a geometric rate at d >= n"
_SIGN = "at d < n the tangent kernel has smaller eigenvalues; sign only"
BANDS = (
    {f"rate_ratio_{model}": Band(0.9, 1.1, _TANGENT) for model in _DESCENT}
    | {"rate_ratio_vanilla": Band(None, 1.0, "attention repairs itself; sign only")}
    | {f"retention_{model}": Band(0.75, None, _GEOMETRIC) for model in _DESCENT}
    | {"retention_many": Band(None, 0.75, "a singular kernel leaves a power or a floor")}
    | {f"slower_{model}": Band(0.0, None, _SIGN) for model in _DESCENT}
    | {
        "residual_helps": Band(0.0, None, "the attention output is better conditioned; sign only"),
        "aware_speedup": Band(0.0, None, "the preconditioner takes out the spectrum; sign only"),
        "length_helps": Band(0.0, None, "the floor of a finite context falls with T; sign only"),
    }
)
r"""``rate_ratio`` and ``retention`` at d >= n; ``retention_many`` is that of a shallow Transformer
with fewer parameters in its kernel than samples. ``slower``: log10 of the rate at d >= n over that
at d < n, seed by seed. ``residual_helps``: ``end`` without minus with the residual, at d >= n.
``aware_speedup``: log10 of ``tenth`` of plain over structure-aware descent at the long context.
``length_helps``: ``end`` of structure-aware descent at d < n minus that at the long context."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Rows (quantity, value) of one model at one size; a pure function of its arguments.

    Raises ValueError for an unknown model or a size out of its range.
    """
    recorded = descend(config, seed, device)
    return rows_of(NAME, config, seed, _quantities(recorded, config.steps))


def curve_steps(steps: int) -> tuple[int, ...]:
    """The steps at which ``loss_k`` is reported: four in each doubling."""
    grid = {round(2 ** (j / 4)) for j in range(4 * steps.bit_length())}
    return tuple(sorted(k for k in grid | {0, steps} if k <= steps))


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """What a band is about: a mean over seeds with its 95 % t-interval."""

    def of(name: str, model: str, place: str) -> pd.Series:
        rows = frame[(frame["model"] == model) & (place_of(frame) == place)]
        return select(rows, name).set_index("seed")["value"]

    kind, _, model = quantity.rpartition("_")
    if quantity == "retention_many":
        values = of("retention", "shallow", "many")
    elif kind in ("rate_ratio", "retention"):
        values = of(kind, model, "wide")
    elif kind == "slower":
        values = (of("rate", model, "wide") / of("rate", model, "narrow")).map(math.log10)
    elif quantity == "residual_helps":
        values = of("end", "vanilla", "wide") - of("end", "residual", "wide")
    elif quantity == "aware_speedup":
        values = (of("tenth", "regression", "long") / of("tenth", "aware", "long")).map(math.log10)
    elif quantity == "length_helps":
        values = of("end", "aware", "narrow") - of("end", "aware", "long")
    else:
        raise ValueError(f"quantity must be one of {', '.join(BANDS)}; got {quantity!r}")
    return t_interval(values)


def place_of(frame: pd.DataFrame) -> pd.Series:
    """Where a row belongs: ``wide`` is d >= n, ``narrow`` d < n, ``long`` and ``many`` are d < n
    with a long context or many samples.
    """
    names = pd.Series("narrow", index=frame.index)
    names = names.mask(frame["dimension"] >= frame["samples"], "wide")
    return names.mask(frame["length"] >= _LONG, "long").mask(frame["samples"] >= _MANY, "many")


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its interval, beside the band."""
    return band_table(BANDS, lambda quantity: estimate(frame, quantity))


def _quantities(recorded: Recorded, steps: int) -> dict[str, float]:
    relative = (recorded.losses / recorded.losses[0]).clamp_min(1e-30)
    end = len(relative) - 1
    logs = relative.log()
    first, second = (
        float(logs[a] - logs[b]) / max(b - a, 1) for a, b in ((end // 4, end // 2), (end // 2, end))
    )
    below = relative <= 0.1
    found = {
        "end": float(logs[end]) / math.log(10),
        "tenth": float(below.to(torch.int8).argmax()) if bool(below.any()) else float(steps),
        "rate": second,
        "retention": second / first if first > 1e-9 else 0.0,
    }
    if recorded.tangents is not None:
        half, whole, condition = recorded.tangents
        found |= {
            "rate_ratio": half / max(second * (end - end // 2), 1e-9),
            "start_ratio": whole / -float(logs[end]),
            "condition": condition,
        }
    return found | {
        f"loss_{k}": float(logs[min(k, end)]) / math.log(10) for k in curve_steps(steps)
    }
