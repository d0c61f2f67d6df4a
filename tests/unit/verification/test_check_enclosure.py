"""Certified maxima: enclosed, refused when wrong, restored precision."""

import pytest
import sympy as sp

from attention_dynamics.verification import CheckFailed, check

flint = pytest.importorskip("flint", reason="python-flint is in the test extra")
z, r = sp.symbols("z r", real=True)
KAPPA = 4 / (3 * sp.sqrt(3))


def test_the_curvature_of_tanh_is_certified():
    """With z = tanh(s), tanh''(s) = -2 z (1 - z^2)."""
    record = check.enclosure("eq-a", sp.Abs(2 * z * (1 - z**2)), (-1, 1), KAPPA, wrong=0.76)
    assert record.kind == "certified"
    assert record.detail["lower"] <= float(KAPPA) <= record.detail["upper"] + 1e-15
    assert record.detail["upper"] <= float(KAPPA) + 1.01e-6
    assert record.detail["argmax"] ** 2 == pytest.approx(1 / 3, abs=1e-2)
    assert r"\sup_{-1 \le z \le 1}" in record.statement


def test_the_curvature_of_tanh_itself_is_certified_on_an_interval():
    curvature = sp.Abs(2 * sp.tanh(z) * (1 - sp.tanh(z) ** 2))
    check.enclosure("eq-a", curvature, (-5, 5), KAPPA, wrong=sp.Rational(3, 4))


def test_the_two_point_moment_is_certified():
    moment = 8 * r * (1 - r) * (1 - 2 * r)
    record = check.enclosure("eq-a", moment, (0, sp.Rational(1, 2)), KAPPA, wrong=0.769)
    assert record.detail["argmax"] == pytest.approx(float((3 - sp.sqrt(3)) / 6), abs=1e-2)


def test_a_bound_that_is_passed_is_refused_at_a_point():
    with pytest.raises(CheckFailed, match="the bound is passed at x = "):
        check.enclosure("eq-a", 2 * z * (1 - z**2), (0, 1), 0.7697, wrong=0.7)


def test_a_wrong_bound_that_holds_is_found_out():
    with pytest.raises(CheckFailed, match="wrong bound is not passed"):
        check.enclosure("eq-a", z * (1 - z), (0, 1), 1, wrong=sp.Rational(1, 2))
    with pytest.raises(ValueError, match="smaller"):
        check.enclosure("eq-a", z * (1 - z), (0, 1), 1, wrong=2)


def test_a_callable_on_balls_is_certified_too():
    record = check.enclosure(
        "eq-a", lambda ball: ball * (1 - ball), (0, 1), sp.Rational(1, 4), wrong=0.24
    )
    assert record.notation == "code"
    assert "ball * (1 - ball)" in record.statement


def test_infinite_intervals_and_several_variables_are_refused():
    with pytest.raises(ValueError, match="substitute a bounded variable"):
        check.enclosure("eq-a", sp.tanh(z), (0, sp.oo), 1, wrong=0.5)
    with pytest.raises(ValueError, match="one is needed"):
        check.enclosure("eq-a", z * r, (0, 1), 1, wrong=0.5)


def test_a_pole_is_not_certified_away():
    with pytest.raises(CheckFailed, match=r"undecided|passed"):
        check.enclosure("eq-a", 1 / z, (-1, 1), 10, wrong=5)


def test_the_precision_of_the_session_is_left_alone():
    before = flint.ctx.prec
    check.enclosure("eq-a", z * (1 - z), (0, 1), sp.Rational(1, 4), wrong=0.24)
    assert flint.ctx.prec == before


@pytest.mark.parametrize(
    ("function", "interval"),
    [
        (1 / (z - sp.Rational(1, 2)), (0, 1)),  # at the first midpoint
        (1 / z, (0, 1)),  # at an end
        (1 / (z - sp.Rational(1, 3)) ** 2, (0, 1)),  # at no end of a box
        (-1 / z, (-1, 1)),
        (sp.log(z), (-1, 1)),
        (sp.sqrt(z), (-1, 1)),
        (sp.sin(z) / z, (-1, 1)),  # removable, but not by balls
    ],
)
def test_no_pole_and_no_end_of_a_domain_is_certified_away(function, interval):
    with pytest.raises(CheckFailed, match=r"undecided|passed"):
        check.enclosure("eq-a", function, interval, 10, wrong=-10)


@pytest.mark.parametrize(
    "function", [sp.tanh(z) - sp.exp(-((z - 700) ** 2)) / 2, sp.exp(-((z - 777) ** 2))]
)
def test_a_spike_in_a_wide_interval_is_found(function):
    check.enclosure("eq-a", function, (0, 1000), 1, wrong=0.999, tolerance=1e-4)
    with pytest.raises(CheckFailed, match="the bound is passed"):
        check.enclosure("eq-a", function, (0, 1000), 0.99, wrong=0.5, tolerance=1e-4)


def test_a_callable_that_looks_at_the_midpoint_is_no_interval_extension():
    with pytest.raises(CheckFailed, match="no interval extension"):
        check.enclosure(
            "eq-a", lambda ball: flint.arb(float(ball) ** 2), (0, 1), sp.Rational(1, 2), wrong=0.1
        )


@pytest.mark.parametrize("tolerance", [0.0, -1.0, 0.5, float("inf"), float("nan")])
def test_a_tolerance_does_not_stand_in_for_the_bound(tolerance):
    with pytest.raises(ValueError, match="tolerance"):
        check.enclosure("eq-a", z * (1 - z), (0, 1), 0.1, wrong=0.05, tolerance=tolerance)


@pytest.mark.parametrize("interval", [(1, 0), (0, 0), (float("nan"), 1), (0, float("inf"))])
def test_an_interval_has_two_ends(interval):
    with pytest.raises(ValueError, match=r"finite|interval"):
        check.enclosure("eq-a", z * (1 - z), interval, 1, wrong=0.1)
