r"""One thread against two: wall time of loss and gradients, on the fused kernel."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from attention_dynamics.models import shallow
from benchmarks.engines import require_engine
from benchmarks.instances import instance
from benchmarks.table import Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import race
from benchmarks.training_step import Shape

GROUP = "threads"
SHAPES = (Shape(8, 16, 64), Shape(8, 16, 256), Shape(17, 97, 64))


def cases(settings: Settings) -> list[Case]:
    """Three shapes of the training step."""
    shapes = (Shape(3, 4, 8, 64),) if settings.quick else SHAPES
    return [Case(f"1 -> 2 threads {shape}", _case(shape, settings)) for shape in shapes]


def _case(shape: Shape, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(shape, settings)


def measure(shape: Shape, settings: Settings) -> list[Row | Point]:
    """The same call with torch told to use one thread, and two."""
    require_engine("fused")
    problem = instance(*shape[:4], query=shape.query, paired=False)

    def gradients(threads: int) -> object:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return shallow.loss_and_gradients(
                problem.initial, problem.data.tokens, problem.data.targets, query=problem.query,
                engine="fused", validate=False,
            )  # fmt: skip
        finally:
            torch.set_num_threads(before)

    difference = agreement(gradients(1), gradients(2), 1e-5)
    sides = {"1 thread": lambda: gradients(1), "2 threads": lambda: gradients(2)}
    times = race(sides, settings.pace)
    busy = os.getloadavg()[0]
    return [
        timed_row(
            times, "1 thread", "2 threads", clock="wall", group=GROUP, sizes=str(shape),
            what="loss and gradients, 1 -> 2 threads, wall", target=settings.target(1.8),
            difference=difference, tolerance=1e-5, threads=2, malloc=settings.malloc,
            note=f"{os.cpu_count()} cores, load {busy:.1f}; see the machine's own ratio above",
        )
    ]  # fmt: skip
