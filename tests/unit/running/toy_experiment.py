r"""An experiment of the right shape with nothing in it: what a sweep does, without the science."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pandas as pd

from attention_dynamics.running import rows_of

NAME = "toy"
SCHEMA = 1


@dataclass(frozen=True)
class Config:
    size: int
    power: float = -0.5
    delay: float = 0.0
    fails_at_seed: int = -1


COLUMNS = ("experiment", "size", "power", "delay", "fails_at_seed", "seed", "quantity", "value")
PROFILES = {
    "smoke": SimpleNamespace(configs=(Config(8), Config(16)), seeds=(0, 1, 2)),
    "slow": SimpleNamespace(
        configs=tuple(Config(size, delay=0.03) for size in (8, 16, 32)), seeds=tuple(range(5))
    ),
}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    time.sleep(config.delay * (1 + seed % 3))  # cells finish out of order in a pool
    if seed == config.fails_at_seed:
        raise ArithmeticError("this cell fails on purpose")
    value = (1 + seed / 7) * config.size**config.power
    return rows_of(NAME, config, seed, {"error": value, "process": float(os.getpid() > 0)})


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.groupby("quantity", as_index=False)["value"].mean()
