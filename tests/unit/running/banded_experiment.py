r"""An experiment with bands, one of them missed, on numbers that are known exactly."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from attention_dynamics.experiments.estimates import Band, Profile, band_table, select, t_interval
from attention_dynamics.experiments.shape import columns_of, rows_of

NAME = "banded"
SCHEMA = 2


@dataclass(frozen=True)
class Config:
    size: int
    rate: float | None = None
    law: str = "iid"
    wide: bool = False


COLUMNS = columns_of(Config)
PROFILES = {
    "smoke": Profile((Config(8), Config(16, 0.5)), seeds=(0, 1, 2)),
    "book": Profile((Config(8), Config(16, 0.5), Config(32, wide=True)), seeds=tuple(range(4))),
}
BANDS = {"near": Band(0.9, 1.1, "theory"), "far": Band(None, 0.0, "a guess")}
DRIFT = {"cpu": 0.0, "cuda": 1e-4}  # what another device would make of a number


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """Two numbers near 1, the same for the same cell."""
    noise = np.random.default_rng(1000 * config.size + seed).normal(scale=0.01) + DRIFT[device]
    return rows_of(NAME, config, seed, {"near": 1 + noise, "far": 1 - noise})


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """Means over all rows beside their bands."""
    return band_table(BANDS, lambda quantity: t_interval(select(frame, quantity)["value"]))
