r"""The command line, as a user calls it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from attention_dynamics import experiments
from attention_dynamics.cli import main
from attention_dynamics.commands.figures import curves, draw_bands
from attention_dynamics.experiments import names, width
from attention_dynamics.running import read_manifest, read_results, sweep
from attention_dynamics.running.store import write_manifest
from attention_dynamics.running.verdicts import verdicts
from attention_dynamics.theory.bounds import UNIT_BALL
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.setting import TERMS, Setting
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.projection import Radii

pytestmark = pytest.mark.xdist_group("cli")  # one process runs the smoke profiles for all


def call(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "attention_dynamics.cli", *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The smoke profile of every experiment, where the commands expect it."""
    root = tmp_path_factory.mktemp("results")
    for name in names():
        sweep(experiments.get(name), "smoke", directory=root / name / "smoke")
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    directory = tmp_path_factory.mktemp("width")
    answer = call("run", "width", "--profile", "smoke", "--directory", str(directory))
    assert answer.returncode == 0, answer.stderr
    return directory, answer


def test_list_names_every_experiment_with_its_profiles(capsys):
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^width$", printed, re.M)
    assert "paper  6 configs x 10 seeds" in printed


def test_run_writes_the_table_of_the_same_sweep_in_python(finished):
    directory, answer = finished
    frame, manifest = read_results(directory)
    assert frame.equals(sweep(width, "smoke"))
    assert manifest["profile"] == "smoke"
    assert json.loads((directory / "manifest.json").read_text()) == manifest
    assert "width smoke" in answer.stderr, "the bar"
    assert f"{directory}/table.parquet" in answer.stdout


def test_show_prints_slopes_and_bands_and_draws_them(finished, tmp_path):
    directory, _ = finished
    target = tmp_path / "width.svg"
    answer = call(
        "show", "width", "--profile", "smoke", "--directory", str(directory),
        "--figure", str(target),
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("width, profile smoke: 9 cells, commit ")
    slope = re.search(r"linearisation_random +(-\d\.\d+)", answer.stdout)
    assert slope, answer.stdout
    assert -2 < float(slope[1]) < 0
    assert target.read_bytes().rstrip().endswith(b"</svg>")


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_show_prints_and_draws_every_experiment(results, tmp_path, capsys, name, suffix):
    target = tmp_path / "new folder" / f"{name}{suffix}"
    arguments = ["--directory", str(results / name / "smoke"), "--figure", str(target)]
    assert main(["show", name, *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    summary = experiments.get(name).summarise(read_results(results / name / "smoke")[0])
    assert printed.out.startswith(f"{name}, profile smoke: ")
    for quantity in summary["quantity"]:
        assert quantity in printed.out
    assert f"figure: {target}" in printed.out
    start = {".svg": b"<?xml", ".png": b"\x89PNG"}[suffix]
    assert target.read_bytes().startswith(start)
    assert target.stat().st_size > 5000


def test_show_refuses_another_kind_of_figure(finished, capsys):
    directory, _ = finished
    arguments = ["--directory", str(directory), "--figure", "figure.jpg"]
    assert main(["show", "width", *arguments]) == 2
    assert "a name that ends in .svg or .png, got figure.jpg" in capsys.readouterr().err


def test_a_curve_is_drawn_only_where_nothing_but_the_size_varies(results):
    def curves_of(name):
        return curves(experiments.get(name), read_results(results / name / "smoke")[0])

    assert "linearisation_random" in curves_of("width")
    assert curves_of("population_limit") == ["excess", "gradient_error"]
    for mixed in ("linearisation", "encoder_scaling", "certificates", "common_task"):
        assert curves_of(mixed) == []


def test_a_figure_of_bands_has_a_line_a_band_and_says_which_are_missed(results):
    experiment = experiments.get("common_task")
    summary = experiment.summarise(read_results(results / "common_task" / "smoke")[0])
    drawn = draw_bands(verdicts(summary), "title")
    axes = drawn.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(summary["quantity"])
    words = [text.get_text().partition(":")[0] for text in axes.texts]
    assert words == ["met" if inside else "missed" for inside in summary["inside"]]
    plt.close(drawn)
    with pytest.raises(ValueError, match="no band to draw"):
        draw_bands({}, "title")


def copied(results, tmp_path, *chosen):
    for name in chosen:
        shutil.copytree(results / name / "smoke", tmp_path / name / "smoke")
    return tmp_path


def test_verify_passes_what_is_as_published_and_prints_what_is_missed(results, capsys):
    assert main(["verify", "--results", str(results)]) == 0
    printed = capsys.readouterr().out
    for name in names():
        manifest = read_manifest(results / name / "smoke" / "manifest.json")
        assert f"{name}/smoke: {manifest['cells']} cells, commit " in printed
        for band, verdict in manifest["verdicts"].items():
            assert f"  {'met   ' if verdict['met'] else 'MISSED'} {band}: " in printed
    found = [
        verdict["met"]
        for name in names()
        for verdict in read_manifest(results / name / "smoke" / "manifest.json")[
            "verdicts"
        ].values()
    ]
    assert False in found, "smoke profiles miss bands"
    assert printed.splitlines()[-1] == (
        f"{len(names())} results, {sum(found)} bands met, {len(found) - sum(found)} missed; "
        "0 results not as published"
    )


def test_verify_fails_on_another_verdict_a_damaged_table_and_a_foreign_name(
    results, tmp_path, capsys
):
    root = copied(results, tmp_path, "width", "sample_maximum", "kernel_length", "encoder_width")
    folder = root / "width" / "smoke"
    manifest = read_manifest(folder / "manifest.json")
    band, verdict = next(iter(manifest["verdicts"].items()))
    changed = verdict | {"met": not verdict["met"]}
    write_manifest(folder, manifest | {"verdicts": manifest["verdicts"] | {band: changed}})
    table = root / "sample_maximum" / "smoke" / "table.parquet"
    table.write_bytes(table.read_bytes()[:-4])
    folder = root / "kernel_length" / "smoke"
    write_manifest(folder, read_manifest(folder / "manifest.json") | {"experiment": "depth"})
    assert main(["verify", "--results", str(root)]) == 1
    printed = capsys.readouterr().out
    assert re.search(rf"  WRONG  {band}: (met|missed) when published, (met|missed) today", printed)
    assert "is not the table its manifest describes" in printed
    assert "unknown experiment: experiment must be one of" in printed
    assert printed.splitlines()[-1].endswith("; 3 results not as published")
    assert main(["verify", "encoder_width", "--results", str(root)]) == 0
    assert main(["verify", "--results", str(root / "nothing")]) == 2


def test_verify_records_verdicts_where_there_are_none(results, tmp_path, capsys):
    root = copied(results, tmp_path, "encoder_width")
    folder = root / "encoder_width" / "smoke"
    complete = read_manifest(folder / "manifest.json")
    write_manifest(folder, {key: x for key, x in complete.items() if key != "verdicts"})
    assert main(["verify", "--results", str(root)]) == 0
    assert "verify --record adds today's" in capsys.readouterr().out
    assert main(["verify", "--record", "--results", str(root)]) == 0
    assert "verify --record" not in capsys.readouterr().out
    assert read_manifest(folder / "manifest.json") == complete


def test_verify_computes_cells_again(results, tmp_path, capsys):
    root = copied(results, tmp_path, "sample_maximum", "encoder_width")
    assert main(["verify", "--rerun", "2", "--device", "cpu", "--results", str(root)]) == 0
    printed = capsys.readouterr().out
    assert "2 cells again: 2 numbers, 2 equal bit for bit, 0 beyond the tolerance" in printed
    assert "2 cells again: 6 numbers" in printed
    assert main(["verify", "--rerun", "-1", "--results", str(root)]) == 2
    assert "got -1" in capsys.readouterr().err


def test_the_stored_results_of_the_book_are_as_published(capsys):
    root = Path(__file__).parents[2] / "results"
    assert main(["verify", "--results", str(root)]) == 0, capsys.readouterr().out


def test_seeds_in_place_of_the_profiles_are_kept_apart_from_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "encoder_width", "--device", "cpu", "--seeds", "5", "6"]
    assert main(arguments) == 0
    assert not (tmp_path / "results" / "encoder_width" / "smoke").exists()
    capsys.readouterr()
    assert main(["show", "encoder_width", "--profile", "custom"]) == 0
    assert "encoder_width, profile custom: 8 cells" in capsys.readouterr().out


def test_run_sweeps_on_a_dask_cluster(tmp_path, capsys):
    pytest.importorskip("distributed", reason="sweeps on a cluster need dask.distributed")
    arguments = ["run", "encoder_width", "--device", "cpu", "--directory", str(tmp_path)]
    assert main([*arguments, "--executor", "dask", "--workers", "1"]) == 0
    frame, _ = read_results(tmp_path, experiments.get("encoder_width"))
    assert frame.equals(sweep(experiments.get("encoder_width"), "smoke"))


def test_bound_prints_the_numbers_of_the_calculator(capsys):
    arguments = (
        "bound -m 4096 -n 500 -T 97 -d 17 --tau 2000 --rho 2 --nu 1 0.5 1.5 --eta 0.001 "
        "--delta 0.01 --delta-prime 0.02 --activation erf --form paper --error sup"
    )
    assert main(arguments.split()) == 0
    printed = capsys.readouterr().out
    setting = Setting(
        heads=4096, samples=500, length=97, dimension=17, steps=2000, step_size=0.001,
        radii=Radii(2.0, 2.0, 2.0), transport_norms=TransportNorms(1.0, 0.5, 1.5),
        inputs=UNIT_BALL, delta=0.01, delta_prime=0.02, activation="erf",
    )  # fmt: skip
    found = BoundCalculator(form="paper", error="sup").bound(setting)
    for name in TERMS:
        assert re.search(
            rf"^  {name} +{getattr(found.terms, name):.6g} +of the loss$", printed, re.M
        )
    assert re.search(rf"^  total +{found.total:.6g} ", printed, re.M)
    assert f"with probability at least {found.probability:g}" in printed
    assert (
        f"is {found.total:.6g} for T = 97, {found.total:.6g} for T = 194; T is in no term"
        in printed
    )
    assert found.vacuous
    assert printed.splitlines()[-1].startswith("vacuous: ")


def test_bound_is_silent_on_vacuity_where_it_says_something(capsys):
    small = "bound -m 100000000 --tau 100000000 --rho 0.5 --nu 0.5"
    assert main(small.split()) == 0
    assert "vacuous" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bound -m 5", "heads: expected an even number"),
        ("bound --nu 3", "radii.c: expected at least transport_norms.c = 3"),
        ("bound --rho 1 2", "rho: expected one number or three, for c, U, W, got 2"),
        ("bound --form slow", "form"),
        ("run width --workers 0", "workers must be at least 1, got 0"),
        ("run width --device cpu --executor 127.0.0.1", ""),
    ],
)
def test_arguments_out_of_range_are_named(arguments, message, tmp_path, monkeypatch, capsys):
    if "executor" in arguments:
        monkeypatch.setitem(sys.modules, "distributed", None)
        message = "dask.distributed is not installed: pip install 'attention-dynamics[cluster]'"
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


def test_a_failing_cell_is_a_message_and_status_1(tmp_path, monkeypatch, capsys):
    def fails(config, seed, device="cpu"):
        raise ArithmeticError("this cell fails on purpose")

    monkeypatch.setattr(width, "run", fails)
    assert main(["run", "width", "--device", "cpu", "--directory", str(tmp_path)]) == 1
    assert "attention-dynamics: width: Config(heads=" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "depth"), f"experiment must be one of {', '.join(names())}; got 'depth'"),
        (("run", "width", "--profile", "huge"), "smoke, book, paper; got 'huge'"),
        (("run", "width", "--device", "cuda:99"), "cuda:99"),
        (("show", "width", "--profile", "paper"), "the sweep has not finished"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("attention-dynamics: ")
    assert message in printed.err


def test_a_shell_sees_the_status_and_no_traceback(tmp_path):
    answer = call("show", "width", cwd=tmp_path)
    assert answer.returncode == 2
    assert "the sweep has not finished" in answer.stderr
    assert "Traceback" not in answer.stderr
