"""Public cases about computer algebra: a check is True, or it fails with a witness."""

import pytest
import sympy as sp

from attention_dynamics.verification import CheckFailed, check

x, a = sp.symbols("x a")
positive_x, positive_a = sp.symbols("x a", positive=True)


def half_disc(x, a):
    """d/dx of x sqrt(a^2 - x^2) + a^2 asin(x/a), which is 2 sqrt(a^2 - x^2) where a > 0."""
    return sp.diff(x * sp.sqrt(a**2 - x**2) + a**2 * sp.asin(x / a), x)


def test_case_17_simplify_does_not_reach_zero_but_the_check_does():
    left, right = sp.sin(x) ** 2, sp.sin(2 * x) * sp.tan(x) / 2
    assert sp.simplify(left - right) != 0
    assert check.identity("eq-17", left, right, wrong=2 * right).kind == "proved"


def test_case_17_equals_returns_none_and_the_check_gives_a_witness():
    left, right = half_disc(x, a), 2 * sp.sqrt(a**2 - x**2)
    assert left.equals(right) is None
    with pytest.raises(CheckFailed, match=r"differ at a = .*, x = .*: .* against "):
        check.identity("eq-17", left, right, wrong=3 * right)


def test_case_17_the_same_statement_holds_under_its_assumption():
    left = half_disc(positive_x, positive_a)
    right = 2 * sp.sqrt(positive_a**2 - positive_x**2)
    assert check.identity("eq-17", left, right, wrong=3 * right).kind == "proved"


def test_case_17_an_answer_that_is_no_answer_is_never_a_pass(monkeypatch):
    """With every simplification silenced, an identity beyond the normal form fails, undecided."""
    left, right = sp.gamma(positive_x + 1), positive_x * sp.gamma(positive_x)
    assert check.identity("eq-17", left, right, wrong=2 * right).detail["route"] == "simplify"
    monkeypatch.setattr(sp, "simplify", lambda expression: expression)
    monkeypatch.setattr(sp, "trigsimp", lambda expression: None)
    with pytest.raises(CheckFailed, match="could not decide"):
        check.identity("eq-17", left, right, wrong=2 * right)
