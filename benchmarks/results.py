r"""Where a run is kept: the table, the curves, and a manifest that says where they come from."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from attention_dynamics.models.engines import native, selection
from benchmarks.groups import GROUPS, TUNED_MALLOC
from benchmarks.machine import processor
from benchmarks.table import POINT_COLUMNS, ROW_COLUMNS, Point, Row, Settings

TABLE, CURVES, MANIFEST = "table.csv", "curves.csv", "manifest.json"
PACKAGES = ("attention-dynamics", "torch", "triton", "numpy", "scipy", "pandas")
SEED = 0  # of every stream of inputs, of the bootstrap and of nothing else


def describe(facts: Sequence[dict[str, Any]], *, quick: bool, threads: int) -> dict[str, Any]:
    """Everything one needs to run the same benchmarks again.

    ``groups`` has commit, date, duration and load of each group: one may be measured again alone.
    """
    return {
        "command": "python -m benchmarks" + (" --quick" if quick else ""),
        "profile": "quick" if quick else "full",
        "groups": list(facts),
        "seeds": [SEED],
        "pace": vars(Settings(quick).pace),
        "tuned_malloc": TUNED_MALLOC,
        "processor": processor(),
        "instruction_set": native.instruction_set(),
        "compiler": native.compiler(),
        "cores": os.cpu_count(),
        "threads": threads,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "engines": selection.available(),
        "platform": platform.platform(),
        "versions": {"python": platform.python_version(), **_versions()},
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def store(
    folder: Path, entries: Sequence[Row | Point | dict[str, Any]], *, quick: bool, threads: int
) -> None:
    """Write the run; what the folder holds of groups that were not run again stays."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [entry.record() for entry in entries if isinstance(entry, Row)]
    points = [vars(entry) for entry in entries if isinstance(entry, Point)]
    facts = [entry for entry in entries if isinstance(entry, dict)]
    ran = {entry["group"] for entry in [*rows, *facts]}
    old = read_manifest(folder)
    same = old.get("profile") == ("quick" if quick else "full")
    kept = [fact for fact in old.get("groups", []) if same and fact["group"] not in ran]
    for name, fresh, columns in ((TABLE, rows, ROW_COLUMNS), (CURVES, points, POINT_COLUMNS)):
        frame = pd.DataFrame(fresh, columns=columns)
        path, keep = folder / name, {fact["group"] for fact in kept}
        if keep and path.is_file():
            earlier = pd.read_csv(path)
            earlier = earlier[earlier["group"].isin(keep)]
            frame = pd.concat([part for part in (earlier, frame) if len(part)] or [frame])
        place = {group: position for position, group in enumerate(GROUPS)}
        frame = frame.sort_values("group", key=lambda groups: groups.map(place), kind="stable")
        frame.to_csv(path, index=False, float_format="%.6g")
    manifest = describe([*kept, *facts], quick=quick, threads=threads)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of an earlier run, empty where there is none."""
    path = folder / MANIFEST
    return json.loads(path.read_text("utf8")) if path.is_file() else {}


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found
