"""The normal form of random nested sums has the value of the sum, at lengths from one to four."""

import random

import pytest
import sympy as sp

from attention_dynamics.verification.explicit import Explicit
from attention_dynamics.verification.normal_form import NormalForm
from attention_dynamics.verification.polynomial import to_sympy

T, d, k = sp.symbols("T d k", integer=True, positive=True)
NAMES = sp.symbols("t s r", integer=True, positive=True)
z = sp.Symbol("z")
u, x = sp.IndexedBase("u"), sp.IndexedBase("x")
LENGTHS = ((1, 1), (1, 3), (3, 1), (2, 4), (4, 2))
EXPRESSIONS = 60  # a seed


class Grammar:
    """Sums over triangles and rectangles, with deltas, roots, shifts and names used twice."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def chance(self, probability):
        return self.random.random() < probability

    def index(self, scope):
        return self.random.choice([*scope, *scope, k, sp.Integer(1), sp.Integer(2), T])

    def leaf(self, scope):
        first, second = self.index(scope), self.index(scope) + self.random.choice((0, 0, 0, 1, -1))
        root = sp.sqrt(self.random.choice((z**2, u[first] ** 2, z, u[k])))
        return self.random.choice(
            (u[second], x[first, second], sp.KroneckerDelta(first, second), first, z, root)
        )

    def total(self, scope, depth):
        name = self.random.choice(NAMES)
        low = self.random.choice([*map(sp.Integer, (1, 1, 1, 1, 2, 0, 3)), *scope, d])
        high = self.random.choice([T, T, T, d, sp.Integer(3), *scope, T - 1, T + 1, k])
        if name in low.free_symbols | high.free_symbols:
            low, high = sp.Integer(1), T
        inner = [other for other in scope if other != name] + [name]
        return sp.Sum(self.term(inner, depth - 1), (name, low, high))

    def term(self, scope, depth):
        if depth == 0:
            return self.leaf(scope)
        if self.chance(0.6):
            return self.total(scope, depth)
        inner = self.term(scope, depth - 1)
        kind = self.random.randrange(8)
        if kind < 3:
            return self.leaf(scope) * inner
        if kind < 5:
            return self.leaf(scope) + inner
        return (inner**2, sp.exp(inner), sp.Derivative(inner, u[k]))[kind - 5]


def value(symbol):
    """A number of its own for every entry, positive or negative."""
    draw = random.Random(str(symbol))
    return sp.Rational(draw.randint(1, 97), draw.randint(40, 99)) * draw.choice((1, -1))


@pytest.mark.parametrize("seed", range(8))
def test_the_normal_form_has_the_value_of_the_expression(seed):
    grammar = Grammar(seed)
    compared = 0
    for _ in range(EXPRESSIONS):
        expression = grammar.total([], 3)
        form = NormalForm({}, [T, d])
        normal = to_sympy(form.of(expression))
        for lengths in LENGTHS:
            for place in (1, 2, 3):
                numbers = dict(zip((T, d, k), map(sp.Integer, (*lengths, place)), strict=True))
                if not all(assumed.subs(numbers) for assumed in form.assumptions):
                    continue
                explicit = Explicit(numbers, frozenset((T, d)))
                left, right = explicit(expression), explicit(normal)
                entries = {s: value(s) for s in left.free_symbols | right.free_symbols}
                gap = sp.N(left.subs(entries) - right.subs(entries), 20, maxn=200)
                size = 1 + abs(sp.N(left.subs(entries), 20))
                assert abs(gap) <= 1e-15 * size, f"{expression} is not {normal} at {numbers}"
                compared += 1
    assert compared > 10 * EXPRESSIONS
