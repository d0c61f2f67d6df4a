r"""Sums in normal form: :math:`\sum_{t,s} a_t b_s c_{ts} \cdots` split, named, summed away."""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sympy as sp
from sympy.core.function import AppliedUndef

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.polynomial import Monomial, Polynomial

if TYPE_CHECKING:
    from attention_dynamics.verification.normal_form import NormalForm

EXPLICIT_TERMS = 64  # sums of at most this many terms with numeric bounds are written out
ORDERINGS = 5040  # names of interchangeable indices tried before settling for any of them


@dataclass(frozen=True)
class Index:
    """A bound index and its range, ``low <= symbol <= high``."""

    symbol: sp.Symbol
    low: sp.Expr
    high: sp.Expr

    def renamed(self, names: dict[sp.Basic, sp.Basic]) -> "Index":
        """The same range under other names."""
        return Index(
            names.get(self.symbol, self.symbol), self.low.xreplace(names), self.high.xreplace(names)
        )


class SumNormaliser:
    """``Sum -> polynomial`` in connected sums with canonical names, for one :class:`NormalForm`."""

    def __init__(self, form: "NormalForm") -> None:
        """Work for ``form``, which converts what is inside."""
        self._form = form

    def convert(self, e: sp.Sum) -> Polynomial:
        """A sum over one or several indices, innermost first as SymPy orders them."""
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
        free = [pair for pair in factors if not _touches(pair[0], indices)]
        result: Polynomial = {frozenset(free): sp.S.One}
        result = self._form.multiply(result, poly.constant(sp.S.One))
        bound = [pair for pair in factors if _touches(pair[0], indices)]
        for part, members in _connected(indices, bound):
            result = self._form.multiply(result, self._component(part, members))
        return result

    def _written_out(self, indices: list[Index], monomial: Monomial) -> Polynomial | None:
        """Sums with numeric bounds, term by term."""
        for place, index in enumerate(indices):
            count = index.high - index.low + 1
            if not (isinstance(count, sp.Integer) and count <= EXPLICIT_TERMS):
                continue
            rest = [other for other in indices if other is not index]
            terms = []
            for offset in range(max(int(count), 0)):
                value = {index.symbol: index.low + offset}
                term = poly.constant(sp.S.One)
                for factor, exponent in monomial:
                    replaced = poly.factor_power(factor, exponent).subs(value)
                    term = self._form.multiply(term, self._form.convert(replaced))
                inner = [Index(o.symbol, o.low.subs(value), o.high.subs(value)) for o in rest]
                terms.append(self.over(inner, term) if inner else term)
            del place
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
                and _touches(factor, indices)
            )
            if not opens:
                factors.append((factor, exponent))
                continue
            for _ in range(int(exponent)):
                names = {limit[0]: sp.Dummy(integer=True) for limit in factor.limits}
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
                if index is None or any(_mentions(o, gone) for o in indices if o is not index):
                    continue
                other = by_symbol.get(kept)
                if other is not None:
                    if (other.low, other.high) != (index.low, index.high):
                        continue
                elif _touches(kept, indices):
                    continue
                else:
                    self._form.assume(sp.Le(index.low, kept))
                    self._form.assume(sp.Le(kept, index.high))
                summand = poly.constant(sp.S.One)
                for factor, power in factors:
                    if factor == delta:
                        continue
                    replaced = poly.factor_power(factor, power).subs(gone, kept)
                    summand = self._form.multiply(summand, self._form.convert(replaced))
                return self.over([o for o in indices if o is not index], summand)
        return None

    def _component(
        self, indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]
    ) -> Polynomial:
        """One connected sum: counted, in closed form, or a factor with canonical names."""
        for index in indices:
            others = [other for other in indices if other is not index]
            if any(_touches(factor, [index]) for factor, _ in factors) or any(
                _mentions(other, index.symbol) for other in others
            ):
                continue
            count = self._form.convert(index.high - index.low + 1)
            summand = self._form.multiply({frozenset(factors): sp.S.One}, count)
            return self.over(others, summand) if others else summand
        closed = self._closed_form(indices, factors)
        if closed is not None:
            return closed
        factor = _named(indices, factors)
        replaced = self._form.hypotheses.replace_factor(factor)
        return poly.atom(factor) if replaced is None else replaced

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
        value = sp.summation(summand, (name, index.low, index.high))
        if isinstance(value, sp.Piecewise):
            *special, (generic, condition) = value.args
            if condition is not sp.S.true:
                return None
            for _, excluded in special:
                self._form.assume(sp.Not(excluded))
            value = generic
        if value.has(sp.Sum, sp.Piecewise, sp.zeta, sp.lerchphi, sp.harmonic):
            return None
        return self._form.convert(value)


def _touches(expression: sp.Basic, indices: list[Index]) -> bool:
    free = expression.free_symbols
    return any(index.symbol in free for index in indices)


def _mentions(index: Index, symbol: sp.Basic) -> bool:
    return symbol in index.low.free_symbols or symbol in index.high.free_symbols


def _connected(
    indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]
) -> list[tuple[list[Index], list[tuple[sp.Expr, sp.Rational]]]]:
    """Groups of indices joined by a common factor or a bound, each with its factors."""
    group = {index.symbol: {index.symbol} for index in indices}

    def join(symbols: set[sp.Basic]) -> None:
        present = [s for s in symbols if s in group]
        merged = set().union(*(group[s] for s in present))
        for symbol in merged:
            group[symbol] = merged

    for factor, _ in factors:
        join(factor.free_symbols)
    for index in indices:
        join({index.symbol} | index.low.free_symbols | index.high.free_symbols)
    parts, seen = [], set()
    for index in indices:
        if index.symbol in seen:
            continue
        members = group[index.symbol]
        seen |= members
        own = [pair for pair in factors if pair[0].free_symbols & members]
        parts.append(([i for i in indices if i.symbol in members], own))
    return parts


def _named(indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]) -> sp.Sum:
    """The sum with canonical names: colours by refinement, ties by the smallest spelling."""
    depth = 1 + max(
        (int(s.name.split("_")[1]) for f, _ in factors for s in _bound_names(f)), default=0
    )
    spelled = [(factor, str(exponent)) for factor, exponent in factors]

    def spell(names: dict[sp.Basic, sp.Basic]) -> tuple[str, ...]:
        return tuple(sorted(f"{f.xreplace(names)}^{e}" for f, e in spelled))

    colours = {index.symbol: f"{index.low}:{index.high}" for index in indices}
    for _ in indices:
        refined = {}
        for symbol, colour in colours.items():
            names = {s: sp.Symbol("own" if s == symbol else f"<{c}>") for s, c in colours.items()}
            near = sorted(
                f"{f.xreplace(names)}^{e}" for f, e in spelled if symbol in f.free_symbols
            )
            refined[symbol] = f"{colour}|{near}"
        ranks = {c: f"{r:03d}" for r, c in enumerate(sorted(set(refined.values())))}
        colours = {symbol: ranks[colour] for symbol, colour in refined.items()}
        if len(ranks) == len(colours):
            break
    classes = [
        [symbol for symbol in colours if colours[symbol] == colour]
        for colour in sorted(set(colours.values()))
    ]
    canonical = [sp.Symbol(f"c_{depth}_{k}", integer=True) for k in range(len(indices))]

    def candidates() -> itertools.product:
        return itertools.product(*(itertools.permutations(members) for members in classes))

    if math.prod(math.factorial(len(members)) for members in classes) > ORDERINGS:
        orders = [next(iter(candidates()))]
    else:
        orders = list(candidates())
    best = min(
        (dict(zip(itertools.chain(*order), canonical, strict=True)) for order in orders), key=spell
    )
    summand = sp.Mul(*(poly.factor_power(f, e).xreplace(best) for f, e in factors))
    return sp.Sum(summand, *_ordered([index.renamed(best) for index in indices]))


def _bound_names(factor: sp.Expr) -> set[sp.Symbol]:
    """Canonical names bound inside a factor, by an inner sum."""
    return {
        limit[0]
        for inner in factor.atoms(sp.Sum)
        for limit in inner.limits
        if limit[0].name.startswith("c_")
    }


def _ordered(indices: list[Index]) -> list[tuple[sp.Expr, sp.Expr, sp.Expr]]:
    """Limits with inner indices first: one whose bounds name another comes before it."""
    remaining = sorted(indices, key=lambda index: index.symbol.name)
    limits: list[tuple[sp.Expr, sp.Expr, sp.Expr]] = []
    while remaining:
        # An index that no remaining range names can be summed first.
        for index in remaining:
            if not any(_mentions(other, index.symbol) for other in remaining if other != index):
                break
        else:
            raise ValueError(f"the ranges of {[i.symbol for i in remaining]} depend on each other")
        remaining.remove(index)
        limits.append((index.symbol, index.low, index.high))
    return limits
