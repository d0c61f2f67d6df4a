r"""A sweep: all (configuration, seed) cells of an experiment, resumable, on any executor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from attention_dynamics.experiments.shape import Cell, Experiment, cells_of
from attention_dynamics.running.agreement import profile_name
from attention_dynamics.running.device import prepare_device
from attention_dynamics.running.manifest import describe
from attention_dynamics.running.store import Store, concatenate
from attention_dynamics.running.verdicts import published
from attention_dynamics.running.workers import (
    Keep,
    Result,
    compute_here,
    compute_on,
    compute_on_fresh,
)

log = logging.getLogger("attention_dynamics")


def sweep(
    experiment: Experiment,
    profile: str | None = None,
    *,
    configs: Iterable[Any] | None = None,
    seeds: Iterable[int] | None = None,
    directory: str | Path | None = None,
    executor: Executor | Callable[[], Executor] | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> pd.DataFrame:
    r"""The rows of every (config, seed) :math:`\in` ``configs`` :math:`\times` ``seeds``.

    Raises ValueError for an unknown profile, for missing configurations or seeds, and for a
    function that worker processes cannot import (one defined in a notebook); CellFailed naming a
    cell that raised, and its kind WorkersLost when workers died, after all cells that finished
    have been stored. Ctrl-C leaves the finished cells too.

    Parameters
    ----------
    experiment
        A module of :mod:`attention_dynamics.experiments`, or any object of that shape.
    profile
        The name of one of its profiles; ``configs`` and ``seeds`` replace the profile's, and the
        manifest then says "custom".
    directory
        Where finished cells are kept, one directory a sweep; None keeps everything in memory. The
        same call again computes only what is missing. Several processes may share it.
    executor
        Any :class:`concurrent.futures.Executor`: that of
        :func:`~attention_dynamics.running.workers.process_pool`, or ``dask.distributed``'s
        ``Client.get_executor()``. None computes in this process. A function that makes one, such
        as ``functools.partial(process_pool, 4)``, is asked for another whenever workers died, and
        the sweep goes on. Cells are written by this process.
    progress
        Show a bar with the estimated time left.

    Returns
    -------
    pandas.DataFrame
        Cells in the order of ``configs``, then of ``seeds``, whatever order they finished in.

    """
    configs, seeds = _resolve(experiment, profile, configs, seeds)
    cells = cells_of(experiment, configs, seeds)
    prepare_device(device)
    store = None if directory is None else Store(directory, experiment.COLUMNS)
    started = time.perf_counter()
    done: dict[str, Result] = {}
    if store is not None:
        store.require_own(experiment.NAME, experiment.SCHEMA)
        store.remove_stale()
        done = {cell.key: found for cell in cells if (found := store.load(cell)) is not None}
    missing = [cell for cell in cells if cell.key not in done]
    label = f"{experiment.NAME} {profile or 'custom'}"
    with tqdm(
        total=len(cells), initial=len(done), desc=label, unit="cell", smoothing=0.05,
        disable=not progress,
    ) as bar:  # fmt: skip

        def keep(cell: Cell, result: Result) -> None:
            done[cell.key] = result if store is None else store.save(cell, *result)
            bar.update()

        _compute(experiment, missing, device, executor, keep)
    ordered = [done[cell.key] for cell in cells]
    frame = concatenate([rows for rows, _ in ordered], experiment.COLUMNS)
    if store is not None and cells:
        facts = [fact for _, fact in ordered]
        name = profile_name(experiment, profile, configs, seeds)
        wall = time.perf_counter() - started
        manifest = describe(cells, name, facts, wall) | published(experiment, frame)
        store.require_own(experiment.NAME, experiment.SCHEMA)
        store.publish(frame, manifest)
    return frame


def _compute(
    experiment: Experiment,
    cells: list[Cell],
    device: str,
    executor: Executor | Callable[[], Executor] | None,
    keep: Keep,
) -> None:
    if executor is None:
        compute_here(experiment, cells, device, keep)
    elif isinstance(executor, Executor):
        compute_on(executor, experiment, cells, device, keep)
    else:
        compute_on_fresh(
            executor, experiment, cells, device, keep,
            lambda left: log.warning("a worker died; %d cells go on in a fresh pool", left),
        )  # fmt: skip


def _resolve(
    experiment: Experiment,
    profile: str | None,
    configs: Iterable[Any] | None,
    seeds: Iterable[int] | None,
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    if profile is not None:
        if profile not in experiment.PROFILES:
            known = ", ".join(experiment.PROFILES)
            raise ValueError(f"profile must be one of {known}; got {profile!r}")
        chosen = experiment.PROFILES[profile]
        configs = chosen.configs if configs is None else configs
        seeds = chosen.seeds if seeds is None else seeds
    if configs is None or seeds is None:
        raise ValueError("give a profile, or both configs and seeds")
    return tuple(configs), tuple(seeds)
