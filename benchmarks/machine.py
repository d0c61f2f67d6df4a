r"""The measured limit of one core: multiply-adds, exponentials, copies; and the work of a step.

:func:`spend` carries out a number of operations from registers, with nothing to load, so that the
limit takes part in a race like any other side: same minute, same clock speed.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from attention_dynamics.models.engines import native
from benchmarks.table import Case, Point, Row, Settings
from benchmarks.timing import Side, race

GROUP = "machine"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Work:
    """Operations of a computation: floating-point ones (multiply-add = 2) and exponentials."""

    flops: float
    exponentials: float

    def plus(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(self.flops + other.flops, self.exponentials + other.exponentials)


def gradient_work(n: int, T: int, d: int, m: int, *, last: bool) -> Work:
    r"""
    .. math:: 8d \cdot nTm + 4d^2 \cdot nm \text{ operations}, \qquad nTm \text{ exponentials}.

    Logits, projections, and the sums a and r take 2d each for every (sample, token, head); a query
    of its own for each sample adds :math:`Wq` and the outer products of the gradient. A fixed query
    shares both, and the second term is then :math:`4d^2m`.
    """
    return Work(8 * d * n * T * m + 4 * d**2 * m * (n if last else 1), n * T * m)


def value_work(n: int, T: int, d: int, m: int, *, last: bool) -> Work:
    r""":math:`4d \cdot nTm + 2d^2 \cdot nm` operations and :math:`nTm` exponentials: f alone."""
    return Work(4 * d * n * T * m + 2 * d**2 * m * (n if last else 1), n * T * m)


@dataclass(frozen=True)
class Machine:
    """How the limit is measured: ``source`` says by what, the functions spend operations."""

    source: str
    multiply_add: Callable[[float], object]
    exponentials: Callable[[float], object]


@cache
def machine() -> Machine:
    """The C++ loops of limit.cpp, or torch's GEMM and exp where no compiler is found."""
    try:
        library = ctypes.CDLL(str(_build()))
    except (native.Unavailable, OSError, subprocess.SubprocessError) as problem:
        log.warning("no C++ limit (%s): torch's GEMM and exp stand in for it", problem)
        return Machine("torch GEMM and exp", _gemm_flops, _torch_exponentials)
    for function in (library.multiply_add, library.exponentials):
        function.argtypes, function.restype = [ctypes.c_double], ctypes.c_float
    lanes = library.lane_count()
    return Machine(f"C++, {lanes} lanes", library.multiply_add, library.exponentials)


def spend(work: Work) -> None:
    """Carry out as many operations as ``work`` counts, as fast as one core can."""
    machine().multiply_add(work.flops)
    machine().exponentials(work.exponentials)


def cases(settings: Settings) -> list[Case]:
    """The limits of this machine, one case each."""
    return [
        Case("limits of one core", lambda: _limits(settings)),
        Case("two cores", lambda: _two_cores(settings)),
    ]


def _limits(settings: Settings) -> list[Row | Point]:
    flops = 2e7 if settings.quick else 2e9
    buffer = np.zeros((1 if settings.quick else 64) * 2**20, dtype=np.uint8)
    target = np.empty_like(buffer)
    amounts = {
        "multiply-add": (flops, "GFLOP/s"),
        "exponential": (flops / 20, "G/s"),
        "copy": (2.0 * buffer.nbytes, "GB/s"),
    }
    sides: dict[str, Side] = {
        "multiply-add": lambda: machine().multiply_add(flops),
        "exponential": lambda: machine().exponentials(flops / 20),
        "copy": lambda: np.copyto(target, buffer),
    }
    times = race(sides, settings.pace)
    rows: list[Row | Point] = []
    for name, (amount, unit) in amounts.items():
        rates = sorted(1e-9 * amount / np.asarray(times.cpu[name]))
        rows.append(
            Row(
                GROUP, f"limit of one core: float32 {name}", machine().source, "", "limit",
                ratio=float(np.median(rates)), lower=float(rates[0]), upper=float(rates[-1]),
                unit=unit, ours_ms=1e3 * times.median(name), rounds=len(rates),
                malloc=settings.malloc,
                note="median, least and most over the rounds"
                + ("; bytes read plus bytes written" if name == "copy" else ""),
            )
        )  # fmt: skip
    return rows


def _two_cores(settings: Settings) -> list[Row]:
    """How much two threads of pure multiply-adds do in the time of one: what threads can give."""
    flops = 2e7 if settings.quick else 4e9
    run = machine().multiply_add

    def two() -> None:
        threads = [threading.Thread(target=run, args=(flops / 2,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    times = race({"one thread": lambda: run(flops), "two threads": two}, settings.pace)
    ratio = times.ratio("one thread", "two threads", "wall")
    return [
        Row(
            GROUP, "multiply-adds on 1 -> 2 threads, wall", machine().source,
            "one thread", "two threads", ratio.median, ratio.lower, ratio.upper,
            baseline_wall_ms=1e3 * times.median("one thread", "wall"),
            ours_wall_ms=1e3 * times.median("two threads", "wall"),
            rounds=len(times.wall["two threads"]), threads=2, malloc=settings.malloc,
            note="what any program could gain here; below 2 where the two are one core's, or busy",
        )
    ]  # fmt: skip


def processor() -> str:
    """The name of the processor, as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _build() -> Path:
    """Compile limit.cpp for this processor, kept beside the library's own kernels."""
    found = native.compiler()
    if found is None:
        raise native.Unavailable("no C++ compiler was found")
    source = Path(__file__).with_name("limit.cpp")
    capability = native.instruction_set()
    target = native.cache_directory() / f"limit-{capability.lower()}-{_digest(source)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(f".{time.time_ns()}")
        extra = native.INSTRUCTION_SETS.get(capability, ())
        subprocess.run(
            [found, *native.FLAGS, *extra, str(source), "-o", str(fresh)],
            check=True, capture_output=True,
        )  # fmt: skip
        fresh.replace(target)
    return target


def _digest(source: Path) -> str:
    import hashlib

    return hashlib.sha256(source.read_bytes()).hexdigest()[:16]


def _gemm_flops(flops: float) -> None:
    size = 256
    a, b, c = (torch.zeros(size, size) for _ in range(3))
    for _ in range(max(1, round(flops / (2 * size**3)))):
        torch.mm(a, b, out=c)


def _torch_exponentials(count: float) -> None:
    x = torch.zeros(2**14)
    y = torch.empty_like(x)
    for _ in range(max(1, round(count / 2**14))):
        torch.exp(x, out=y)
