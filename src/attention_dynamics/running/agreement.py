r"""Do table, manifest and source belong together? Every cell is there, and none that is not listed.

.. math:: \{\text{cells of the table}\} = \text{configs} \times \text{seeds of the manifest}
    = \text{those of the named profile in the source.}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from attention_dynamics.experiments.shape import Experiment, config_dictionary

CUSTOM = "custom"  # the profile of a sweep whose cells are those of no profile of the source


class ForeignResults(ValueError):
    """A file in the store belongs to another experiment, or has other columns; nothing is mixed."""


def profile_name(
    experiment: Experiment, profile: str | None, configs: Iterable[Any], seeds: Iterable[int]
) -> str:
    """``profile`` if these are its configurations and seeds, else "custom"."""
    if profile is None:
        return CUSTOM
    chosen = experiment.PROFILES[profile]
    same = tuple(configs) == tuple(chosen.configs) and tuple(seeds) == tuple(chosen.seeds)
    return profile if same else CUSTOM


def require_cells(frame: pd.DataFrame, manifest: Mapping[str, Any], where: str) -> None:
    """Check that a table holds exactly configs x seeds of its manifest. Raises ForeignResults."""
    if not manifest.get("configs") or not manifest.get("seeds"):
        raise ForeignResults(f"{where}: the manifest lists no configs and seeds; run it again")
    if set(frame["experiment"]) - {manifest["experiment"]}:
        raise ForeignResults(
            f"{where}: the table holds rows of {sorted(set(frame['experiment']))}, the manifest is "
            f"of {manifest['experiment']!r}"
        )
    fields = [name for name in manifest["configs"][0] if name in frame.columns]
    listed = {
        _identity({name: config[name] for name in fields}, seed)
        for config in manifest["configs"]
        for seed in manifest["seeds"]
    }
    rows = frame[[*fields, "seed"]].drop_duplicates()
    present = {
        _identity(dict(zip(fields, values, strict=True)), seed)
        for *values, seed in rows.itertuples(index=False, name=None)
    }
    _require_equal(
        present, listed, f"{where}: the table does not hold the cells its manifest lists",
        "of the table are not in the manifest", "of the manifest are not in the table",
        "run the sweep again: it computes what is missing",
    )  # fmt: skip


def require_source(
    frame: pd.DataFrame, manifest: Mapping[str, Any], experiment: Experiment, where: str
) -> None:
    """Check a stored table against the experiment's source. Raises ForeignResults."""
    for what, found, own in (
        ("experiment", manifest.get("experiment"), experiment.NAME),
        ("schema", manifest.get("schema"), experiment.SCHEMA),
        ("columns", tuple(frame.columns), tuple(experiment.COLUMNS)),
    ):
        if found != own:
            raise ForeignResults(
                f"{where}: {what} of the stored results is {found!r}, of the source {own!r}; "
                "run the sweep again with this source"
            )
    name = manifest["profile"]
    if name == CUSTOM:
        return
    if name not in experiment.PROFILES:
        raise ForeignResults(
            f"{where}: the manifest states profile {name!r}, which the source does not have; it "
            f"has {', '.join(experiment.PROFILES)}"
        )
    profile = experiment.PROFILES[name]
    drifted = f"{where}: profile {name!r} of the source has drifted from the manifest"
    remedy = f"run attention-dynamics run {experiment.NAME} --profile {name} again"
    _require_equal(
        {_identity(config) for config in manifest["configs"]},
        {_identity(config_dictionary(config)) for config in profile.configs},
        drifted, "configurations are in the manifest only",
        "configurations are in the source only", remedy,
    )  # fmt: skip
    _require_equal(
        {str(seed) for seed in manifest["seeds"]}, {str(seed) for seed in profile.seeds},
        drifted, "seeds are in the manifest only", "seeds are in the source only", remedy,
    )  # fmt: skip


def select_cell(frame: pd.DataFrame, config: Mapping[str, Any], seed: int) -> pd.DataFrame:
    """The rows of one cell, in their order."""
    chosen = frame["seed"] == seed
    for name, value in config.items():
        if name in frame.columns:
            chosen &= frame[name].isna() if value is None else frame[name] == value
    return frame[chosen].reset_index(drop=True)


def _require_equal(
    left: set[str], right: set[str], what: str, only_left: str, only_right: str, remedy: str
) -> None:
    parts = [
        f"{len(extra)} {text} (first: {min(extra)})"
        for extra, text in ((left - right, only_left), (right - left, only_right))
        if extra
    ]
    if parts:
        raise ForeignResults(f"{what}: {', '.join(parts)}; {remedy}")


def _identity(config: Mapping[str, Any], seed: int | None = None) -> str:
    """Canonical text of a configuration (and a seed), equal however its numbers were stored."""
    values = {name: _plain(value) for name, value in config.items()}
    return json.dumps(values if seed is None else values | {"seed": _plain(seed)}, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool) or value is None:
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "item"):
        return _plain(value.item())
    return None if value != value else float(value)  # a missing number is read back as NaN
