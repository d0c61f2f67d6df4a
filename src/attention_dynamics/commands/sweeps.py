r"""``list`` the experiments, ``run`` a sweep."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from attention_dynamics import experiments
from attention_dynamics.running import dask_executor, process_pool, sweep
from attention_dynamics.running.device import choose_device, prepare_device
from attention_dynamics.running.store import RESULTS


def add(commands: Any) -> None:
    """Declare ``list`` and ``run``."""
    listing = commands.add_parser("list", help="the experiments and their profiles")
    listing.set_defaults(command=show_list)
    run = commands.add_parser("run", help="run a sweep, or finish one that was interrupted")
    run.set_defaults(command=run_sweep)
    add_result(run)
    add_device(run)
    run.add_argument(
        "--workers",
        type=int,
        help="processes with one thread each (default 1; with dask as many as there are cores)",
    )
    run.add_argument(
        "--executor",
        default="pool",
        help="pool (default): processes of this machine; dask: a dask cluster of this machine; "
        "or the address of a dask scheduler, such as tcp://host:8786",
    )
    run.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        help="seeds in place of those of the profile; kept apart from its results, as 'custom'",
    )


def add_result(command: argparse.ArgumentParser) -> None:
    """Declare what names a result: experiment, profile, directory."""
    command.add_argument("experiment", help="a name from the list")
    command.add_argument("--profile", help="smoke (default), book, paper, or another of the list")
    command.add_argument(
        "--directory",
        type=Path,
        help="where the sweep is kept (default results/<experiment>/<profile>)",
    )


def add_device(command: argparse.ArgumentParser) -> None:
    """Declare ``--device``."""
    command.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:1, ...")


def directory_of(options: argparse.Namespace, profile: str) -> Path:
    """The directory asked for, or that of the profile in the results of the current folder."""
    return options.directory or Path(RESULTS) / options.experiment / profile


def show_list(options: argparse.Namespace) -> int:
    """Print every experiment with the size of its profiles."""
    for name in experiments.names():
        experiment = experiments.get(name)
        print(f"{name}\n  {(experiment.__doc__ or '').strip().splitlines()[0]}")
        for profile, chosen in experiment.PROFILES.items():
            print(f"  {profile:<6} {len(chosen.configs)} configs x {len(chosen.seeds)} seeds")
    return 0


def run_sweep(options: argparse.Namespace) -> int:
    """Run or finish a sweep; workers that die are replaced."""
    experiment = experiments.get(options.experiment)
    profile = options.profile or "smoke"
    workers = options.workers
    if workers is None:
        workers = 1 if options.executor == "pool" else os.cpu_count() or 1
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if profile not in experiment.PROFILES:
        raise ValueError(
            f"profile must be one of {', '.join(experiment.PROFILES)}; got {profile!r}"
        )
    directory = directory_of(options, profile if options.seeds is None else "custom")
    device = choose_device(options.device)
    prepare_device(device)  # before workers start, which take the environment from here
    with contextlib.ExitStack() as stack:
        executor: Executor | Callable[[], Executor] | None = None
        if options.executor != "pool":
            executor = stack.enter_context(dask_executor(options.executor, workers))
        elif workers > 1:
            executor = partial(process_pool, workers)
        sweep(
            experiment, profile, seeds=options.seeds, directory=directory, executor=executor,
            device=device, progress=True,
        )  # fmt: skip
    print(f"finished: {directory}/table.parquet and manifest.json")
    return 0
