r"""Sums in normal form: :math:`\sum_{t,s} a_t b_s c_{ts} \cdots` split, named, summed away."""

from typing import TYPE_CHECKING

import sympy as sp
from sympy.core.function import AppliedUndef

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.calculus import index_symbol, rename_bound
from attention_dynamics.verification.indices import (
    Index,
    connected,
    is_canonical,
    mentions,
    named,
    touches,
)
from attention_dynamics.verification.polynomial import Monomial, Polynomial

if TYPE_CHECKING:
    from attention_dynamics.verification.normal_form import NormalForm

EXPLICIT_TERMS = 64  # sums of at most this many terms with numeric bounds are written out


class SumNormaliser:
    """``Sum -> polynomial`` in connected sums with canonical names, for one :class:`NormalForm`."""

    def __init__(self, form: "NormalForm") -> None:
        """Work for ``form``, which converts what is inside."""
        self._form = form

    def convert(self, e: sp.Sum) -> Polynomial:
        """A sum over one or several indices, innermost first as SymPy orders them."""
        if any(is_canonical(limit[0]) for limit in e.limits):
            # Named again from the inside, an inner index could take the name of an outer one.
            e = rename_bound(e)
        result = self._form.convert(e.function)
        for limit in e.limits:
            if len(limit) != 3:
                raise ValueError(f"{e} has an index without bounds: write Sum(f, (t, 1, T))")
            symbol, low, high = limit
            index = Index(symbol, self._form.canonical(low), self._form.canonical(high))
            result = self.over([index], result)
        return result

    def over(self, indices: list[Index], summand: Polynomial) -> Polynomial:
        """The sum of a polynomial over ``indices`` (outermost first)."""
        return poly.add(
            poly.scale(self._monomial(indices, monomial), coefficient)
            for monomial, coefficient in summand.items()
        )

    def _monomial(self, indices: list[Index], monomial: Monomial) -> Polynomial:
        explicit = self._written_out(indices, monomial)
        if explicit is not None:
            return explicit
        indices, factors = self._flattened(indices, monomial)
        collapsed = self._without_delta(indices, factors)
        if collapsed is not None:
            return collapsed
        free = [pair for pair in factors if not touches(pair[0], indices)]
        result: Polynomial = {frozenset(free): sp.S.One}
        result = self._form.multiply(result, poly.constant(sp.S.One))
        bound = [pair for pair in factors if touches(pair[0], indices)]
        for part, members in connected(indices, bound):
            result = self._form.multiply(result, self._component(part, members))
        return result

    def _written_out(self, indices: list[Index], monomial: Monomial) -> Polynomial | None:
        """Sums with numeric bounds, term by term."""
        for index in indices:
            count = index.high - index.low + 1
            if not (isinstance(count, sp.Integer) and count <= EXPLICIT_TERMS):
                continue
            rest = [other for other in indices if other is not index]
            terms = []
            for offset in range(max(int(count), 0)):
                value = {index.symbol: index.low + offset}
                term = self._substituted(list(monomial), index.symbol, index.low + offset)
                inner = [Index(o.symbol, o.low.subs(value), o.high.subs(value)) for o in rest]
                terms.append(self.over(inner, term) if inner else term)
            return poly.add(terms)
        return None

    def _flattened(
        self, indices: list[Index], monomial: Monomial
    ) -> tuple[list[Index], list[tuple[sp.Expr, sp.Rational]]]:
        """Inner sums that depend on ``indices`` opened: ``(sum_i a_ti)^2 = sum_ij a_ti a_tj``."""
        indices = list(indices)
        factors: list[tuple[sp.Expr, sp.Rational]] = []
        for factor, exponent in monomial:
            opens = (
                isinstance(factor, sp.Sum)
                and isinstance(exponent, sp.Integer)
                and exponent > 0
                and touches(factor, indices)
            )
            if not opens:
                factors.append((factor, exponent))
                continue
            for _ in range(int(exponent)):
                names: dict[sp.Basic, sp.Basic] = {}
                for symbol, low, _ in reversed(factor.limits):
                    names[symbol] = index_symbol(low.xreplace(names))
                # Canonical sums hold their outermost index last.
                indices += [
                    Index(*(part.xreplace(names) for part in limit))
                    for limit in reversed(factor.limits)
                ]
                summand = self._form.convert(factor.function.xreplace(names))
                ((inner, coefficient),) = summand.items()
                assert coefficient == 1
                factors += list(inner)
        merged: Polynomial = poly.constant(sp.S.One)
        for factor, exponent in factors:
            merged = self._form.multiply(merged, poly.atom(factor, exponent))
        ((combined, _),) = merged.items()
        return indices, list(combined)

    def _without_delta(
        self, indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]
    ) -> Polynomial | None:
        """``sum_t delta_tk f_t = f_k``, for k in the range of t."""
        by_symbol = {index.symbol: index for index in indices}
        for delta, exponent in factors:
            if not isinstance(delta, sp.KroneckerDelta) or exponent != 1:
                continue
            for gone, kept in (delta.args, delta.args[::-1]):
                index = by_symbol.get(gone)
                if index is None or any(mentions(o, gone) for o in indices if o is not index):
                    continue
                other = by_symbol.get(kept)
                if other is not None:
                    if (other.low, other.high) != (index.low, index.high):
                        continue
                elif touches(kept, indices) or not self._form.assume(
                    sp.Le(index.low, kept), sp.Le(kept, index.high)
                ):
                    continue
                remaining = [pair for pair in factors if pair[0] != delta]
                summand = self._substituted(remaining, gone, kept)
                return self.over([o for o in indices if o is not index], summand)
        return None

    def _component(
        self, indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]
    ) -> Polynomial:
        """One connected sum: counted, in closed form, or a factor with canonical names."""
        for index in indices:
            others = [other for other in indices if other is not index]
            if any(touches(factor, [index]) for factor, _ in factors) or any(
                mentions(other, index.symbol) for other in others
            ):
                continue
            count = self._form.canonical(index.high - index.low + 1)
            if not self._nonnegative(count, others):
                continue
            summand = self._form.multiply({frozenset(factors): sp.S.One}, self._form.convert(count))
            return self.over(others, summand) if others else summand
        closed = self._closed_form(indices, factors)
        if closed is not None:
            return closed
        standard = self._standard_range(indices, factors)
        if standard is not None:
            return standard
        factor = named(indices, factors)
        replaced = self._form.hypotheses.replace_factor(factor)
        return poly.atom(factor) if replaced is None else replaced

    def _nonnegative(self, count: sp.Expr, indices: list[Index]) -> bool:
        """Whether a number of terms is no less than 0, for all values of ``indices``.

        SymPy gives a sum from ``low`` to ``low - 3`` the value of two terms with a minus sign;
        readers, and the numeric witness, take it to be empty.
        """
        for index in indices:
            if index.symbol not in count.free_symbols:
                continue
            slope = sp.diff(count, index.symbol)
            if index.symbol in slope.free_symbols:
                return False
            rest = [other for other in indices if other is not index]
            ends = (count.subs(index.symbol, end) for end in (index.low, index.high))
            return all(self._nonnegative(end.expand(), rest) for end in ends)
        constant, terms = count.as_coeff_Add()
        return self._form.assume(sp.Ge(terms, -constant))

    def _standard_range(
        self, indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]
    ) -> Polynomial | None:
        r"""Entries ``x[t]`` over ``1 <= t <= T``, ends split off: lengths exceed the shifts.

        :math:`\sum_{t=2}^{T+1} x_{t-1} = \sum_{t=1}^{T} x_t`, and
        :math:`\sum_{t=2}^{T} x_t = \sum_{t=1}^{T} x_t - x_1`.
        """
        for index in indices:
            symbol = index.symbol
            offset = _least_offset(symbol, factors)
            if offset != 0:
                shifted = index_symbol(index.low + offset)
                place = shifted - offset
                moved = [o.renamed({symbol: place}) for o in indices if o is not index]
                moved.append(Index(shifted, index.low + offset, index.high + offset))
                return self.over(moved, self._substituted(factors, symbol, place))
            constant, length = index.high.as_coeff_Add()
            if not isinstance(index.low, sp.Integer) or not isinstance(constant, sp.Integer):
                continue
            ends = [(value, -1) for value in range(1, int(index.low))]
            ends += [(value, 1) for value in range(int(index.low), 1)]
            ends += [(length + step, 1) for step in range(1, int(constant) + 1)]
            ends += [(length + step, -1) for step in range(int(constant) + 1, 1)]
            if not ends or len(ends) > EXPLICIT_TERMS:
                continue
            others = [other for other in indices if other is not index]
            counts = (index.high - index.low + 1, length)
            if not all(self._nonnegative(count, others) for count in counts):
                continue
            whole = [*others, Index(symbol, sp.S.One, length)]
            terms = [self.over(whole, self._substituted(factors, symbol, symbol))]
            for value, sign in ends:
                entry = self._substituted(factors, symbol, value)
                rest = [other.renamed({symbol: sp.sympify(value)}) for other in others]
                terms.append(
                    poly.scale(self.over(rest, entry) if rest else entry, sp.Integer(sign))
                )
            return poly.add(terms)
        return None

    def _substituted(
        self, factors: list[tuple[sp.Expr, sp.Rational]], symbol: sp.Basic, value: sp.Basic
    ) -> Polynomial:
        product = poly.constant(sp.S.One)
        for factor, exponent in factors:
            replaced = poly.factor_power(factor, exponent).subs(symbol, value)
            product = self._form.multiply(product, self._form.convert(replaced))
        return product

    def _closed_form(
        self, indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]
    ) -> Polynomial | None:
        """Sums of powers and geometric sums, which SymPy evaluates."""
        if len(indices) != 1 or any(f.has(sp.Indexed, AppliedUndef, sp.Sum) for f, _ in factors):
            return None
        (index,) = indices
        name = sp.Dummy("t", integer=True)
        summand = sp.Mul(*(poly.factor_power(f, e) for f, e in factors)).subs(index.symbol, name)
        if not summand.is_polynomial(name) and not summand.has(sp.Pow, sp.exp):
            return None
        if not self._nonnegative(index.high - index.low + 1, []):
            return None
        value = sp.summation(summand, (name, index.low, index.high))
        if isinstance(value, sp.Piecewise):
            *special, (generic, condition) = value.args
            if condition is not sp.S.true:
                return None
            if not self._form.assume(*(sp.Not(excluded) for _, excluded in special)):
                return None
            value = generic
        if value.has(sp.Sum, sp.Piecewise, sp.zeta, sp.lerchphi, sp.harmonic):
            return None
        return self._form.convert(value)


def _least_offset(symbol: sp.Basic, factors: list[tuple[sp.Expr, sp.Rational]]) -> sp.Integer:
    """The smallest o among entries ``x[t + o]``; 0 where t is in no entry."""
    offsets = [
        place - symbol
        for factor, _ in factors
        for entry in factor.atoms(sp.Indexed)
        for place in entry.indices
        if symbol in place.free_symbols
    ]
    whole = [offset for offset in offsets if isinstance(offset, sp.Integer)]
    return min(whole, default=sp.S.Zero)
