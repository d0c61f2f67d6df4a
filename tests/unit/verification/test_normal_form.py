"""The normal form, rule by rule, and where two sides have to fall apart."""

import pytest
import sympy as sp

from attention_dynamics.verification.decide import vanishes
from attention_dynamics.verification.normal_form import NormalForm
from attention_dynamics.verification.polynomial import add, scale, to_sympy

T, d = sp.symbols("T d", integer=True, positive=True)
t, s, i, j, k = sp.symbols("t s i j k", integer=True, positive=True)
a, b, y = sp.symbols("a b y")
x, u, v = (sp.IndexedBase(name) for name in "xuv")


def over(f, index=t, high=T, low=1):
    return sp.Sum(f, (index, low, high))


def equal(left, right):
    form = NormalForm()
    return vanishes(form, add([form.of(left), scale(form.of(right), sp.S.NegativeOne)]))


SAME = {
    "linearity": (over(a * u[t] + b * v[t]), a * over(u[t]) + b * over(v[t])),
    "names": (over(u[t]), over(u[s], s)),
    "constant": (over(a), a * T),
    "from zero": (over(a, low=0), a * (T + 1)),
    "order": (over(over(x[t, i], i, d)), over(over(x[t, i]), i, d)),
    "product": (over(over(u[t] * v[s], s)), over(u[t]) * over(v[s], s)),
    "square": (over(u[t]) ** 2, over(over(u[t] * u[s], s))),
    "relabelled": (over(over(x[t, s] * u[t], s)), over(over(x[s, t] * u[s], s))),
    "cube of inner sum": (
        over(u[t] * over(x[t, i], i, d) ** 3),
        over(u[t] * over(over(over(x[t, i] * x[t, j] * x[t, k], i, d), j, d), k, d)),
    ),
    "delta": (over(sp.KroneckerDelta(t, k) * u[t]), u[k]),
    "double delta": (over(over(sp.KroneckerDelta(t, s) * x[t, s], s)), over(x[t, t])),
    "outer delta": (sp.KroneckerDelta(j, k) * u[j], sp.KroneckerDelta(j, k) * u[k]),
    "delta squared": (sp.KroneckerDelta(j, k) ** 2, sp.KroneckerDelta(j, k)),
    "exponentials": (over(sp.exp(a + u[t])), sp.exp(a) * over(sp.exp(u[t]))),
    "exponential of a sum": (sp.exp(over(u[t] + v[t])), sp.exp(over(u[t])) * sp.exp(over(v[t]))),
    "inside a function": (sp.tanh(over(2 * u[t])), sp.tanh(2 * over(u[s], s))),
    "inside a denominator": (1 / over(2 * u[t]), 1 / (2 * over(u[s], s))),
    "numeric bounds": (over(u[t], high=3), u[1] + u[2] + u[3]),
    "arithmetic": (over(t), T * (T + 1) / 2),
    "geometric": ((1 - a) * over(a**t, high=T - 1, low=0), 1 - a**T),
    "symbolic power": (a ** (T + 2), a**2 * a**T),
    "roots": (sp.sqrt(1 - a**2) ** 2, 1 - a**2),
    "nested roots": (sp.sqrt(12) / sp.sqrt(3), sp.Integer(2)),
    "imaginary": (sp.I**2 * a, -a),
    "rational functions": (1 / (1 - a) - 1 / (1 + a), 2 * a / (1 - a**2)),
    "last entry": (over(u[t]) - u[T], over(u[t], high=T - 1)),
    "first entry": (over(u[t]) - u[1], over(u[t], low=2)),
    "shift": (over(u[t + 1]), over(u[t], high=T + 1, low=2)),
    "telescope": (over(u[t + 1] - u[t]), u[T + 1] - u[1]),
    "power sums shifted": (over(a**t * u[t]), a * over(a**t * u[t + 1], high=T - 1, low=0)),
    "triangle": (over(over(x[s, t], s, t)) - over(x[t, t]), over(over(x[s, t], s, t - 1))),
}

DIFFERENT = {
    "lost factor": (over(a), a),
    "diagonal": (over(u[t]) ** 2, over(u[t] ** 2)),
    "transpose": (over(over(x[t, s] * u[t], s)), over(over(x[t, s] * u[s], s))),
    "other range": (over(u[t]), over(u[t], high=d)),
    "off by one": (over(u[t]), over(u[t], high=T - 1)),
    "free index": (over(u[t]), u[k]),
    "delta is not one": (sp.KroneckerDelta(j, k) * u[j], u[k]),
    "other array": (over(u[t]), over(v[t])),
    "sign of a root": (sp.sqrt(a**2), a),
    "exponent": (sp.exp(a) ** 2, sp.exp(a**2)),
}


@pytest.mark.parametrize("name", SAME)
def test_equal_expressions_have_one_normal_form(name):
    assert equal(*SAME[name]) is True


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_expressions_stay_different(name):
    assert equal(*DIFFERENT[name]) is False


def test_an_inner_name_is_never_captured():
    """The inner sum sits in a denominator and cannot be flattened: it keeps names of its own."""
    form = NormalForm()
    expression = to_sympy(form.of(over(u[t] / over(x[t, s] * v[s], s))))
    (outer,) = [total for total in expression.atoms(sp.Sum) if total.function.has(sp.Sum)]
    (inner,) = outer.function.atoms(sp.Sum)
    assert outer.limits[0][0] != inner.limits[0][0]
    assert outer.limits[0][0] in inner.free_symbols
    swapped = over(u[t] / over(x[s, t] * v[s], s))
    assert not equal(expression, swapped)


def test_derivatives_of_entries_are_deltas():
    jacobian = sp.Derivative(over(u[t] ** 3 * v[t]), u[k])
    assert equal(jacobian, 3 * u[k] ** 2 * v[k])


def test_a_division_by_zero_is_not_a_proof():
    with pytest.raises(ZeroDivisionError):
        NormalForm().of(1 / (over(u[t]) - over(u[s], s)))
