"""Which symbols of a statement are lengths, which are free indices, and over what they range."""

from collections.abc import Iterable

import sympy as sp


def sizes_of(expressions: Iterable[sp.Basic]) -> list[sp.Symbol]:
    """The symbols that bound a sum and are not indices themselves, sorted: ``[T, d]``."""
    bounds: set[sp.Basic] = set()
    indices: set[sp.Basic] = set()
    for expression in expressions:
        for total in expression.atoms(sp.Sum, sp.Product):
            for symbol, low, high in total.limits:
                indices.add(symbol)
                bounds |= low.free_symbols | high.free_symbols
    return sorted(bounds - indices, key=str)


def free_indices(
    expressions: Iterable[sp.Basic],
) -> dict[sp.Symbol, tuple[sp.Expr, sp.Expr]]:
    """``{k: (1, T)}``: free symbols in index position, with the range their neighbours have.

    The range is that of a bound index in the same slot of the same array; without one the index
    takes the values 1, 2 and 3.
    """
    expressions = list(expressions)
    slots: dict[tuple[sp.Basic, int], tuple[sp.Expr, sp.Expr]] = {}
    uses: dict[sp.Symbol, list[tuple[sp.Basic, int]]] = {}
    deltas: list[tuple[sp.Expr, ...]] = []
    for expression in expressions:
        ranges = {
            symbol: (low, high)
            for total in expression.atoms(sp.Sum, sp.Product)
            for symbol, low, high in total.limits
        }
        lengths = set(sizes_of([expression]))
        for entry in expression.atoms(sp.Indexed):
            for place, index in enumerate(entry.indices):
                if index in ranges:
                    slots.setdefault((entry.base, place), ranges[index])
                for symbol in index.free_symbols - set(ranges) - lengths:
                    uses.setdefault(symbol, []).append((entry.base, place))
        for delta in expression.atoms(sp.KroneckerDelta):
            deltas.append(delta.args)
            for symbol in delta.free_symbols - set(ranges) - lengths:
                uses.setdefault(symbol, [])
    sizes = set(sizes_of(expressions))
    known: dict[sp.Symbol, tuple[sp.Expr, sp.Expr]] = {}
    for symbol in sorted(uses, key=str):
        if symbol in sizes or not isinstance(symbol, sp.Symbol):
            continue
        found = [slots[slot] for slot in uses[symbol] if slot in slots]
        if found and all(not (set().union(*(e.free_symbols for e in f)) - sizes) for f in found):
            known[symbol] = found[0]
    result = {}
    for symbol in sorted(uses, key=str):
        if symbol in sizes:
            continue
        partners = [other for pair in deltas if symbol in pair for other in pair]
        near = [known[other] for other in [symbol, *partners] if other in known]
        result[symbol] = near[0] if near else (sp.S.One, sp.Integer(3))
    return result
