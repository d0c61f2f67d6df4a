r"""The linearisation experiment: the error of the tangent for all samples, along random directions.

The baseline asks autograd for the gradient of one sample at a time and multiplies it with the
direction; ours is one tangent map for all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.linearisation import linearisation_error, random_perturbation
from attention_dynamics.training import Radii
from benchmarks import plain
from benchmarks.instances import instance
from benchmarks.table import Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import race

GROUP = "linearisation"
WIDTHS = (8, 16, 32, 64, 128, 256)
# The error is a small difference of values of order one, in float32.
TOLERANCE = 2e-2


def cases(settings: Settings) -> list[Case]:
    """The widths of the paper."""
    widths = (8,) if settings.quick else WIDTHS
    return [Case(f"linearisation m={m}", _case(m, settings)) for m in widths]


def _case(m: int, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(m, settings)


def measure(m: int, settings: Settings) -> list[Row | Point]:
    """One random direction of the radii of the paper, all samples, both ways."""
    n = 16 if settings.quick else 1000
    problem = instance(8, 16, m, n, query="fixed")
    tokens, query, initial = problem.data.tokens, problem.query, problem.initial
    assert isinstance(query, Tensor)
    moved = random_perturbation(
        initial, Radii(3.0, 3.0, 3.0), generator=generator(0, "benchmarks", "direction")
    )

    def ours() -> Tensor:
        return linearisation_error(initial, moved, tokens, query=query)

    def baseline() -> Tensor:
        return by_sample(initial, moved, tokens, query)

    difference = agreement(baseline(), ours(), TOLERANCE)
    times = race({"autograd, sample by sample": baseline, "ours": ours},
                 replace(settings.pace, budget=6.0))  # fmt: skip
    target = settings.target(300.0 if m == 256 else 110.0)
    return [
        timed_row(
            times, "autograd, sample by sample", "ours", group=GROUP, malloc=settings.malloc,
            what="linearisation error along a direction", sizes=f"d=8 T=16 m={m} n={n}",
            target=target, difference=difference, tolerance=TOLERANCE,
        )
    ]  # fmt: skip


def by_sample(initial: Parameters, moved: Parameters, tokens: Tensor, query: Tensor) -> Tensor:
    r""":math:`f(\phi) - f(\phi_0) - \langle \nabla f(\phi_0), \phi - \phi_0\rangle`, row by row."""
    step = [new - old for new, old in zip(moved, initial, strict=True)]
    leaves = tuple(block.clone().requires_grad_() for block in initial)
    errors = []
    for row in tokens:
        start = plain.value(leaves, row, query)  # type: ignore[arg-type]
        gradients = torch.autograd.grad(start, leaves)
        tangent = sum((g * s).sum() for g, s in zip(gradients, step, strict=True))
        with torch.no_grad():
            errors.append(plain.value(moved, row, query) - start - tangent)
    return torch.stack(errors).detach()
