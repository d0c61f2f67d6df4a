r"""A normal form for expressions with symbolic sums, exact for every length and dimension.

Derivatives are carried out, sums are expanded by linearity into sums whose summand is one product,
every product of sums is split into connected sums (no factor shared between two of them), indices
get canonical names, Kronecker deltas are summed away. What is left is a polynomial in opaque
factors; two expressions with one normal form are equal.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import sympy as sp

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.calculus import resolve
from attention_dynamics.verification.hypotheses import Hypotheses
from attention_dynamics.verification.polynomial import Polynomial
from attention_dynamics.verification.sums import SumNormaliser


class NormalForm:
    """``expression -> polynomial`` under hypotheses; collects the assumptions made on the way.

    ``assumptions`` lists what was used beyond the expression itself, as SymPy relations: an index
    collapsed by a Kronecker delta lies in its range, a ratio of a geometric sum is not 1.
    """

    def __init__(
        self, given: Mapping[Any, Any] | None = None, sizes: Iterable[sp.Basic] = ()
    ) -> None:
        """Start with the hypotheses ``given``, expressions mapped to what they equal.

        ``sizes`` are the symbols that stand for lengths in the indices of ``given``.
        """
        self.assumptions: list[sp.Basic] = []
        self._cache: dict[sp.Basic, Polynomial] = {}
        self._sums = SumNormaliser(self)
        self.hypotheses = Hypotheses(self, sizes)
        self.hypotheses.add(given or {})

    def of(self, expression: sp.Expr) -> Polynomial:
        """The normal form of ``expression``: equal normal forms prove equal expressions."""
        return self.collapse_deltas(self.convert(resolve(expression)))

    def assume(self, *relations: sp.Basic) -> bool:
        """Whether the relations hold or may be assumed; those assumed are noted, each once.

        A relation that is false, or says something of a bound index, is no assumption on the
        statement: it would hold for some terms of a sum only.
        """
        open_relations = [relation for relation in relations if relation is not sp.S.true]
        for relation in open_relations:
            if relation is sp.S.false or relation.atoms(sp.Dummy):
                return False
        self.assumptions += [r for r in open_relations if r not in self.assumptions]
        return True

    def multiply(self, left: Polynomial, right: Polynomial) -> Polynomial:
        """``p q`` in normal form."""
        return poly.multiply(left, right, self.convert)

    def convert(self, expression: sp.Expr) -> Polynomial:
        """The polynomial of an expression without derivatives."""
        if expression not in self._cache:
            self._cache[expression] = self._convert(expression)
        return self._cache[expression]

    def canonical(self, expression: sp.Expr) -> sp.Expr:
        """The normal form as a SymPy expression, for arguments of functions and indices."""
        return poly.to_sympy(self.convert(expression))

    def _convert(self, e: sp.Expr) -> Polynomial:
        if isinstance(e, sp.Rational):
            return poly.constant(e)
        if isinstance(e, sp.Float):
            raise ValueError(f"the expression holds the float {e}: write sympy.Rational instead")
        if isinstance(e, sp.Symbol | sp.Indexed):
            replaced = self.hypotheses.replace(e)
            if replaced is not None:
                return replaced
            if isinstance(e, sp.Symbol):
                return poly.atom(e)
            return poly.atom(e.base[tuple(self.canonical(index) for index in e.indices)])
        if isinstance(e, sp.Add):
            return poly.add(self.convert(term) for term in e.args)
        if isinstance(e, sp.Mul):
            product = poly.constant(sp.S.One)
            for factor in e.args:
                product = self.multiply(product, self.convert(factor))
            return product
        if isinstance(e, sp.exp):
            return self._exponential(lambda m: sp.exp(m), self.convert(e.args[0]))
        if e is sp.I:
            return poly.atom(sp.S.NegativeOne, sp.S.Half)
        if e is sp.E:
            return poly.atom(sp.exp(1, evaluate=False))
        if isinstance(e, sp.Pow):
            return self._power(e.base, e.exp)
        if isinstance(e, sp.Sum):
            return self._sums.convert(e)
        return self._opaque(e)

    def _opaque(self, e: sp.Expr) -> Polynomial:
        if not e.args or isinstance(e, sp.Piecewise | sp.Product | sp.Integral):
            return poly.atom(e)
        rebuilt = e.func(*(self.canonical(a) if isinstance(a, sp.Expr) else a for a in e.args))
        # Rebuilding may evaluate, as tanh(-x) = -tanh(x): convert what came out of it.
        if rebuilt.func is not e.func:
            return self.convert(rebuilt)
        return poly.atom(rebuilt)

    def _exponential(self, build: Any, exponent: Polynomial) -> Polynomial:
        """``exp`` or a power with a symbolic exponent: one factor a monomial of the exponent."""
        product = poly.constant(sp.S.One)
        for monomial, coefficient in exponent.items():
            argument = poly.to_sympy({monomial: sp.S.One})
            factor = build(argument)
            if not isinstance(factor, sp.exp | sp.Pow):  # exp(1) is the number E
                factor = sp.exp(argument, evaluate=False)
            product = self.multiply(product, poly.atom(factor, coefficient))
        return product

    def _power(self, base: sp.Expr, exponent: sp.Expr) -> Polynomial:
        if isinstance(exponent, sp.Integer) and exponent >= 0:
            return poly.power(self.convert(base), int(exponent), self.convert)
        inner = self.convert(base)
        if isinstance(exponent, sp.Integer):
            return poly.power(self._inverse(inner), int(-exponent), self.convert)
        canonical = poly.to_sympy(inner)
        if isinstance(exponent, sp.Rational):
            whole = sp.floor(exponent)
            return self.multiply(self._root(canonical, exponent - whole), self._power(base, whole))
        return self._symbolic_power(canonical, inner, exponent)

    def _root(self, base: sp.Expr, exponent: sp.Rational) -> Polynomial:
        """``b**q`` for 0 <= q < 1 and a base in normal form."""
        factor = sp.Pow(base, exponent)
        if not (isinstance(factor, sp.Pow) and factor.base == base):
            return self.convert(factor)  # SymPy split it, as sqrt(12) = 2 sqrt(3)
        if isinstance(base, sp.Pow | sp.exp):
            # The exponent of such a factor would multiply its own, and sqrt(a^2) is not a.
            return poly.atom(factor)
        return poly.atom(base, exponent)

    def _symbolic_power(self, base: sp.Expr, inner: Polynomial, exponent: sp.Expr) -> Polynomial:
        """``b**(n + 2 m) = (b**n) (b**m)**2``; whole parts of the exponent become powers of b."""
        terms = self.convert(exponent)
        whole = terms.get(poly.EMPTY, sp.S.Zero)
        if not isinstance(whole, sp.Integer):
            whole = sp.S.Zero
        rest = poly.add([terms, poly.constant(-whole)])
        if whole < 0:
            numbers = poly.power(self._inverse(inner), int(-whole), self.convert)
        else:
            numbers = poly.power(inner, int(whole), self.convert)

        def build(argument: sp.Expr) -> sp.Expr:
            return sp.Pow(base, argument, evaluate=False)

        return self.multiply(numbers, self._exponential(build, rest))

    def _inverse(self, base: Polynomial) -> Polynomial:
        """``1/p``: monomials inverted, anything else one opaque factor of canonical sign."""
        if not base:
            raise ZeroDivisionError("the expression divides by zero")
        if len(base) == 1:
            ((monomial, coefficient),) = base.items()
            inverted = {frozenset((f, -e) for f, e in monomial): 1 / coefficient}
            return self.multiply(inverted, poly.constant(sp.S.One))
        leading = min(base, key=lambda monomial: str(poly.to_sympy({monomial: sp.S.One})))
        coefficient = base[leading]
        monic = poly.to_sympy(poly.scale(base, 1 / coefficient))
        return poly.scale(poly.atom(monic, sp.S.NegativeOne), 1 / coefficient)

    def collapse_deltas(self, polynomial: Polynomial) -> Polynomial:
        """``delta_jk f_k = delta_jk f_j`` in every monomial: one name for equal indices."""
        changed = True
        while changed:
            changed = False
            terms = []
            for monomial, coefficient in polynomial.items():
                rewritten = self._collapse(monomial)
                changed = changed or rewritten is not None
                terms.append(
                    {monomial: coefficient}
                    if rewritten is None
                    else poly.scale(rewritten, coefficient)
                )
            polynomial = poly.add(terms)
        return polynomial

    def _collapse(self, monomial: poly.Monomial) -> Polynomial | None:
        for delta, _ in monomial:
            if not isinstance(delta, sp.KroneckerDelta):
                continue
            kept, gone = sorted(delta.args, key=lambda a: (isinstance(a, sp.Symbol), str(a)))
            if not isinstance(gone, sp.Symbol):
                continue
            others = [(f, e) for f, e in monomial if f != delta]
            if not any(gone in f.free_symbols for f, _ in others):
                continue
            result = poly.atom(delta)
            for factor, exponent in others:
                replaced = poly.factor_power(factor, exponent).subs(gone, kept)
                result = self.multiply(result, self.convert(replaced))
            return result
        return None
