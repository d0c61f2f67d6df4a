r"""Slopes and intervals on tables whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from attention_dynamics.experiments.estimates import (
    Band,
    geometric_interval,
    geometric_means,
    loglog_slope,
    median_interval,
    slope_estimate,
    slopes_by_seed,
    t_interval,
)

WIDTHS = (8, 16, 32, 64)


def power_law(slopes, noise=0.0):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"heads": m, "seed": seed, "quantity": "error",
         "value": (2 + seed) * m**slope * np.exp(noise * random.standard_normal())}
        for seed, slope in enumerate(slopes) for m in WIDTHS
    )  # fmt: skip


def test_an_exact_power_law_gives_its_exponent_whatever_its_constant():
    assert loglog_slope(WIDTHS, [7 * m**-0.5 for m in WIDTHS]) == pytest.approx(-0.5, abs=1e-12)
    slopes = slopes_by_seed(power_law([-0.4, -0.5, -0.6]), "error", "heads")
    np.testing.assert_allclose(slopes, [-0.4, -0.5, -0.6], atol=1e-12)
    assert list(slopes.index) == [0, 1, 2]


def test_the_order_of_the_rows_does_not_matter():
    frame = power_law([-0.4, -0.6], noise=0.1)
    shuffled = frame.sample(frac=1, random_state=3)
    pd.testing.assert_series_equal(
        slopes_by_seed(frame, "error", "heads"), slopes_by_seed(shuffled, "error", "heads")
    )


def test_the_interval_is_students_with_one_value_a_seed():
    estimate = t_interval([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    # t quantile .975 with 2 degrees of freedom, from a printed table, over sqrt(3)
    assert estimate.upper - estimate.mean == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)
    assert estimate.mean - estimate.lower == pytest.approx(estimate.upper - estimate.mean)
    assert estimate.seeds == 3
    assert t_interval([1.0, 2.0, 3.0], confidence=0.9).upper < estimate.upper


def test_the_interval_covers_as_often_as_it_says():
    random = np.random.default_rng(1)
    covered = [
        estimate.lower <= 0 <= estimate.upper
        for estimate in (t_interval(sample) for sample in random.standard_normal((2000, 5)))
    ]
    assert abs(np.mean(covered) - 0.95) < 0.02


def test_a_known_slope_under_noise_lies_in_its_interval_and_another_does_not():
    estimate = slope_estimate(power_law([-0.5] * 8, noise=0.05), "error", "heads")
    assert estimate.lower < -0.5 < estimate.upper
    assert not estimate.lower < -0.6 < estimate.upper
    assert estimate.seeds == 8


def test_geometric_means_have_the_slope_that_the_estimate_reports():
    frame = power_law([-0.3, -0.5, -0.9], noise=0.2)
    points = geometric_means(frame, "error", "heads")
    assert loglog_slope(points["heads"], points["mean"]) == pytest.approx(
        slope_estimate(frame, "error", "heads").mean
    )
    assert (points["lower"] < points["mean"]).all()
    assert (points["mean"] < points["upper"]).all()


def test_a_band_holds_only_whole_intervals():
    estimate = t_interval([-0.52, -0.5, -0.48])  # half width .05
    assert Band(-0.6, -0.4, "theory").contains(estimate)
    assert not Band(-0.6, -0.49, "theory").contains(estimate)
    assert not Band(-0.51, -0.4, "theory").contains(estimate)
    assert Band(None, 0.0, "sign").contains(estimate)
    assert not Band(0.0, None, "sign").contains(estimate)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: t_interval([1.0]), "at least 2 seeds"),
        (lambda: t_interval([1.0, float("inf")]), "finite"),
        (lambda: loglog_slope([8, 8], [1.0, 2.0]), "two different values"),
        (lambda: loglog_slope([8, 16], [1.0, 0.0]), "y must be positive"),
        (lambda: slopes_by_seed(power_law([-1.0]), "loss", "heads"), "'loss'.*it holds error"),
        (lambda: slopes_by_seed(power_law([-1, -1])[:-1], "error", "heads"), "seed 1 lacks"),
        (lambda: geometric_means(power_law([-1, -1]).assign(value=0), "error", "heads"),
         "must be positive"),
    ],
)  # fmt: skip
def test_what_has_no_answer_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        found = median_interval(random.exponential(size=20))
        assert found.lower <= found.mean <= found.upper
        covered += found.lower <= np.log(2) <= found.upper
    assert covered >= 0.95 * 400
    few = median_interval([3.0, 1.0, 2.0])
    assert (few.mean, *few.interval, few.seeds) == (2.0, 1.0, 3.0, 3)
    for bad in ([], [1.0, np.inf]):
        with pytest.raises(ValueError, match="finite"):
            median_interval(bad)


def test_the_geometric_interval_is_the_interval_of_logarithms():
    values = np.array([0.5, 2.0, 3.0, 8.0])
    found, logarithms = geometric_interval(values), t_interval(np.log(values))
    expected = np.exp([logarithms.mean, *logarithms.interval])
    np.testing.assert_allclose([found.mean, *found.interval], expected, rtol=1e-14)
    assert found.mean == pytest.approx(24**0.25)
    assert found.seeds == 4


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, -2.0], [1.0, float("nan")]])
def test_a_geometric_interval_needs_positive_values(values):
    with pytest.raises(ValueError, match="positive"):
        geometric_interval(values)
