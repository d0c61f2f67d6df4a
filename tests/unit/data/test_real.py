"""Real sequences: what the packages hold, splits that share nothing, tokens against NumPy."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.data import (
    digit_images,
    forecasting_task,
    position_features,
    real,
    real_series,
    real_task,
)

SERIES = ("co2", "sunspots")


def test_co2_is_the_weekly_change_with_the_gaps_counted():
    from statsmodels.datasets import co2

    raw = co2.load_pandas().data["co2"]
    series = real_series("co2")
    assert series.missing == int(raw.isna().sum()) == 59
    changes = raw.interpolate().diff().iloc[1:].to_numpy()
    np.testing.assert_allclose(series.values.numpy(), changes, atol=1e-10)
    observed = raw.diff().iloc[1:].notna().to_numpy()
    np.testing.assert_array_equal(series.observed.numpy(), observed)
    assert series.lag == 52


def test_sunspots_are_the_yearly_numbers_and_complete():
    series = real_series("sunspots")
    assert (len(series.values), series.lag, series.missing) == (309, 11, 0)
    assert series.observed.all()
    assert series.values[:3].tolist() == [5.0, 11.0, 16.0]


def test_no_two_digit_images_are_equal_and_pixels_lie_in_the_unit_interval():
    images, digits = digit_images()
    assert images.shape == (1797, 8, 8)
    assert images.flatten(1).unique(dim=0).shape[0] == 1797
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    assert digits.unique().tolist() == list(range(10))


@given(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=0, max_size=12))
def test_interpolation_fills_gaps_on_a_line_and_keeps_the_rest(inner):
    raw = np.array([1.0, *(math.nan if x is None else x for x in inner), 2.0])
    filled, known = real.interpolated(raw)
    np.testing.assert_array_equal(filled[known], raw[known])
    for i in np.flatnonzero(~known):
        left, right = np.flatnonzero(known[:i])[-1], i + np.flatnonzero(known[i:])[0]
        share = (i - left) / (right - left)
        assert filled[i] == pytest.approx(raw[left] * (1 - share) + raw[right] * share)


@pytest.mark.parametrize("raw", [[math.nan, 1.0], [1.0, math.nan], []])
def test_a_series_without_known_ends_is_refused(raw):
    with pytest.raises(ValueError, match="known first and last"):
        real.interpolated(np.array(raw))


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("ball", [True, False])
def test_windows_of_a_series_against_numpy(name, ball):
    task, series = real_task(name, training=30, held=20, ball=ball), real_series(name)
    x, L, T = series.values.numpy(), series.lag, series.lag + 1
    windows = real._thinned(series, T, 30, 20, 0.25)
    train, held = windows.training.numpy(), windows.validation.numpy()
    assert len(train) == 30
    assert len(held) == 20
    assert held[0] > train[-1] + T  # no value of a held out window is seen, as input or target
    assert series.observed[windows.training + T].all()
    assert series.observed[windows.validation + T].all()
    past = x[: train[-1] + T + 1]
    z = (x - past.mean()) / past.std()
    mean, deviation = z[train + T].mean(), z[train + T].std()
    pairs = math.ceil(math.log2(T / 4)) + 1
    b = math.sqrt(pairs + 4.5**2) if ball else 1.0
    places = position_features(T, pairs=pairs, base_period=4.0).numpy()
    for starts, tokens, targets in (
        (train, task.tokens, task.targets), (held, task.held_tokens, task.held_targets)
    ):  # fmt: skip
        window = np.stack([z[a : a + T] for a in starts])
        expected = np.concatenate(
            (window[..., None], np.broadcast_to(places, (len(starts), *places.shape))), axis=-1
        )
        np.testing.assert_allclose(tokens.numpy(), expected / b, atol=1e-12)
        np.testing.assert_allclose(targets.numpy(), (z[starts + T] - mean) / deviation, atol=1e-12)
    standard = (z - mean) / deviation
    np.testing.assert_allclose(task.forecasts["seasonal"], standard[held + T - L], atol=1e-12)
    np.testing.assert_allclose(task.forecasts["persistence"], standard[held + T - 1], atol=1e-12)
    assert not task.forecasts["constant"].any()
    assert task.block == T
    assert task.outside == (0.0 if ball else 1.0)
    np.testing.assert_allclose(
        task.features.numpy(), np.stack([standard[a : a + T] for a in train]), atol=1e-12
    )


def test_without_thinning_the_windows_are_all_there_are():
    # 309 years, T = 12: a quarter of 309 - 2 * 12 windows is held out, the last target is the last
    # year, and T windows lie between.
    windows = real._thinned(real_series("sunspots"), 12, 5000, 5000, 0.25)
    assert windows.training.tolist() == list(range(214))
    assert windows.validation.tolist() == list(range(226, 297))


def test_no_window_knows_what_was_measured_after_it():
    # A gap is filled on a line to the next measured week, which may lie in the future; not so here,
    # since the week in which a target's change begins was measured.
    from statsmodels.datasets import co2

    raw, T = co2.load_pandas().data["co2"].to_numpy(dtype=float), 53
    changes = np.diff(real.interpolated(raw)[0])
    near = np.flatnonzero(np.isnan(raw))
    count = 0
    for starts in real._thinned(real_series("co2"), T, 5000, 5000, 0.25):
        for a in starts.tolist():
            if np.abs(near - (a + T)).min() > 8:  # no gap near the target, no line to worry about
                continue
            other = raw.copy()
            other[a + T + 1 :] += 100.0
            filled = np.diff(real.interpolated(other)[0])
            np.testing.assert_array_equal(filled[a : a + T], changes[a : a + T])
            count += 1
    assert count > 100


def test_the_ball_is_made_for_the_farthest_value():
    for name, farthest in (("co2", 4.252), ("sunspots", 4.327)):
        series = real_series(name)
        T = series.lag + 1
        last = int(real._thinned(series, T, 120, 240, 0.25).training[-1]) + T
        past = series.values[: last + 1]
        z = (series.values - past.mean()) / past.std(correction=0)
        assert float(z.abs().max()) == pytest.approx(farthest, abs=1e-3)
        assert float(z.abs().max()) < real.LARGEST


@pytest.mark.parametrize("name", ["digits", *SERIES])
def test_tokens_lie_in_the_ball_or_are_said_not_to(name):
    inside = real_task(name, training=40, held=40)
    raw = real_task(name, training=40, held=40, ball=False)
    assert float(torch.cat((inside.tokens, inside.held_tokens)).norm(dim=-1).max()) <= 1
    assert inside.outside == 0.0
    assert raw.outside == 1.0
    ratio = raw.tokens / inside.tokens
    finite = ratio[inside.tokens.abs() > 1e-6]
    assert float(finite.max() - finite.min()) < 1e-9
    assert torch.equal(raw.targets, inside.targets)


def test_digits_are_dealt_in_their_shares_and_no_image_twice():
    task, (images, digits) = real_task("digits", training=300, held=200), digit_images()
    whole = images.flatten(1)
    found = [
        (side[:, None] == whole).all(dim=-1).double().argmax(dim=1)
        for side in (task.features, task.held_features)
    ]
    assert len(torch.cat(found).unique()) == 500
    share = torch.bincount(digits, minlength=10) / len(digits)
    for index, size in zip(found, (300, 200), strict=True):
        counts = torch.bincount(digits[index], minlength=10)
        assert int(counts.sum()) == size
        assert float((counts - size * share).abs().max()) < 2
    parity = 1.0 - 2.0 * (digits[found[0]] % 2)
    assert torch.equal(task.targets, parity.double())
    rows = task.tokens[..., :8] * math.sqrt(8 + 2)
    torch.testing.assert_close(rows.flatten(1), task.features)
    other = real_task("digits", training=300, held=200, seed=1)
    assert not torch.equal(other.tokens, task.tokens)


@given(st.integers(1, 60), st.data())
def test_spaced_takes_as_many_as_asked_and_spreads_them(of, data):
    count = data.draw(st.integers(1, of))
    index = real._spaced(of, count)
    assert len(index) == count
    steps = index.diff()
    assert not len(steps) or int(steps.max() - steps.min()) <= 1


@pytest.mark.parametrize(("length", "pairs"), [(1, 1), (4, 1), (5, 2), (8, 2), (12, 3), (53, 5)])
def test_places_reach_over_the_window(length, pairs):
    assert real.place_pairs(length) == pairs
    assert 4 * 2 ** (pairs - 1) >= length


@pytest.mark.parametrize(
    ("name", "sizes", "words"),
    [
        ("weather", {"training": 5, "held": 5}, "name"),
        ("digits", {"training": 1700, "held": 98}, "at most 1797 images together, got 1798"),
        ("digits", {"training": 0, "held": 5}, "training"),
        ("sunspots", {"training": 5, "held": 0}, "held"),
    ],
)
def test_errors_name_the_argument(name, sizes, words):
    with pytest.raises(ValueError, match=words):
        real_task(name, **sizes)


def test_a_longer_token_is_refused_and_not_scaled_away(monkeypatch):
    monkeypatch.setattr(real, "LARGEST", 1.0)
    with pytest.raises(ValueError, match="norms <="):
        real_task("sunspots", training=20, held=20)


@pytest.mark.parametrize(
    ("module", "package", "load"),
    [
        ("statsmodels.datasets", "statsmodels", lambda: real_series.__wrapped__("co2")),
        ("sklearn.datasets", "scikit-learn", lambda: digit_images.__wrapped__()),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(monkeypatch, module, package, load):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{package}.*attention-dynamics\[data\]"):
        load()


def test_the_task_of_a_series_is_that_of_forecasting():
    series = real_series("sunspots")
    windows = real._thinned(series, 12, 30, 20, 0.25)
    whole = forecasting_task(series.values, 12, 11, windows, dtype=torch.float64)
    task = real_task("sunspots", training=30, held=20)
    torch.testing.assert_close(task.targets, whole.targets)
    torch.testing.assert_close(task.held_targets, whole.held_targets)
