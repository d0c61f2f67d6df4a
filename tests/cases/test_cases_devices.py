r"""Cases 8, 14 and 15: what devices and threads do to last digits, and how it is told."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attention_dynamics.experiments import width
from attention_dynamics.running import process_pool, read_results, sweep
from attention_dynamics.running.device import WORKSPACE, choose_device, prepare_device

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "running"))
import toy_experiment as toy

#: What threads may change: sums of float32 in another order, 1e-7, through the steps of a descent.
THREADS_RELATIVE = 1e-3


def test_case_8_tf32_is_off_by_default_and_the_manifest_says_so(tmp_path):
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import toy_experiment as toy\n"
        "from attention_dynamics.running import sweep\n"
        "from attention_dynamics import models, training, theory\n"
        "for name, switch in (('off', lambda: None),\n"
        "        ('old', lambda: torch.set_float32_matmul_precision('high')),\n"
        "        ('new', lambda: setattr(torch.backends.cuda.matmul, 'fp32_precision', 'tf32'))):\n"
        "    switch()\n"
        "    sweep(toy, 'smoke', directory=f'{sys.argv[2]}/{name}')\n"
        "    torch.set_float32_matmul_precision('highest')\n"
    )
    environment = {name: x for name, x in os.environ.items() if "TF32" not in name}
    subprocess.run(
        [sys.executable, "-c", code, str(Path(toy.__file__).parent), str(tmp_path)],
        check=True, env=environment, timeout=120,
    )  # fmt: skip
    recorded = {name: read_results(tmp_path / name)[1]["tf32"] for name in ("off", "old", "new")}
    assert recorded == {"off": [False], "old": [True], "new": [True]}


def test_case_14_one_and_six_threads_agree_within_the_tolerance_and_are_recorded(tmp_path):
    found = {}
    for threads in (1, 6):
        with process_pool(1, threads=threads) as pool:
            sweep(width, "smoke", seeds=[0, 1], executor=pool, directory=tmp_path / str(threads))
        found[threads], manifest = read_results(tmp_path / str(threads))
        assert manifest["threads"] == [threads]
    one, six = found[1], found[6]
    assert one.drop(columns="value").equals(six.drop(columns="value"))
    counts = one["quantity"].str.startswith("active")  # heads on their boundary: whole numbers
    np.testing.assert_allclose(
        one["value"][~counts], six["value"][~counts], rtol=THREADS_RELATIVE, atol=1e-7
    )
    assert (one["value"][counts] - six["value"][counts]).abs().max() <= 1
    # the tolerance is not so wide that anything would pass
    other = sweep(width, "smoke", seeds=[0, 1, 2, 3], directory=tmp_path / "6")
    assert read_results(tmp_path / "6")[1]["threads"] == sorted({6, torch.get_num_threads()})
    other = other[other["seed"] > 1]
    assert not np.allclose(one["value"], other["value"], rtol=THREADS_RELATIVE, atol=1e-7)


@pytest.fixture
def no_workspace(monkeypatch):
    monkeypatch.setenv(WORKSPACE, "")  # so that it is put back
    monkeypatch.delenv(WORKSPACE)


@pytest.mark.usefixtures("no_workspace")
def test_case_15_the_environment_is_set_while_cuda_has_not_started(monkeypatch):
    for torch_module in (None, SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))):
        monkeypatch.setitem(sys.modules, "torch", torch_module)
        os.environ.pop(WORKSPACE, None)
        prepare_device("cuda:1")
        assert os.environ[WORKSPACE] == ":4096:8"


@pytest.mark.usefixtures("no_workspace")
def test_case_15_where_cuda_has_started_the_remedy_is_said(monkeypatch):
    started = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "torch", started)
    with pytest.warns(UserWarning, match=f"set {WORKSPACE}=:4096:8 in the environment before"):
        prepare_device("cuda")
    assert WORKSPACE not in os.environ
    monkeypatch.setenv(WORKSPACE, ":0:0")
    with pytest.warns(UserWarning, match=f"{WORKSPACE} is ':0:0' and CUDA has started"):
        prepare_device("cuda")
    for good in (":4096:8", ":16:8"):
        monkeypatch.setenv(WORKSPACE, good)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare_device("cuda")
        assert os.environ[WORKSPACE] == good


@pytest.mark.usefixtures("no_workspace")
def test_case_15_a_sweep_prepares_its_device_before_the_first_cell_and_records_it(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch", None)  # a process that has not loaded it
    seen = []

    def run(config, seed, device):
        seen.append((device, os.environ.get(WORKSPACE)))
        return toy.run(config, seed)

    names = ("NAME", "SCHEMA", "COLUMNS", "PROFILES", "summarise")
    experiment = SimpleNamespace(run=run, **{name: getattr(toy, name) for name in names})
    for device, expected in (("cpu", None), ("cuda", ":4096:8")):
        sweep(experiment, "smoke", device=device, directory=tmp_path / device)
        assert set(seen) == {(device, expected)}
        assert read_results(tmp_path / device)[1]["cublas_workspace"] == [expected]
        seen.clear()


def test_devices_are_chosen_by_what_there_is(monkeypatch):
    assert choose_device("cpu") == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ValueError, match="no CUDA device is available; use cpu or auto"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == "cuda"
    assert choose_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="this machine has 2 CUDA devices, from cuda:0"):
        choose_device("cuda:2")
    with pytest.raises(ValueError, match="device 'gpu'"):
        choose_device("gpu")
