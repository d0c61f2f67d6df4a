r"""How wide the encoder must be for descent to reach a threshold, against the number of samples.

The encoder-only neighbour (``models.wu_encoder``, logit exponent 1/2) learns the common task. A
cell tries the ``widths`` from the smallest on and reports the first at which descent brings
:math:`L_k/L_0` to ``threshold`` within ``steps``, or twice the last one. Two places: d = 4, below
most n, and d = n.

A width quadratic in n is said to suffice, which at d = n suggests an exponent of at most 2. It
proves none, since no theorem speaks of this step size and number of steps. Below d = n nothing is
promised, but fewer dimensions take more neurons. Bands were fixed before any run at the profile
``book``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from attention_dynamics.experiments import common_task
from attention_dynamics.experiments.common_models import reaches
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    slope_estimate,
    slope_table,
)
from attention_dynamics.experiments.shape import columns_of, rows_of

NAME = "encoder_width"
SCHEMA = 1


@dataclass(frozen=True)
class Config:
    """``dimension`` 0 means d = n."""

    samples: int
    dimension: int
    largest: int = 256
    steps: int = 300
    threshold: float = 0.01

    @property
    def widths(self) -> tuple[int, ...]:
        """1, 2, 4, ..., ``largest``."""
        return tuple(2**j for j in range(self.largest.bit_length()))


COLUMNS = columns_of(Config)
PROFILES = {
    "smoke": Profile(
        tuple(Config(n, d, largest=4, steps=10) for d in (4, 0) for n in (4, 8)), seeds=(100, 101)
    ),
    "book": Profile(
        tuple(Config(n, d) for d in (4, 0) for n in (4, 8, 16, 32)), seeds=tuple(range(8))
    ),
    "paper": Profile(
        tuple(Config(n, d, largest=2048, steps=3000) for d in (4, 0) for n in (4, 8, 16, 32, 64)),
        seeds=tuple(range(20)),
    ),
}
BANDS = {
    "width_narrow": Band(0.0, None, "d = 4: more samples need more neurons; sign only"),
    "width_wide": Band(None, 2.0, "d = n: a width quadratic in n is said to suffice"),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """One row, the smallest width of the grid that reaches the threshold."""
    d = config.dimension or config.samples
    enough = 2 * config.largest
    for width in config.widths:
        cell = common_task.Config(
            "encoder", d, samples=config.samples, width=width, steps=config.steps
        )
        if reaches(cell, seed, config.threshold, device):
            enough = width
            break
    return rows_of(NAME, config, seed, {"width": float(enough)})


def estimate(frame: pd.DataFrame, quantity: str) -> Estimate:
    """The slope of the width against n, at d = 4 (``width_narrow``) or d = n (``width_wide``)."""
    narrow = {"width_narrow": True, "width_wide": False}[quantity]
    rows = frame[(frame["dimension"] > 0) == narrow]
    return slope_estimate(rows, "width", "samples")


def summarise(frame: pd.DataFrame, bands: Mapping[str, Band] = BANDS) -> pd.DataFrame:
    """Log-log slopes against n, mean and 95 % t-interval over seeds, and their bands."""
    return slope_table(bands, lambda quantity: estimate(frame, quantity))
