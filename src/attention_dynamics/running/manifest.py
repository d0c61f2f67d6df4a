r"""The manifest of a sweep: commit, configurations, seeds, versions, device, duration."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from attention_dynamics.experiments.shape import Cell, config_dictionary
from attention_dynamics.running.device import WORKSPACE

MANIFEST_NAME = "manifest.json"
_PACKAGES = ("attention-dynamics", "torch", "numpy", "scipy", "pandas", "pyarrow")


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest as a dictionary. Raises FileNotFoundError that says what to run."""
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no manifest at {path}: the sweep has not finished; run it (again), "
            "finished cells are kept"
        ) from None


def describe(
    cells: Sequence[Cell], profile: str, facts: Sequence[dict[str, Any]], wall_seconds: float
) -> dict[str, Any]:
    """Everything needed to run the same sweep again, and what it cost.

    ``facts`` are the device, threads, TF32 setting and seconds recorded with each cell by the
    process that computed it, perhaps on another day and machine: ``cell_seconds`` is their sum,
    ``wall_seconds`` the length of the last call only.
    """
    configs = list(dict.fromkeys(cell.config for cell in cells))
    return {
        "experiment": cells[0].experiment,
        "schema": cells[0].schema,
        "profile": profile,
        "configs": [config_dictionary(config) for config in configs],
        "seeds": list(dict.fromkeys(cell.seed for cell in cells)),
        "cells": len(cells),
        "commit": _commit(),
        "commits_of_cells": _distinct(facts, "commit"),
        "versions": {"python": platform.python_version(), **_versions()},
        "platform": platform.platform(),
        "devices": _distinct(facts, "device"),
        "threads": _distinct(facts, "threads"),
        "tf32": _distinct(facts, "tf32"),
        "cublas_workspace": _distinct(facts, "cublas_workspace"),
        "cell_seconds": round(sum(fact["seconds"] for fact in facts), 3),
        "wall_seconds": round(wall_seconds, 3),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cell_facts(device: str, seconds: float) -> dict[str, Any]:
    """What the process that computes a cell knows about itself.

    Threads and TF32 are settings of torch that change last digits, and so is the workspace of
    cuBLAS; they are read where the experiment has loaded torch, which this subpackage does not
    import for itself.
    """
    torch = sys.modules.get("torch")
    return {
        "commit": _commit(),
        "device": _device_name(torch, device),
        "threads": None if torch is None else torch.get_num_threads(),
        "tf32": None if torch is None else _tf32(torch),
        "cublas_workspace": os.environ.get(WORKSPACE) if device.startswith("cuda") else None,
        "seconds": round(seconds, 4),
    }


def _tf32(torch: ModuleType) -> bool:
    """Whether matrix products may be rounded to TF32, by either of torch's two interfaces."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the newer one was used, and the older one refuses to answer
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _device_name(torch: ModuleType | None, device: str) -> str:
    if torch is not None and device.startswith("cuda"):
        return f"{device}: {torch.cuda.get_device_name(device)}"
    return device


def _distinct(facts: Sequence[dict[str, Any]], name: str) -> list[Any]:
    return sorted({fact.get(name) for fact in facts}, key=str)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


_COMMIT: list[str | None] = []


def _commit() -> str | None:
    """The commit of the source this package runs from, marked ``+changes``; None outside git."""
    if not _COMMIT:
        _COMMIT.append(_ask_git())
    return _COMMIT[0]


def _ask_git() -> str | None:
    source = Path(__file__).resolve().parent
    try:
        head, changes = (
            subprocess.run(
                ["git", "--no-optional-locks", "-C", str(source), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()
            for arguments in (
                ("rev-parse", "HEAD"),
                ("status", "--porcelain", "--untracked-files=no", "--", str(source.parent)),
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+changes" if changes else "")
