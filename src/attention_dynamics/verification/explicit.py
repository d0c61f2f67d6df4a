"""Symbolic sums, indices, derivatives and functions written out at small lengths."""

import hashlib
from collections.abc import Mapping
from typing import Any

import mpmath
import sympy as sp
from sympy.core.function import AppliedUndef


class Explicit:
    """An expression with numbers for lengths and indices, and plain symbols for entries."""

    def __init__(self, values: dict[sp.Basic, sp.Basic], sizes: frozenset[sp.Basic]) -> None:
        """``values`` of lengths and free indices; ``sizes`` says which of them are lengths."""
        self._values = values
        self._sizes = {s: v for s, v in values.items() if s in sizes}
        self._entries: dict[sp.Symbol, sp.Indexed] = {}
        self._known: dict[sp.Expr, sp.Expr] = {}

    def __call__(self, expression: sp.Expr) -> sp.Expr:
        """The expression written out; remembered, since a side is asked for more than once."""
        if expression not in self._known:
            self._known[expression] = self._of(expression, self._values)
        return self._known[expression]

    def defined(self, symbol: sp.Basic, given: Mapping[Any, Any]) -> sp.Expr | None:
        """The value that an entry has by a hypothesis on all entries of its array."""
        entry = self._entries.get(symbol)
        for key, value in given.items():
            if entry is None or not isinstance(key, sp.Indexed) or key.base != entry.base:
                continue
            bound: dict[Any, Any] = {}
            if self._match(key, entry, bound):
                return self._of(value, {**self._values, **bound})
        return None

    def _match(self, key: sp.Indexed, entry: sp.Indexed, bound: dict[Any, Any]) -> bool:
        """Solve ``c[i + 2]`` against ``c[3]`` for i, which starts at 1 where it is shifted."""
        for wanted, found in zip(key.indices, entry.indices, strict=True):
            index = wanted.subs(self._sizes)
            names = index.free_symbols
            if not names:
                if index != found:
                    return False
                continue
            (name,) = names
            value = found - index.subs(name, 0)
            if (index != name and value < 1) or bound.setdefault(name, value) != value:
                return False
        return True

    def describe(self, values: Mapping[sp.Symbol, Any], limit: int = 12) -> str:
        """``T = 3, k = 1, x[1, 2] = 0.7, ...``."""
        parts = [f"{s} = {v}" for s, v in self._values.items()]
        parts += [f"{self._entries.get(s, s)} = {short(v)}" for s, v in values.items()]
        return ", ".join(parts[:limit]) + (", ..." if len(parts) > limit else "")

    def _of(self, e: Any, values: Mapping[sp.Basic, sp.Basic]) -> Any:
        if isinstance(e, sp.Symbol):
            return values.get(e, e)
        if isinstance(e, sp.Indexed):
            return self._entry(e, tuple(self._of(index, values) for index in e.indices))
        if isinstance(e, sp.Sum | sp.Product):
            return self._written_out(e, list(e.limits), values)
        if isinstance(e, sp.Derivative):
            result = self._of(e.expr, values)
            for variable, count in e.variable_count:
                # Without simplify=False SymPy factors every second derivative, at great length.
                result = sp.diff(result, self._of(variable, values), int(count), simplify=False)
            return result
        if isinstance(e, sp.Subs):
            inner = {k: v for k, v in values.items() if k not in e.variables}
            new = [self._of(value, values) for value in e.point]
            old = [self._of(variable, inner) for variable in e.variables]
            return self._of(e.expr, inner).subs(list(zip(old, new, strict=True)), simultaneous=True)
        if isinstance(e, AppliedUndef):
            return _concrete(e.func.__name__, [self._of(a, values) for a in e.args])
        if not e.args:
            return e
        return e.func(*(self._of(argument, values) for argument in e.args))

    def _written_out(self, e: Any, limits: list[Any], values: Mapping[Any, Any]) -> Any:
        if not limits:
            return self._of(e.function, values)
        *inner, (symbol, low, high) = limits
        start, stop = self._of(low, values), self._of(high, values)
        if not (start.is_Integer and stop.is_Integer):
            raise ValueError(
                f"{e}: the range {low} to {high} of {symbol} depends on something that is neither "
                "a length nor an outer index; give the bound index another name"
            )
        terms = [
            self._written_out(e, inner, {**values, symbol: sp.Integer(t)})
            for t in range(int(start), int(stop) + 1)
        ]
        return sp.Add(*terms) if isinstance(e, sp.Sum) else sp.Mul(*terms)

    def _entry(self, e: sp.Indexed, indices: tuple[Any, ...]) -> sp.Symbol:
        label = e.base.label
        name = f"{label}[{','.join(map(str, indices))}]"  # no symbol and no other array has it
        assumptions = {"real": True} | (
            {"positive": True} if getattr(e.base, "is_positive", None) or label.is_positive else {}
        )
        symbol = sp.Symbol(name, **assumptions)
        self._entries[symbol] = e.base[indices]
        return symbol


def _concrete(name: str, arguments: list[sp.Expr]) -> sp.Expr:
    """A smooth function for an undefined one: its coefficients come from its name."""
    digest = hashlib.sha256(name.encode()).digest()
    a, b, c = (sp.Rational(byte + 40, 128) for byte in digest[:3])
    phase = sp.Add(*(a * (k + 1) * x for k, x in enumerate(arguments)))
    return sp.sin(phase + b) + c * sp.Mul(*arguments) ** 2 + sp.cos(b * sp.Add(*arguments))


def short(value: Any) -> str:
    """Eight digits, for people."""
    return mpmath.nstr(value, 8)
