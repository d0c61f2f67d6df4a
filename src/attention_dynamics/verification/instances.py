r"""A statement at small lengths and random values: the independent witness at 40 digits.

Nothing here shares code with the normal form: sums are written out, derivatives taken by SymPy on
plain variables, and the result is evaluated by mpmath.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy as sp
from sympy.core.function import AppliedUndef

from attention_dynamics.verification.ranges import free_indices, sizes_of

DIGITS = 40
WORKING_DIGITS = 60
AGREEMENT = mpmath.mpf(10) ** -DIGITS
SIZES = ((3, 2, 4, 3, 2), (2, 3, 3, 4, 3))
ATTEMPTS = 20


@dataclass(frozen=True)
class Point:
    """One random point: the gap of the sides relative to their size, and a description of it."""

    gap: mpmath.mpf
    left: Any
    right: Any
    where: str

    @property
    def differs(self) -> bool:
        """Whether the sides differ here beyond rounding."""
        return self.gap > AGREEMENT

    def __str__(self) -> str:
        """``at T = 3, ...: 0.25 against 0.5``."""
        return f"at {self.where}: {_short(self.left)} against {_short(self.right)}"


class Instances:
    """Random points of ``left = right`` under hypotheses, reproducible from the label."""

    def __init__(self, seed: str, given: Mapping[Any, Any]) -> None:
        """Seed from a text; ``given`` are the hypotheses the points have to satisfy."""
        self._random = random.Random(hashlib.sha256(seed.encode()).digest())
        self._given = {sp.sympify(key): sp.sympify(value) for key, value in given.items()}

    def points(self, left: sp.Expr, right: sp.Expr, count: int) -> Iterator[Point]:
        """``count`` points, over two sets of lengths and changing index values.

        Raises ``ValueError`` when no point satisfies the hypotheses or has finite sides.
        """
        everything = [left, right, *self._given, *self._given.values()]
        sizes = sizes_of(everything)
        stated = left.free_symbols | right.free_symbols
        # An index that occurs in hypotheses only is theirs, and takes every value there.
        indices = {s: r for s, r in free_indices(everything).items() if s in stated}
        for number in range(count):
            lengths = dict(zip(sizes, SIZES[number % len(SIZES)], strict=False))
            values: dict[sp.Basic, sp.Basic] = {s: sp.Integer(n) for s, n in lengths.items()}
            for symbol, (low, high) in indices.items():
                first, last = int(low.subs(values)), int(high.subs(values))
                # Equal indices first, so that Kronecker deltas are seen at 1 and at 0.
                chosen = first if number < 2 else self._random.randint(first, last)
                values[symbol] = sp.Integer(chosen)
            yield self._point(_Explicit(values, frozenset(sizes)), left, right)

    def _point(self, explicit: "_Explicit", left: sp.Expr, right: sp.Expr) -> Point:
        sides = [explicit(left), explicit(right)]
        constraints = []
        definitions: dict[sp.Basic, sp.Expr] = {}
        for key, value in self._given.items():
            if isinstance(key, sp.Symbol):
                definitions[key] = explicit(value)
            elif not isinstance(key, sp.Indexed):
                constraints.append(explicit(key) - explicit(value))
        for _ in range(8):  # values by hypothesis may name others
            for symbol in set().union(*(e.free_symbols for e in [*sides, *constraints])):
                definition = explicit.defined(symbol, self._given)
                if definition is not None:
                    definitions[symbol] = definition
            sides = [side.xreplace(definitions) for side in sides]
            constraints = [c.xreplace(definitions) for c in constraints]
        symbols = sorted(set().union(*(e.free_symbols for e in [*sides, *constraints])), key=str)
        # Subexpressions must stay under their integral: mpmath does it by quadrature.
        shared = not any(side.has(sp.Integral) for side in sides)
        evaluate = sp.lambdify(symbols, sides, modules="mpmath", cse=shared)
        for _ in range(ATTEMPTS):
            with mpmath.workdps(WORKING_DIGITS):
                values = {s: _to_mp(self._value(s)) for s in symbols}
                if constraints and not self._solve(constraints, symbols, values):
                    continue
                try:
                    a, b = evaluate(*values.values())
                except (ZeroDivisionError, ValueError):
                    continue
                if not (mpmath.isfinite(a) and mpmath.isfinite(b)):
                    continue
                gap = abs(a - b) / (1 + max(abs(a), abs(b)))
                return Point(gap, a, b, explicit.describe(values))
        raise ValueError(
            "no random point satisfies the hypotheses with finite sides: give assumptions "
            "(positive=True) to the symbols, or simpler hypotheses"
        )

    def _solve(
        self, constraints: list[sp.Expr], symbols: list[sp.Symbol], values: dict[sp.Symbol, Any]
    ) -> bool:
        """Move one variable a constraint until every hypothesis holds, by Newton's method."""
        chosen: list[sp.Symbol] = []
        for constraint in constraints:
            if constraint == 0:
                continue
            candidates = [s for s in symbols if s in constraint.free_symbols and s not in chosen]
            if not candidates:
                return False
            chosen.append(self._random.choice(candidates))
        active = [c for c in constraints if c != 0]
        if not active:
            return True
        function = sp.lambdify(symbols, active, modules="mpmath", cse=True)

        def residual(*unknowns: Any) -> list[Any]:
            return function(*{**values, **dict(zip(chosen, unknowns, strict=True))}.values())

        try:
            solution = mpmath.findroot(residual, [values[s] for s in chosen], tol=1e-100)
        except (ValueError, ZeroDivisionError):
            return False
        for symbol, value in zip(chosen, solution, strict=True):
            if symbol.is_positive and not value > 0:
                return False
            values[symbol] = value
        return True

    def _value(self, symbol: sp.Symbol) -> sp.Rational:
        if symbol.is_integer:
            return sp.Integer(self._random.randint(1, 5))
        size = sp.Rational(self._random.randint(3, 40), self._random.randint(17, 23))
        if symbol.is_positive or symbol.is_nonnegative:
            return size
        if symbol.is_negative or symbol.is_nonpositive:
            return -size
        return size * self._random.choice((-1, 1))


class _Explicit:
    """An expression with numbers for lengths and indices, and plain symbols for entries."""

    def __init__(self, values: dict[sp.Basic, sp.Basic], sizes: frozenset[sp.Basic]) -> None:
        self._values = values
        self._sizes = {s: v for s, v in values.items() if s in sizes}
        self._entries: dict[sp.Symbol, sp.Indexed] = {}

    def __call__(self, expression: sp.Expr) -> sp.Expr:
        return self._of(sp.sympify(expression), self._values)

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
        parts += [f"{self._entries.get(s, s)} = {_short(v)}" for s, v in values.items()]
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
                result = sp.diff(result, self._of(variable, values), int(count))
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
        terms = [
            self._written_out(e, inner, {**values, symbol: sp.Integer(t)})
            for t in range(int(start), int(stop) + 1)
        ]
        return sp.Add(*terms) if isinstance(e, sp.Sum) else sp.Mul(*terms)

    def _entry(self, e: sp.Indexed, indices: tuple[Any, ...]) -> sp.Symbol:
        label = e.base.label
        name = "_".join([str(label), *map(str, indices)])
        assumptions = {"real": True} | (
            {"positive": True} if getattr(e.base, "is_positive", None) or label.is_positive else {}
        )
        symbol = sp.Symbol(f"{name}_", **assumptions)
        self._entries[symbol] = e.base[indices]
        return symbol


def _concrete(name: str, arguments: list[sp.Expr]) -> sp.Expr:
    """A smooth function for an undefined one: its coefficients come from its name."""
    digest = hashlib.sha256(name.encode()).digest()
    a, b, c = (sp.Rational(byte + 40, 128) for byte in digest[:3])
    phase = sp.Add(*(a * (k + 1) * x for k, x in enumerate(arguments)))
    return sp.sin(phase + b) + c * sp.Mul(*arguments) ** 2 + sp.cos(b * sp.Add(*arguments))


def _to_mp(value: sp.Rational) -> Any:
    return mpmath.mpf(int(value.p)) / int(value.q)


def _short(value: Any) -> str:
    return mpmath.nstr(value, 8)
