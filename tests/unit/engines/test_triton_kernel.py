"""The Triton kernels in processes of their own: interpreted, and compiled where there is a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("triton_cases.py")
ROOT = CASES.parents[3]
WAYS = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.parametrize("device", WAYS)
def test_the_kernels_do_what_the_cases_say(device):
    environment = os.environ | {"TRITON_DEVICE": device, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    environment.pop("TRITON_INTERPRET", None)
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    alone = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *alone, str(CASES)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


@pytest.mark.parametrize(
    ("absent", "reason"),
    [(True, "Triton can't be imported"), (False, "TRITON_INTERPRET=1")],
    ids=["without triton", "without a GPU"],
)
def test_a_call_that_names_the_engine_is_served_by_another(absent, reason):
    script = f"""
import logging, sys
import torch
if {absent}:
    sys.modules["triton"] = None
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import symmetric_initialisation
phi = symmetric_initialisation(4, 3, generator=torch.Generator().manual_seed(0))
tokens, y = torch.ones(2, 5, 3), torch.ones(2)
loss = {{
    engine: float(shallow.loss_and_gradients(phi, tokens, y, query="last", engine=engine)[0])
    for engine in ("triton", "reference")
}}
assert loss["triton"] == loss["reference"] == 1.0
assert "triton.language" not in sys.modules or not {absent}
"""
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("WARNING engine triton can't be used")
    assert reason in run.stdout


def test_nothing_imports_triton_unasked():
    script = """
import sys
import torch
before = "triton" in sys.modules
from attention_dynamics.training import stacked
from attention_dynamics.models.engines import triton
assert before or "triton" not in sys.modules
"""
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
