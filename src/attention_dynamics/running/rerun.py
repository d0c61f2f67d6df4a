r"""Cells computed again with the same seeds, and compared with what is stored.

Each number agrees within a float32 tolerance,

.. math:: |x - x'| \le 10^{-3} \max(|x|, |x'|) + 10^{-5} \max |x_{\text{table}}|,

the maximum over all rows of its quantity: rounding of 1e-7 is amplified by the steps of a descent.
Where one does not, the 95 % t-intervals of its quantity over the recomputed rows of its
configuration have to overlap: on another kind of device (CPU or CUDA) trajectories may part, and an
unstable descent amplifies any rounding until single runs do. A number of which there is one row
alone has no interval, and disagrees.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from attention_dynamics.experiments.shape import Cell, Experiment, cells_of, config_dictionary
from attention_dynamics.running.agreement import select_cell

RELATIVE, ABSOLUTE = 1e-3, 1e-5


@dataclass(frozen=True)
class Rerun:
    """How many cells and numbers were compared, how far they are apart, and what disagrees.

    ``equal`` numbers are the same bit for bit, ``beyond`` so many lie outside the tolerance,
    ``largest`` is the largest relative difference. ``same_device`` is False for another kind of
    device than that of the stored cells. ``problems`` are quantities whose intervals are apart.
    """

    cells: int
    numbers: int
    equal: int
    beyond: int
    largest: float
    same_device: bool
    problems: tuple[str, ...]


def rerun(
    experiment: Experiment,
    frame: pd.DataFrame,
    manifest: Mapping[str, Any],
    *,
    cells: int,
    seed: int = 0,
    device: str = "cpu",
) -> Rerun:
    """Compute ``cells`` randomly drawn cells again and compare them with the stored ``frame``.

    ``seed`` fixes the draw; on another kind of device the cells share one configuration, so that
    there are seeds to take an interval over. Raises ValueError for fewer than one cell.
    """
    if cells < 1:
        raise ValueError(f"cells must be at least 1, got {cells}")
    kinds = {str(used).partition(":")[0] for used in manifest["devices"]}
    same = kinds == {device.partition(":")[0]}
    drawn = _drawn(experiment, manifest, cells, seed, spread=same)
    problems, parts = [], []
    for cell in drawn:
        new = experiment.run(cell.config, cell.seed, device)
        old = select_cell(frame, config_dictionary(cell.config), cell.seed)
        if list(old["quantity"]) != list(new["quantity"]):
            problems.append(f"{cell}: other quantities than stored: {sorted(set(new['quantity']))}")
            continue
        values = {"old": old["value"].to_numpy(float), "new": new["value"].to_numpy(float)}
        parts.append(pd.DataFrame({"cell": str(cell), "config": repr(cell.config)} | values))
        parts[-1]["quantity"] = old["quantity"]
    if not parts:
        return Rerun(len(drawn), 0, 0, 0, 0.0, same, tuple(problems))
    table = pd.concat(parts, ignore_index=True)
    scale = frame["value"].abs().groupby(frame["quantity"]).max()
    apart = (table["old"] - table["new"]).abs()
    size = table[["old", "new"]].abs().max(axis=1)
    beyond = apart > RELATIVE * size + ABSOLUTE * table["quantity"].map(scale)
    for (config, quantity), _ in table[beyond].groupby(["config", "quantity"], sort=False):
        rows = table[(table["config"] == config) & (table["quantity"] == quantity)]
        problems += _disjoint(rows, quantity)
    return Rerun(
        len(drawn), len(table), int((apart == 0).sum()), int(beyond.sum()),
        float((apart / size.where(size > 0, 1.0)).max()), same, tuple(problems),
    )  # fmt: skip


def _drawn(
    experiment: Experiment, manifest: Mapping[str, Any], count: int, seed: int, *, spread: bool
) -> list[Cell]:
    """Cells from anywhere in the sweep (``spread``), or seeds of one configuration."""
    draw = random.Random(f"{seed} {manifest['experiment']} {manifest['profile']}")
    configs, seeds = _configurations(experiment, manifest), list(manifest["seeds"])
    if not spread:
        chosen = draw.sample(seeds, min(max(count, 2), len(seeds)))
        return list(cells_of(experiment, [draw.choice(configs)], chosen))
    everything = cells_of(experiment, configs, seeds)
    return draw.sample(everything, min(count, len(everything)))


def _configurations(experiment: Experiment, manifest: Mapping[str, Any]) -> list[Any]:
    profile = experiment.PROFILES.get(manifest["profile"])
    if profile is not None:
        return list(profile.configs)
    kind = type(next(iter(experiment.PROFILES.values())).configs[0])
    return [
        kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items()})
        for config in manifest["configs"]
    ]


def _disjoint(rows: pd.DataFrame, quantity: str) -> list[str]:
    """In words, that the intervals of stored and new rows do not overlap."""
    from attention_dynamics.experiments.estimates import t_interval  # scipy: a second to load

    first = rows.iloc[0]
    if len(rows) < 2:
        return [f"{first['cell']}: {quantity} is {first['new']:.6g}, stored {first['old']:.6g}"]
    old, new = t_interval(rows["old"]), t_interval(rows["new"])
    if old.lower <= new.upper and new.lower <= old.upper:
        return []
    return [f"{first['cell']} and others: {quantity} is {new}, stored {old}"]
