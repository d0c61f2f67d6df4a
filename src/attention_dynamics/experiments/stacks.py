r"""Stacks: one to four layers of the shallow Transformer, trained at several sequence lengths.

A student of L layers is trained on the multi-anchor teacher of one layer, with the same step size
and number of steps for every depth, length and start, and with one target for each sequence (the
last token asks) or one for each token. Recorded are the loss over the variance of the targets, how
far the layers and the tokens move, and the gradients of samples beside their bounds.

- At the *paired* start the layers below the read-out are the identity and have no gradient.
- At the *mixed* start only the read-out is paired: it reads tokens that random layers have moved.
- At the *unpaired* start no layer is, and every one has a gradient. The targets are shifted by the
  output at the start, so that this student begins with the error of the others.

``target_scale`` multiplies the targets, for the paired start: what depth adds is to be of second
order in it. All lengths and depths of a seed share teacher, student layers, last tokens and
sequence means. Setting: arXiv 2601.16514, which treats one layer; the stacks are ours. The bands
were fixed before any run with these seeds; of others, from 1000 on, only time and descent of the
loss had been looked at, to choose the sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd

from attention_dynamics.data import generator
from attention_dynamics.experiments._stacks_problem import (
    gradients,
    movement,
    output,
    stack_problem,
)
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    geometric_interval,
    loglog_slope,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.shallow_stack import Output
from attention_dynamics.models.stack_parameters import (
    Start,
    stack_initialisation,
)
from attention_dynamics.training.descent import DescentConfig
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.stack_descent import stack_descent

NAME = "stacks"
SCHEMA = 1
AGAINST = "length"
DEPTHS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Config:
    r"""Sizes of one cell; ``depth`` (L) and ``length`` (T) have no default.

    ``outputs`` is ``"last"`` or ``"each"``, ``start`` ``"paired"``, ``"mixed"`` or ``"unpaired"``;
    ``step_size`` is :math:`\eta`, the same for all; ``transport_norm`` and ``projection_radius``
    are :math:`\nu` and :math:`\rho`, the same for all blocks and layers.
    """

    depth: int
    length: int
    outputs: Output = "last"
    start: Start = "paired"
    target_scale: float = 1.0
    samples: int = 32
    heads: int = 32
    dimension: int = 8
    activation: str = "tanh"
    anchors: int = 16
    anchor_length: int = 16
    teacher_heads: int = 2048
    transport_norm: float = 3.0
    projection_radius: float = 3.0
    steps: int = 60
    step_size: float = 0.25


COLUMNS = columns_of(Config)
SCALE_LENGTH = 8


def _configs(
    base: Config,
    last: dict[int, tuple[int, ...]],
    each: dict[int, tuple[int, ...]],
    starts: tuple[int, ...],
    scales: tuple[float, ...],
) -> tuple[Config, ...]:
    """The lengths of every depth for both outputs; those of the other starts; the scales."""
    deepest = max(last)
    return (
        *(replace(base, depth=L, length=T) for L, lengths in last.items() for T in lengths),
        *(
            replace(base, depth=L, length=T, outputs="each")
            for L, lengths in each.items()
            for T in lengths
        ),
        *(replace(base, depth=deepest, length=T, start="mixed") for T in starts),
        *(replace(base, depth=L, length=T, start="unpaired") for L in (1, deepest) for T in starts),
        *(
            replace(base, depth=L, length=SCALE_LENGTH, target_scale=scale)
            for scale in scales
            for L in (1, 2)
            if scale != 1.0 or SCALE_LENGTH not in last.get(L, ())
        ),
    )


_SMOKE = Config(1, 4, samples=4, heads=4, dimension=3, anchors=4, teacher_heads=32, steps=6)
_BOOK = Config(1, 4, samples=16, heads=16, teacher_heads=512, steps=30)
_SCALES = (0.25, 0.5, 1.0)
_SHORT, _LONG = (4, 8, 16, 32), (4, 16, 64)
PROFILES = {
    "smoke": Profile(
        _configs(_SMOKE, {1: (4, 8), 4: (4, 8)}, {1: (4, 8), 4: (4, 8)}, (4, 8), (0.5, 1.0)),
        seeds=(100, 101, 102),
    ),
    "book": Profile(
        _configs(
            _BOOK, {1: _SHORT, 2: _SHORT, 4: _SHORT}, {1: _SHORT, 4: _SHORT}, (4, 32), _SCALES
        ),
        seeds=tuple(range(5)),
    ),
    "paper": Profile(
        _configs(
            Config(1, 4),
            {1: (*_LONG, 256), 2: (*_LONG, 256), 3: _LONG, 4: (*_LONG, 256)},
            dict.fromkeys(DEPTHS, _LONG),
            _LONG,
            _SCALES,
        ),
        seeds=tuple(range(5)),
    ),
}

_FREE = "the bounds of a stack hold no T; short sequences are easier, by at most a fifth"
_SAME = "near its start a stack is one layer, at every T"
_GRADIENT = "a gradient is bounded free of T"
_ORDER = "the kernels of the inner layers are of the order of Var(y), a few per cent"
BANDS = {
    **{f"trend_{out}_{L}": Band(None, 0.1, _FREE) for out in ("last", "each") for L in DEPTHS},
    **{
        f"extra_{out}_{L}": Band(-0.05, 0.05, _SAME)
        for out in ("last", "each")
        for L in DEPTHS[1:]
    },
    **{f"gradient_{out}_{L}": Band(None, 0.05, _GRADIENT) for out in ("last", "each")
       for L in DEPTHS},
    "trend_mixed": Band(None, 0.1, "a guess: the layers of the start are bounded free of T too"),
    "trend_unpaired": Band(None, 0.1, "a guess: the layers of the start are bounded free of T too"),
    "scale_readout": Band(0.95, 1.05, "the read-out follows the residuals"),
    "scale_inner": Band(1.9, 2.1, "residuals times the distance of the read-out"),
    "scale_loss": Band(1.7, 2.3, "the kernels of the inner layers are of second order"),
    "depth_last": Band(0.9, 1.1, _ORDER),
    "depth_each": Band(0.9, 1.1, _ORDER),
    "depth_unpaired": Band(None, 1.0, "a guess: three more kernels add to that of the read-out"),
}  # fmt: skip
r"""Log-log slopes in T are ``trend`` of the smallest relative loss, ``extra`` of its ratio to that
of one layer, ``gradient`` of the largest :math:`\|\nabla f_T\|` after training; by outputs and
depth, at the paired start, or at four layers for another start. Log-log slopes in the scale of the
targets, with two layers, are ``scale_readout`` and ``scale_inner`` of the distances that the layers
move, ``scale_loss`` of the relative change of the final loss by the second layer. ``depth`` is the
geometric mean over T of the loss of four layers over that of one."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one stack at one length; a pure function of its arguments.

    Raises ValueError if a field of the configuration is out of its range, FloatingPointError if
    the descent diverges.
    """
    tokens, targets = stack_problem(NAME, seed, config, device)
    start = stack_initialisation(
        config.depth, config.heads, config.dimension, generator=generator(seed, NAME, "student"),
        start=config.start, device=device,
    )  # fmt: skip
    offset = output(config, start, tokens)
    radii = Radii(*(config.projection_radius,) * 3)
    descent = DescentConfig(steps=config.steps, step_size=config.step_size, radii=radii)
    found = stack_descent(
        start, tokens, targets + offset, descent, outputs=config.outputs,
        activation=config.activation,
    )  # fmt: skip
    variance = float(targets.double().var(correction=0))
    averaged = output(config, found.averaged, tokens) - offset - targets
    quantities = {
        "target_variance": variance,
        "relative_start": float(targets.double().square().mean()) / variance,
        "relative_loss": found.best_loss / variance,
        "relative_loss_final": float(found.history["loss"].iloc[-1]) / variance,
        "relative_loss_averaged": float(averaged.double().square().mean()) / variance,
        **movement(config, found, tokens),
        **gradients(config, found, tokens),
    }
    return rows_of(NAME, config, seed, quantities)


def values(
    frame: pd.DataFrame,
    quantity: str,
    *,
    depth: int,
    outputs: Output = "last",
    start: Start = "paired",
    scale: float | None = 1.0,
) -> pd.DataFrame:
    """One quantity, a row a seed; columns are lengths, or scales if ``scale`` is None.

    Scales were varied at one length. Empty where the frame holds no such cell.
    """
    kept = (frame["quantity"] == quantity) & (frame["depth"] == depth)
    kept &= (frame["outputs"] == outputs) & (frame["start"] == start)
    if scale is not None:
        kept &= frame["target_scale"] == scale
        return frame[kept].pivot(index="seed", columns="length", values="value")
    kept &= frame["length"] == SCALE_LENGTH
    return frame[kept].pivot(index="seed", columns="target_scale", values="value")


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate | None:
    """What a band is about, over seeds with its 95 % interval; None where the frame lacks it."""
    kind, case, *rest = quantity.split("_")
    deepest = int(frame["depth"].max())
    if kind == "scale":
        return _in_scale(frame, case)
    if kind == "depth":
        outputs: Output = "each" if case == "each" else "last"
        start: Start = "unpaired" if case == "unpaired" else "paired"
        ratio = _ratio(frame, deepest, outputs, start)
        found = ratio.map(math.log).mean(axis=1).map(math.exp)
        return geometric_interval(found) if len(found) > 1 else None
    if case in ("mixed", "unpaired"):
        start = "mixed" if case == "mixed" else "unpaired"
        return _slope(values(frame, "relative_loss", depth=deepest, start=start))
    depth, outputs = int(rest[0]), "each" if case == "each" else "last"
    if kind == "extra":
        return _slope(_ratio(frame, depth, outputs, "paired"))
    name = {"trend": "relative_loss", "gradient": "gradient_end"}[kind]
    return _slope(values(frame, name, depth=depth, outputs=outputs))


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The estimate of each band's quantity with its interval, beside the band.

    Quantities of which the frame lacks a side have no row: only ``paper`` has three layers.
    """
    return band_table(BANDS, lambda quantity: estimate(frame, quantity))


def _ratio(frame: pd.DataFrame, depth: int, outputs: Output, start: Start) -> pd.DataFrame:
    """The smallest loss of a stack over that of one layer of the same start; a row a seed."""
    one, deep = (
        values(frame, "relative_loss", depth=L, outputs=outputs, start=start) for L in (1, depth)
    )
    return (deep / one).dropna(axis=1)


def _in_scale(frame: pd.DataFrame, case: str) -> Estimate | None:
    if case != "loss":
        return _slope(values(frame, f"moved_{case}", depth=2, scale=None))
    one, two = (values(frame, "relative_loss_final", depth=L, scale=None) for L in (1, 2))
    return _slope((two / one - 1).abs().dropna(axis=1))


def _slope(table: pd.DataFrame) -> Estimate | None:
    """The log-log slope of each row, its mean and t-interval; None below two columns or rows."""
    if min(table.shape) < 2:
        return None
    at = [float(column) for column in table.columns]
    return t_interval(table.apply(lambda row: loglog_slope(at, row), axis=1))
