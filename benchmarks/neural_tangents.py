r"""neural-tangents in an environment of its own: it needs a jax that nothing else here can share.

The environment is made once under ``build/neural-tangents`` from pinned packages. A kernel runs in
a process there; inputs and result travel as npz files, and each call is asked for by a line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attention_dynamics.models.parameters import Parameters
from benchmarks.timing import Spent

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "build" / "neural-tangents"
METHODS = ("JACOBIAN_CONTRACTION", "STRUCTURED_DERIVATIVES")


class NotInstalled(RuntimeError):
    """The environment can't be made here; the message says why."""


def interpreter() -> Path:
    """The interpreter of the environment, made first if need be. Raises NotInstalled."""
    python, done = FOLDER / "bin" / "python", FOLDER / ".ready"
    if done.exists():
        return python
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    pins = HERE / "neural_tangents.txt"
    for command in (
        [sys.executable, "-m", "venv", str(FOLDER)],
        # Its declared dependencies contain TensorFlow, for an interface that is not used here.
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(pins)],
        [str(python), "-c", "import jax"],
    ):
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise NotInstalled(f"not installed: {problem}") from None
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["no message"])[-1]
            raise NotInstalled(f"not installed: {last}"[:200])
    done.touch()
    return python


@dataclass(frozen=True)
class Peer:
    """A kernel in the other process: its value, peak memory and CPU seconds; a side of a race."""

    kernel: Tensor
    peak_mb: float
    first_cpu: float
    process: subprocess.Popen[str]

    def __call__(self) -> Spent:
        """Compute the kernel once more, there, and say what it took."""
        assert self.process.stdin is not None
        print("again", file=self.process.stdin, flush=True)
        return Spent(**_line(self.process))


@contextmanager
def peer(parameters: Parameters, tokens: Tensor, query: Tensor, method: str) -> Iterator[Peer]:
    """Start the process for one problem and method; it ends with the block."""
    python = interpreter()
    with tempfile.TemporaryDirectory() as folder:
        problem, result = Path(folder) / "problem.npz", Path(folder) / "result.npz"
        arrays = {**parameters._asdict(), "tokens": tokens, "query": query}
        np.savez(problem, **{name: array.numpy() for name, array in arrays.items()})
        process = subprocess.Popen(
            # -P: the module beside the script has the name of the package.
            [str(python), "-P", str(HERE / "neural_tangents_server.py"), str(problem), method,
             str(result)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **{name: v for name, v in os.environ.items() if name != "PYTHONPATH"},
                "JAX_PLATFORMS": "cpu",
                # One thread, like every other side.
                "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
            },
        )  # fmt: skip
        try:
            first = _line(process)
            kernel = torch.from_numpy(np.load(result)["kernel"])
            yield Peer(kernel, first["peak_mb"], first["cpu"], process)
        finally:
            process.kill()
            process.communicate()


def _line(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"neural-tangents ended with status {process.wait()}")
    return json.loads(line)
