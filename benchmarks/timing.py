r"""Alternating timers: the sides of a comparison take turns, and ratios are formed within a round.

A machine that is shared, or changes its clock speed, changes it for both sides of a round. CPU
time of the process counts, unless the row is about threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Side = Callable[[], object]


@dataclass(frozen=True)
class Clock:
    """Process CPU seconds and wall seconds; tests put their own functions here."""

    cpu: Callable[[], float] = time.process_time
    wall: Callable[[], float] = time.perf_counter


class Spent(NamedTuple):
    """What a side returns that runs in another process and reads its own clock there: seconds."""

    cpu: float
    wall: float


@dataclass(frozen=True)
class Pace:
    """How long to measure: rounds at most, seconds a turn at least, seconds in all about.

    A turn repeats its side until it lasts ``turn`` CPU seconds, so that the clock's resolution
    does not count. At least ``least`` rounds are made, however long they take.
    """

    rounds: int = 9
    turn: float = 0.05
    budget: float = 15.0
    least: int = 5


class Ratio(NamedTuple):
    """The median of the ratios of all rounds and the 95 % bootstrap interval of that median."""

    median: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Times:
    """Seconds of one call by side, one entry a round."""

    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)

    def median(self, side: str, clock: str = "cpu") -> float:
        """The median seconds of one call."""
        return float(np.median(getattr(self, clock)[side]))

    def ratio(self, baseline: str, ours: str, clock: str = "cpu") -> Ratio:
        r""":math:`\mathrm{median}_k\, t^{\text{baseline}}_k / t^{\text{ours}}_k`."""
        seconds = getattr(self, clock)
        return median_ratio(seconds[baseline], seconds[ours])

    def per_call(self, calls: int) -> Times:
        """The same, with every time divided by ``calls``: those that one side makes inside."""
        return Times(
            *(
                {side: [second / calls for second in seconds] for side, seconds in clock.items()}
                for clock in (self.cpu, self.wall)
            )
        )


def race(sides: Mapping[str, Side], pace: Pace, *, clock: Clock | None = None) -> Times:
    """Call the sides in turn, ABAB..., after a call or two of the short ones to warm up.

    Every caller has compared the results before, so nothing is called here for the first time.

    Raises ValueError without sides.
    """
    if not sides:
        raise ValueError("sides: expected at least one function to time, got none")
    clock = Clock() if clock is None else clock
    times = Times({name: [] for name in sides}, {name: [] for name in sides})
    repeats, round_seconds = {}, 0.0
    for name, side in sides.items():
        cpu, wall = _turn(side, 1, clock)
        if cpu < pace.turn:  # short ones are warm now, and worth another look
            cpu, wall = _turn(side, 1, clock)
        repeats[name] = max(1, round(pace.turn / max(cpu, 1e-7)))
        round_seconds += repeats[name] * cpu
        times.cpu[name].append(cpu)
        times.wall[name].append(wall)
    if max(repeats.values()) > 1:  # else the first look was a whole round already
        for name in sides:
            times.cpu[name].clear()
            times.wall[name].clear()
    rounds = max(pace.least, min(pace.rounds, int(pace.budget / max(round_seconds, 1e-9))))
    while len(times.cpu[name]) < rounds:
        for name, side in sides.items():
            cpu, wall = _turn(side, repeats[name], clock)
            times.cpu[name].append(cpu)
            times.wall[name].append(wall)
    return times


def median_ratio(baseline: Sequence[float], ours: Sequence[float]) -> Ratio:
    """The median of the ratios within rounds, with its interval (2000 resamples, fixed seed).

    Raises ValueError when the two were not measured in the same rounds, or a time is not positive.
    """
    above, below = np.asarray(baseline, dtype=float), np.asarray(ours, dtype=float)
    if above.shape != below.shape or above.ndim != 1 or not above.size:
        raise ValueError(
            f"baseline, ours: expected one time a round for each, got {above.size} and {below.size}"
        )
    if not (above > 0).all() or not (below > 0).all():
        raise ValueError("baseline, ours: a time is not positive; make the turns longer")
    ratios = above / below
    draws = np.random.default_rng(0).integers(ratios.size, size=(2000, ratios.size))
    lower, upper = np.quantile(np.median(ratios[draws], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(ratios)), float(lower), float(upper))


def growth_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    r"""The slope of :math:`\log t` against :math:`\log` size, by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def _turn(side: Side, repeats: int, clock: Clock) -> tuple[float, float]:
    """CPU and wall seconds of one call, averaged over ``repeats`` calls."""
    elsewhere = []
    cpu, wall = clock.cpu(), clock.wall()
    for _ in range(repeats):
        result = side()
        if isinstance(result, Spent):
            elsewhere.append(result)
    cpu, wall = clock.cpu() - cpu, clock.wall() - wall
    if elsewhere:
        cpu, wall = (sum(seconds) for seconds in zip(*elsewhere, strict=True))
    return cpu / repeats, wall / repeats
