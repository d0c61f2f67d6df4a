r"""Sweeps: order, resumption, executors, failures."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pandas as pd
import pytest
import toy_experiment as toy

from attention_dynamics.running import (
    CellFailed,
    ForeignResults,
    Store,
    cells_of,
    process_pool,
    read_results,
    sweep,
)


def shaped(**changes):
    names = ("NAME", "SCHEMA", "COLUMNS", "PROFILES", "run", "summarise")
    return SimpleNamespace(**{**{name: getattr(toy, name) for name in names}, **changes})


def counting():
    calls = []

    def run(config, seed, device="cpu"):
        calls.append((config, seed))
        return toy.run(config, seed, device)

    return shaped(run=run), calls


def test_rows_come_in_the_order_of_configs_then_seeds():
    frame = sweep(toy, "smoke")
    assert tuple(frame.columns) == toy.COLUMNS
    order = list(dict.fromkeys(zip(frame["size"], frame["seed"], strict=True)))
    assert order == [(8, 0), (8, 1), (8, 2), (16, 0), (16, 1), (16, 2)]


def test_configs_and_seeds_replace_the_profiles():
    frame = sweep(toy, "smoke", seeds=[7])
    assert set(frame["seed"]) == {7}
    assert set(sweep(toy, configs=[toy.Config(4)], seeds=[1])["size"]) == {4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"profile": "huge"}, "smoke, slow; got 'huge'"), ({"seeds": [0]}, "both configs and seeds")],
)
def test_an_incomplete_or_unknown_request_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sweep(toy, **arguments)


def test_threads_processes_memory_and_disk_give_the_same_table(tmp_path):
    expected = sweep(toy, "slow")
    with ThreadPoolExecutor(4) as threads:
        pd.testing.assert_frame_equal(sweep(toy, "slow", executor=threads), expected)
    with process_pool(2) as processes:
        stored = sweep(toy, "slow", executor=processes, directory=tmp_path)
    pd.testing.assert_frame_equal(stored, expected, check_exact=True)
    pd.testing.assert_frame_equal(read_results(tmp_path)[0], expected, check_exact=True)


def test_a_second_run_computes_only_what_is_missing(tmp_path):
    experiment, calls = counting()
    first = sweep(experiment, "smoke", directory=tmp_path)
    assert len(calls) == 6
    table = (tmp_path / "table.parquet").read_bytes()
    removed = cells_of(toy, *vars(toy.PROFILES["smoke"]).values())[3]
    Store(tmp_path, toy.COLUMNS).path(removed).unlink()
    again = sweep(experiment, "smoke", directory=tmp_path)
    assert calls[6:] == [(toy.Config(16), 0)]
    pd.testing.assert_frame_equal(again, first, check_exact=True)
    assert (tmp_path / "table.parquet").read_bytes() == table


def test_a_grown_sweep_keeps_the_old_cells(tmp_path):
    experiment, calls = counting()
    sweep(experiment, "smoke", directory=tmp_path)
    sweep(experiment, "smoke", seeds=range(4), directory=tmp_path)
    assert [seed for _, seed in calls[6:]] == [3, 3]


def test_a_changed_schema_reuses_no_old_cell(tmp_path):
    experiment, calls = counting()
    sweep(experiment, "smoke", directory=tmp_path)
    experiment.SCHEMA = 2
    sweep(experiment, "smoke", directory=tmp_path)
    assert len(calls) == 12


def test_a_damaged_cell_is_computed_again(tmp_path):
    expected = sweep(toy, "smoke", directory=tmp_path)
    cell = cells_of(toy, [toy.Config(8)], [1])[0]
    path = Store(tmp_path, toy.COLUMNS).path(cell)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="damaged; its cell is computed again"):
        again = sweep(toy, "smoke", directory=tmp_path)
    pd.testing.assert_frame_equal(again, expected, check_exact=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sweep(toy, "smoke", directory=tmp_path)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_failing_cell_is_named_and_the_finished_ones_are_kept(tmp_path, pooled):
    configs = [toy.Config(8, fails_at_seed=2)]
    with ThreadPoolExecutor(1) as executor, pytest.raises(CellFailed, match="seed 2") as caught:
        sweep(
            toy,
            configs=configs,
            seeds=[0, 1, 2, 3],
            directory=tmp_path,
            executor=executor if pooled else None,
        )
    assert isinstance(caught.value.__cause__, ArithmeticError)
    kept = Store(tmp_path, toy.COLUMNS)
    assert [kept.load(cell) is not None for cell in cells_of(toy, configs, [0, 1, 2])] == [
        True,
        True,
        False,
    ]
    assert not (tmp_path / "manifest.json").exists()


def test_rows_with_other_columns_stop_the_sweep(tmp_path):
    experiment = shaped(run=lambda config, seed, device: toy.run(config, seed).assign(extra=0.0))
    with pytest.raises(ForeignResults, match="extra"):
        sweep(experiment, "smoke", directory=tmp_path)


def test_another_experiments_directory_is_refused(tmp_path):
    sweep(toy, "smoke", directory=tmp_path)
    with pytest.raises(ForeignResults, match="holds results of 'toy', not of 'other'"):
        sweep(shaped(NAME="other"), "smoke", directory=tmp_path)


def test_the_manifest_says_how_to_run_it_again_and_what_it_cost(tmp_path):
    sweep(toy, "smoke", directory=tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["experiment"] == "toy"
    assert manifest["profile"] == "smoke"
    assert manifest["seeds"] == [0, 1, 2]
    assert [config["size"] for config in manifest["configs"]] == [8, 16]
    assert manifest["cells"] == 6
    assert manifest["devices"] == ["cpu"]
    assert {"commit", "versions", "threads", "tf32", "cell_seconds", "wall_seconds"} <= set(
        manifest
    )
    assert manifest["versions"]["pandas"] == pd.__version__
    rebuilt = [toy.Config(**config) for config in manifest["configs"]]
    pd.testing.assert_frame_equal(
        sweep(toy, configs=rebuilt, seeds=manifest["seeds"]), read_results(tmp_path)[0]
    )


def test_a_pool_needs_a_worker():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        process_pool(0)


def test_progress_is_silent_unless_asked_for(capsys):
    sweep(toy, "smoke")
    assert capsys.readouterr().err == ""
    sweep(toy, "smoke", progress=True)
    assert "toy smoke" in capsys.readouterr().err
