r"""Recurrence: a Transformer and independent recurrent units forecast an AR(L) series.

.. math:: x_t = 0.9\, x_{t-L} + \epsilon_t, \quad \operatorname{Var}\epsilon_t = 0.1, \qquad
    \text{windows of } T = L + 1 \text{ tokens}, \quad L \in \{4, 16, 72, 96\}.

Both models have m units of d = 17 inputs, start at f = 0 and descend without projection, at one
step size. A cell is one model at one lag. What may decide the contrast is an explicit argument:
the initial recurrent weights, the split of the windows and the length of the tokens. Setting: arXiv
2601.16514 (v2) and its published code; the bands were fixed before the first run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import pandas as pd

from attention_dynamics.data import (
    Forecasting,
    autoregressive_task,
    generator,
    targets_seen,
)
from attention_dynamics.data.windows import Split
from attention_dynamics.experiments._recurrence_cells import (
    Trained,
    baseline_errors,
    measures,
    paired_units,
    train_recurrent,
    train_transformer,
)
from attention_dynamics.experiments._recurrence_saturation import (
    mean_log_factor,
    saturation_bound,
)
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    slope_estimate,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.validation import require_one_of

NAME = "recurrence"
SCHEMA = 1
AGAINST = "lag"
Model = Literal["transformer", "recurrent"]
NO_RECURRENCE = "none"


@dataclass(frozen=True)
class Config:
    r"""The sizes of arXiv 2601.16514; a ``lag`` (L) and a ``model`` have no default.

    ``recurrent_init`` is ``"normal"`` or a number r in text, for :math:`u_i = \pm r`; ``"none"``
    for the Transformer, which has no such weights. ``split`` is ``"time"`` or ``"random"``.
    ``token_bound`` b divides the tokens, which brings them into the unit ball; 0 leaves them as
    they are. ``units`` are heads or recurrent units, m; ``samples`` are windows, the share
    ``validation_fraction`` of them held out.
    """

    lag: int
    model: Model
    recurrent_init: str = NO_RECURRENCE
    split: Split = "time"
    token_bound: float = 0.0
    units: int = 64
    samples: int = 5000
    validation_fraction: float = 0.2
    coefficient: float = 0.9
    innovation_variance: float = 0.1
    position_pairs: int = 8
    base_period: float = 32.0
    steps: int = 5000
    step_size: float = 0.05


COLUMNS = columns_of(Config)
LAGS = (4, 16, 72, 96)
INITS = ("1.5", "normal", "1.0", "0.5")
CODE = INITS[0]  # the initial recurrent weights of the published code; "normal" is the text's
BALL = 5.0  # longer than a token of a series with |x| < 4.1, which is 5.7 standard deviations
LEAK_LAGS = (4, 16)


def _pair(base: Config, lag: int, **changes: object) -> tuple[Config, Config]:
    """Both models of one comparison."""
    both = replace(base, lag=lag, **changes)  # type: ignore[arg-type]
    return both, replace(both, model="recurrent", recurrent_init=CODE)


def _contrast(base: Config) -> tuple[Config, ...]:
    return tuple(config for lag in LAGS for config in _pair(base, lag))


def _variants(
    base: Config,
    rest: tuple[int, ...] = LAGS,
    split: tuple[int, ...] = LAGS,
    ball: tuple[int, ...] = LAGS,
) -> tuple[Config, ...]:
    """The contrast, and at some lags the rest of the initial weights, the other split, the ball."""
    inits = [
        replace(base, lag=lag, model="recurrent", recurrent_init=init)
        for lag in LAGS
        for init in INITS[1:]
        if init == "normal" or lag in rest
    ]
    dealt = [config for lag in split for config in _pair(base, lag, split="random")]
    inside = [config for lag in ball for config in _pair(base, lag, token_bound=BALL)]
    return (*_contrast(base), *inits, *dealt, *inside)


_PAPER = Config(lag=4, model="transformer")
_BOOK = replace(_PAPER, units=32, samples=250, steps=250)
_SMOKE = replace(_PAPER, units=4, samples=30, steps=4)
PROFILES = {
    "smoke": Profile(_variants(_SMOKE, (4,), (4,), (4,)), seeds=(0, 1, 2)),
    "book": Profile(_variants(_BOOK, (4, 16), LEAK_LAGS, (16,)), seeds=tuple(range(5))),
    "paper": Profile(_contrast(_PAPER), seeds=tuple(range(20))),
    "variants": Profile(_variants(_PAPER), seeds=tuple(range(5))),
}
r"""``paper`` is the contrast with the initial weights of the published code. ``variants`` adds, on
five seeds, the other initial weights, the random split and the unit ball; it holds the cells of
``paper`` with these seeds too, so that every difference lies within one table."""

_BACK = "the paper's claim: attention reaches back to the lag, the recurrence forgets it"
SATURATION = saturation_bound(1.5, math.sqrt(8.0))
BANDS = {
    "short_lag": Band(
        0.0, None, "the recurrence is ahead at L = 4, as in trial runs of other sizes"
    ),
    "long_lag_72": Band(None, 0.0, _BACK),
    "long_lag_96": Band(None, 0.0, _BACK),
    "long_lag_72_normal": Band(None, 0.0, _BACK),
    "long_lag_96_normal": Band(None, 0.0, _BACK),
    "gradient_growth": Band(None, 0.1, "the bound of a head's gradient holds no T"),
    "recurrent_rate": Band(-0.05, 0.05, "saturation: an eighth of the worst case, log 1.5"),
    "saturation": Band(None, SATURATION, "the bound for Gaussian w and tokens of norm >= sqrt 8"),
    "leak": Band(0.0, None, "dealt windows share the slow swings of the series; sign only"),
    "ball": Band(0.0, None, "tokens divided by b move the heads more slowly; sign only"),
}
r"""The smallest validation error of the Transformer minus that of the recurrent units is
``short_lag`` at L = 4, ``long_lag`` at L = 72 and 96. ``gradient_growth`` is the log-log slope of
the Transformer's largest gradient norm against T, ``recurrent_rate`` the slope of the logarithm of
the recurrent mean gradient norm against T, ``saturation`` the mean of
:math:`\log|u\,\sigma'(z_t)|` at the start, u = 1.5 or -1.5. ``leak`` is the error of the split in
time minus that of the random one, ``ball`` the Transformer's error with tokens in the unit ball
minus that outside of it."""
LEAK_RIDGE = Band(0.0, None, "the same sign, for a linear fit, whose many seeds cost nothing")
LEAK_SEEDS = tuple(range(200))


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one model at one lag; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range, FloatingPointError if the
    Transformer diverges; of recurrent units that diverge ``diverged`` is 1.
    """
    require_one_of("model", config.model, get_args(Model))
    if (config.model == "transformer") != (config.recurrent_init == NO_RECURRENCE):
        raise ValueError(
            f"recurrent_init: got {config.recurrent_init!r} with model = {config.model!r}; "
            f"'{NO_RECURRENCE}' is for the Transformer alone, 'normal' or a number for the other"
        )
    task = task_of(config, seed, device)
    trained = _train(config, task, seed, device)
    quantities = {
        **measures(trained.history),
        **baseline_errors(task, config.lag, config.coefficient),
        "targets_seen": targets_seen(task.windows, config.lag + 1),
        "token_norm": float(task.tokens.norm(dim=-1).max()),
    }
    if trained.recurrent is not None:
        found = trained.recurrent
        quantities["diverged"] = float(found.diverged)
        for name, phi in (("start", found.initial), ("final", found.final)):
            quantities[f"log_factor_{name}"] = float(mean_log_factor(phi, task.tokens[:64]).mean())
    return rows_of(NAME, config, seed, quantities)


def task_of(config: Config, seed: int, device: str = "cpu") -> Forecasting:
    """The series of a seed and lag, its windows and tokens; both models see the same."""
    return autoregressive_task(
        config.lag, config.samples, seed=seed, split=config.split,
        validation_fraction=config.validation_fraction, coefficient=config.coefficient,
        innovation_variance=config.innovation_variance, token_bound=config.token_bound or None,
        pairs=config.position_pairs, base_period=config.base_period, device=device,
    )  # fmt: skip


def _train(config: Config, task: Forecasting, seed: int, device: str) -> Trained:
    stream = generator(seed, NAME, config.model)
    if config.model == "transformer":
        return train_transformer(
            task, config.units, steps=config.steps, step_size=config.step_size, generator=stream,
            device=device,
        )  # fmt: skip
    start = paired_units(
        config.units, task.tokens.shape[-1], generator=stream, device=device,
        recurrent_init=_init(config.recurrent_init),
    )  # fmt: skip
    return train_recurrent(task, start, steps=config.steps, step_size=config.step_size)


def _init(text: str) -> str | float:
    """A number where the text is one; IndRNN refuses other words than "normal"."""
    try:
        return float(text)
    except ValueError:
        return text


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate | None:
    """What a band is about: a mean over seeds with its 95 % t-interval.

    None where the frame lacks one of the sides.
    """
    kind, *rest = quantity.split("_")
    error = _values(frame, "validation_minimum")
    if quantity == "short_lag" or kind == "long":
        lag = 4 if quantity == "short_lag" else int(rest[1])
        init = "normal" if rest[-1] == "normal" else CODE
        sides = _at(error, lag=lag), _at(error, lag=lag, model="recurrent", recurrent_init=init)
    elif quantity == "ball":
        lags = _at(error, token_bound=BALL).index.get_level_values("lag")
        sides = _at(error, token_bound=BALL), _lags(_at(error), lags)
    elif quantity == "leak":
        units = {"model": "recurrent", "recurrent_init": CODE}
        pairs = [(_at(error, **who), _at(error, split="random", **who)) for who in ({}, units)]
        time, dealt = (pd.concat(side, keys=("t", "r")) for side in zip(*pairs, strict=True))
        sides = _lags(time, dealt.index.get_level_values("lag")), dealt
    elif quantity == "gradient_growth":
        rows = _rows(frame)
        rows = rows[rows["quantity"] == "gradient_max"].assign(length=lambda x: x["lag"] + 1)
        return slope_estimate(rows, "gradient_max", "length") if len(rows) else None
    else:
        name = {"recurrent_rate": "gradient_mean", "saturation": "log_factor_start"}[quantity]
        values = _at(_values(frame, name), model="recurrent", recurrent_init=CODE)
        by_seed = values.groupby("seed")
        found = by_seed.mean() if quantity == "saturation" else by_seed.apply(_rate)
        return t_interval(found) if len(found) > 1 else None
    difference = (sides[0] - sides[1]).dropna().groupby("seed").mean()
    return t_interval(difference) if len(difference) > 1 else None


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its interval, beside the band.

    Quantities of which the frame lacks a side have no row: ``paper`` alone has no variants.
    """
    return band_table(BANDS, lambda quantity: estimate(frame, quantity))


_KEYS = ["lag", "model", "recurrent_init", "split", "token_bound", "seed"]
_USUAL = {
    "model": "transformer", "recurrent_init": NO_RECURRENCE, "split": "time", "token_bound": 0.0,
}  # fmt: skip


def _values(frame: pd.DataFrame, quantity: str) -> pd.Series:
    rows = frame[frame["quantity"] == quantity].drop_duplicates(_KEYS)
    return rows.set_index(_KEYS)["value"]


def _at(values: pd.Series, **where: object) -> pd.Series:
    """The values by lag and seed where the other keys are as usual, or as said."""
    table = values.reset_index()
    for key, value in (_USUAL | where).items():
        table = table[table[key] == value]
    return table.set_index(["lag", "seed"])["value"]


def _lags(values: pd.Series, lags: pd.Index) -> pd.Series:
    return values[values.index.get_level_values("lag").isin(lags)]


def _rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The Transformer's rows in the usual setting."""
    kept = np.logical_and.reduce([frame[key] == value for key, value in _USUAL.items()])
    return frame[kept].drop_duplicates([*_KEYS, "quantity"])


def _rate(values: pd.Series) -> float:
    """The least-squares slope of log y against T = L + 1."""
    lengths = values.index.get_level_values("lag").to_numpy(dtype=float) + 1
    return float(np.polyfit(lengths, np.log(values.to_numpy()), 1)[0])
