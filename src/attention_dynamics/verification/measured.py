"""Checks on numbers: float64 agreement, a bound under attack, an interval against a band."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_dynamics.verification.comparison import Comparison, as_array, compare
from attention_dynamics.verification.outcome import caller, finish, relation_of, require_label
from attention_dynamics.verification.record import CheckFailed, CheckRecord, show_interval
from attention_dynamics.verification.source import call_arguments

LARGEST_RTOL = 1e-2  # two values that agree worse than this do not agree
TWIN_FACTOR = 1000.0  # a wrong twin of a float comparison misses by more than this many tolerances
ROUNDING = 1e-12  # how far a sharp bound, reached exactly, may be passed by rounding

Interval = tuple[float, float]
Band = tuple[float | None, float | None]


def close(
    label: str,
    actual: Any,
    expected: Any,
    *,
    wrong: Any,
    rtol: float = 1e-10,
    atol: float = 0.0,
    dtype: str = "float64",
    uses: Sequence[str] = (),
    title: str = "",
) -> CheckRecord:
    r""":math:`|a - e| \le \mathrm{atol} + \mathrm{rtol}\,|e|`, a actual and e expected.

    Entrywise, over float64 tensors, arrays, numbers, tuples of them (``Parameters`` too, block by
    block) or callables without arguments that return one. Nothing is broadcast or converted.

    Raises ``CheckFailed`` naming the worst entry, or when ``wrong``, a wrong expected value, does
    not miss by more than 1000 tolerances; ``TypeError`` for another ``dtype``; ``ValueError`` for
    shapes that differ, empty input, or one object compared with itself.
    """
    require_label(label)
    if actual is expected or wrong is expected or wrong is actual:
        raise ValueError(f"{label}: two of actual, expected and wrong are the same object")
    if not 0 < rtol <= LARGEST_RTOL or not atol >= 0:
        raise ValueError(
            f"{label}: rtol={rtol} must lie in (0, {LARGEST_RTOL}], atol={atol} in [0, oo); "
            "check.band is for what agrees roughly"
        )
    arguments = call_arguments(caller(), label)
    tolerances: dict[str, Any] = {"rtol": rtol, "atol": atol, "dtype": str(dtype).split(".")[-1]}
    result = compare(actual, expected, **tolerances, expected_name="expected")
    if not result.excess <= 1:
        raise CheckFailed(f"{label}: {_describe(result)}; allowed rtol={rtol}, atol={atol}")
    twin = compare(actual, wrong, **tolerances, expected_name="wrong")
    if not twin.excess > TWIN_FACTOR:
        raise CheckFailed(
            f"{label}: the wrong twin misses by only {twin.excess:.3g} tolerances (more than "
            f"{TWIN_FACTOR:.0f} needed), so the check cannot tell right from wrong here; "
            f"{_describe(twin)}"
        )
    return finish(
        label,
        "autograd",
        title,
        uses,
        statement=relation_of(arguments, "actual", "≈", "expected"),
        notation="code",
        scope=f"{result.entries} entries",
        detail={
            "worst_relative_error": result.relative,
            "worst_block": result.block,
            "entries": result.entries,
            **tolerances,
        },
        wrong_twin={
            "statement": arguments.get("wrong", "wrong"),
            "refuted": f"misses by {twin.excess:.3g} tolerances",
        },
    )


def bound(
    label: str,
    observed: Any,
    bound: Any,
    *,
    wrong: Any,
    at_least: float | None = None,
    uses: Sequence[str] = (),
    title: str = "",
    attack: str = "",
) -> CheckRecord:
    r""":math:`o_i \le b_i` for all i and, when promised, :math:`\max_i o_i / b_i \ge r`.

    o ``observed`` and b ``bound`` are float64 arrays or numbers (a bound is broadcast to what was
    observed). ``attack`` says how the observations were searched. A sharp bound states the ratio
    r it must reach in ``at_least``.

    Raises ``CheckFailed`` naming the observation that passes the bound, when ``at_least`` is not
    reached, or when no observation violates ``wrong``, a smaller bound; ``ValueError`` for bounds
    that are not positive or a wrong bound that is not smaller.
    """
    require_label(label)
    if observed is bound or wrong is bound or wrong is observed:
        raise ValueError(f"{label}: two of observed, bound and wrong are the same object")
    if at_least is not None and not 0 < at_least <= 1:
        raise ValueError(f"{label}: at_least={at_least} must be a ratio in (0, 1]")
    arguments = call_arguments(caller(), label)
    values, given = as_array(observed, "observed"), as_array(bound, "bound")
    if np.shares_memory(values, given):
        raise ValueError(f"{label}: observed and bound share their memory")
    limit = _spread(label, "bound", given, values.shape)
    twin = _spread(label, "wrong", as_array(wrong, "wrong"), values.shape)
    if not (limit > 0).all():
        raise ValueError(f"{label}: bound={limit.min()} must be positive for a ratio to exist")
    if not ((twin < limit) & (twin > 0)).all():
        raise ValueError(f"{label}: wrong must be a positive bound smaller than bound everywhere")
    ratios = values / limit
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(ratios), ratios.shape))
    tightest = float(ratios[worst])
    if tightest > 1 + ROUNDING:
        raise CheckFailed(
            f"{label}: observed{list(worst)} = {float(values[worst])!r} passes the bound "
            f"{float(limit[worst])!r}, ratio {tightest!r}"
        )
    if at_least is not None and tightest < at_least:
        raise CheckFailed(
            f"{label}: the tightest ratio is {tightest:.6g} and at_least={at_least} was promised; "
            "search harder, or state a bound that is not claimed to be sharp"
        )
    violated = float((values / twin).max())
    if not violated > 1 + ROUNDING:
        raise CheckFailed(
            f"{label}: no observation violates the wrong bound (largest ratio {violated:.6g}), so "
            "the check cannot tell right from wrong here"
        )
    return finish(
        label,
        "attacked",
        title,
        uses,
        statement=relation_of(arguments, "observed", "≤", "bound"),
        notation="code",
        scope=f"{values.size} observations",
        detail={
            "tightest_ratio": min(tightest, 1.0),
            "observations": int(values.size),
            "at_least": at_least,
            "attack": attack,
        },
        wrong_twin={
            "statement": arguments.get("wrong", "wrong"),
            "refuted": f"violated, ratio {violated:.6g}",
        },
    )


def band(
    label: str,
    estimate: float,
    interval: Interval,
    band: Band,
    *,
    wrong: Band,
    missed_because: str | None = None,
    uses: Sequence[str] = (),
    title: str = "",
) -> CheckRecord:
    r""":math:`[l, h] \subseteq \mathrm{band}`: the whole interval, not the estimate alone.

    Either end of a band may be None (open). With ``missed_because`` the interval must *not* lie
    inside the band: the record's status is then ``missed`` and the page says why. ``wrong`` is a
    band with the opposite verdict: one the interval does not lie in, or, for a missed band, one
    that it does lie in, so that the measurement could have met a band at all.

    Raises ``CheckFailed`` with the numbers when the verdict or that of the twin is another one;
    ``ValueError`` for an empty interval or band, or an estimate outside its interval.
    """
    require_label(label)
    arguments = call_arguments(caller(), label)
    value, (low, high) = float(estimate), map(float, interval)
    if not low <= value <= high or not np.isfinite([low, high]).all():
        raise ValueError(
            f"{label}: estimate={value} must lie in a finite interval={(low, high)}; pass "
            "(lower, upper) around the estimate"
        )
    target, twin = _band_ends(label, "band", band), _band_ends(label, "wrong", wrong)
    if target == twin:
        raise ValueError(f"{label}: wrong={wrong} is the band itself")
    if missed_because is not None and not missed_because.strip():
        raise ValueError(f"{label}: missed_because must say why the band is missed")
    missed = missed_because is not None
    shown = f"estimate {value:.6g}, interval [{low:.6g}, {high:.6g}]"
    if _inside(low, high, target) is missed:
        raise CheckFailed(
            f"{label}: {shown} {'lies' if missed else 'does not lie'} inside the band "
            f"{show_interval(target)}" + (", so missed_because has to go" if missed else "")
        )
    if _inside(low, high, twin) is not missed:
        raise CheckFailed(
            f"{label}: {shown} gives the wrong band {show_interval(twin)} the verdict of the right "
            "one; " + ("a missed band needs a twin that is met" if missed else "move the twin off")
        )
    return finish(
        label,
        "band",
        title,
        uses,
        statement=relation_of(arguments, "interval", "⊆", "band", first=2),
        notation="code",
        scope="measured",
        detail={
            "estimate": value,
            "interval": [low, high],
            "band": list(target),
            "missed_because": missed_because,
        },
        wrong_twin={
            "statement": arguments.get("wrong", show_interval(twin)),
            "refuted": f"the interval {'lies' if missed else 'does not lie'} inside it",
        },
        status="missed" if missed else "passed",
    )


def _describe(result: Comparison) -> str:
    where = f"{result.block}{list(result.index)}" if result.index else result.block
    return (
        f"{where} = {float(result.actual)!r} against {float(result.expected)!r}, relative error "
        f"{abs(result.actual - result.expected) / (abs(result.expected) or 1.0):.3g}"
    )


def _band_ends(label: str, name: str, ends: Band) -> Band:
    low, high = (None if end is None else float(end) for end in ends)
    stated = [end for end in (low, high) if end is not None]
    # Nothing lies in a band with an end that is no number: it would refute any twin.
    if not stated or not np.isfinite(stated).all() or (len(stated) == 2 and stated[0] >= stated[1]):
        raise ValueError(f"{label}: {name}={ends} needs finite low < high, one end may be None")
    return low, high


def _spread(label: str, name: str, values: NDArray, shape: tuple[int, ...]) -> NDArray:
    try:
        return np.broadcast_to(values, shape)
    except ValueError:
        raise ValueError(
            f"{label}: {name} has shape {values.shape} and observed has shape {shape}; pass one "
            f"{name}, or one an observation"
        ) from None


def _inside(low: float, high: float, band: Band) -> bool:
    return (band[0] is None or band[0] <= low) and (band[1] is None or high <= band[1])
