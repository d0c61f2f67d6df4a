r"""Cases 21, 23, 24 and 28: what broke similar software while running, saving and drawing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from attention_dynamics.experiments import width
from attention_dynamics.running import process_pool, sweep

TOY = Path(__file__).parents[1] / "unit" / "running"
SWEEP = (
    "import sys; sys.path.insert(0, {toy!r}); import toy_experiment as toy\n"
    "from attention_dynamics.running import sweep, store\n"
    "{before}\n"
    "sweep(toy, 'slow', directory={directory!r})\n"
)


def start(directory: Path, before: str = "") -> subprocess.Popen[str]:
    code = SWEEP.format(toy=str(TOY), directory=str(directory), before=before)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code], stderr=subprocess.PIPE, text=True
    )


def finish(directory: Path, before: str = "") -> tuple[int, str]:
    process = start(directory, before)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors


def finished_cells(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "cells").glob("*.parquet")}


def kill_after(directory: Path, cells: int) -> None:
    process = start(directory)
    deadline = time.monotonic() + 60
    while len(finished_cells(directory)) < cells and process.poll() is None:
        assert time.monotonic() < deadline, "the sweep makes no progress"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "the sweep ended before it was killed"


def test_case_21_a_function_of_a_notebook_is_refused_for_a_process_pool():
    def run(config, seed, device="cpu"):
        return pd.DataFrame()

    local = SimpleNamespace(NAME="local", SCHEMA=1, COLUMNS=(), PROFILES={}, run=run)
    with process_pool(1) as pool, pytest.raises(ValueError, match=r"notebook.*src/"):
        sweep(local, configs=[], seeds=[], executor=pool)
    run.__module__, run.__qualname__ = "__main__", "run"  # as in a notebook's cell
    with process_pool(1) as pool, pytest.raises(ValueError, match="'run' of module '__main__'"):
        sweep(local, configs=[], seeds=[], executor=pool)


def test_case_23_killed_again_and_again_the_table_is_the_same_byte_for_byte(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert finish(whole) == (0, "")
    for cells in (2, 5, 11):
        kill_after(broken, cells)
        kept = finished_cells(broken)
        assert len(kept) >= cells
        assert not (broken / "table.parquet").exists()
    assert finish(broken) == (0, "")  # -W error: nothing was found damaged
    after = finished_cells(broken)
    assert {name: after[name] for name in kept} == kept, "a finished cell was written again"
    assert (broken / "table.parquet").read_bytes() == (whole / "table.parquet").read_bytes()


@pytest.mark.parametrize("moment", ["os.fsync", "os.link"])
def test_case_23_killed_while_writing_leaves_the_previous_results_intact(tmp_path, moment):
    assert finish(tmp_path) == (0, "")
    table, manifest = (
        (tmp_path / name).read_bytes() for name in ("table.parquet", "manifest.json")
    )
    kept = finished_cells(tmp_path)
    # one cell is gone, and the process dies at the given moment of writing it
    lost = tmp_path / "cells" / sorted(kept)[4]
    lost.unlink()
    dies = f"import os; {moment} = lambda *arguments: os.kill(os.getpid(), 9)"
    code, _ = finish(tmp_path, before=dies)
    assert code == -signal.SIGKILL
    assert not lost.exists()
    assert (tmp_path / "table.parquet").read_bytes() == table
    assert (tmp_path / "manifest.json").read_bytes() == manifest
    assert len(list((tmp_path / "cells").glob(".*.part"))) == 1, "it died while writing"
    assert finish(tmp_path) == (0, "")
    assert set(finished_cells(tmp_path)) == set(kept)
    assert (tmp_path / "table.parquet").read_bytes() == table


DRAW = """
import sys
from attention_dynamics.experiments import width
from attention_dynamics.experiments.estimates import geometric_means
from attention_dynamics.plotting import figure, plot_scaling, save_svg
from attention_dynamics.running import sweep

frame = sweep(width, "smoke", seeds=[0, 1], directory=sys.argv[1])
drawn, axes = figure()
curves = {name: geometric_means(frame, name, "heads") for name in width.BANDS}
plot_scaling(axes, curves, against="heads", xlabel="heads $m$")
save_svg(drawn, sys.argv[1] + "/width.svg")
"""


def test_case_24_the_same_seeds_give_the_same_data_and_figure_byte_for_byte(tmp_path):
    contents = []
    for hash_seed in ("0", "7"):
        directory = tmp_path / hash_seed
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-c", DRAW, str(directory)], check=True, env=environment, timeout=120
        )
        contents.append(
            [(directory / name).read_bytes() for name in ("table.parquet", "width.svg")]
        )
    assert contents[0] == contents[1]
    assert all(len(content) > 1000 for content in contents[0])


def test_case_28_two_cells_whose_seed_and_width_have_the_same_sum_share_nothing():
    states = {
        (seed, heads, role): width._stream(seed, role, width.Config(heads)).get_state()
        for seed, heads in ((0, 24), (8, 16), (16, 8), (8, 24), (0, 16))
        for role in ("student", "unpaired", "random", "adversary")
    }
    assert len({state.numpy().tobytes() for state in states.values()}) == len(states)
    a, b = (
        width.symmetric_initialisation(heads, 3, generator=width._stream(seed, "student", config))
        for seed, heads, config in ((8, 16, width.Config(16)), (16, 8, width.Config(8)))
    )
    assert not set(a.U.flatten().tolist()) & set(b.U.flatten().tolist())
