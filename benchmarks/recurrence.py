r"""The IndRNN step of the paper's recurrent contrast: loss, gradients and a held-out pass.

The baseline loops over time and lets autograd go back through it; ours is closed
back-propagation through time. No projection, as in the paper's autoregressive experiment.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.models import recurrence
from attention_dynamics.models.indrnn import IndRNN
from attention_dynamics.models.recurrence import RecurrentParameters
from benchmarks import plain
from benchmarks.instances import instance
from benchmarks.table import Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import race

GROUP = "recurrence"
STEP_SIZE, TOLERANCE = 0.05, 1e-3
LENGTHS = (5, 17, 73, 97)


def cases(settings: Settings) -> list[Case]:
    """The lengths of the paper, d = 17 and 64 units."""
    lengths = (4,) if settings.quick else LENGTHS if settings.malloc == "default" else LENGTHS[::3]
    return [Case(f"IndRNN T={T}", _case(T, settings)) for T in lengths]


def _case(T: int, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(T, settings)


def measure(T: int, settings: Settings) -> list[Row | Point]:
    """A few steps of plain training against the same steps in closed form."""
    n, d, units = (32, 3, 8) if settings.quick else (4000, 17, 64)
    data = instance(d, T, units, n).data
    stream = generator(0, "benchmarks", "recurrence")
    model = IndRNN(units, d, recurrent_init=1.0, generator=stream)
    start = model.snapshot()
    steps = 2

    def baseline() -> tuple[Tensor, tuple[Tensor, ...]]:
        fresh = plain.PlainIndRNN(*start)
        return plain.train(fresh, data, steps, STEP_SIZE, None)

    def ours() -> tuple[Tensor, tuple[Tensor, ...]]:
        return our_training(start, data, steps)

    difference = agreement(baseline(), ours(), TOLERANCE)
    sides = {"plain": baseline, "ours": ours}
    times = race(sides, settings.pace).per_call(steps + 1)
    target = settings.target(8.0)
    rows: list[Row | Point] = [
        timed_row(
            times, "plain", "ours", group=GROUP, what="IndRNN step", malloc=settings.malloc,
            sizes=f"d={d} T={T} m={units} n={n}", target=target,
            difference=difference, tolerance=TOLERANCE,
        )
    ]  # fmt: skip
    if settings.malloc == "default":
        rows += [
            Point(GROUP, "IndRNN step", side, "T", T, 1e3 * times.median(side), "CPU ms a step")
            for side in sides
        ]
    return rows


def our_training(
    start: RecurrentParameters, data: plain.Data, steps: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The plain loop with closed gradients; the history is read at its end."""
    phi, history = start.clone(), []
    for step in range(steps + 1):
        loss, gradients = recurrence.loss_and_gradients(
            phi, data.tokens, data.targets, validate=step == 0
        )
        held = recurrence.forward(phi, data.held_tokens, validate=step == 0)
        norms = [gradient.norm() for gradient in gradients]
        history.append(torch.stack([loss, (held - data.held_targets).square().mean(), *norms]))
        if step < steps:
            phi = phi.minus(gradients.scaled(STEP_SIZE))
    return torch.stack(history), tuple(phi)
