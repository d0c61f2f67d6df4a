r"""The empirical tangent kernel (n, n): ours against ``torch.func``, a loop, and neural-tangents.

One float32 problem for all, with a fixed query and independent heads, so that no symmetry helps;
a second row shows what the symmetric initialisation saves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor

from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.kernels import empirical_kernel_total
from benchmarks import neural_tangents, plain
from benchmarks.instances import instance
from benchmarks.probe import peak_megabytes
from benchmarks.table import NAN, Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import Side, race

GROUP = "tangent_kernel"
TOLERANCE = 1e-4
Sizes = tuple[int, int, int, int]  # n, m, T, d
FULL: tuple[Sizes, ...] = ((512, 64, 16, 8), (2048, 1024, 16, 8))
QUICK: tuple[Sizes, ...] = ((24, 8, 4, 3),)


def cases(settings: Settings) -> list[Case]:
    """One case for each size, and one for the symmetric initialisation."""
    sizes = QUICK if settings.quick else FULL
    last = sizes[-1]
    return [
        *(Case(_label(size), _case(size, settings)) for size in sizes),
        Case(f"{_label(last)}, symmetric", lambda: symmetric(last, settings)),
    ]


def _case(size: Sizes, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(size, settings)


def measure(size: Sizes, settings: Settings) -> list[Row | Point]:
    """All sides in one race, then the peak of ours and of ``vmap(jacrev)``."""
    n, m, *_ = size
    asked = size == FULL[-1]
    tokens, query, initial = problem(*size)
    sides: dict[str, Side] = {
        "vmap(jacrev)": lambda: plain.kernel_by_vmap(initial, tokens, query),
        "ours": ours(*size),
    }
    if n * m <= 512 * 64:  # one backward pass a sample: minutes at the large size
        sides["autograd loop"] = lambda: plain.kernel_by_loop(initial, tokens, query)
    expected = sides["ours"]()
    differences = {
        name: agreement(side(), expected, TOLERANCE)
        for name, side in sides.items()
        if name != "ours"
    }
    rows: list[Row | Point] = []
    common: dict[str, Any] = {"group": GROUP, "sizes": _label(size), "malloc": settings.malloc}
    peaks = {"ours": NAN}
    if not settings.quick:
        peaks |= {name: peak_megabytes(side, *size) for name, side in _SIDES.items()}
    with ExitStack() as stack:
        best = ""
        try:
            if not settings.quick:
                found = {}
                for method in neural_tangents.METHODS:
                    name = f"neural-tangents, {method.split('_')[0].lower()}"
                    peer = neural_tangents.peer(initial, tokens, query, method)
                    found[name] = stack.enter_context(peer)
                    differences[name] = agreement(found[name].kernel, expected, TOLERANCE)
                best = min(found, key=lambda name: found[name].first_cpu)
                sides[best], peaks[best] = found[best], found[best].peak_mb
        except neural_tangents.NotInstalled as reason:
            note = str(reason)
            rows.append(
                Row(what="tangent kernel", baseline="neural-tangents", ours="ours", note=note,
                    **common)
            )  # fmt: skip
        times = race(sides, replace(settings.pace, least=3, budget=20.0))
    for name in (name for name in sides if name != "ours"):
        target = 8.0 if name == "vmap(jacrev)" else 2.0 if name == best else NAN
        rows.append(
            timed_row(
                times, name, "ours", what="tangent kernel",
                target=settings.target(target if asked else NAN),
                baseline_mb=peaks.get(name, NAN), ours_mb=peaks["ours"],
                difference=differences[name], tolerance=TOLERANCE,
                note="the faster of its two methods here" if name == best else "", **common,
            )
        )  # fmt: skip
    rows.append(
        Row(
            what="tangent kernel, peak memory", baseline="vmap(jacrev)", ours="ours",
            ratio=peaks["ours"], target=settings.target(150.0 if asked else NAN), sense="at most",
            unit="MB", baseline_mb=peaks.get("vmap(jacrev)", NAN), ours_mb=peaks["ours"],
            note=f"of which the kernel itself {4 * n * n / 2**20:.0f} MB", **common,
        )
    )  # fmt: skip
    return rows


def symmetric(size: Sizes, settings: Settings) -> list[Row | Point]:
    """At the symmetric initialisation half of the heads are enough."""
    n, m, T, d = size
    start = instance(d, T, m, n, query="fixed")
    assert isinstance(start.query, Tensor)
    tokens, query = start.data.tokens, start.query
    heads = start.initial.map(lambda block: block[: m // 2])

    def paired() -> Tensor:
        return empirical_kernel_total(start.initial, tokens, query=query)

    half = empirical_kernel_total(heads, tokens, query=query)
    difference = agreement(half, paired(), TOLERANCE)
    independent = ours(*size)
    times = race({"independent heads": independent, "paired heads": paired}, settings.pace)
    return [
        timed_row(
            times, "independent heads", "paired heads", group=GROUP, sizes=_label(size),
            what="tangent kernel at the symmetric start", difference=difference,
            tolerance=TOLERANCE, malloc=settings.malloc,
            note="agreement is with the kernel of half of the heads",
        )
    ]  # fmt: skip


def problem(n: int, m: int, T: int, d: int) -> tuple[Tensor, Tensor, Parameters]:
    """Tokens, fixed query, and independent heads."""
    found = instance(d, T, m, n, query="fixed", paired=False)
    assert isinstance(found.query, Tensor)
    return found.data.tokens, found.query, found.initial


def ours(n: int, m: int, T: int, d: int) -> Callable[[], Tensor]:
    """The library's kernel, warmed up on a small problem."""
    small = problem(4, 4, 4, d)
    empirical_kernel_total(small[2], small[0], query=small[1])
    tokens, query, initial = problem(n, m, T, d)
    return lambda: empirical_kernel_total(initial, tokens, query=query)


def by_vmap(n: int, m: int, T: int, d: int) -> Callable[[], Tensor]:
    """``vmap(jacrev)``, warmed up on a small problem."""
    small = problem(4, 4, 4, d)
    plain.kernel_by_vmap(small[2], small[0], small[1])
    tokens, query, initial = problem(n, m, T, d)
    return lambda: plain.kernel_by_vmap(initial, tokens, query)


_SIDES = {"ours": ours, "vmap(jacrev)": by_vmap}


def _label(size: Sizes) -> str:
    n, m, T, d = size
    return f"n={n} m={m} T={T} d={d}"
