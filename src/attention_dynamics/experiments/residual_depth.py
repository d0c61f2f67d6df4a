r"""Depth: condition numbers at the start and losses after training, by depth and wiring.

Stacks of L = 1..4 residual layers, wired in the five ways of ``models.residual_depth``, are trained
by gradient descent on Gaussian data at the step :math:`0.5/\lambda_{\max}`, the top eigenvalue of
the tangent kernel at the start. Bands, seeds and sizes were fixed before any run at these
profiles: the order of the wirings is that of a pilot (8 seeds, 400 steps), and the growth of
:math:`\lambda_{\max}` is that of theory, by :math:`1 + (\frac{1+a}2)^2` or more a layer for plain
residuals and bounded for scaled ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    select,
    t_interval,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models import residual_depth
from attention_dynamics.models.residual import ResidualConfig
from attention_dynamics.models.residual_depth import WIRINGS, DepthParameters, Wiring
from attention_dynamics.theory.tangent_spectrum import depth_lambda_max

NAME = "residual_depth"
SCHEMA = 1
AGAINST = "layers"


@dataclass(frozen=True)
class Config:
    r"""One depth; ``fraction`` is :math:`\eta\lambda_{\max}`.

    ``together`` seeds are computed in one batch (0 to 19, 20 to 39, ...), which changes the time
    and the start of the power iteration, nothing else.
    """

    layers: int
    samples: int = 2
    length: int = 4
    dimension: int = 32
    key_dimension: int = 8
    hidden: int = 32
    steps: int = 400
    fraction: float = 0.5
    iterations: int = 60
    together: int = 20

    @property
    def layer(self) -> ResidualConfig:
        """Sizes and activation of one layer."""
        return ResidualConfig(self.dimension, self.key_dimension, self.hidden)


COLUMNS = columns_of(Config)
_DEPTHS = (1, 2, 3, 4)
_SMOKE = Config(1, length=3, dimension=8, key_dimension=4, hidden=8, steps=5, iterations=4,
                together=4)  # fmt: skip
_BOOK = Config(1, steps=100, iterations=20)
PROFILES = {
    "smoke": Profile(tuple(replace(_SMOKE, layers=L) for L in (1, 2)), seeds=(100, 101, 102)),
    "book": Profile(tuple(replace(_BOOK, layers=L) for L in _DEPTHS), seeds=tuple(range(20))),
    "paper": Profile(tuple(Config(L) for L in _DEPTHS), seeds=tuple(range(20))),
}

DEEP = ("rezero", "scaled", "rmsnorm", "plain", "none")
"""From best to worst, condition numbers and losses alike, at two layers and more."""
SINGLE = {"condition": DEEP, "loss": ("rezero", "scaled", "none", "rmsnorm", "plain")}
"""The same with one layer, where the pilot has another order of the losses."""
LAYER_GROWTH = math.log10(1 + 0.75**2)
r""":math:`\log_{10}(1 + (\frac{1+a}2)^2)` at a = 1/2, what theory says a plain layer adds."""


def _pairs(what: str, order: tuple[str, ...], where: str) -> dict[str, Band]:
    source = f"order of the pilot, {where}"
    return {
        f"{what}_{worse}_over_{better}_{'single' if where == 'L = 1' else 'deep'}": Band(
            0.0, None, source
        )
        for better, worse in pairwise(order)
    }


BANDS = {
    **_pairs("condition", DEEP, "L = 2, 3, 4"),
    **_pairs("loss", DEEP, "L = 2, 3, 4"),
    **_pairs("condition", SINGLE["condition"], "L = 1"),
    **_pairs("loss", SINGLE["loss"], "L = 1"),
    "lambda_plain_by_layers": Band(LAYER_GROWTH, None, "a plain layer adds a fixed share"),
    "lambda_scaled_by_layers": Band(None, LAYER_GROWTH, "scaled branches stay bounded"),
}
r"""Means over seeds of :math:`\log_{10}` ratios, worse over better, at the depth where the lower
end of the interval is lowest; and slopes of :math:`\log_{10}\lambda_{\max}` against L."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value), for each wiring: ``condition`` of :math:`Z^{(L)}` at the start,
    capped at 1/epsilon of float64; ``lambda``, the largest eigenvalue of the tangent kernel;
    ``growth`` of :math:`\|X^{(L)}\|_F^2`; ``loss``, :math:`L_{\mathrm{steps}}/L_0`, 1e6 where it
    ``diverged``.
    """
    group, place = divmod(seed, config.together)
    measured = _group(config, group, device)
    return rows_of(NAME, config, seed, {name: float(x[place]) for name, x in measured.items()})


@lru_cache(maxsize=64)
def _group(config: Config, group: int, device: str) -> dict[str, Tensor]:
    """All quantities of all wirings, for the seeds of one group: one batch, wirings outermost."""
    seeds = range(group * config.together, (group + 1) * config.together)
    layer, L = config.layer, config.layers
    wirings = [residual_depth.wiring(name, L) for name in WIRINGS]
    drawn = [
        residual_depth.init_depth(layer, wired, L, generator(seed, NAME, "weights", L))
        for wired in wirings
        for seed in seeds
    ]
    parameters = DepthParameters(
        *(torch.stack(blocks).to(device) for blocks in zip(*drawn, strict=True))
    )
    stacked = residual_depth.stack_wirings(wirings)
    wired = Wiring(
        *(torch.as_tensor(entry).repeat_interleave(len(seeds)).to(device) for entry in stacked)
    )
    tokens, targets = (
        torch.stack([_gaussian(config, seed, role) for seed in seeds])
        .repeat(len(WIRINGS), 1, 1, 1)
        .to(device)
        for role in ("tokens", "targets")
    )
    start = residual_depth.forward(parameters, tokens, layer, wired)
    condition = _condition(start.Z[:, -1].flatten(-3, -2))
    growth = residual_depth.growth(start, tokens)[:, -1]
    top = depth_lambda_max(
        parameters, tokens, layer, wired,
        generator=generator(group, NAME, "power iteration", L), iterations=config.iterations,
    )  # fmt: skip
    relative = _descend(parameters, tokens, targets, layer, wired, config.fraction / top,
                        config.steps)  # fmt: skip
    measured = {"condition": condition, "lambda": top, "growth": growth, "loss": relative,
                "diverged": (relative >= _CAP).double()}  # fmt: skip
    return {
        f"{what}_{name}": values.reshape(len(WIRINGS), -1)[i].cpu()
        for what, values in measured.items()
        for i, name in enumerate(WIRINGS)
    }


_CAP = 1e6


def _descend(parameters: DepthParameters, tokens: Tensor, targets: Tensor, layer: ResidualConfig,
             wired: Wiring, step_size: Tensor, steps: int) -> Tensor:  # fmt: skip
    """L_steps / L_0, capped; an entry above the cap stays where it was."""
    initial = residual_depth.loss(parameters, tokens, targets, layer, wired)
    frozen = torch.zeros_like(initial, dtype=torch.bool)
    for _ in range(steps):
        value, gradient = residual_depth.loss_and_gradients(
            parameters, tokens, targets, layer, wired, validate=False
        )
        frozen = frozen | ~(value <= _CAP * initial)
        eta = torch.where(frozen, 0.0, step_size)
        blocks = []
        for block, slope in zip(parameters, gradient, strict=True):
            shape = (-1, *[1] * (block.ndim - 1))
            moved = block - eta.reshape(shape) * slope
            blocks.append(torch.where(frozen.reshape(shape), block, moved))
        parameters = DepthParameters(*blocks)
    last = residual_depth.loss(parameters, tokens, targets, layer, wired, validate=False)
    ratio = last / initial
    return torch.where(frozen | ~(ratio <= _CAP), _CAP, ratio)


def _gaussian(config: Config, seed: int, role: str) -> Tensor:
    shape = (config.samples, config.length, config.dimension)
    stream = generator(seed, NAME, role, config.layers)
    return torch.randn(shape, generator=stream, dtype=torch.float64)


def _condition(Z: Tensor) -> Tensor:
    values = torch.linalg.svdvals(Z)
    largest = values[..., 0]
    return largest / values[..., -1].clamp_min(torch.finfo(Z.dtype).eps * largest)


def log_ratio(frame: pd.DataFrame, what: str, worse: str, better: str, layers: int) -> Estimate:
    r""":math:`\log_{10}` of worse over better at one depth: mean and 95 % interval over seeds."""
    rows = frame[frame[AGAINST] == layers]
    over, under = (
        select(rows, f"{what}_{name}").set_index("seed")["value"] for name in (worse, better)
    )
    return t_interval(np.log10(over / under))


def slope_per_layer(frame: pd.DataFrame, quantity: str) -> Estimate:
    r"""The least-squares slope of :math:`\log_{10}` of a quantity against L, over seeds."""
    table = select(frame, quantity).pivot(index="seed", columns=AGAINST, values="value")
    L = table.columns.to_numpy(dtype=float)
    centred = L - L.mean()
    return t_interval(np.log10(table.to_numpy()) @ centred / (centred @ centred))


def estimate(frame: pd.DataFrame, name: str) -> Estimate:
    """The number that a band speaks of: the worst depth of a pair, or a slope."""
    if name.endswith("_by_layers"):
        return slope_per_layer(frame, name.removesuffix("_by_layers"))
    pair, where = name.rsplit("_", 1)
    what, worse, _, better = pair.split("_")
    depths = [L for L in sorted(frame[AGAINST].unique()) if bool(L == 1) is (where == "single")]
    found = [log_ratio(frame, what, worse, better, L) for L in depths]
    return min(found, key=lambda one: one.lower)


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Each estimate with its 95 % interval over seeds, beside its band."""
    return band_table(BANDS, lambda quantity: estimate(frame, quantity))
