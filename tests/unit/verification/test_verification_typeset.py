"""Checked expressions in LaTeX: several indices of one range under one sum sign."""

import sympy as sp

from attention_dynamics.verification.typeset import latex

T, d = sp.symbols("T d", integer=True, positive=True)
a, b, t = sp.symbols("a b t", integer=True)
x = sp.IndexedBase("x")


def test_indices_of_one_range_share_a_sign():
    double = sp.Sum(x[a] * x[b], (a, 1, d), (b, 1, d))
    assert latex(2 * double) == r"2 \sum_{a,b=1}^{d} {x}_{a} {x}_{b}"
    assert r"\substack" in sp.latex(double), "SymPy stacks no more: typeset can go"


def test_ranges_that_differ_keep_their_own_signs_outermost_first():
    nested = sp.Sum(x[a] + x[b], (a, 1, b), (b, 1, d))
    assert latex(nested) == r"\sum_{b=1}^{d} \sum_{a=1}^{b} \left({x}_{a} + {x}_{b}\right)"


def test_everything_else_is_as_sympy_prints_it():
    for expression in (sp.Sum(x[t] + 1, (t, 1, T)), sp.sqrt(2) * sp.exp(-T), sp.Matrix([T, d])):
        assert latex(expression) == sp.latex(expression)
