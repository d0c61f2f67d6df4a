"""Random rational expressions: equal ones are proved, unequal ones never."""

import pytest
import sympy as sp
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from attention_dynamics.verification import CheckFailed, check

a, b, c = SYMBOLS = sp.symbols("a b c", real=True)
T, t = sp.symbols("T t", integer=True, positive=True)
u = sp.IndexedBase("u")

numbers = st.integers(-4, 4).filter(bool).map(sp.Integer)
leaves = st.one_of(st.sampled_from(SYMBOLS), numbers)


def combine(children):
    pairs = st.tuples(children, children)
    return st.one_of(
        pairs.map(lambda pair: pair[0] + pair[1]),
        pairs.map(lambda pair: pair[0] * pair[1]),
        pairs.map(lambda pair: pair[0] / (pair[1] ** 2 + 1)),
        children.map(lambda child: child**2),
    )


expressions = st.recursive(leaves, combine, max_leaves=6)
relaxed = settings(max_examples=25, deadline=None, derandomize=True)


@relaxed
@given(expressions)
def test_an_expression_equals_its_expansion(expression):
    expanded = sp.together(sp.expand(expression))
    assume(expanded != expression)
    record = check.identity("eq-expand", expression, expanded, wrong=expanded + 1)
    assert record.kind == "proved"


@relaxed
@given(expressions, numbers)
def test_an_expression_differs_from_itself_plus_a_number(expression, number):
    with pytest.raises(CheckFailed, match=r"the sides differ at .*against"):
        check.identity("eq-off", expression, sp.expand(expression) + number, wrong=expression + 9)


@relaxed
@given(expressions)
def test_sums_are_linear_whatever_stands_before_them(expression):
    inside = sp.Sum(expression * u[t] + u[t] ** 2, (t, 1, T))
    outside = expression * sp.Sum(u[t], (t, 1, T)) + sp.Sum(u[t] ** 2, (t, 1, T))
    assert check.identity("eq-linear", inside, outside, wrong=outside + 1).kind == "proved"
