r"""The rows of the table: what was compared, and by how much ours is ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.timing import Pace, Ratio, Times

NAN = math.nan


class Disagreement(AssertionError):
    """Two sides of a comparison do not compute the same: there is nothing to time."""


@dataclass(frozen=True)
class Row:
    """One comparison. ``ratio`` is baseline over ours, or what ``what`` says, with its interval.

    ``target`` is the least ratio asked for (the largest one where ``sense`` is "at most"), NaN
    where none is. ``difference`` is how far the results of the two sides are apart, relative to
    the baseline's, and ``tolerance`` what is allowed.
    """

    group: str
    what: str
    sizes: str
    baseline: str
    ours: str
    ratio: float = NAN
    lower: float = NAN
    upper: float = NAN
    target: float = NAN
    sense: Literal["at least", "at most"] = "at least"
    unit: str = "x"
    baseline_ms: float = NAN
    ours_ms: float = NAN
    baseline_wall_ms: float = NAN
    ours_wall_ms: float = NAN
    baseline_mb: float = NAN
    ours_mb: float = NAN
    rounds: int = 0
    difference: float = NAN
    tolerance: float = NAN
    malloc: str = "default"
    threads: int = 1
    note: str = ""
    error: str = ""

    @property
    def met(self) -> str:
        """One of yes, no, failed; empty where no target is set."""
        if self.error:
            return "failed"
        if math.isnan(self.target) or math.isnan(self.ratio):
            return ""
        good = self.ratio >= self.target if self.sense == "at least" else self.ratio <= self.target
        return "yes" if good else "no"

    def record(self) -> dict[str, Any]:
        """The row as a dictionary, with its verdict."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True)
class Point:
    """One point of a curve: a ``value`` in ``unit`` of ``side`` at ``size``."""

    group: str
    curve: str
    side: str
    against: str
    size: float
    value: float
    unit: str


@dataclass(frozen=True)
class Settings:
    """What a group is told: how long to measure, small sizes or full ones, and its environment."""

    quick: bool = False
    malloc: str = "default"
    threads: int = 1

    def target(self, asked: float) -> float:
        """What was asked for, at the sizes it was asked for: small ones have no target."""
        return NAN if self.quick else asked

    @property
    def pace(self) -> Pace:
        """Nine rounds, or three short ones."""
        return Pace(rounds=3, turn=0.001, budget=0.5, least=3) if self.quick else Pace()


@dataclass(frozen=True)
class Case:
    """A part of a group that succeeds or fails alone."""

    name: str
    measure: Callable[[], Sequence[Row | Point]]


def run_case(group: str, case: Case) -> Iterator[Row | Point]:
    """What a case measured, or one row that says how it failed."""
    try:
        yield from case.measure()
    except Exception as failure:
        first = (str(failure).splitlines() or [""])[0]
        yield Row(group, case.name, "", "", "", error=f"{type(failure).__name__}: {first}"[:300])


def agreement(baseline: Any, ours: Any, tolerance: float) -> float:
    r""":math:`\max \|b - o\| / \|b\|` over tensors, or tuples of them; refuses what is too large.

    Raises Disagreement when the difference exceeds ``tolerance``, is NaN, or shapes differ.
    """
    first, second = list(_tensors(baseline)), list(_tensors(ours))
    if [block.shape for block in first] != [block.shape for block in second]:
        raise Disagreement(
            f"shapes {[tuple(b.shape) for b in first]} and {[tuple(b.shape) for b in second]}"
        )
    worst = 0.0
    for expected, found in zip(first, second, strict=True):
        scale = float(torch.linalg.vector_norm(expected))
        apart = float(torch.linalg.vector_norm(expected - found))
        relative = apart / scale if scale > 0 else apart
        if not relative <= tolerance:
            raise Disagreement(
                f"the two sides differ by {relative:.2e} relative, and {tolerance:.0e} is allowed"
            )
        worst = max(worst, relative)
    return worst


def timed_row(times: Times, baseline: str, ours: str, *, clock: str = "cpu", **other: Any) -> Row:
    """A row from a race: the ratio of two of its sides and the times of both."""
    ratio: Ratio = times.ratio(baseline, ours, clock)
    other.setdefault("baseline", baseline)
    other.setdefault("ours", ours)
    return Row(
        ratio=ratio.median,
        lower=ratio.lower,
        upper=ratio.upper,
        baseline_ms=1e3 * times.median(baseline),
        ours_ms=1e3 * times.median(ours),
        baseline_wall_ms=1e3 * times.median(baseline, "wall"),
        ours_wall_ms=1e3 * times.median(ours, "wall"),
        rounds=len(times.cpu[ours]),
        **other,
    )


def as_text(row: Row) -> str:
    """The row as one line for the terminal."""
    head = f"{row.met or '-':>6}  {row.what} [{row.sizes}]"
    if row.error:
        return f"{head}: {row.error}"
    parts = [head]
    if not math.isnan(row.ratio):
        interval = "" if math.isnan(row.lower) else f" ({row.lower:.3g} to {row.upper:.3g})"
        asked = "" if math.isnan(row.target) else f", {row.sense} {row.target:g}"
        parts = [f"{head}: {row.ratio:.3g} {row.unit}{interval}{asked}"]
    for title, unit, before, after in (
        ("CPU", "ms", row.baseline_ms, row.ours_ms),
        ("peak", "MB", row.baseline_mb, row.ours_mb),
    ):
        if not math.isnan(after):
            sides = [f"{after:.4g} {unit} {row.ours}"]
            if not math.isnan(before):
                sides.insert(0, f"{before:.4g} {unit} {row.baseline}")
            parts.append(f"{title} {' | '.join(sides)}")
    return "; ".join([*parts, f"malloc {row.malloc}", *filter(None, [row.note])])


ROW_COLUMNS = [field.name for field in fields(Row)] + ["met"]
POINT_COLUMNS = [field.name for field in fields(Point)]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    else:
        yield torch.as_tensor(value).detach().to(device="cpu", dtype=torch.float64)
