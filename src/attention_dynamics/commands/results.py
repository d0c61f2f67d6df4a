r"""``show`` a finished sweep: estimates beside their bands, as a table and as a figure."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd

from attention_dynamics import experiments
from attention_dynamics.commands.sweeps import add_result, directory_of
from attention_dynamics.running import read_results


def add(commands: Any) -> None:
    """Declare ``show``."""
    show = commands.add_parser("show", help="estimates of a finished sweep against their bands")
    show.set_defaults(command=show_results)
    add_result(show)
    show.add_argument("--figure", type=Path, help="also draw them into this .svg or .png file")


def show_results(options: argparse.Namespace) -> int:
    """Print where a stored table comes from and what it says of each band."""
    experiment = experiments.get(options.experiment)
    if options.figure is not None and options.figure.suffix not in (".svg", ".png"):
        raise ValueError(f"figure: expected a name that ends in .svg or .png, got {options.figure}")
    frame, manifest = read_results(directory_of(options, options.profile or "smoke"), experiment)
    summary = experiment.summarise(frame)
    print(
        f"{manifest['experiment']}, profile {manifest['profile']}: {manifest['cells']} cells, "
        f"commit {manifest['commit'] or 'unknown'}, {', '.join(manifest['devices'])}, "
        f"finished {manifest['finished']}"
    )
    with pd.option_context("display.width", 200, "display.max_columns", None):
        print(summary.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    if options.figure is not None:
        from attention_dynamics.commands.figures import draw  # matplotlib: a second to load

        title = f"{manifest['experiment']}, profile {manifest['profile']}"
        print(f"figure: {draw(experiment, frame, summary, title, options.figure)}")
    return 0
