r"""Who computes cells: this process, processes of this machine, or a dask cluster.

Where workers die (killed, out of memory) nothing that finished is lost. A pool of processes is
broken by one death; dask goes on with the workers it has.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from functools import partial
from multiprocessing import get_context
from typing import Any

import pandas as pd

from attention_dynamics.experiments.shape import Cell, Experiment
from attention_dynamics.running.device import prepare_device
from attention_dynamics.running.manifest import cell_facts

Result = tuple[pd.DataFrame, dict[str, Any]]
Keep = Callable[[Cell, Result], None]

_THREADS: list[int] = []  # in a worker of a pool: what torch is set to once an experiment loads it


class CellFailed(RuntimeError):
    """A cell raised; the message names it, the cause is the error itself."""


class WorkersLost(CellFailed):
    """Workers died without an answer; the cells that finished are kept, the same call resumes."""


def process_pool(workers: int, *, threads: int = 1) -> ProcessPoolExecutor:
    """A pool of fresh processes with a fixed number of threads each, so that numbers repeat.

    Processes are spawned, not forked: a forked copy of a process that has used torch may hang.
    """
    for name, value in (("workers", workers), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(threads,)
    )


@contextlib.contextmanager
def dask_executor(
    where: str = "dask", workers: int = 1, *, timeout: float = 30.0
) -> Iterator[Executor]:
    """An executor of ``dask.distributed``: on a cluster of this machine, or on one that runs.

    ``where`` is ``"dask"``, for ``workers`` processes with one thread each, or the address of a
    scheduler, such as ``tcp://host:8786``, whose workers have this package. Raises
    ModuleNotFoundError that says what to install, OSError if the scheduler does not answer.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError:
        raise ModuleNotFoundError(
            "dask.distributed is not installed: pip install 'attention-dynamics[cluster]'"
        ) from None
    with contextlib.ExitStack() as stack:
        if where == "dask":
            # No limit of memory: dask's own ends a worker at its share of the machine, and writes
            # pickles to the disk before.
            cluster = LocalCluster(
                n_workers=workers, threads_per_worker=1, processes=True, memory_limit=0,
                dashboard_address="127.0.0.1:0", silence_logs=50,
            )  # fmt: skip
            where = stack.enter_context(cluster)
        # pure=False, or a cell that is tried again would be told of its old failure
        yield stack.enter_context(Client(where, timeout=timeout)).get_executor(pure=False)


def run_cell(run: Callable[..., pd.DataFrame], config: Any, seed: int, device: str) -> Result:
    """Compute one cell, in whatever process this is."""
    prepare_device(device)
    torch = sys.modules.get("torch")
    if _THREADS and torch is not None and torch.get_num_threads() != _THREADS[0]:
        torch.set_num_threads(_THREADS[0])
    started = time.perf_counter()
    rows = run(config, seed, device)
    return rows, cell_facts(device, time.perf_counter() - started)


def compute_here(experiment: Experiment, cells: Sequence[Cell], device: str, keep: Keep) -> None:
    """Compute cells one after the other in this process. Raises CellFailed naming one."""
    for cell in cells:
        try:
            result = run_cell(experiment.run, cell.config, cell.seed, device)
        except Exception as error:
            raise CellFailed(f"{cell}: {error}") from error
        keep(cell, result)


def compute_on(
    executor: Executor,
    experiment: Experiment,
    cells: Sequence[Cell],
    device: str,
    keep: Keep,
    *,
    stop: Callable[[], None] | None = None,
) -> None:
    """Compute cells on an executor, and ``keep`` each as it finishes.

    Raises CellFailed for the first cell that raised, WorkersLost if workers died; whatever
    finished is kept before, also on Ctrl-C. That cancels what waits, or calls ``stop`` instead.
    """
    require_importable(experiment.run, executor)
    futures: dict[Future[Result], Cell] = {}
    kept: set[Future[Result]] = set()

    def keep_finished(future: Future[Result]) -> None:
        if future not in kept and not future.cancelled() and future.exception() is None:
            keep(futures[future], future.result())
            kept.add(future)

    failure: tuple[Cell, BaseException] | None = None
    lost: BaseException | None = None
    blamed: list[Cell] = []
    try:
        for cell in cells:
            arguments = (experiment.run, cell.config, cell.seed, device)
            try:
                futures[executor.submit(run_cell, *arguments)] = cell
            except BrokenExecutor as error:
                lost = error
                break
        for future in as_completed(futures):
            raised = None if future.cancelled() else future.exception()
            if raised is None:
                keep_finished(future)
            elif _is_loss(raised):
                lost = lost or raised
                blamed.append(futures[future])
            elif failure is None:
                failure = (futures[future], raised)
                _cancel(futures)
        if failure is None and len(blamed) > 1 and not isinstance(lost, BrokenExecutor):
            # dask blames every cell that waited on a worker which died: each has a run of its own
            for cell in blamed:
                again = executor.submit(run_cell, experiment.run, cell.config, cell.seed, device)
                futures[again] = cell
                again.exception()
                keep_finished(again)
    except KeyboardInterrupt:
        (stop or partial(_cancel, futures))()
        for future in futures:
            if future.done():
                keep_finished(future)
        raise
    finally:
        _cancel(futures)
    if failure is not None:
        cell, cause = failure
        raise CellFailed(
            f"{cell}: {cause!r}; with a directory, the finished cells are kept: run it again"
        ) from cause
    missing = len(cells) - len(kept)
    if missing:
        finished = {futures[future].key for future in kept}
        first = next(cell for cell in cells if cell.key not in finished)
        raise WorkersLost(
            f"workers died with {missing} of {len(cells)} cells unfinished (first: {first}): "
            f"{lost!r}. Out of memory? Try fewer workers. With a directory the finished cells are "
            "kept: the same call, with a new executor, computes the rest"
        ) from lost


def compute_on_fresh(
    make: Callable[[], Executor],
    experiment: Experiment,
    cells: Sequence[Cell],
    device: str,
    keep: Keep,
    lost: Callable[[int], None],
) -> None:
    """Compute cells on executors made one after the other: a new one whenever workers died.

    Each new one takes the cells from the other end, so that a cell that kills its worker keeps no
    other from finishing. ``lost`` is told how many are left. Raises WorkersLost after two
    executors on which nothing finished.
    """
    missing, fruitless = list(cells), 0
    finished: set[str] = set()

    def note(cell: Cell, result: Result) -> None:
        keep(cell, result)
        finished.add(cell.key)

    while missing:
        executor = make()
        before = len(finished)
        try:
            stop = partial(stop_now, executor)
            compute_on(executor, experiment, missing, device, note, stop=stop)
        except WorkersLost:
            fruitless = fruitless + 1 if len(finished) == before else 0
            if fruitless == 2:
                raise
        finally:
            executor.shutdown()
        missing = [cell for cell in reversed(missing) if cell.key not in finished]
        if missing:
            lost(len(missing))


def stop_now(executor: Executor) -> None:
    """Shut an executor down without waiting for the cells it is computing.

    Processes of a pool are ended first, and nothing is cancelled before: a pool that loses its
    processes with cancelled cells in it stumbles over them, loudly.
    """
    processes = list((getattr(executor, "_processes", None) or {}).values())
    for process in processes:
        process.terminate()
    executor.shutdown(wait=bool(processes))


def require_importable(run: Callable[..., Any], executor: Executor) -> None:
    """Refuse a function that the workers of a pool cannot import, such as a notebook's."""
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


def _cancel(futures: dict[Future[Result], Cell]) -> None:
    for waiting in futures:
        waiting.cancel()


def _is_loss(error: BaseException) -> bool:
    """Whether a worker is gone, and not the cell wrong."""
    cluster = sys.modules.get("distributed.scheduler")
    return isinstance(error, BrokenExecutor) or (
        cluster is not None and isinstance(error, cluster.KilledWorker | cluster.NoValidWorkerError)
    )


def _start_worker(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that sweeps
    os.environ["OMP_NUM_THREADS"] = str(threads)
    _THREADS[:] = [threads]
