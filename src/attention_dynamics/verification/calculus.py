"""Derivatives carried out, with bound indices renamed first so that none is captured."""

from typing import Any

import sympy as sp
from sympy.core.function import AppliedUndef


def resolve(expression: sp.Expr) -> sp.Expr:
    """Every ``Derivative``, ``Subs`` and ``Integral`` of the expression carried out.

    The derivative of an undefined function ``f(g)`` becomes the function ``f'`` at ``g``.
    """
    return _resolve(rename_bound(expression))


def index_symbol(low: sp.Expr, name: str = "t") -> sp.Dummy:
    """A bound index that starts at ``low``: an integer, positive where its range is.

    Every bound index of a normal form is a ``Dummy``: nothing a statement names can equal it.
    """
    if low.is_positive:
        return sp.Dummy(name, integer=True, positive=True)
    if low.is_nonnegative:
        return sp.Dummy(name, integer=True, nonnegative=True)
    return sp.Dummy(name, integer=True)


def rename_bound(e: sp.Basic) -> sp.Basic:
    """The same expression with a ``Dummy`` of its own for every bound index."""
    if not e.args:
        return e
    e = e.func(*(rename_bound(argument) for argument in e.args)) if _has_sum(e) else e
    if isinstance(e, sp.Sum | sp.Product):
        # Outermost first: a bound may name an outer index, never an inner one or its own.
        fresh: dict[sp.Basic, sp.Dummy] = {}
        limits: list[tuple[sp.Basic, ...]] = []
        for symbol, *bounds in reversed(e.limits):
            bounds = [bound.xreplace(fresh) for bound in bounds]
            low = bounds[0] if bounds else sp.S.NegativeInfinity
            index = index_symbol(low, str(symbol))
            limits.append((index, *bounds))
            fresh = {**fresh, symbol: index}
        return e.func(e.function.xreplace(fresh), *reversed(limits))
    return e


def _has_sum(e: sp.Basic) -> bool:
    return e.has(sp.Sum, sp.Product)


def _resolve(e: sp.Basic) -> Any:
    if not e.args or not e.has(sp.Derivative, sp.Subs, sp.Integral):
        return e
    if isinstance(e, sp.Integral):
        # An integral that SymPy cannot do stays, and the proof then fails: never a wrong pass.
        return e.func(_resolve(e.function), *e.limits).doit()
    if isinstance(e, sp.Derivative):
        result = _resolve(e.expr)
        for variable, count in e.variable_count:
            for _ in range(int(count)):
                result = _primed(sp.diff(result, variable))
        return result
    if isinstance(e, sp.Subs):
        inner = _resolve(e.expr)
        if inner.has(sp.Sum, sp.Product) and any(not v.is_Symbol for v in e.variables):
            return e  # the entry x[1] hides in sum_t x[t], where subs does not find it
        pairs = [(old, _resolve(new)) for old, new in zip(e.variables, e.point, strict=True)]
        return inner.subs(pairs, simultaneous=True)
    return e.func(*(_resolve(argument) for argument in e.args))


def _primed(e: sp.Basic) -> Any:
    """Unevaluated derivatives of undefined functions, as functions of their own."""
    if not e.args or not e.has(sp.Derivative, sp.Subs):
        return e
    if isinstance(e, sp.Subs):
        inner = _primed(e.expr)
        pairs = [(old, _primed(new)) for old, new in zip(e.variables, e.point, strict=True)]
        return inner.subs(pairs, simultaneous=True)
    if isinstance(e, sp.Derivative):
        result = _primed(e.expr)
        for variable, count in e.variable_count:
            if not isinstance(result, AppliedUndef) or variable not in result.args:
                return e
            for _ in range(int(count)):
                result = _prime(result.func, result.args.index(variable))(*result.args)
        return result
    return e.func(*(_primed(argument) for argument in e.args))


def _prime(function: Any, position: int) -> Any:
    """``f'``, or ``f'2`` for the derivative in the second argument, in sorted order."""
    name, _, marks = function.__name__.partition("'")
    orders = [*(marks.split("'") if marks else []), str(position + 1)]
    return sp.Function("'".join([name, *sorted(orders)]))
