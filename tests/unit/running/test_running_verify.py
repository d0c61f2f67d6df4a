r"""Verdicts travel with results, a result is verified against them, cells are computed again."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import banded_experiment as banded
import pandas as pd
import pytest
import toy_experiment as toy

from attention_dynamics.experiments.estimates import Band, band_table
from attention_dynamics.running import read_manifest, read_results, sweep, verify_results
from attention_dynamics.running.rerun import ABSOLUTE, RELATIVE, rerun
from attention_dynamics.running.store import write_manifest
from attention_dynamics.running.verdicts import Verdict, verdicts
from attention_dynamics.running.verify import stored_directories

NAMES = ("NAME", "SCHEMA", "COLUMNS", "PROFILES", "BANDS", "run", "summarise")


def source(**changes):
    return SimpleNamespace(**{**{name: getattr(banded, name) for name in NAMES}, **changes})


@pytest.fixture
def folder(tmp_path):
    sweep(banded, "book", directory=tmp_path)
    return tmp_path


def manifest_of(folder):
    return read_manifest(folder / "manifest.json")


def edit(folder, **changes):
    write_manifest(folder, manifest_of(folder) | changes)


def test_a_sweep_publishes_the_verdict_of_every_band(folder):
    found = manifest_of(folder)["verdicts"]
    assert {name: verdict["met"] for name, verdict in found.items()} == {"near": True, "far": False}
    assert found["far"]["band_lower"] is None
    assert found["far"]["band_upper"] == 0.0
    mean = read_results(folder)[0].query("quantity == 'near'")["value"].mean()
    assert found["near"]["estimate"] == pytest.approx(mean, rel=1e-15)


def test_a_sweep_that_cannot_be_summarised_is_stored_and_says_why(tmp_path):
    frame = sweep(banded, configs=[banded.Config(8)], seeds=[0], directory=tmp_path)
    manifest = manifest_of(tmp_path)
    assert manifest["verdicts"] is None
    assert "at least 2 seeds" in manifest["no_verdicts_because"]
    pd.testing.assert_frame_equal(read_results(tmp_path, banded)[0], frame)
    assert verify_results(tmp_path, banded).problems == ()


def test_an_experiment_without_bands_has_no_verdicts(tmp_path):
    sweep(toy, "smoke", directory=tmp_path)
    assert manifest_of(tmp_path)["verdicts"] == {}
    assert verify_results(tmp_path, toy).problems == ()


def test_a_miss_that_was_published_is_no_problem(folder):
    found = verify_results(folder, banded)
    assert found.problems == ()
    assert found.missed == ("far",)
    assert found.recorded
    assert found.verdicts["near"].met


def moved_bands(bands):
    def summarise(frame):
        from attention_dynamics.experiments.estimates import select, t_interval

        return band_table(bands, lambda quantity: t_interval(select(frame, quantity)["value"]))

    return source(summarise=summarise)


@pytest.mark.parametrize(
    ("bands", "messages"),
    [
        (
            {**banded.BANDS, "far": Band(None, 2.0, "wider")},
            ["far: the band was moved after the run", "far: missed when published, met today"],
        ),
        (
            {**banded.BANDS, "near": Band(0.9, 1.2, "wider")},
            ["near: the band was moved after the run"],
        ),
        ({"near": banded.BANDS["near"]}, ["far: missed when published, no such band today"]),
    ],
)
def test_a_band_that_changed_after_the_run_is_a_problem(folder, bands, messages):
    problems = verify_results(folder, moved_bands(bands)).problems
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert problem.startswith(message)


def test_another_verdict_on_the_same_table_is_a_problem(folder):
    found = manifest_of(folder)["verdicts"]
    edit(folder, verdicts=found | {"near": found["near"] | {"met": False}})
    [problem] = verify_results(folder, banded).problems
    assert problem.startswith("near: missed when published, met today: 0.99")


def test_a_band_that_was_not_published_is_a_problem(folder):
    edit(folder, verdicts={"near": manifest_of(folder)["verdicts"]["near"]})
    assert verify_results(folder, banded).problems == ("far: not published, missed today",)


def test_what_cannot_be_read_or_summarised_is_a_problem_and_no_exception(folder):
    broken = source(summarise=lambda frame: frame["no such column"])
    assert "cannot be summarised: KeyError" in verify_results(folder, broken).problems[0]
    table = folder / "table.parquet"
    table.write_bytes(table.read_bytes()[:-1])
    assert "is not the table its manifest describes" in verify_results(folder, banded).problems[0]
    assert verify_results(folder / "nothing", banded).problems[0].startswith("no manifest at")


def test_recording_adds_verdicts_once_and_changes_nothing_else(folder):
    before = manifest_of(folder)
    bare = {name: value for name, value in before.items() if name != "verdicts"}
    write_manifest(folder, bare)
    assert not verify_results(folder, banded).recorded
    assert manifest_of(folder) == bare
    assert verify_results(folder, banded, record=True).recorded
    assert manifest_of(folder) == before
    wrong = before["verdicts"] | {"near": before["verdicts"]["near"] | {"met": False}}
    edit(folder, verdicts=wrong)
    assert verify_results(folder, banded, record=True).problems
    assert manifest_of(folder)["verdicts"] == wrong, "a verdict that is there stays"


def test_a_result_that_is_not_sound_is_not_recorded(folder):
    edit(folder, verdicts=None, seeds=[0])
    assert verify_results(folder, banded, record=True).problems
    assert manifest_of(folder)["verdicts"] is None


def test_verdicts_are_named_by_what_stands_left_of_the_estimate():
    summary = pd.DataFrame(
        {
            "descent": ["a", "b", "b"], "quantity": ["x", "x", "y"], "size": [1.0, 1000.0, 2.5],
            "mean": [1.0, 2.0, 3.0], "lower": [0.0, 1.0, 2.0], "upper": [2.0, float("inf"), 4.0],
            "band_lower": [0.0, 5.0, float("nan")], "band_upper": [3.0, float("inf"), None],
            "inside": [True, False, None],
        }
    )  # fmt: skip
    found = verdicts(summary)
    assert found == {
        "descent a, x, size 1": Verdict(True, 1.0, 0.0, 2.0, 0.0, 3.0),
        "descent b, x, size 1000": Verdict(False, 2.0, 1.0, None, 5.0, None),
    }
    assert str(found["descent b, x, size 1000"]) == "2 [1, open], band 5 to open"
    with pytest.raises(ValueError, match="two rows are named"):
        verdicts(pd.concat([summary, summary]))


def test_stored_directories_are_those_with_a_manifest(tmp_path):
    for place in ("banded/book", "banded/smoke", "toy/book", "benchmarks"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "manifest.json").write_text("{}")
    (tmp_path / "toy" / "unfinished").mkdir()
    found = [path.relative_to(tmp_path).as_posix() for path in stored_directories(tmp_path)]
    assert found == ["banded/book", "banded/smoke", "toy/book"]
    assert len(stored_directories(tmp_path, ("banded",))) == 2
    with pytest.raises(FileNotFoundError, match="no stored results of 'depth'"):
        stored_directories(tmp_path, ("banded", "depth"))
    with pytest.raises(FileNotFoundError, match="attention-dynamics run makes them"):
        stored_directories(tmp_path / "toy")


def again(folder, experiment=banded, **options):
    frame, manifest = read_results(folder)
    return rerun(experiment, frame, manifest, **options)


def test_recomputed_cells_are_equal_bit_for_bit(folder):
    found = again(folder, cells=5)
    assert (found.cells, found.numbers, found.equal, found.beyond) == (5, 10, 10, 0)
    assert found.same_device
    assert found.problems == ()
    assert again(folder, cells=99).cells == 12, "no more than there are"


def shifted(shift, only=None):
    calls = []

    def run(config, seed, device="cpu"):
        calls.append((config, seed))
        rows = banded.run(config, seed, device)
        rows.loc[(rows["quantity"] == (only or "near")), "value"] += shift
        return rows

    return source(run=run), calls


def test_the_draw_of_cells_is_that_of_its_seed(folder):
    draws = []
    for seed in (0, 0, 1):
        experiment, calls = shifted(0.0)
        again(folder, experiment, cells=3, seed=seed)
        draws.append(calls)
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(("factor", "beyond"), [(0.9, 0), (1.3, 1)])
def test_the_tolerance_is_the_stated_one(folder, factor, beyond):
    experiment, _ = shifted(factor * (RELATIVE + ABSOLUTE))
    found = again(folder, experiment, cells=1)
    assert found.beyond == beyond
    assert found.equal == 1
    assert found.largest == pytest.approx(factor * (RELATIVE + ABSOLUTE), rel=0.1)
    assert len(found.problems) == beyond, "one number alone has no interval"
    if beyond:
        assert re.search(r"seed \d: near is \d\.\d+, stored \d\.\d+$", found.problems[0])


def test_numbers_that_part_within_their_spread_are_counted_and_no_problem(folder):
    experiment, _ = shifted(0.004)
    found = again(folder, experiment, cells=12)
    assert found.beyond == 12
    assert found.problems == ()
    found = again(folder, shifted(0.5)[0], cells=12)
    assert len(found.problems) == 3, "one a configuration"
    assert "and others: near is 1.490, 95 % interval [" in found.problems[0]


def test_on_another_device_intervals_over_seeds_of_one_configuration_count(folder):
    experiment, calls = shifted(0.0)
    found = again(folder, experiment, cells=4, device="cuda")
    assert not found.same_device
    assert found.problems == ()
    assert len({config for config, _ in calls}) == 1
    assert sorted(seed for _, seed in calls) == [0, 1, 2, 3]
    assert found.equal == 0
    assert again(folder, cells=1, device="cuda").cells == 2
    assert again(folder, shifted(0.5)[0], cells=4, device="cuda").problems


def test_cells_with_other_quantities_are_a_problem(folder):
    def run(config, seed, device="cpu"):
        return banded.run(config, seed, device).iloc[:1]

    [problem] = again(folder, source(run=run), cells=1).problems
    assert "other quantities than stored: ['near']" in problem


def test_a_custom_sweep_is_computed_again_from_its_manifest(tmp_path):
    configs = [banded.Config(5, 0.125, "shared", True), banded.Config(6)]
    sweep(banded, configs=configs, seeds=[7, 8, 9], directory=tmp_path)
    found = verify_results(tmp_path, banded, cells=4)
    assert found.problems == ()
    assert (found.rerun.cells, found.rerun.equal) == (4, 8)


def test_a_rerun_needs_a_cell(folder):
    with pytest.raises(ValueError, match="cells must be at least 1, got 0"):
        again(folder, cells=0)


def test_the_manifest_is_json_without_infinity(folder):
    text = (folder / "manifest.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the manifest"))
