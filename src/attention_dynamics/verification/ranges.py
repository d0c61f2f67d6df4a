"""Which symbols of a statement are lengths, which are free indices, and over what they range."""

from collections.abc import Iterable, Iterator, Mapping

import sympy as sp

Slot = tuple[sp.Basic, int]
Range = tuple[sp.Expr, sp.Expr]


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
    slots: dict[Slot, Range] = {}
    uses: dict[sp.Symbol, list[Slot]] = {}
    deltas: list[tuple[sp.Expr, ...]] = []
    for expression in expressions:
        for slot, bounds in _bound_slots(expression, {}):
            slots.setdefault(slot, bounds)
        bound = {
            limit[0] for total in expression.atoms(sp.Sum, sp.Product) for limit in total.limits
        }
        lengths = set(sizes_of([expression]))
        for entry in expression.atoms(sp.Indexed):
            for place, index in enumerate(entry.indices):
                for symbol in index.free_symbols - bound - lengths:
                    uses.setdefault(symbol, []).append((entry.base, place))
        for delta in expression.atoms(sp.KroneckerDelta):
            deltas.append(delta.args)
            for symbol in delta.free_symbols - bound - lengths:
                uses.setdefault(symbol, [])
    sizes = set(sizes_of(expressions))
    known: dict[sp.Symbol, Range] = {}
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


def _bound_slots(e: sp.Basic, ranges: Mapping[sp.Basic, Range]) -> Iterator[tuple[Slot, Range]]:
    """Each slot that holds a bound index, with the range of the innermost sum that binds it."""
    if isinstance(e, sp.Sum | sp.Product):
        ranges = {**ranges, **{symbol: (low, high) for symbol, low, high in reversed(e.limits)}}
    if isinstance(e, sp.Indexed):
        for place, index in enumerate(e.indices):
            if index in ranges:
                yield (e.base, place), ranges[index]
    for argument in e.args:
        yield from _bound_slots(argument, ranges)
