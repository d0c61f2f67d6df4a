r"""``attention-dynamics list | run | show``: the sweeps of the book from a shell."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from attention_dynamics import experiments
from attention_dynamics.experiments.estimates import geometric_means
from attention_dynamics.running import process_pool, read_results, sweep


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns 0, or 2 after a message for a request that cannot be met."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except (ValueError, OSError) as error:
        print(f"attention-dynamics: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; finished cells are kept, the same command resumes", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attention-dynamics", description="Run and show the experiments of the book."
    )
    commands = parser.add_subparsers(required=True)
    listing = commands.add_parser("list", help="the experiments and their profiles")
    listing.set_defaults(command=_list)

    run = commands.add_parser("run", help="run a sweep, or finish one that was interrupted")
    run.set_defaults(command=_run)
    run.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")
    run.add_argument(
        "--workers", type=int, default=1, help="processes with one thread each (default 1)"
    )
    run.add_argument("--seeds", type=int, nargs="+", help="seeds in place of those of the profile")

    show = commands.add_parser("show", help="estimates of a finished sweep against their bands")
    show.set_defaults(command=_show)
    show.add_argument("--figure", type=Path, help="also draw the quantities into this SVG file")
    for command in (run, show):
        command.add_argument("experiment", help="a name from the list")
        command.add_argument("--profile", default="smoke", help="smoke (default), book or paper")
        command.add_argument(
            "--directory",
            type=Path,
            help="where the sweep is kept (default results/<experiment>/<profile>)",
        )
    return parser


def _list(options: argparse.Namespace) -> None:
    for name in experiments.names():
        experiment = experiments.get(name)
        print(f"{name}\n  {(experiment.__doc__ or '').strip().splitlines()[0]}")
        for profile, chosen in experiment.PROFILES.items():
            print(f"  {profile:<6} {len(chosen.configs)} configs x {len(chosen.seeds)} seeds")


def _run(options: argparse.Namespace) -> None:
    experiment = experiments.get(options.experiment)
    directory, device = _directory(options), _device(options.device)
    with contextlib.ExitStack() as stack:
        executor = None
        if options.workers != 1:
            executor = stack.enter_context(process_pool(options.workers))
        sweep(
            experiment, options.profile, seeds=options.seeds, directory=directory,
            executor=executor, device=device, progress=True,
        )  # fmt: skip
    print(f"finished: {directory}/table.parquet and manifest.json")


def _show(options: argparse.Namespace) -> None:
    experiment = experiments.get(options.experiment)
    frame, manifest = read_results(_directory(options))
    summary = experiment.summarise(frame)
    print(
        f"{manifest['experiment']}, profile {manifest['profile']}: {manifest['cells']} cells, "
        f"commit {manifest['commit'] or 'unknown'}, {', '.join(manifest['devices'])}, "
        f"finished {manifest['finished']}"
    )
    with pd.option_context("display.width", 200, "display.max_columns", None):
        print(summary.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    if options.figure is not None:
        print(f"figure: {_draw(experiment, frame, options.figure)}")


def _draw(experiment: Any, frame: pd.DataFrame, path: Path) -> Path:
    from attention_dynamics.plotting import figure, plot_scaling, save_svg

    drawn, axes = figure()
    curves = {
        quantity: geometric_means(frame, quantity, experiment.AGAINST)
        for quantity in experiment.BANDS
    }
    plot_scaling(axes, curves, against=experiment.AGAINST, xlabel=experiment.AGAINST)
    return save_svg(drawn, path)


def _directory(options: argparse.Namespace) -> Path:
    return options.directory or Path("results") / options.experiment / options.profile


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: no CUDA device is available; use --device cpu or auto")
    return str(torch.device(name))


if __name__ == "__main__":
    sys.exit(main())
