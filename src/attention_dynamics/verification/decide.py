"""Whether a normal form is zero: an identity of rational functions in its factors."""

import sympy as sp

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.normal_form import NormalForm
from attention_dynamics.verification.polynomial import Polynomial

SIMPLIFY_OPERATIONS = 400  # larger differences are not handed to simplify, which may run for hours


def vanishes(form: NormalForm, difference: Polynomial) -> bool:
    """True only if the difference is proved to be zero with its factors independent of each other.

    Roots are reduced by their defining equations; everything else is a free variable.
    """
    if not difference:
        return True
    return _Numerator(form, difference).is_zero()


def simplifies_to_zero(expression: sp.Expr) -> str | None:
    """The name of the SymPy simplification that gives exactly 0, or None.

    The result has to *be* ``0``: ``.equals`` may answer None, and an expression is always true.
    """
    if expression.count_ops() > SIMPLIFY_OPERATIONS or expression.has(sp.Sum, sp.Product):
        return None
    for name, simplification in (
        ("simplify", sp.simplify),
        ("trigsimp", sp.trigsimp),
        ("simplify after logcombine", lambda e: sp.simplify(sp.logcombine(sp.expand_log(e)))),
    ):
        if simplification(expression) is sp.S.Zero:
            return name
    return None


class _Numerator:
    """The difference over one denominator, with a plain variable for every factor."""

    def __init__(self, form: NormalForm, difference: Polynomial) -> None:
        self._form = form
        self._difference = difference
        self._variables: dict[sp.Expr, sp.Dummy] = {}
        self._roots: dict[sp.Expr, int] = {}
        self._collect(difference)

    def is_zero(self) -> bool:
        numerator = sp.fraction(sp.together(self._expression(self._difference)))[0].expand()
        # A root may hold others: reduce until nothing changes.
        for _ in range(len(self._roots) + 1):
            if numerator is sp.S.Zero:
                return True
            for factor, order in self._roots.items():
                variable = self._variables[factor]
                if order == 1 or not numerator.has(variable):
                    continue
                if not poly.is_composite(factor):
                    continue
                value = sp.fraction(
                    sp.together(variable**order - self._expression(self._form.convert(factor)))
                )[0]
                numerator = sp.rem(numerator, value.expand(), variable)
                numerator = sp.fraction(sp.together(numerator))[0].expand()
        return numerator is sp.S.Zero

    def _collect(self, polynomial: Polynomial) -> None:
        for monomial in polynomial:
            for factor, exponent in monomial:
                known = factor in self._variables
                self._variables.setdefault(factor, sp.Dummy())
                order = self._roots.get(factor, 1)
                self._roots[factor] = int(sp.ilcm(order, exponent.q))
                if not known and poly.is_composite(factor):
                    self._collect(self._form.convert(factor))

    def _expression(self, polynomial: Polynomial) -> sp.Expr:
        return sp.Add(
            *(
                sp.Mul(coefficient, *(self._factor(f, e) for f, e in monomial))
                for monomial, coefficient in polynomial.items()
            )
        )

    def _factor(self, factor: sp.Expr, exponent: sp.Rational) -> sp.Expr:
        order = self._roots[factor]
        if order == 1 and poly.is_composite(factor):
            return self._expression(self._form.convert(factor)) ** exponent
        return self._variables[factor] ** (exponent * order)
