r"""How the time of loss and gradients grows with n, m, T and d: fitted exponents.

Theory gives 1 for n, m and T, and for a fixed query 1 for d. Each race holds all sizes of one
axis; the exponent is fitted within every round, so that its spread is that of the rounds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attention_dynamics.models import shallow
from benchmarks.instances import instance
from benchmarks.table import Case, Point, Row, Settings
from benchmarks.timing import Side, growth_exponent, race

GROUP = "growth"
BASE = {"n": 4000, "m": 64, "T": 16, "d": 8}
AXES = {
    "n": (1000, 2000, 4000, 8000),
    "m": (32, 64, 128, 256),
    "T": (16, 64, 256, 1024),
    "d": (8, 16, 32, 64),
}


def cases(settings: Settings) -> list[Case]:
    """One case for every size."""
    return [Case(f"growth with {axis}", _case(axis, settings)) for axis in AXES]


def _case(axis: str, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(axis, settings)


def measure(axis: str, settings: Settings) -> list[Row | Point]:
    """Times over one axis, the others as in the paper (n = 500 for the axis T)."""
    base = dict(BASE)
    sizes: tuple[int, ...] = AXES[axis]
    if axis == "T":
        base["n"] = 500
    if settings.quick:
        base, sizes = {"n": 16, "m": 8, "T": 4, "d": 3}, (4, 8)
    sides = {str(size): _side({**base, axis: size}) for size in sizes}
    for side in sides.values():
        side()
    times = race(sides, settings.pace)
    rounds = zip(*(times.cpu[str(size)] for size in sizes), strict=True)
    slopes = sorted(growth_exponent(sizes, seconds) for seconds in rounds)
    fixed = " ".join(f"{name}={value}" for name, value in base.items() if name != axis)
    rows: list[Row | Point] = [
        Row(
            GROUP, f"exponent of time in {axis}", f"{axis}={sizes[0]}..{sizes[-1]} {fixed} q=fixed",
            "", "auto", float(np.median(slopes)), slopes[0], slopes[-1], unit="exponent",
            rounds=len(slopes), malloc=settings.malloc, note="median, least and most over rounds",
        )
    ]  # fmt: skip
    rows += [
        Point(GROUP, "time of loss and gradients", axis, axis, size,
              1e3 * times.median(str(size)), "CPU ms")
        for size in sizes
    ]  # fmt: skip
    return rows


def _side(sizes: dict[str, int]) -> Side:
    problem = instance(sizes["d"], sizes["T"], sizes["m"], sizes["n"], query="fixed", paired=False)
    return lambda: shallow.loss_and_gradients(
        problem.initial, problem.data.tokens, problem.data.targets, query=problem.query,
        validate=False,
    )  # fmt: skip
