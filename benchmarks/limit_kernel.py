r"""The limit kernel: error variance at equal cost, ours against plain Monte Carlo over heads.

Variance times CPU time is what an estimate of given accuracy costs, whichever number of points
either side takes. The error is measured against a closed form over U with many more points.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.theory.limit_kernel import Method, limit_kernel
from benchmarks.instances import instance
from benchmarks.table import NAN, Case, Disagreement, Point, Row, Settings
from benchmarks.timing import median_ratio

GROUP = "limit_kernel"


@dataclass(frozen=True)
class Sizes:
    """The problem (n, T, d), heads of one estimate, and repetitions."""

    n: int = 48
    T: int = 16
    d: int = 8
    points: int = 1024
    reference_points: int = 2048
    repetitions: int = 15


def cases(settings: Settings) -> list[Case]:
    """One case for each norm of the query that the notes on the method name."""
    sizes = Sizes(6, 4, 3, 32, 256, 3) if settings.quick else Sizes()
    return [
        Case(f"|q| = {norm:g}", partial(measure, norm, sizes, settings))
        for norm in ((1.0,) if settings.quick else (1.0, 2.8))
    ]


def measure(norm: float, sizes: Sizes, settings: Settings) -> list[Row | Point]:
    """Monte Carlo, Sobol points, and the closed form, in turn, with fresh points each time."""
    problem = instance(sizes.d, sizes.T, 2, sizes.n, query="fixed")
    assert isinstance(problem.query, Tensor)
    tokens, query = problem.data.tokens.double(), norm * problem.query.double()

    def estimate(method: Method, points: int, seed: int) -> Tensor:
        found = limit_kernel(
            tokens, query=query, activation="erf", points=points, randomisations=2, method=method,
            generator=generator(seed, "benchmarks", "limit kernel", method, points),
        )  # fmt: skip
        return found.total

    reference = estimate("closed form", sizes.reference_points, 0)
    costs: dict[Method, list[float]] = {"monte carlo": [], "sobol": [], "closed form": []}
    errors: dict[Method, list[float]] = {method: [] for method in costs}
    scale = float(reference.abs().max())
    for seed in range(1, sizes.repetitions + 1):
        for method in costs:
            points = max(2, sizes.points // 32) if method == "closed form" else sizes.points
            start = time.process_time()
            found = estimate(method, points, seed)
            seconds = time.process_time() - start
            error = float((found - reference).square().mean())
            if not error < (0.2 * scale) ** 2:
                raise Disagreement(f"{method} is off by {error**0.5 / scale:.1%} of the kernel")
            errors[method].append(error)
            costs[method].append(error * seconds)
    rows: list[Row | Point] = []
    for method in ("sobol", "closed form"):
        ratio = median_ratio(costs["monte carlo"], costs[method])
        asked = 7.0 if method == "sobol" and norm == 1.0 else NAN
        rows.append(
            Row(
                GROUP, "limit kernel, error variance at equal cost",
                f"erf |q|={norm:g} n={sizes.n} T={sizes.T} d={sizes.d}", "Monte Carlo", method,
                ratio.median, ratio.lower, ratio.upper, settings.target(asked),
                rounds=sizes.repetitions, difference=float(np.mean(errors[method])) ** 0.5 / scale,
                tolerance=0.2, malloc=settings.malloc,
                note=f"{2 * sizes.points} heads for Monte Carlo and Sobol points"
                + ("; the default method" if method == "sobol" else ""),
            )
        )  # fmt: skip
    return rows
