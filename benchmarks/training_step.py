r"""The training step, engine by engine, against the plain trainer and against the machine's limit.

Both sides run the same few steps of projected gradient descent on the paper's sizes (n = 4000
training and 1000 held-out samples) and record the same history: losses, gradient norms, held-out
losses. The limit carries out the operations that these steps need, from registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention_dynamics.models import shallow
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.training import DescentConfig, Radii, projected_gradient_descent
from benchmarks import plain
from benchmarks.engines import Unusable, require_engine, served_by
from benchmarks.instances import Instance, instance
from benchmarks.machine import Work, gradient_work, spend, value_work
from benchmarks.table import NAN, Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import Side, race

GROUP = "training_step"
ENGINES = ("fused", "compiled", "eager")
STEP_SIZE, RADIUS = 1.75 / 4000**0.5, 3.0
TOLERANCE = 2e-4  # float32, over the steps of one run
#: Where the step must come close to the limit, and how close.
LIMIT_T, LIMIT_M, LIMIT = 16, 64, 1.7


class Shape(NamedTuple):
    """Sizes (d, T, m, n) and the kind of query of a training problem."""

    d: int
    T: int
    m: int
    n: int = 4000
    query: str = "last"

    def __str__(self) -> str:
        return f"d={self.d} T={self.T} m={self.m} n={self.n} q={self.query}"

    def gradient_work(self) -> Work:
        """Operations of one loss with its gradients."""
        return gradient_work(self.n, self.T, self.d, self.m, last=self.query == "last")

    def step_work(self, data: plain.Data) -> Work:
        """Operations of one step: loss, gradients, and values of the held-out samples."""
        held = data.held_targets.shape[0]
        return self.gradient_work().plus(
            value_work(held, self.T, self.d, self.m, last=self.query == "last")
        )


WIDTHS = tuple(Shape(8, 16, m) for m in (8, 16, 32, 64, 128, 256))
LENGTHS = tuple(Shape(17, T, 64) for T in (5, 17, 73, 97))
FIXED = tuple(s._replace(query="fixed") for s in (WIDTHS[0], WIDTHS[3], WIDTHS[5], LENGTHS[3]))
# Compiling takes up to a minute a shape.
COMPILED = (WIDTHS[0], WIDTHS[3], WIDTHS[5], LENGTHS[3])
QUICK = (Shape(3, 4, 8, n=64), Shape(3, 4, 8, n=64, query="fixed"))


def cases(settings: Settings) -> list[Case]:
    """One case for every shape; the fixed query only at the default malloc."""
    shapes = WIDTHS + LENGTHS + (FIXED if settings.malloc == "default" else ())
    return [
        Case(str(shape), _case(shape, settings)) for shape in (QUICK if settings.quick else shapes)
    ]


def target(engine: str, shape: Shape, malloc: str) -> float:
    """The least ratio to the plain trainer that was asked for, NaN where none was."""
    if engine == "fused":
        return 7.5 if malloc == "tuned" else 16.0 if shape.m >= 256 else 12.0
    if malloc == "tuned":
        return NAN
    return 4.5 if engine == "compiled" else 3.3 if shape.m >= 64 else 2.5


def _case(shape: Shape, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(shape, settings)


def measure(shape: Shape, settings: Settings) -> list[Row | Point]:
    """All engines, the plain trainer and the limit in one race, for one shape."""
    problem = instance(shape.d, shape.T, shape.m, shape.n, query=shape.query)
    # Enough steps that what a descent does once, before and after them, does not count.
    steps = max(3, min(60, round(0.8 / (2.5e-8 * shape.n * shape.T * shape.m))))
    expected = plain_training(problem, steps)
    sides: dict[str, Side] = {"plain": lambda: plain_training(problem, steps)}
    rows: list[Row | Point] = []
    differences = {}
    common: dict[str, Any] = {"group": GROUP, "sizes": str(shape), "malloc": settings.malloc}
    for engine in ENGINES:
        if engine == "compiled" and not (shape in COMPILED and settings.malloc == "default"):
            continue
        side = served_by(engine, lambda: our_training(problem, steps))
        try:
            require_engine(engine)
            differences[engine] = agreement(expected, side(), TOLERANCE)
        except (Unusable, AssertionError) as problem_found:
            what = f"training step, {engine}"
            rows.append(Row(what=what, baseline="plain", ours=engine,
                            target=settings.target(target(engine, shape, settings.malloc)),
                            error=f"{type(problem_found).__name__}: {problem_found}",
                            **common))  # fmt: skip
            continue
        sides[engine] = side
    total = shape.step_work(problem.data)
    evaluations = steps + 1
    sides["limit"] = lambda: spend(
        Work(evaluations * total.flops, evaluations * total.exponentials)
    )
    times = race(sides, settings.pace).per_call(evaluations)
    for engine, difference in differences.items():
        rows.append(
            timed_row(
                times, "plain", engine, what=f"training step, {engine}",
                target=settings.target(target(engine, shape, settings.malloc)),
                difference=difference, tolerance=TOLERANCE, note=f"{steps} steps a run", **common,
            )
        )  # fmt: skip
    if "fused" in differences:
        near = shape.T >= LIMIT_T and shape.m >= LIMIT_M
        rows.append(
            timed_row(
                times, "fused", "limit", what="training step, fused, over the limit",
                target=settings.target(LIMIT if near else NAN), sense="at most",
                note="whole step with its bookkeeping", **common,
            )
        )  # fmt: skip
        if settings.malloc == "default":
            rows.append(_gradient_alone(shape, problem, settings, common))
    if settings.malloc == "default":
        curve = "step against m" if shape in WIDTHS else "step against T"
        if shape in WIDTHS + LENGTHS + QUICK[:1]:
            against = "T" if shape in LENGTHS else "m"
            rows += [
                Point(GROUP, curve, side, against, getattr(shape, against),
                      1e3 * times.median(side), "CPU ms a step")
                for side in sides
            ]  # fmt: skip
    return rows


def _gradient_alone(
    shape: Shape, problem: Instance, settings: Settings, common: dict[str, str]
) -> Row:
    """Loss and gradients alone, without held-out samples, norms and projection."""
    data, query = problem.data, problem.query
    initial = instance(*shape[:4], query=shape.query, paired=False).initial

    def gradients() -> object:
        return shallow.loss_and_gradients(
            initial, data.tokens, data.targets, query=query, engine="fused", validate=False
        )

    reference = shallow.loss_and_gradients(
        initial, data.tokens, data.targets, query=query, engine="reference"
    )
    difference = agreement(reference, gradients(), 1e-5)
    work = shape.gradient_work()
    times = race({"fused": gradients, "limit": lambda: spend(work)}, settings.pace)
    near = shape.T >= LIMIT_T and shape.m >= LIMIT_M
    return timed_row(
        times, "fused", "limit", what="loss and gradients, fused, over the limit",
        target=settings.target(LIMIT if near else NAN), sense="at most", difference=difference,
        tolerance=1e-5,
        note="agreement is with the reference engine", **common,
    )  # fmt: skip


def plain_training(problem: Instance, steps: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """History and final parameters of the plain trainer."""
    query = None if isinstance(problem.query, str) else problem.query
    model = plain.PlainTransformer(problem.initial, query)
    return plain.train(model, problem.data, steps, STEP_SIZE, RADIUS)


def our_training(problem: Instance, steps: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """History and final parameters of :func:`projected_gradient_descent`, in the same form."""
    data, query, initial = problem
    result = projected_gradient_descent(
        ShallowTransformer(initial, query=query),
        data.tokens,
        data.targets,
        DescentConfig(steps=steps, step_size=STEP_SIZE, radii=Radii(RADIUS, RADIUS, RADIUS)),
        validation=(data.held_tokens, data.held_targets),
    )
    names = ("loss", "validation_loss", "gradient_c", "gradient_U", "gradient_W")
    columns = [torch.tensor(result.history[name].to_numpy(), dtype=torch.float32) for name in names]
    return torch.stack(columns, dim=1), tuple(result.final)
