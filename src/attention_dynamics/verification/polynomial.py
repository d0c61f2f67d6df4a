r"""Exact sums of monomials in opaque factors: the carrier of the normal form.

A polynomial is ``{monomial: coefficient}``, a monomial a frozenset of ``(factor, exponent)``. A
factor is a SymPy object that is never looked into. The exponent c of a factor ``exp(m)`` or
``b**m`` with symbolic m stands for ``exp(c m)`` and ``b**(c m)``, so that products combine by
adding exponents.
"""

from collections.abc import Callable, Iterable

import sympy as sp

Monomial = frozenset[tuple[sp.Expr, sp.Rational]]
Polynomial = dict[Monomial, sp.Rational]

EMPTY: Monomial = frozenset()


def constant(value: sp.Rational) -> Polynomial:
    """``c``."""
    return {EMPTY: value} if value != 0 else {}


def atom(factor: sp.Expr, exponent: sp.Rational = sp.S.One) -> Polynomial:
    """``factor**exponent`` as one monomial."""
    return {frozenset([(factor, exponent)]): sp.S.One}


def add(polynomials: Iterable[Polynomial]) -> Polynomial:
    """``p + q + ...``."""
    total: Polynomial = {}
    for polynomial in polynomials:
        for monomial, coefficient in polynomial.items():
            value = total.get(monomial, sp.S.Zero) + coefficient
            if value == 0:
                total.pop(monomial, None)
            else:
                total[monomial] = value
    return total


def scale(polynomial: Polynomial, coefficient: sp.Rational) -> Polynomial:
    """``c p``."""
    return {m: c * coefficient for m, c in polynomial.items()} if coefficient != 0 else {}


def multiply(
    left: Polynomial, right: Polynomial, open_factor: Callable[[sp.Expr], Polynomial]
) -> Polynomial:
    """``p q``; ``open_factor`` expands a composite factor that reached a whole power."""
    return add(_merge(m, n, c * d, open_factor) for m, c in left.items() for n, d in right.items())


def power(
    base: Polynomial, exponent: int, open_factor: Callable[[sp.Expr], Polynomial]
) -> Polynomial:
    """``p**n`` for a whole n >= 0, by squaring."""
    result, square = constant(sp.S.One), base
    while exponent:
        if exponent & 1:
            result = multiply(result, square, open_factor)
        exponent >>= 1
        if exponent:
            square = multiply(square, square, open_factor)
    return result


def factor_power(factor: sp.Expr, exponent: sp.Rational) -> sp.Expr:
    """One factor with its exponent, back as SymPy."""
    if isinstance(factor, sp.exp):
        return sp.exp(exponent * factor.args[0])
    if isinstance(factor, sp.Pow):
        return sp.Pow(factor.base, exponent * factor.exp)
    return sp.Pow(factor, exponent)


def to_sympy(polynomial: Polynomial) -> sp.Expr:
    """The polynomial as a SymPy expression."""
    return sp.Add(
        *(
            sp.Mul(coefficient, *(factor_power(f, e) for f, e in monomial))
            for monomial, coefficient in polynomial.items()
        )
    )


def is_composite(factor: sp.Expr) -> bool:
    """Whether a whole positive power of the factor has to be expanded: a sum, product, number."""
    return isinstance(factor, sp.Add | sp.Mul | sp.Rational)


def is_nested_root(factor: sp.Expr) -> bool:
    """Whether the factor is ``(b**m)**q`` or ``exp(m)**q``, which is not ``b**(m q)``."""
    return (
        isinstance(factor, sp.Pow)
        and isinstance(factor.base, sp.Pow | sp.exp)
        and isinstance(factor.exp, sp.Rational)
    )


def _merge(
    left: Monomial, right: Monomial, coefficient: sp.Rational, open_factor: Callable
) -> Polynomial:
    if not left or not right:
        return {left | right: coefficient}
    exponents = dict(left)
    opened: list[Polynomial] = []
    for factor, exponent in right:
        total = exponents.pop(factor, sp.S.Zero) + exponent
        if isinstance(factor, sp.KroneckerDelta) and total > 1:
            total = sp.S.One  # it is 0 or 1
        if isinstance(factor, sp.Rational):
            # Roots of numbers keep an exponent in (0, 1).
            whole = sp.floor(total)
            coefficient, total = coefficient * factor**whole, total - whole
        elif is_composite(factor) and total >= 1:
            whole = sp.floor(total)
            opened.append(power(open_factor(factor), int(whole), open_factor))
            total -= whole
        elif is_nested_root(factor):
            whole = sp.floor(total * factor.exp)
            if whole != 0:
                opened.append(open_factor(factor.base**whole))
                total -= whole / factor.exp
        if total != 0:
            exponents[factor] = total
    result: Polynomial = {frozenset(exponents.items()): coefficient}
    for polynomial in opened:
        result = multiply(result, polynomial, open_factor)
    return result
