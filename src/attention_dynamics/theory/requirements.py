r"""The theorem asked backwards: how many heads and steps for a given error?

Exact integers, found by doubling and bisection and verified at their neighbours: the bound meets
the target at the number returned and misses it one step, or one pair of heads, earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.convergence import fast_form
from attention_dynamics.theory.setting import ErrorBound, Setting, Start
from attention_dynamics.validation import require_number

_LARGEST = 2**60


class Requirement(NamedTuple):
    r"""``heads`` (m), ``steps`` (:math:`\tau`), ``step_size`` (:math:`\eta`), their ``bound``."""

    heads: int
    steps: int
    step_size: float
    bound: ErrorBound


def required_steps(
    calculator: BoundCalculator, setting: Setting, target: float, start: Start | None = None
) -> int:
    r"""A :math:`\tau` whose bound meets the target while that of :math:`\tau - 1` does not.

    ``target`` is a loss, compared with ``total``. Everything else is as in the setting, whose own
    ``steps`` are ignored; its step size, if None, is :math:`1/\sqrt\tau` at each :math:`\tau`.
    At a constant step the bound falls with :math:`\tau`, so this is the smallest number of all. At
    :math:`1/\sqrt\tau` it jumps up where :math:`\kappa` falls below 1 and the fast form begins.

    Raises ValueError if no number of steps is enough: the error of m heads stays.
    """
    _require_predicting(calculator)
    require_number("target", target, positive=True)

    def meets(steps: int) -> bool:
        return calculator.bound(replace(setting, steps=steps), start).total <= target

    found = _first(meets, 1)
    if found is None:
        bound = calculator.bound(replace(setting, steps=_LARGEST), start)
        raise ValueError(
            f"target: expected a loss that {setting.heads} heads can reach, got {target:g}; "
            f"however many steps, the bound stays at {bound.total:.4g}: take more heads, see "
            "required_width"
        )
    return found


def required_width(calculator: BoundCalculator, setting: Setting, target: float) -> int:
    r"""An even m with bound(m) :math:`\le` ``target`` < bound(m - 2), or 2.

    For the steps and step size of the setting, whose own ``heads`` are ignored. A priori only: the
    heads of a measured start cannot be changed. It is the least m where the bound falls with m:
    with the concentration of the mean head and small :math:`\delta'`, while the form stays the
    same. At a step size for which :math:`\kappa` falls below 1 only from some width on, the bound
    jumps up there, from the paper's form to the fast one.

    Raises ValueError if no width is enough: the error of :math:`\tau` steps, or the noise, stays.
    """
    _require_a_priori(calculator)
    require_number("target", target, positive=True)

    def meets(pairs: int) -> bool:
        return calculator.bound(replace(setting, heads=2 * pairs)).total <= target

    found = _first(meets, 1)
    if found is None:
        bound = calculator.bound(replace(setting, heads=2 * _LARGEST))
        raise ValueError(
            f"target: expected a loss that {setting.steps} steps of {setting.eta:.4g} can reach, "
            f"got {target:g}; however many heads, the bound stays at {bound.total:.4g}: take more "
            "steps, see requirement"
        )
    return 2 * found


def requirement(
    calculator: BoundCalculator,
    setting: Setting,
    target: float,
    *,
    kappa: float = 0.5,
    share: float = 0.5,
) -> Requirement:
    r"""
    .. math:: m: \text{ error of infinitely many steps } \le \text{share}\cdot\text{target}, \qquad
        \tau: \text{ bound}(m, \tau) \le \text{target}, \qquad \eta = \kappa/G^2(m).

    First m, then for it the least :math:`\tau`, in the fast form, whose error of
    infinitely many steps is :math:`(\epsilon/(1-\kappa) + 2E_{\mathrm{lin}}(\rho)/\sqrt m)^2 =
    O(1/m)`. The step size is chosen (``kappa`` below 1), so that of the setting is ignored, as are
    its heads and steps. A larger ``share`` means fewer heads and more steps.

    Raises ValueError for another form or mode, ``kappa`` or ``share`` outside of (0, 1), or a
    target below the noise.
    """
    _require_a_priori(calculator)
    if calculator.form != "fast":
        raise ValueError(
            f"calculator.form: expected 'fast', got {calculator.form!r}; the step size is chosen "
            "for kappa < 1: for the paper's form use required_width and required_steps"
        )
    require_number("target", target, positive=True)
    for name, value in (("kappa", kappa), ("share", share)):
        if not 0.0 < value < 1.0:
            raise ValueError(f"{name}: expected a number in (0, 1), got {value}")

    def at(heads: int) -> Setting:
        wide = replace(setting, heads=heads, step_size=None)
        return replace(wide, step_size=kappa / calculator.ingredients(wide).gradient_squared)

    def limit(pairs: int) -> float:
        wide = at(2 * pairs)
        return fast_form(calculator.ingredients(wide), wide.eta, math.inf).total

    pairs = _first(lambda pairs: limit(pairs) <= share * target, 1)
    if pairs is None:
        raise ValueError(
            f"target: expected a loss above that of the noise, got {target:g}; with share = "
            f"{share:g} and kappa = {kappa:g} no width reaches {limit(_LARGEST) / share:.4g}"
        )
    wide = at(2 * pairs)
    steps = required_steps(calculator, wide, target)
    return Requirement(2 * pairs, steps, wide.eta, calculator.bound(replace(wide, steps=steps)))


def _first(holds: Callable[[int], bool], least: int) -> int | None:
    """Return the smallest integer of a monotone property, or None if it fails up to 2^60."""
    if holds(least):
        return least
    low, high = least, 2 * least
    while not holds(high):
        if high >= _LARGEST:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _require_predicting(calculator: BoundCalculator) -> None:
    if calculator.mode == "certificate":
        raise ValueError(
            "calculator.mode: expected 'a priori' or 'posterior', got 'certificate'; a certificate "
            "explains one run and predicts no other"
        )


def _require_a_priori(calculator: BoundCalculator) -> None:
    if calculator.mode != "a priori":
        raise ValueError(
            f"calculator.mode: expected 'a priori', got {calculator.mode!r}; the number of heads "
            "of a start is fixed: ask before drawing them"
        )
