r"""An experiment whose cells kill the process that computes them, as a lack of memory does."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from attention_dynamics.running import rows_of

NAME = "lethal"
SCHEMA = 1


@dataclass(frozen=True)
class Config:
    folder: str
    deaths: int = 1
    lethal_seed: int = 1
    delay: float = 0.0


COLUMNS = ("experiment", "folder", "deaths", "lethal_seed", "delay", "seed", "quantity", "value")
PROFILES = {"smoke": SimpleNamespace(configs=(Config(""),), seeds=(0, 1))}


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    """One number; the lethal seed dies ``deaths`` times before it gives one."""
    time.sleep(config.delay)
    if seed == config.lethal_seed:
        died = len(list(Path(config.folder).glob("death.*")))
        if died < config.deaths:
            Path(config.folder, f"death.{died}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return rows_of(NAME, config, seed, {"value": seed / 7})


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    return frame
