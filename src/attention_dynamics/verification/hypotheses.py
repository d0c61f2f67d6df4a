"""What a statement takes for granted: expressions and the values they have by hypothesis."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import sympy as sp

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.calculus import resolve
from attention_dynamics.verification.polynomial import Polynomial

if TYPE_CHECKING:
    from attention_dynamics.verification.normal_form import NormalForm


class Hypotheses:
    """``{key: value}``: keys are symbols, indexed entries with free indices, or sums.

    A symbol or an entry ``mu[i]`` is replaced wherever it occurs (an entry for every value of its
    indices). Any other key is brought to normal form and solved for one of its sums.
    """

    def __init__(self, form: "NormalForm", sizes: Iterable[sp.Basic]) -> None:
        """Start without hypotheses, for ``form``; ``sizes`` are lengths, never free indices."""
        self._form = form
        self._sizes = frozenset(sizes)
        self._symbols: dict[sp.Symbol, sp.Expr] = {}
        self._entries: list[tuple[sp.Indexed, sp.Expr]] = []
        self._factors: dict[sp.Expr, Polynomial] = {}

    def add(self, given: Mapping[Any, Any]) -> None:
        """Sort the hypotheses; ``ValueError`` for a key that cannot be solved for one factor."""
        for key, value in given.items():
            key, value = sp.sympify(key), sp.sympify(value)
            self._reject_circle(key, value)
            if isinstance(key, sp.Symbol):
                self._symbols[key] = resolve(value)
            elif isinstance(key, sp.Indexed):
                self._entries.append((key, resolve(value)))
            else:
                self._add_factor(key, value)

    def replace(self, e: sp.Symbol | sp.Indexed) -> Polynomial | None:
        """The normal form of what ``e`` equals by hypothesis, or None."""
        if isinstance(e, sp.Symbol):
            return self._form.convert(self._symbols[e]) if e in self._symbols else None
        found: Polynomial | None = None
        for pattern, value in self._entries:
            bound = match_entry(pattern, e, self._sizes)
            if bound is None:
                continue
            here = self._form.convert(value.subs(bound, simultaneous=True))
            if found is not None and here != found:
                raise ValueError(
                    f"given: two hypotheses give {e} different values; make one of them say which "
                    "indices it is for"
                )
            found = here
        return found

    def replace_factor(self, factor: sp.Expr) -> Polynomial | None:
        """The value of a sum (in normal form) by hypothesis, or None."""
        return self._factors.get(factor)

    def _reject_circle(self, key: sp.Expr, value: sp.Expr) -> None:
        if isinstance(key, sp.Indexed):
            inside = [entry for entry in value.atoms(sp.Indexed) if self._matches(key, entry)]
        else:
            inside = [key] if value.has(key) else []
        if inside:
            raise ValueError(f"given: the value of {key} contains {inside[0]} itself: {value}")

    def _matches(self, pattern: sp.Indexed, entry: sp.Indexed) -> bool:
        return match_entry(pattern, entry, self._sizes) is not None

    def _add_factor(self, key: sp.Expr, value: sp.Expr) -> None:
        left = self._form.of(key)
        for monomial, coefficient in sorted(left.items(), key=str):
            if len(monomial) != 1:
                continue
            ((factor, exponent),) = monomial
            if exponent == 1 and isinstance(factor, sp.Sum):
                rest = {m: c for m, c in left.items() if m != monomial}
                right = poly.add([self._form.of(value), poly.scale(rest, sp.S.NegativeOne)])
                self._factors[factor] = poly.scale(right, 1 / coefficient)
                self._form._cache.clear()
                return
        raise ValueError(
            f"given: {key} cannot be used as a hypothesis; give a symbol, an entry such as mu[i], "
            "or a sum that does not factor"
        )


def match_entry(
    pattern: sp.Indexed, entry: sp.Indexed, sizes: frozenset[sp.Basic]
) -> dict[sp.Basic, sp.Basic] | None:
    """``mu[i]`` against ``mu[3]`` gives ``{i: 3}``; None where they do not match.

    ``c[i + p]`` with the length p matches ``c[j + p]``, at ``i = j``, and no entry without p.
    """
    if pattern.base != entry.base or len(pattern.indices) != len(entry.indices):
        return None
    bound: dict[sp.Basic, sp.Basic] = {}
    for wanted, found in zip(pattern.indices, entry.indices, strict=True):
        names = sorted(wanted.free_symbols - sizes, key=str)
        if not names:
            if wanted != found:
                return None
            continue
        shift = wanted - names[0]
        value = found - shift
        if len(names) > 1 or shift.free_symbols & (value.free_symbols | {names[0]}):
            return None
        if bound.setdefault(names[0], value) != value:
            return None
    return bound
