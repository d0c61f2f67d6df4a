r"""The command line, as a user calls it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from attention_dynamics.cli import main
from attention_dynamics.experiments import names, width
from attention_dynamics.running import read_results, sweep


def call(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "attention_dynamics.cli", *arguments],
        capture_output=True, text=True, cwd=cwd, timeout=120,
    )  # fmt: skip


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
