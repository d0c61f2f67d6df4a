r"""Case 23 to the end: sweeps killed at any moment, stopped by Ctrl-C, or run twice at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention_dynamics.running import read_results

NURSERY = Path(__file__).with_name("sweep_nursery.py")
pytestmark = [
    pytest.mark.xdist_group("killed"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the nursery forks"),
]


class Nursery:
    """Starts sweeps in processes of their own, and waits for them."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(NURSERY)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, directory, **options):
        return self.ask(sweep={"directory": str(directory), **options})

    def wait(self, pid):
        return self.ask(wait=pid)

    def finish(self, directory, **options):
        assert self.wait(self.start(directory, **options)) == 0


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    _, errors = nursery.process.communicate(timeout=30)
    assert errors == ""


def cells(directory):
    return {path.name: path.read_bytes() for path in (directory / "cells").glob("*.parquet")}


def until(happened):
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline, "the sweep makes no progress"
        time.sleep(0.002)


def table(directory):
    return (directory / "table.parquet").read_bytes()


def test_case_23_killed_twenty_times_at_random_no_finished_cell_is_lost(nursery, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    nursery.finish(whole, delay=0.02)
    assert len(cells(whole)) == 60
    delays, before = random.Random(23), {}
    for kill in range(20):
        pid = nursery.start(broken, delay=0.02)
        if kill % 2:  # half of the kills anywhere, half once the process has finished a cell
            until(lambda: len(cells(broken)) > len(before))  # noqa: B023
        time.sleep(delays.uniform(0.0, 0.08))
        os.kill(pid, signal.SIGKILL)
        assert nursery.wait(pid) == -signal.SIGKILL, "the sweep ended before it was killed"
        after = cells(broken)
        assert {name: after.get(name) for name in before} == before, "a finished cell was lost"
        before = after
    assert 10 <= len(before) < 60
    nursery.finish(broken, delay=0.02)
    after = cells(broken)
    assert {name: after[name] for name in before} == before, "a finished cell was written again"
    assert table(broken) == table(whole)
    read_results(broken)


def test_case_23_killed_at_every_touch_of_the_disk_old_or_new_results_can_be_read(
    nursery, tmp_path
):
    old, new = tmp_path / "old", tmp_path / "new"
    nursery.finish(old, sizes=1, seeds=1)
    nursery.finish(new, sizes=1, seeds=2)
    tables, seen = (table(old), table(new)), set()
    for moment in range(1, 100):
        directory = tmp_path / str(moment)
        nursery.finish(directory, sizes=1, seeds=1)
        status = nursery.wait(nursery.start(directory, sizes=1, seeds=2, die=moment))
        frame, manifest = read_results(directory)
        assert sorted(set(frame["seed"])) == manifest["seeds"]
        assert manifest["seeds"] in ([0], [0, 1])
        seen.add(len(manifest["seeds"]))
        nursery.finish(directory, sizes=1, seeds=2)
        assert table(directory) == tables[1]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert moment > 12, "the sweep touches the disk more often than that"
    assert status == 0
    assert seen == {1, 2}
    assert tables[0] != tables[1]


def test_two_processes_on_one_sweep_end_with_one_table(nursery, tmp_path):
    for round_, yields in enumerate((("", ""), ("", ""), ("last", "first"))):
        directory = tmp_path / str(round_)
        pids = [
            nursery.start(directory, seeds=2, delay=0.001, noisy=True, yields=cell)
            for cell in yields
        ]
        assert [nursery.wait(pid) for pid in pids] == [0, 0]
        returned = [(directory / f"returned.{pid}").read_text() for pid in pids]
        assert returned[0] == returned[1], "each took the cells that the other finished first"
        frame, manifest = read_results(directory)
        assert frame.to_json(double_precision=15) == returned[0]
        assert manifest["cells"] == len(cells(directory)) == 24
        writers = frame.loc[frame["quantity"] == "process", "value"].nunique()
        assert not list(directory.glob("**/.*.part"))
        assert not list(directory.glob(".*.pending"))
    assert writers == 2, "each finished a cell before the other"


def test_ctrl_c_leaves_the_finished_cells_and_the_next_call_does_the_rest(nursery, tmp_path):
    directory, log = tmp_path / "sweep", tmp_path / "log"
    pid = nursery.start(directory, seeds=2, delay=0.01, log=str(log))
    until(lambda: len(cells(directory)) >= 4)
    os.kill(pid, signal.SIGINT)
    assert nursery.wait(pid) == 130
    kept = cells(directory)
    assert 4 <= len(kept) < 24
    assert not (directory / "table.parquet").exists()
    log.unlink()
    nursery.finish(directory, seeds=2, delay=0.01, log=str(log))
    computed = log.read_text().splitlines()
    assert len(computed) == len(set(computed)) == 24 - len(kept)
    assert {name: cells(directory)[name] for name in kept} == kept
