r"""What the paper's experiments cost here: hours on two cores, from the cost of their parts.

Seeds are run in two processes of one thread each. The cost of every part is measured while
another process computes the same, so that what two busy cores take from each other is counted.

- width: 6 widths x 10 seeds x 4000 projected steps, n = 4000 + 1000, T = 16, d = 8;
- autoregression: 4 lengths x 20 seeds x 5000 steps for each of Transformer and IndRNN, d = 17,
  on the windows of the experiment, whose tokens are a value and 16 features of its place;
- 10 teachers of 8192 heads on 5000 samples;
- linearisation: 6 widths x 10 seeds, 8 random directions and one adversary.
"""

from __future__ import annotations

import multiprocessing
import time

import torch

from attention_dynamics.data import autoregressive_task, generator
from attention_dynamics.models.indrnn import IndRNN
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.theory.linearisation import (
    adversarial_perturbation,
    linearisation_error,
    random_perturbation,
)
from attention_dynamics.training import Radii
from attention_dynamics.training.recurrent_descent import recurrent_descent
from benchmarks.instances import HELD_OUT, Instance, instance
from benchmarks.plain import Data
from benchmarks.recurrence import LENGTHS, STEP_SIZE
from benchmarks.table import Case, Point, Row, Settings
from benchmarks.teacher import our_teacher
from benchmarks.timing import Side
from benchmarks.training_step import our_training as our_descent

GROUP = "reproduction"
WIDTHS = (8, 16, 32, 64, 128, 256)
RADII = Radii(3.0, 3.0, 3.0)
_SPENT: list[float] = []  # CPU and wall seconds, in turn, of this process


def cases(settings: Settings) -> list[Case]:
    """One case: the sum."""
    return [Case("the whole reproduction", lambda: measure(settings))]


def measure(settings: Settings) -> list[Row | Point]:
    """Measure the parts in two processes at once and add them up."""
    if settings.quick:
        found = [costs(True)]
    else:
        context = multiprocessing.get_context("spawn")
        with context.Pool(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            found = pool.map(costs, [False] * 2, chunksize=1)
    mean = {part: sum(one[part] for one in found) / len(found) for part in found[0]}
    share = mean.pop("share")  # below 1 where others are at work: the hours are then too many
    hours = {
        "width": 10 * 4000 * _total(mean, "width"),
        "Transformer, autoregression": 20 * 5000 * _total(mean, "AR"),
        "IndRNN, autoregression": 20 * 5000 * _total(mean, "IndRNN"),
        "teachers": 10 * mean["teacher"],
        "linearisation": 10 * _total(mean, "linearisation"),
    }
    hours = {part: seconds / 2 / 3600 for part, seconds in hours.items()}
    rows: list[Row | Point] = [
        Row(
            GROUP, "whole reproduction of the paper", "two processes on two cores", "", "ours",
            ratio=sum(hours.values()), target=settings.target(2.0), sense="at most", unit="hours",
            threads=1, malloc=settings.malloc,
            note="; ".join(f"{part} {value:.2f} h" for part, value in hours.items())
            + f"; each process had {100 * share:.0f} % of a core",
        )
    ]  # fmt: skip
    rows += [
        Point(GROUP, "hours of a part", part, "part", index, value, "hours on two cores")
        for index, (part, value) in enumerate(hours.items())
    ]
    rows += [
        Point(GROUP, "cost of a part", part, "part", index, 1e3 * value, "wall ms")
        for index, (part, value) in enumerate(mean.items())
    ]
    return rows


def costs(quick: bool) -> dict[str, float]:
    """Wall seconds of one step, teacher, or linearisation cell of each part, in this process."""
    n = 32 if quick else 4000
    widths, lengths = (WIDTHS[:1], LENGTHS[:1]) if quick else (WIDTHS, LENGTHS)
    found = {}
    for m in widths:
        problem = instance(8, 16, m, n)
        steps = 2 if quick else max(10, 2560 // m)
        found[f"width m={m}"] = _seconds(lambda: our_descent(problem, steps)) / (steps + 1)  # noqa: B023
    for T in lengths:
        windows = forecasts(T, n)
        steps = 2 if quick else 20
        found[f"AR T={T}"] = _seconds(lambda: our_descent(windows, steps)) / (steps + 1)  # noqa: B023
        model = IndRNN(
            64, 17, recurrent_init=1.5, generator=generator(0, "benchmarks", "recurrence")
        )
        data, start = windows.data, model.snapshot()
        run = lambda: recurrent_descent(  # noqa: E731
            start, data.tokens, data.targets, steps=steps, step_size=STEP_SIZE,  # noqa: B023
            validation=(data.held_tokens, data.held_targets),  # noqa: B023
        )  # fmt: skip
        found[f"IndRNN T={T}"] = _seconds(run) / (steps + 1)
    found["teacher"] = _seconds(our_teacher(64 if quick else 8192, 16 if quick else 5000))
    for m in widths:
        found[f"linearisation m={m}"] = _seconds(lambda: _linearisation(m, n))  # noqa: B023
    found["share"] = sum(_SPENT[::2]) / sum(_SPENT[1::2])
    return found


def forecasts(T: int, n: int) -> Instance:
    """The windows of the autoregressive experiment at lag T - 1: a value and its place a token."""
    task = autoregressive_task(T - 1, round(n / (1 - HELD_OUT)), seed=0, split="time")
    data = Data(task.tokens, task.targets, task.held_tokens, task.held_targets)
    stream = generator(0, "benchmarks", "student")
    return Instance(
        data, "last", symmetric_initialisation(64, data.tokens.shape[-1], generator=stream)
    )


def _total(seconds: dict[str, float], part: str) -> float:
    return sum(value for name, value in seconds.items() if name.startswith(part))


def _linearisation(m: int, n: int) -> None:
    """Eight random directions and the adversary of one cell."""
    problem = instance(8, 16, m, n, query="fixed")
    draws = generator(0, "benchmarks", "directions")
    for _ in range(8):
        moved = random_perturbation(problem.initial, RADII, generator=draws)
        linearisation_error(problem.initial, moved, problem.data.tokens, query=problem.query)
    adversarial_perturbation(
        problem.initial, RADII, problem.data.tokens, query=problem.query, generator=draws
    )


def _seconds(run: Side) -> float:
    """Wall seconds of a second call; ``_SPENT`` keeps them and the CPU seconds."""
    run()
    start, spent = time.perf_counter(), time.process_time()
    run()
    _SPENT.append(time.process_time() - spent)
    seconds = time.perf_counter() - start
    _SPENT.append(seconds)
    return seconds
