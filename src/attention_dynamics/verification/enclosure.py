r"""Rigorous maxima over an interval: branch and bound with ball arithmetic."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy as sp

from attention_dynamics.verification.record import CheckFailed

PRECISION = 128  # bits; balls of far-from-degenerate boxes dominate the rounding anyway
MAXIMAL_BOXES = 200_000
HALVINGS = 80  # a box this small that is still undecided holds a pole
LARGEST_TOLERANCE = 1e-3  # beyond it another bound is certified than the one that is stated


@dataclass(frozen=True)
class Enclosure:
    """The maximum lies in ``[lower, upper]``, with what the record keeps of it."""

    statement: str
    detail: dict[str, Any]
    refutation: str


def enclose(
    label: str, function: Any, interval: tuple[Any, Any], bound: Any, wrong: Any, tolerance: float
) -> Enclosure:
    r""":math:`\sup_{[a,b]} f \le \mathrm{bound} + \mathrm{tolerance}`, refined until decided.

    Raises ``CheckFailed`` at a point where the bound is passed, or when no point passes ``wrong``;
    ``ValueError`` for an interval that is not finite or a ``wrong`` that is not smaller.
    """
    import flint

    if not 0 < tolerance <= LARGEST_TOLERANCE:
        raise ValueError(f"{label}: tolerance={tolerance} must lie in (0, {LARGEST_TOLERANCE}]")
    previous, flint.ctx.prec = flint.ctx.prec, PRECISION
    try:
        evaluate, variable = _evaluator(label, function)
        ends = [sp.sympify(end) for end in interval]
        low, high = (flint.arb("nan") if e.is_infinite else to_arb(e) for e in ends)
        if not (low.is_finite() and high.is_finite() and low < high):
            raise ValueError(
                f"{label}: interval={interval} must be finite with low < high; substitute a "
                "bounded variable, such as t = tanh(s), for an unbounded one"
            )
        limit, twin = to_arb(sp.sympify(bound)), to_arb(sp.sympify(wrong))
        if not twin < limit:
            raise ValueError(f"{label}: wrong={wrong} must be smaller than bound={bound}")
        target = limit + flint.arb(tolerance)
        lower, where, upper, boxes = _maximise(label, evaluate, low, high, target, twin)
    finally:
        flint.ctx.prec = previous
    statement = ""
    if variable is not None:
        a, b = (sp.latex(sp.sympify(end)) for end in interval)
        name = sp.latex(variable)
        statement = (
            rf"\sup_{{{a} \le {name} \le {b}}} {sp.latex(function)} \le "
            rf"{sp.latex(sp.sympify(bound))} + {_scientific(tolerance)}"
        )
    detail = {
        "lower": lower,
        "upper": upper,
        "argmax": where,
        "tolerance": tolerance,
        "boxes": boxes,
        "shown": f"[{lower:.9g}, {upper:.9g}]",
    }
    return Enclosure(statement, detail, f"passed at {where:.6g}, where the value is {lower:.9g}")


def _maximise(
    label: str, evaluate: Callable[[Any], Any], low: Any, high: Any, target: Any, twin: Any
) -> tuple[float, float, float, int]:
    """Split the box with the largest upper bound until every box lies below the target."""
    import flint

    counter = itertools.count()

    def box(a: Any, b: Any) -> tuple[float, int, Any, Any, Any]:
        value = evaluate(a.union(b))
        end = evaluate(b)
        if value.is_finite() and end.is_finite() and not value.overlaps(end):
            raise CheckFailed(
                f"{label}: over [{a}, {b}] the function gives {value}, and {end} at the end: it is "
                "no interval extension; compute with the ball it is given, not with its midpoint"
            )
        top = value.upper() if value.is_finite() else flint.arb("+inf")
        return -float(top) if top.is_finite() else float("-inf"), next(counter), a, b, top

    best, where = evaluate(low), low
    heap = [box(low, high)]
    boxes = 1
    done = flint.arb("-inf")
    narrowest = (high - low) * flint.arb(2) ** -HALVINGS
    while heap:
        _, _, a, b, top = heapq.heappop(heap)
        middle = ((a + b) / 2).mid()
        for point in (middle, b):
            value = evaluate(point)
            if value.is_finite() and value.lower() > best.lower():
                best, where = value, point
        if best.lower() > target:
            raise CheckFailed(
                f"{label}: the bound is passed at x = {float(where):.12g}, where the value is "
                f"{float(best.lower()):.12g} > {float(target):.12g}"
            )
        if top < target and (best.lower() > twin or top < twin):
            done = done.max(top)
            continue
        if boxes > MAXIMAL_BOXES or not a < middle < b or b - a < narrowest:
            raise CheckFailed(
                f"{label}: undecided after {boxes} boxes: near x = {float(middle):.12g} the upper "
                "bound stays above the target; write the function with fewer repeated variables"
            )
        for half in ((a, middle), (middle, b)):
            heapq.heappush(heap, box(*half))
            boxes += 1
    if not best.lower() > twin:
        raise CheckFailed(
            f"{label}: the wrong bound is not passed: the maximum is below {float(done):.12g}, so "
            "the check cannot tell right from wrong here"
        )
    return float(best.lower()), float(where), float(done), boxes


def _evaluator(label: str, function: Any) -> tuple[Callable[[Any], Any], sp.Symbol | None]:
    if not isinstance(function, sp.Expr):
        return function, None
    symbols = sorted(function.free_symbols, key=str)
    if len(symbols) != 1:
        raise ValueError(f"{label}: the expression has variables {symbols}; one is needed")
    (variable,) = symbols
    return lambda ball: to_arb(function, {variable: ball}), variable


def to_arb(expression: sp.Basic, values: dict[sp.Basic, Any] | None = None) -> Any:
    """``expression -> flint.arb``, rigorously, node by node; ``ValueError`` for an unknown node."""
    import flint

    if values and expression in values:
        return values[expression]
    if expression is sp.pi:
        return flint.arb.pi()
    if expression is sp.E:
        return flint.arb(1).exp()
    if isinstance(expression, sp.Rational):
        return flint.arb(expression.p) / flint.arb(expression.q)
    if isinstance(expression, sp.Float):
        # Floats are read as the exact binary number they hold.
        exact = sp.Rational(expression)
        return flint.arb(int(exact.p)) / flint.arb(int(exact.q))
    arguments = [to_arb(argument, values) for argument in expression.args]
    if isinstance(expression, sp.Add):
        return sum(arguments[1:], arguments[0])
    if isinstance(expression, sp.Mul):
        product = arguments[0]
        for factor in arguments[1:]:
            product = product * factor
        return product
    if isinstance(expression, sp.Pow):
        exponent = expression.args[1]
        if exponent == sp.Rational(1, 2):
            return arguments[0].sqrt()
        if exponent == -sp.Rational(1, 2):
            return arguments[0].rsqrt()
        if isinstance(exponent, sp.Integer):
            return _integer_power(arguments[0], int(exponent))
        return arguments[0] ** arguments[1]
    method = _METHODS.get(type(expression))
    if method is None:
        raise ValueError(f"{expression} has no interval extension here; use a callable on arb")
    return getattr(arguments[0], method)()


_METHODS = {
    sp.exp: "exp",
    sp.log: "log",
    sp.tanh: "tanh",
    sp.sinh: "sinh",
    sp.cosh: "cosh",
    sp.sin: "sin",
    sp.cos: "cos",
    sp.erf: "erf",
    sp.atan: "atan",
    sp.asin: "asin",
    sp.Abs: "__abs__",
}


def _integer_power(base: Any, exponent: int) -> Any:
    """Even powers as powers of the absolute value: the range of x^2 is not [-1, 1]."""
    value = abs(base) if exponent % 2 == 0 else base
    return value**exponent


def _scientific(number: float) -> str:
    mantissa, exponent = f"{number:.0e}".split("e")
    power = rf"10^{{{int(exponent)}}}"
    return power if mantissa == "1" else rf"{mantissa} \cdot {power}"
