"""Bound indices: their ranges, what they connect, and names that do not depend on the author."""

import functools
import itertools
import math
import re
from dataclasses import dataclass

import sympy as sp

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.calculus import index_symbol

CANONICAL = re.compile(r"c_\d+_\d+")  # depth of a sum, and place of an index in it
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
            names.get(self.symbol, self.symbol), self.low.subs(names), self.high.subs(names)
        )


def touches(expression: sp.Basic, indices: list[Index]) -> bool:
    """Whether an expression depends on one of the indices."""
    free = expression.free_symbols
    return any(index.symbol in free for index in indices)


def mentions(index: Index, symbol: sp.Basic) -> bool:
    """Whether the range of an index depends on a symbol."""
    return symbol in index.low.free_symbols or symbol in index.high.free_symbols


def connected(
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


def named(indices: list[Index], factors: list[tuple[sp.Expr, sp.Rational]]) -> sp.Sum:
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
    lows = {index.symbol: index.low for index in indices}
    canonical = [
        _canonical(depth, k, _sign(lows[symbol]))
        for k, symbol in enumerate(itertools.chain(*classes))
    ]

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


@functools.cache
def _canonical(depth: int, place: int, sign: int) -> sp.Dummy:
    """One name for one place, the same in every normal form of this process."""
    return index_symbol(sp.Integer(sign), f"c_{depth}_{place}")


def is_canonical(symbol: sp.Symbol) -> bool:
    """Whether a bound index bears a canonical name already."""
    return isinstance(symbol, sp.Dummy) and CANONICAL.fullmatch(symbol.name) is not None


def _sign(low: sp.Expr) -> int:
    return 1 if low.is_positive else 0 if low.is_nonnegative else -1


def _bound_names(factor: sp.Expr) -> set[sp.Symbol]:
    """Canonical names bound inside a factor, by an inner sum."""
    return {
        limit[0]
        for inner in factor.atoms(sp.Sum)
        for limit in inner.limits
        if is_canonical(limit[0])
    }


def _ordered(indices: list[Index]) -> list[tuple[sp.Expr, sp.Expr, sp.Expr]]:
    """Limits with inner indices first: one whose bounds name another comes before it."""
    remaining = sorted(indices, key=lambda index: index.symbol.name)
    limits: list[tuple[sp.Expr, sp.Expr, sp.Expr]] = []
    while remaining:
        # An index that no remaining range names can be summed first.
        for index in remaining:
            if not any(mentions(other, index.symbol) for other in remaining if other != index):
                break
        else:
            raise ValueError(f"the ranges of {[i.symbol for i in remaining]} depend on each other")
        remaining.remove(index)
        limits.append((index.symbol, index.low, index.high))
    return limits
