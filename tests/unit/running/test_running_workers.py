r"""Workers that die: nothing that finished is lost, and the sweep goes on or says how to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path

import lethal_experiment as lethal
import pandas as pd
import pytest
import toy_experiment as toy

from attention_dynamics.running import CellFailed, Store, WorkersLost, cells_of, process_pool, sweep
from attention_dynamics.running.workers import (
    compute_on,
    compute_on_fresh,
    dask_executor,
    stop_now,
)


def test_a_broken_pool_keeps_what_finished_and_says_that_the_same_call_resumes(tmp_path):
    configs, folder = [lethal.Config(str(tmp_path), lethal_seed=3)], tmp_path / "sweep"
    seeds = range(6)
    with process_pool(1) as pool, pytest.raises(WorkersLost) as caught:
        sweep(lethal, configs=configs, seeds=seeds, directory=folder, executor=pool)
    message = str(caught.value)
    assert "the finished cells are kept" in message
    assert "the same call, with a new executor, computes the rest" in message
    assert "Out of memory? Try fewer workers" in message
    assert "3 of 6 cells unfinished (first: lethal: Config(" in message
    assert "seed 3)" in message
    store = Store(folder, lethal.COLUMNS)
    kept = [store.load(cell) is not None for cell in cells_of(lethal, configs, seeds)]
    assert kept == [True, True, True, False, False, False]
    with process_pool(1) as pool:
        frame = sweep(lethal, configs=configs, seeds=seeds, directory=folder, executor=pool)
    pd.testing.assert_frame_equal(frame, sweep(lethal, configs=configs, seeds=seeds))


def test_a_pool_that_is_broken_before_is_said_to_be(tmp_path):
    configs = [lethal.Config(str(tmp_path))]
    with process_pool(1) as pool:
        with pytest.raises(WorkersLost):
            sweep(lethal, configs=configs, seeds=[1], executor=pool)
        with pytest.raises(WorkersLost, match="2 of 2 cells unfinished"):
            sweep(lethal, configs=configs, seeds=[2, 3], executor=pool)


def test_a_function_that_makes_pools_is_asked_again_and_the_sweep_finishes(tmp_path, caplog):
    configs = [lethal.Config(str(tmp_path), deaths=1)]
    frame = sweep(lethal, configs=configs, seeds=range(5), executor=partial(process_pool, 1))
    pd.testing.assert_frame_equal(frame, sweep(lethal, configs=configs, seeds=range(5)))
    assert len(list(tmp_path.glob("death.*"))) == 1
    assert "a worker died; 4 cells go on in a fresh pool" in caplog.text


class Scripted(Executor):
    """An executor that loses a cell of the lethal seed and everything that waits behind it."""

    def __init__(self):
        self.broken = False

    def submit(self, function, *arguments, **options):
        from concurrent.futures.process import BrokenProcessPool

        if self.broken:
            raise BrokenProcessPool("a worker died")
        future: Future = Future()
        if arguments[2] == 1:
            self.broken = True
            future.set_exception(BrokenProcessPool("a worker died"))
        else:
            future.set_result(function(*arguments, **options))
        return future


def test_a_cell_that_kills_every_worker_keeps_no_other_from_finishing(tmp_path):
    made, kept, left = [], [], []

    def make():
        made.append(Scripted())
        return made[-1]

    cells = cells_of(toy, [toy.Config(8)], range(6))
    with pytest.raises(WorkersLost, match=r"1 of 1 cells unfinished \(first: toy: .*seed 1\)"):
        compute_on_fresh(
            make, toy, cells, "cpu", lambda cell, _: kept.append(cell.seed), left.append
        )
    assert sorted(kept) == [0, 2, 3, 4, 5], "from the other end all others finish"
    assert left == [5, 1, 1]
    assert len(made) == 4


def test_what_finished_before_ctrl_c_is_kept_even_where_it_was_being_written():
    class Ready(Executor):
        def submit(self, function, *arguments, **options):
            future: Future = Future()
            if arguments[2] < 4:  # the others wait for ever
                future.set_result(function(*arguments, **options))
            waiting.append(future)
            return future

    waiting, kept, calls = [], [], []

    def keep(cell, result):
        calls.append(cell)
        if len(calls) == 2:
            raise KeyboardInterrupt
        kept.append(cell.seed)

    with pytest.raises(KeyboardInterrupt):
        compute_on(Ready(), toy, cells_of(toy, [toy.Config(8)], range(6)), "cpu", keep)
    assert sorted(kept) == [0, 1, 2, 3]
    assert all(future.cancelled() for future in waiting[4:])


def test_an_executor_that_drops_cells_without_an_error_is_not_believed():
    class Dropping(Executor):
        def submit(self, function, *arguments, **options):
            future: Future = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    with pytest.raises(WorkersLost, match="6 of 6 cells unfinished"):
        sweep(toy, "smoke", executor=Dropping())


def test_a_failing_cell_is_not_taken_for_a_lost_worker(tmp_path):
    configs = [toy.Config(8, fails_at_seed=1)]
    made = []

    def make():
        made.append(process_pool(1))
        return made[-1]

    with pytest.raises(CellFailed, match="fails on purpose") as caught:
        sweep(toy, configs=configs, seeds=[0, 1], executor=make)
    assert not isinstance(caught.value, WorkersLost)
    assert len(made) == 1


def test_workers_are_stopped_without_waiting_for_their_cells(tmp_path):
    pool = process_pool(1)
    future = pool.submit(time.sleep, 60)
    while not future.running():
        time.sleep(0.01)
    started = time.monotonic()
    stop_now(pool)
    pool.shutdown(wait=True)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(("name", "value"), [("workers", 0), ("threads", 0)])
def test_a_pool_needs_workers_and_threads(name, value):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        process_pool(**{"workers": 1, name: value})


def test_without_dask_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(ModuleNotFoundError, match=r"pip install 'attention-dynamics\[cluster\]'"),
        dask_executor(),
    ):
        pass


COMMAND = """
import sys
sys.path.insert(0, {toy!r})
import toy_experiment as toy
from attention_dynamics import experiments
toy.PROFILES["slow"].configs = tuple(toy.Config(k, delay=0.1) for k in range(2, 42))
experiments.get = lambda name: toy
from attention_dynamics.cli import main
arguments = ["run", "toy", "--profile", "slow", "--device", "cpu", "--directory", sys.argv[1]]
sys.exit(main([*arguments, "--workers", sys.argv[2]]))
"""


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal here")
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_in_a_shell_ends_the_command_at_once_and_keeps_finished_cells(tmp_path, workers):
    code = COMMAND.format(toy=str(Path(toy.__file__).parent))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(workers)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "cells").glob("*.parquet"))) < 3:
        assert time.monotonic() < deadline, "the sweep makes no progress"
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers too
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "stopped; finished cells are kept, the same command resumes" in errors
    assert "Traceback" not in errors
    assert "toy slow" in errors
    assert "<" in errors.split("toy slow")[-1].split("cell")[0], "the time left is estimated"
    configs = [toy.Config(k, delay=0.1) for k in range(2, 42)]
    store = Store(tmp_path, toy.COLUMNS)
    kept = [store.load(cell) for cell in cells_of(toy, configs, range(5))]
    assert 3 <= sum(cell is not None for cell in kept) < 200
