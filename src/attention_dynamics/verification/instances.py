r"""A statement at small lengths and random values: the independent witness at 40 digits.

Nothing here shares code with the normal form: sums are written out, derivatives taken by SymPy on
plain variables, and the result is evaluated by mpmath.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mpmath
import sympy as sp

from attention_dynamics.verification.explicit import Explicit, short
from attention_dynamics.verification.ranges import free_indices, sizes_of

DIGITS = 40
WORKING_DIGITS = 60
AGREEMENT = mpmath.mpf(10) ** -DIGITS
SIZES = ((3, 2, 4, 3, 2), (2, 3, 3, 4, 3))
SCALES = (1, 1, 1, 3)  # some values beyond pi, where branches of complex functions change
ATTEMPTS = 20
DEPTH = 8  # hypotheses whose values name other hypotheses, at most this deep


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
        return f"at {self.where}: {short(self.left)} against {short(self.right)}"


class Instances:
    """Random points of ``left = right`` under hypotheses, reproducible from the label."""

    def __init__(self, seed: str, given: Mapping[Any, Any]) -> None:
        """Seed from a text; ``given`` are the hypotheses the points have to satisfy."""
        self._random = random.Random(hashlib.sha256(seed.encode()).digest())
        self._given = {sp.sympify(key): sp.sympify(value) for key, value in given.items()}
        self._explicit: dict[Any, Explicit] = {}
        self._cache: dict[Any, _Compiled] = {}
        self._scales: tuple[int, ...] = SCALES

    def points(self, left: sp.Expr, right: sp.Expr, count: int) -> Iterator[Point]:
        """``count`` points, over two sets of lengths and changing index values.

        Raises ``ValueError`` when no point satisfies the hypotheses or has finite sides.
        """
        everything = [left, right, *self._given, *self._given.values()]
        # Quadrature over an infinite range loses digits where the integrand is narrow.
        self._scales = (1,) if left.has(sp.Integral) or right.has(sp.Integral) else SCALES
        sizes = sizes_of(everything)
        stated = left.free_symbols | right.free_symbols
        # An index that occurs in hypotheses only is theirs, and takes every value there.
        indices = {s: r for s, r in free_indices(everything).items() if s in stated}
        settings = list(self._settings(sizes, indices))
        for number in range(count):
            values = settings[number % len(settings)]
            compiled = self._compiled(values, frozenset(sizes), left, right)
            # Where signs are free, one point has all of them positive and one all negative.
            yield self._point(compiled, (1,) if number == 0 else (-1,) if number == 1 else (-1, 1))

    def _settings(
        self, sizes: list[sp.Symbol], indices: Mapping[sp.Symbol, tuple[sp.Expr, sp.Expr]]
    ) -> Iterator[dict[sp.Basic, sp.Basic]]:
        """Lengths and index values: all indices equal, all distinct, then at random."""
        choices = ("equal", "distinct", "random") if indices else ("equal",)
        for choice in choices:
            for numbers in SIZES:
                values: dict[sp.Basic, sp.Basic] = {
                    size: sp.Integer(n) for size, n in zip(sizes, numbers, strict=False)
                }
                for place, (symbol, (low, high)) in enumerate(indices.items()):
                    first, last = int(low.subs(values)), int(high.subs(values))
                    value = {
                        "equal": first,
                        "distinct": first + (place + 1) % max(last - first + 1, 1),
                        "random": self._random.randint(first, max(first, last)),
                    }[choice]
                    values[symbol] = sp.Integer(value)
                yield values

    def _compiled(
        self,
        values: dict[sp.Basic, sp.Basic],
        sizes: frozenset[sp.Basic],
        left: sp.Expr,
        right: sp.Expr,
    ) -> "_Compiled":
        setting = tuple(values.items())
        if (setting, left, right) not in self._cache:
            explicit = self._explicit.setdefault(setting, Explicit(values, sizes))
            self._cache[setting, left, right] = self._compile(explicit, left, right)
        return self._cache[setting, left, right]

    def _compile(self, explicit: "Explicit", left: sp.Expr, right: sp.Expr) -> "_Compiled":
        sides = [explicit(left), explicit(right)]
        constraints = []
        definitions: dict[sp.Basic, sp.Expr] = {}
        for key, value in self._given.items():
            if isinstance(key, sp.Symbol):
                definitions[key] = explicit(value)
            elif not isinstance(key, sp.Indexed):
                constraints.append(explicit(key) - explicit(value))
        for _ in range(DEPTH):  # values by hypothesis may name others
            present = set().union(*(e.free_symbols for e in [*sides, *constraints]))
            for symbol in present - set(definitions):
                definition = explicit.defined(symbol, self._given)
                if definition is not None:
                    definitions[symbol] = definition
            if not present & set(definitions):
                break
            sides = [side.xreplace(definitions) for side in sides]
            constraints = [c.xreplace(definitions) for c in constraints]
        symbols = sorted(set().union(*(e.free_symbols for e in [*sides, *constraints])), key=str)
        # Subexpressions must stay under their integral: mpmath does it by quadrature.
        shared = not any(side.has(sp.Integral) for side in sides)
        evaluate = sp.lambdify(symbols, sides, modules="mpmath", cse=shared)
        return _Compiled(explicit, symbols, [c for c in constraints if c != 0], evaluate)

    def _point(self, compiled: "_Compiled", signs: tuple[int, ...]) -> Point:
        for attempt in range(ATTEMPTS):
            with mpmath.workdps(WORKING_DIGITS):
                exact = {
                    s: self._value(s, signs if attempt == 0 else (-1, 1)) for s in compiled.symbols
                }
                values = {s: _to_mp(value) for s, value in exact.items()}
                if not self._solve(compiled.constraints, compiled.symbols, values):
                    continue
                try:
                    a, b = compiled.evaluate(*values.values())
                except (ZeroDivisionError, ValueError):
                    continue
                if not (mpmath.isfinite(a) and mpmath.isfinite(b)):
                    continue
                size = max(abs(a), abs(b))
                gap = abs(a - b) / (1 + size)
                if 0 < size < AGREEMENT * 2 and not compiled.constraints:
                    gap = _gap_of_small(compiled, exact)
                return Point(gap, a, b, compiled.explicit.describe(values))
        raise ValueError(
            "no random point satisfies the hypotheses with finite sides: give assumptions "
            "(positive=True) to the symbols, or simpler hypotheses"
        )

    def _solve(
        self, constraints: list[sp.Expr], symbols: list[sp.Symbol], values: dict[sp.Symbol, Any]
    ) -> bool:
        """Move one variable a constraint until every hypothesis holds, by Newton's method."""
        if not constraints:
            return True
        chosen: list[sp.Symbol] = []
        for constraint in constraints:
            candidates = [s for s in symbols if s in constraint.free_symbols and s not in chosen]
            if not candidates:
                return False
            chosen.append(self._random.choice(candidates))
        function = sp.lambdify(symbols, constraints, modules="mpmath", cse=True)

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

    def _value(self, symbol: sp.Symbol, signs: tuple[int, ...]) -> sp.Rational:
        """A random value that the symbol's assumptions admit; a sign is one of ``signs``."""
        if symbol.is_integer:
            size = sp.Integer(self._random.randint(1, 5))
        else:
            size = sp.Rational(self._random.randint(3, 40), self._random.randint(17, 23))
            size *= self._random.choice(self._scales)
        if symbol.is_extended_nonnegative:
            return size
        if symbol.is_extended_nonpositive:
            return -size
        return size * self._random.choice(signs)


@dataclass(frozen=True)
class _Compiled:
    """Both sides at one setting of lengths and indices, as a function of the remaining values."""

    explicit: "Explicit"
    symbols: list[sp.Symbol]
    constraints: list[sp.Expr]
    evaluate: Callable[..., Any]


def _gap_of_small(compiled: _Compiled, exact: Mapping[sp.Symbol, sp.Rational]) -> Any:
    """Relative gap of sides too small for the working precision: cancellation, or tiny numbers."""
    with mpmath.workdps(6 * WORKING_DIGITS):
        a, b = compiled.evaluate(*map(_to_mp, exact.values()))
        size = max(abs(a), abs(b))
        if size < mpmath.mpf(10) ** (-5 * WORKING_DIGITS):
            return mpmath.mpf(0)
        return abs(a - b) / size


def _to_mp(value: sp.Rational) -> Any:
    return mpmath.mpf(int(value.p)) / int(value.q)
