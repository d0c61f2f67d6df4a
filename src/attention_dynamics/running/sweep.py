r"""A sweep: all (configuration, seed) cells of an experiment, resumable, on any executor."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from attention_dynamics.experiments.shape import Cell, Experiment, cells_of
from attention_dynamics.running.manifest import cell_facts, describe
from attention_dynamics.running.store import Store, concatenate

Result = tuple[pd.DataFrame, dict[str, Any]]


class CellFailed(RuntimeError):
    """A cell raised; the message names it, the cause is the error itself."""


def sweep(
    experiment: Experiment,
    profile: str | None = None,
    *,
    configs: Iterable[Any] | None = None,
    seeds: Iterable[int] | None = None,
    directory: str | Path | None = None,
    executor: Executor | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> pd.DataFrame:
    r"""The rows of every (config, seed) :math:`\in` ``configs`` :math:`\times` ``seeds``.

    Raises ValueError for an unknown profile, for missing configurations or seeds, and for a
    function that worker processes cannot import (one defined in a notebook); CellFailed naming a
    cell that raised, after all cells that finished have been stored.

    Parameters
    ----------
    experiment
        A module of :mod:`attention_dynamics.experiments`, or any object of that shape.
    profile
        The name of one of its profiles; ``configs`` and ``seeds`` replace the profile's.
    directory
        Where finished cells are kept, one directory a sweep; None keeps everything in memory. The
        same call again computes only what is missing.
    executor
        Any :class:`concurrent.futures.Executor`: :func:`process_pool`, or ``dask.distributed``'s
        ``Client.get_executor()``. None computes in this process. Cells are written by this process.
    progress
        Show a bar with the estimated time left.

    Returns
    -------
    pandas.DataFrame
        Cells in the order of ``configs``, then of ``seeds``, whatever order they finished in.

    """
    configs, seeds = _resolve(experiment, profile, configs, seeds)
    cells = cells_of(experiment, configs, seeds)
    if executor is not None:
        _require_importable(experiment.run, executor)
    store = None if directory is None else Store(directory, experiment.COLUMNS)
    started = time.perf_counter()
    done: dict[str, Result] = {}
    if store is not None:
        store.require_own(experiment.NAME)
        store.remove_stale()
        done = {cell.key: found for cell in cells if (found := store.load(cell)) is not None}
    missing = [cell for cell in cells if cell.key not in done]
    computed = _compute(experiment, missing, device, executor)
    label = f"{experiment.NAME} {profile or 'custom'}"
    with tqdm(total=len(cells), initial=len(done), desc=label, disable=not progress) as bar:
        for cell, result in computed:
            if store is not None:
                store.save(cell, *result)
            done[cell.key] = result
            bar.update()
    ordered = [done[cell.key] for cell in cells]
    frame = concatenate([rows for rows, _ in ordered], experiment.COLUMNS)
    if store is not None and cells:
        facts = [fact for _, fact in ordered]
        wall = time.perf_counter() - started
        store.publish(frame, describe(cells, profile or "custom", facts, wall))
    return frame


def process_pool(workers: int, *, threads: int = 1) -> ProcessPoolExecutor:
    """A pool of fresh processes with a fixed number of threads each, so that numbers repeat.

    Processes are spawned, not forked: a forked copy of a process that has used torch may hang.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    return ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_set_threads, initargs=(threads,)
    )


def run_cell(run: Callable[..., pd.DataFrame], config: Any, seed: int, device: str) -> Result:
    """Compute one cell, in whatever process this is."""
    started = time.perf_counter()
    rows = run(config, seed, device)
    return rows, cell_facts(device, time.perf_counter() - started)


def _compute(
    experiment: Experiment, cells: list[Cell], device: str, executor: Executor | None
) -> Iterator[tuple[Cell, Result]]:
    if executor is None:
        for cell in cells:
            try:
                result = run_cell(experiment.run, cell.config, cell.seed, device)
            except Exception as error:
                raise CellFailed(f"{cell}: {error}") from error
            yield cell, result
        return
    futures: dict[Future[Result], Cell] = {
        executor.submit(run_cell, experiment.run, cell.config, cell.seed, device): cell
        for cell in cells
    }
    failure: tuple[Cell, BaseException] | None = None
    try:
        for future in as_completed(futures):
            if future.cancelled():
                continue
            raised = future.exception()
            if raised is None:
                yield futures[future], future.result()
            elif failure is None:
                failure = (futures[future], raised)
                for waiting in futures:
                    waiting.cancel()
    finally:
        for waiting in futures:
            waiting.cancel()
    if failure is not None:
        cell, cause = failure
        raise CellFailed(
            f"{cell}: {cause!r}; with a directory, the finished cells are kept: run it again"
        ) from cause


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


def _require_importable(run: Callable[..., Any], executor: Executor) -> None:
    # a pickled function is a name: a worker process looks it up, and a notebook has no module
    if not isinstance(executor, ProcessPoolExecutor):
        return
    where = getattr(run, "__module__", None)
    try:
        pickle.dumps(run)
        importable = where != "__main__"
    except Exception:
        importable = False
    if not importable:
        name = getattr(run, "__qualname__", repr(run))
        raise ValueError(
            f"run function {name!r} of module {where!r} cannot be imported by worker processes, "
            "because it lives in a notebook, a script or another function; move it into an "
            "importable module (here: src/attention_dynamics/experiments), or leave out executor"
        )


def _set_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
