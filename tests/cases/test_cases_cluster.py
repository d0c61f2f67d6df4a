r"""Case 22: workers of a dask cluster that die; the sweep finishes, with the same table."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pandas as pd
import pytest

from attention_dynamics.running import WorkersLost, dask_executor, read_results, sweep

pytest.importorskip("distributed", reason="sweeps on a cluster need dask.distributed")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "running"))
import lethal_experiment as lethal
import toy_experiment as toy

pytestmark = [
    pytest.mark.xdist_group("cluster"),
    pytest.mark.skipif(os.name != "posix", reason="workers are killed by a signal"),
]
CONFIGS = tuple(toy.Config(size, delay=0.03) for size in range(2, 10))


@pytest.fixture(scope="module")
def cluster():
    with dask_executor("dask", workers=2) as executor:
        yield executor


def finished(directory):
    return len(list((directory / "cells").glob("*.parquet")))


def test_case_22_a_worker_killed_in_mid_sweep_changes_no_byte_of_the_table(cluster, tmp_path):
    sweep(toy, configs=CONFIGS, seeds=range(5), directory=tmp_path / "whole")
    broken, killed = tmp_path / "broken", []

    def kill_one():
        deadline = time.monotonic() + 60
        while finished(broken) < 5 and time.monotonic() < deadline:
            time.sleep(0.005)
        pid = next(iter(cluster._client.run(os.getpid).values()))
        killed.append((pid, finished(broken)))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    sweep(toy, configs=CONFIGS, seeds=range(5), directory=broken, executor=cluster)
    killer.join()
    (_, cells), *_ = killed
    assert 5 <= cells < 40, "it was killed in mid-sweep"
    assert finished(broken) == 40
    tables = [(folder / "table.parquet").read_bytes() for folder in (tmp_path / "whole", broken)]
    assert tables[0] == tables[1]
    read_results(broken)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.suffix for path in written} == {".parquet", ".json"}
    for path in written:  # and no pickle under another name
        assert path.read_bytes()[:4] == (b"PAR1" if path.suffix == ".parquet" else b"{\n  ")


def test_case_22_a_cell_that_kills_every_worker_is_named_and_the_others_are_kept(cluster, tmp_path):
    configs, folder = [lethal.Config(str(tmp_path), deaths=99)], tmp_path / "sweep"
    with pytest.raises(WorkersLost, match=r"1 of 4 cells unfinished \(first: lethal: .*seed 1\)"):
        sweep(lethal, configs=configs, seeds=range(4), directory=folder, executor=cluster)
    assert finished(folder) == 3
    for death in tmp_path.glob("death.*"):
        death.unlink()
    spared = [lethal.Config(str(tmp_path), deaths=0)]
    frame = sweep(lethal, configs=spared, seeds=range(4), executor=cluster)
    pd.testing.assert_frame_equal(frame, sweep(lethal, configs=spared, seeds=range(4)))


def test_a_function_of_a_notebook_travels_to_a_cluster(cluster):
    def run(config, seed, device="cpu"):
        return toy.run(config, seed, device)

    experiment = lethal.SimpleNamespace(
        NAME="toy", SCHEMA=1, COLUMNS=toy.COLUMNS, PROFILES=toy.PROFILES, run=run
    )
    frame = sweep(experiment, "smoke", executor=cluster)
    pd.testing.assert_frame_equal(frame, sweep(toy, "smoke"))


def test_an_address_without_a_scheduler_is_said_to_be_one():
    with (
        pytest.raises(OSError, match=r"127\.0\.0\.1:9"),
        dask_executor("tcp://127.0.0.1:9", timeout=1),
    ):
        pass
