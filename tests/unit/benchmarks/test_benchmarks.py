"""The benchmarks: what they refuse, what their ratios are, and that every group's sides agree."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from attention_dynamics.models import shallow
from attention_dynamics.training import Radii
from attention_dynamics.training.projection import ProjectionSet
from benchmarks import machine, plain, training_step
from benchmarks.engines import engine
from benchmarks.groups import GROUPS, TUNED_MALLOC, environment, read, run, write
from benchmarks.instances import instance
from benchmarks.probe import peak_megabytes
from benchmarks.results import describe, store
from benchmarks.table import Case, Disagreement, Point, Row, Settings, agreement, as_text, run_case
from benchmarks.timing import (
    Clock,
    Pace,
    Spent,
    growth_exponent,
    median_ratio,
    race,
)

ROOT = Path(__file__).resolve().parents[3]
QUICK = Settings(quick=True)


class FakeTime:
    """A clock that moves only when a side says so."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def side(self, name, seconds):
        def spend():
            self.calls.append(name)
            self.now += seconds() if callable(seconds) else seconds

        return spend

    @property
    def clock(self):
        return Clock(cpu=lambda: self.now, wall=lambda: 2 * self.now)


def test_ratios_are_those_of_the_clock():
    fake = FakeTime()
    sides = {"slow": fake.side("slow", 3.0), "fast": fake.side("fast", 0.25)}
    times = race(sides, Pace(rounds=4, turn=0.1, budget=100.0, least=2), clock=fake.clock)
    assert times.ratio("slow", "fast") == pytest.approx((12.0, 12.0, 12.0))
    assert times.median("slow") == pytest.approx(3.0)
    assert times.median("fast", "wall") == pytest.approx(0.5)


def test_sides_take_turns_and_short_ones_are_repeated():
    fake = FakeTime()
    sides = {"a": fake.side("a", 1.0), "b": fake.side("b", 0.25)}
    race(sides, Pace(rounds=3, turn=1.0, budget=1000.0, least=2), clock=fake.clock)
    assert "".join(fake.calls) == "a" + "bb" + 3 * ("a" + 4 * "b")


def test_a_budget_bounds_the_rounds_but_not_below_the_least():
    fake = FakeTime()
    times = race({"a": fake.side("a", 10.0)}, Pace(9, 1.0, 15.0, least=2), clock=fake.clock)
    assert len(times.cpu["a"]) == 2


def test_a_drift_that_hits_both_sides_leaves_the_ratio():
    fake = FakeTime()
    slow = fake.side("slow", lambda: 2.0 * (fake.now + 1))
    fast = fake.side("fast", lambda: 1.0 * (fake.now + 1))
    times = race({"slow": slow, "fast": fast}, Pace(5, 1e-9, 1e9, least=5), clock=fake.clock)
    assert times.cpu["slow"][-1] > 10 * times.cpu["slow"][0]
    assert times.ratio("slow", "fast").lower == pytest.approx(times.ratio("slow", "fast").upper)


def test_a_side_in_another_process_brings_its_own_seconds():
    fake = FakeTime()
    times = race(
        {"here": fake.side("here", 1.0), "there": lambda: Spent(5.0, 7.0)},
        Pace(2, 1.0, 100.0, least=2),
        clock=fake.clock,
    )
    assert times.ratio("there", "here").median == pytest.approx(5.0)
    assert times.median("there", "wall") == 7.0


def test_the_interval_holds_the_median_and_spreads_with_the_ratios():
    ratio = median_ratio([2.0, 4.0, 6.0, 8.0, 10.0], [1.0] * 5)
    assert ratio.median == 6.0
    assert 2.0 <= ratio.lower < 6.0 < ratio.upper <= 10.0
    with pytest.raises(ValueError, match="one time a round"):
        median_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="not positive"):
        median_ratio([1.0], [0.0])
    with pytest.raises(ValueError, match="at least one function"):
        race({}, Pace())


def test_the_exponent_of_a_power_is_that_power():
    assert growth_exponent([1, 2, 4], [3.0, 3.0 * 2**1.5, 3.0 * 4**1.5]) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("ratio", "target", "sense", "error", "met"),
    [
        (8.0, 7.5, "at least", "", "yes"),
        (7.0, 7.5, "at least", "", "no"),
        (1.8, 1.7, "at most", "", "no"),
        (1.6, 1.7, "at most", "", "yes"),
        (8.0, math.nan, "at least", "", ""),
        (8.0, 7.5, "at least", "it broke", "failed"),
    ],
)
def test_verdicts(ratio, target, sense, error, met):
    row = Row("g", "w", "s", "b", "o", ratio=ratio, target=target, sense=sense, error=error)
    assert row.met == met
    assert "w [s]" in as_text(row)


def test_results_that_differ_are_refused():
    right = (torch.ones(3), torch.arange(4.0))
    assert agreement(right, right, 0.0) == 0.0
    with pytest.raises(Disagreement, match="differ by 1"):
        agreement(right, (torch.ones(3), torch.zeros(4)), 1e-6)
    with pytest.raises(Disagreement, match="shapes"):
        agreement(right, (torch.ones(3), torch.ones(5)), 1e-6)
    with pytest.raises(Disagreement, match="nan"):
        agreement(torch.ones(2), torch.tensor([1.0, math.nan]), 1e-6)


def test_a_wrong_step_of_ours_is_a_failed_row_and_no_ratio(monkeypatch):
    correct = training_step.our_training

    def wrong(problem, steps):
        history, final = correct(problem, steps)
        return history, (final[0], 1.01 * final[1], final[2])

    monkeypatch.setattr(training_step, "our_training", wrong)
    shape = training_step.QUICK[0]
    rows = [row for row in training_step.measure(shape, QUICK) if isinstance(row, Row)]
    assert rows
    assert {row.met for row in rows} == {"failed"}
    assert any("Disagreement" in row.error for row in rows)
    assert all(math.isnan(row.ratio) for row in rows)


def test_one_case_that_raises_leaves_a_row_and_the_rest_goes_on():
    def broken():
        raise ZeroDivisionError("no samples\nsecond line")

    (row,) = run_case("group", Case("broken case", broken))
    assert row.met == "failed"
    assert row.error == "ZeroDivisionError: no samples"
    assert row.what == "broken case"


def test_a_process_that_dies_leaves_a_row():
    rows = [entry for entry in run(["absent"], quick=True, threads=1) if isinstance(entry, Row)]
    assert [row.met for row in rows] == ["failed"]
    assert "ended with status" in rows[0].error


def test_the_plain_trainer_is_the_model_and_its_projection():
    problem = instance(3, 4, 6, 20, paired=False)
    model = plain.PlainTransformer(problem.initial, None)
    expected = shallow.forward(problem.initial, problem.data.tokens, query="last")
    torch.testing.assert_close(model(problem.data.tokens).detach(), expected)
    for parameter in model.parameters():
        parameter.data += 3.0
    moved = type(problem.initial)(*(p.detach().clone() for p in model.parameters()))
    plain.project(list(model.parameters()), list(problem.initial), 0.5)
    region = ProjectionSet(problem.initial, Radii(0.5, 0.5, 0.5)).project(moved)
    for ours, theirs in zip(region, model.parameters(), strict=True):
        torch.testing.assert_close(theirs.detach(), ours)


def test_the_limit_is_spent_and_its_exponential_is_one():
    limit = machine.machine()
    if limit.source.startswith("C++"):
        assert limit.exponentials(8.0) == pytest.approx(math.exp(-0.25), rel=1e-6)
    work = machine.gradient_work(4000, 16, 8, 64, last=True)
    assert work.flops == 4000 * 64 * (16 * 64 + 4 * 64)
    assert work.exponentials == 4000 * 16 * 64
    assert machine.gradient_work(4000, 16, 8, 64, last=False).flops < work.flops


def test_without_a_compiler_torch_stands_in_for_the_limit(monkeypatch):
    machine.machine.cache_clear()
    monkeypatch.setattr(machine.native, "compiler", lambda: None)
    try:
        assert "torch" in machine.machine().source
        machine.spend(machine.Work(1e6, 1e4))
    finally:
        machine.machine.cache_clear()


def test_only_the_tuned_process_has_the_allocator_tuned(monkeypatch):
    monkeypatch.setenv("MALLOC_TOP_PAD_", "1")
    assert not environment("default", 1).keys() & TUNED_MALLOC
    assert environment("tuned", 2).items() >= {**TUNED_MALLOC, "OMP_NUM_THREADS": "2"}.items()


def test_the_engine_of_a_row_is_set_and_put_back(monkeypatch):
    monkeypatch.delenv("ATTENTION_DYNAMICS_ENGINE", raising=False)
    with engine("eager"):
        assert os.environ["ATTENTION_DYNAMICS_ENGINE"] == "eager"
    assert "ATTENTION_DYNAMICS_ENGINE" not in os.environ


def allocate(megabytes):
    return lambda: torch.ones(megabytes * 2**18)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak memory to read")
def test_the_peak_is_what_the_computation_allocates():
    assert peak_megabytes(allocate, 200) == pytest.approx(200, abs=12)


def test_entries_survive_the_file_between_processes(tmp_path):
    row = Row("machine", "w", "s", "b", "o", ratio=2.0, target=1.0)
    point = Point("machine", "curve", "ours", "m", 8, 1.5, "ms")
    for entry in (row, point, {"group": "machine", "seconds": 1.0}):
        write(tmp_path / "lines", entry)
    back = list(read(tmp_path / "lines"))
    assert back[0].record()["met"] == "yes"
    assert back[1] == point
    assert back[2] == {"group": "machine", "seconds": 1.0}


def facts(group, commit="abc"):
    return {"group": group, "malloc": "default", "commit": commit, "finished": "2026", "seconds": 1}


def test_measuring_one_group_again_keeps_the_others(tmp_path):
    first = [Row("machine", "limit", "", "", "", ratio=1.0), facts("machine"),
             Row("gpu", "old", "", "", "", ratio=1.0), facts("gpu")]  # fmt: skip
    store(tmp_path, first, quick=False, threads=1)
    again = [Row("gpu", "new", "", "", "", ratio=2.0), facts("gpu", "def")]
    store(tmp_path, again, quick=False, threads=1)
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["what"].tolist() == ["limit", "new"]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {entry["group"]: entry["commit"] for entry in manifest["groups"]} == {
        "machine": "abc",
        "gpu": "def",
    }


def test_the_manifest_says_what_one_needs_to_run_it_again():
    manifest = describe([facts("machine")], quick=False, threads=1)
    for name in (
        "command", "groups", "seeds", "processor", "threads", "versions", "finished", "compiler",
        "instruction_set", "engines", "pace", "tuned_malloc", "cores",
    ):  # fmt: skip
        assert manifest[name] is not None, name
    recorded, running = manifest["versions"]["torch"], torch.__version__
    assert recorded.split("+")[0] == running.split("+")[0]
    assert set(manifest["engines"]) >= {"reference", "eager", "compiled", "fused"}


def test_the_quick_profile_runs_and_all_sides_agree(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    table = pd.read_csv(tmp_path / "table.csv")
    failed = table[table["met"] == "failed"]
    # An engine that this machine does not have is a row that says so.
    unusable = failed["error"].astype(str).str.startswith("Unusable")
    assert failed[~unusable].empty, failed[["group", "what", "error"]].to_string()
    assert done.returncode == int(len(failed) > 0), done.stderr
    assert set(table["group"]) == set(GROUPS)
    compared = table.dropna(subset=["difference"])
    assert (compared["difference"] <= compared["tolerance"]).all()
    assert set(compared["group"]) >= {
        "training_step", "threads", "tangent_kernel", "teacher", "linearisation", "recurrence",
        "regression_step", "memory", "peers", "limit_kernel",
    }  # fmt: skip
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert {entry["group"] for entry in manifest["groups"]} == set(GROUPS)
    assert manifest["profile"] == "quick"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda p: p.stem)
def test_modules_of_the_benchmarks_stay_short(path):
    assert len(path.read_text("utf8").splitlines()) <= 300


def test_the_library_does_not_know_the_benchmarks():
    for module in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) benchmarks\b", module.read_text("utf8"), re.M), (
            module
        )
