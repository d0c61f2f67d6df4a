r"""The one shape of an experiment, and the cell (configuration, seed) a sweep is made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import pandas as pd


class ProfileShape(Protocol):
    """What a sweep needs of a profile: its configurations and its seeds."""

    @property
    def configs(self) -> Sequence[Any]: ...

    @property
    def seeds(self) -> Sequence[int]: ...


@runtime_checkable
class Experiment(Protocol):
    r"""``run(config, seed, device) -> rows`` and what surrounds it.

    A module of ``attention_dynamics.experiments`` has this shape; so may any object.

    Attributes
    ----------
    NAME, SCHEMA
        The name and the version of the meaning of the rows. Both enter the hash of a cell: raise
        ``SCHEMA`` when a change of the code changes what a row says, and no old cell is reused.
    COLUMNS
        The columns every cell has, in order. A stored cell with other columns is refused.
    PROFILES
        Named profiles (``smoke``, ``book``, ``paper``), each with ``configs`` and ``seeds``.

    """

    NAME: str
    SCHEMA: int
    COLUMNS: tuple[str, ...]
    PROFILES: Mapping[str, ProfileShape]

    def run(self, config: Any, seed: int, device: str = "cpu") -> pd.DataFrame:
        """Compute one cell; a pure function of its arguments."""
        ...

    def summarise(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Turn the rows of a sweep into estimates with intervals."""
        ...


@dataclass(frozen=True)
class Cell:
    r"""One (configuration, seed) of an experiment, the unit that is computed and stored.

    Two cells are the same exactly when experiment, schema, configuration and seed agree; the
    :attr:`key` is the SHA-256 of these four in canonical JSON.
    """

    experiment: str
    schema: int
    config: Any
    seed: int

    @property
    def identity(self) -> str:
        """Canonical JSON, sorted keys, no spaces, no NaN; equal text means equal cell."""
        return json.dumps(
            {
                "config": config_dictionary(self.config),
                "experiment": self.experiment,
                "schema": self.schema,
                "seed": self.seed,
            },
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )

    @property
    def key(self) -> str:
        """The first 32 hexadecimal digits of SHA-256 of :attr:`identity`."""
        return hashlib.sha256(self.identity.encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.experiment}: {self.config!r}, seed {self.seed}"


def config_dictionary(config: Any) -> dict[str, Any]:
    """The fields of a frozen configuration as plain values, in the order of their definition."""
    if not is_dataclass(config) or isinstance(config, type):
        raise TypeError(
            f"config must be an instance of a frozen dataclass, got {config!r}; "
            "define a Config with @dataclass(frozen=True)"
        )
    return asdict(config)


def cells_of(
    experiment: Experiment, configs: Iterable[Any], seeds: Iterable[int]
) -> tuple[Cell, ...]:
    """All (configuration, seed) pairs, configurations outermost: the order of every table."""
    seeds = tuple(int(seed) for seed in seeds)
    cells = tuple(
        Cell(experiment.NAME, experiment.SCHEMA, config, seed)
        for config in configs
        for seed in seeds
    )
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError("configs or seeds hold a duplicate; every (config, seed) may occur once")
    return cells


def rows_of(name: str, config: Any, seed: int, quantities: Mapping[str, float]) -> pd.DataFrame:
    r"""Tidy rows: experiment, every field of the configuration, seed, quantity, value.

    Raises ValueError if a quantity is not finite, naming it; a NaN never enters a table.
    """
    for quantity, value in quantities.items():
        if not abs(value) < float("inf"):
            raise ValueError(f"quantity {quantity!r} is {value} for {config!r}, seed {seed}")
    columns = {
        "experiment": name,
        **config_dictionary(config),
        "seed": int(seed),
        "quantity": list(quantities),
        "value": [float(value) for value in quantities.values()],
    }
    # All at once: a frame that grows column by column costs more than a small cell.
    return pd.DataFrame(columns, index=pd.RangeIndex(len(quantities)))


def columns_of(config_type: type) -> tuple[str, ...]:
    """The columns that :func:`rows_of` gives for configurations of one type."""
    names = tuple(field.name for field in fields(config_type))
    return ("experiment", *names, "seed", "quantity", "value")
