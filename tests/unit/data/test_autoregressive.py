"""A series stationary from its first value, a split in time that shares nothing, errors."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.data import (
    Windows,
    autoregressive_series,
    autoregressive_task,
    forecasting_task,
    generator,
    position_features,
    split_windows,
    stationary_variance,
    targets_seen,
)


def series_of(length, lag, seed=0, **options):
    return autoregressive_series(length, lag, generator=generator(seed, "series"), **options)


@pytest.mark.parametrize(("length", "lag"), [(1, 1), (7, 3), (12, 4), (50, 1), (3, 8)])
def test_the_series_is_its_recursion(length, lag):
    draws = torch.randn((-(-length // lag), lag), generator=generator(0, "series"),
                        dtype=torch.float64).reshape(-1)  # fmt: skip
    expected = []
    for t in range(length):
        start = draws[t] * math.sqrt(0.3 / (1 - 0.64))
        expected.append(start if t < lag else -0.8 * expected[t - lag] + math.sqrt(0.3) * draws[t])
    found = series_of(length, lag, coefficient=-0.8, innovation_variance=0.3)
    assert found.shape == (length,)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-13, atol=0)


def test_every_value_has_the_stationary_law():
    many = torch.stack([series_of(13, 4, seed) for seed in range(4000)]).numpy()
    covariance = np.cov(many.T)
    apart = np.subtract.outer(np.arange(13), np.arange(13))
    expected = np.where(apart % 4 == 0, 0.9 ** np.abs(apart / 4), 0.0) * 0.1 / 0.19
    # standard errors of a covariance of 4000 draws are below 0.526 sqrt(2 / 4000) = 0.012
    assert np.abs(covariance - expected).max() < 5 * 0.012
    assert stationary_variance() == pytest.approx(0.1 / 0.19)


def test_positions_are_sines_and_cosines_of_doubling_periods():
    found = position_features(40, pairs=3, base_period=8.0)
    assert found.shape == (40, 6)
    for k, period in enumerate((8.0, 16.0, 32.0)):
        for t in (0, 1, 17, 39):
            angle = 2 * math.pi * t / period
            assert found[t, k].item() == pytest.approx(math.sin(angle), abs=1e-14)
            assert found[t, 3 + k].item() == pytest.approx(math.cos(angle), abs=1e-14)
    norms = position_features(97).norm(dim=1)
    torch.testing.assert_close(norms, torch.full((97,), math.sqrt(8), dtype=torch.float64))
    assert position_features(5, pairs=0).shape == (5, 0)


def indices(starts, length):
    """Every place of the series that these windows or their targets read."""
    return {int(a) + t for a in starts for t in range(length + 1)}


sizes = {
    "windows": st.integers(2, 60),
    "length": st.integers(1, 30),
    "fraction": st.floats(0.05, 0.95),
    "extra": st.integers(0, 9),
}


@given(**sizes)
def test_the_split_in_time_shares_no_value(windows, length, fraction, extra):
    if not 0 < round(fraction * windows) < windows:
        return
    found = split_windows(
        windows, length, split="time", validation_fraction=fraction, gap=length + extra
    )
    trained, held = indices(found.training, length), indices(found.validation, length)
    assert not trained & held
    assert min(held) - max(trained) == 1 + extra  # and wastes none
    assert len(found.training) + len(found.validation) == windows
    assert targets_seen(found, length) == 0.0


@given(**sizes)
def test_the_random_split_deals_every_window_once(windows, length, fraction, extra):
    if not 0 < round(fraction * windows) < windows:
        return
    found = split_windows(
        windows, length, split="random", validation_fraction=fraction,
        generator=generator(extra, "deal"),
    )  # fmt: skip
    assert sorted([*found.training.tolist(), *found.validation.tolist()]) == list(range(windows))
    assert len(found.validation) == round(fraction * windows)
    trained = indices(found.training, length)
    seen = [int(a) + length in trained for a in found.validation]
    assert targets_seen(found, length) == pytest.approx(np.mean(seen))


def test_the_random_split_shows_validation_targets_to_training():
    dealt = split_windows(500, 17, split="random", generator=generator(0, "deal"))
    assert targets_seen(dealt, 17) > 0.99
    other = split_windows(500, 17, split="random", generator=generator(1, "deal"))
    assert not torch.equal(dealt.validation, other.validation)


def test_targets_seen_counts_tokens_and_targets_of_training_windows():
    # training reads 0..3 and 10..13; validation targets are 3, 8, 12
    windows = Windows(torch.tensor([0, 10]), torch.tensor([0, 5, 9]))
    assert targets_seen(windows, 3) == pytest.approx(2 / 3)


@pytest.mark.parametrize("bound", [None, 5.0])
def test_tokens_and_targets_are_what_the_formula_says(bound):
    series = series_of(60, 4)
    windows = split_windows(40, 6, split="time")
    task = forecasting_task(
        series, 6, 4, windows, token_bound=bound, pairs=2, base_period=8.0, dtype=torch.float64
    )
    b = bound or 1.0
    targets = np.array([series[a + 6].item() for a in range(32)])
    assert task.tokens.shape == (32, 6, 5)
    assert task.held_tokens.shape == (8, 6, 5)
    assert windows.validation.tolist() == list(range(38, 46))
    for a in (0, 31):
        for t in range(6):
            places = [f(2 * math.pi * t / p) for f in (math.sin, math.cos) for p in (8, 16)]
            expected = torch.tensor([series[a + t].item(), *places], dtype=torch.float64) / b
            torch.testing.assert_close(task.tokens[a, t], expected, rtol=1e-14, atol=1e-15)
            assert task.values[a, t] == series[a + t]
    assert task.held_tokens[3, 2, 0].item() == pytest.approx(series[41 + 2].item() / b)
    # statistics of training targets alone
    assert task.mean == pytest.approx(targets.mean())
    assert task.deviation == pytest.approx(targets.std())
    torch.testing.assert_close(
        task.targets.numpy(), (targets - targets.mean()) / targets.std(), rtol=1e-12, atol=0
    )
    held = [(series[a + 6].item() - task.mean) / task.deviation for a in windows.validation]
    torch.testing.assert_close(task.held_targets.numpy(), np.array(held), rtol=1e-12, atol=0)
    torch.testing.assert_close(task.standardise(series[10 + 6]), task.targets[10])


@pytest.mark.parametrize("lag", [1, 4, 9])
def test_the_lagged_value_is_the_second_token_at_the_published_length(lag):
    # without noise the next value is the coefficient times the value L back: token 2 of L + 1
    task = autoregressive_task(
        lag, 50, seed=0, split="time", innovation_variance=1e-18, dtype=torch.float64
    )
    assert task.tokens.shape[1:] == (lag + 1, 17)
    raw = task.targets * task.deviation + task.mean
    torch.testing.assert_close(raw, 0.9 * task.tokens[:, 1, 0], rtol=0, atol=2e-8)


def test_the_two_splits_of_a_seed_read_one_series():
    time, dealt = (autoregressive_task(4, 50, seed=3, split=s) for s in ("time", "random"))
    at = dealt.windows.training < len(time.targets)
    starts = dealt.windows.training[at]
    torch.testing.assert_close(dealt.values[at], time.values[starts])
    other = autoregressive_task(4, 50, seed=4, split="time")
    assert not torch.equal(other.values, time.values)


def test_validation_values_do_not_move_the_statistics_of_training():
    series, windows = series_of(60, 4), split_windows(40, 5, split="time")
    changed = series.clone()
    changed[-12:] *= 100  # read by validation windows alone: the first of them starts at 37
    before, after = (forecasting_task(s, 5, 4, windows) for s in (series, changed))
    assert (before.mean, before.deviation) == (after.mean, after.deviation)
    assert torch.equal(before.tokens, after.tokens)
    assert not torch.equal(before.held_targets, after.held_targets)


def test_inside_of_the_ball_and_outside():
    outside = autoregressive_task(16, 200, seed=0, split="time")
    inside = autoregressive_task(16, 200, seed=0, split="time", token_bound=5.0)
    norms = outside.tokens.norm(dim=-1)
    assert norms.min() >= math.sqrt(8) - 1e-5
    assert inside.tokens.norm(dim=-1).max() <= 1.0
    torch.testing.assert_close(inside.tokens * 5, outside.tokens)
    assert torch.equal(inside.targets, outside.targets)


def task_with(**changes):
    series, windows = series_of(60, 4), split_windows(40, 5, split="time")
    options = {"series": series, "length": 5, "lag": 4, "windows": windows} | changes
    return forecasting_task(**options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: task_with(lag=6), r"length: expected an integer >= 6, got 5; x\[t - 6\] predicts"),
        (lambda: task_with(lag=0), "lag: expected an integer >= 1"),
        (lambda: task_with(series=series_of(49, 4)), "windows.validation: .* 0..43 .* got 37..44"),
        (lambda: task_with(windows=Windows(torch.tensor([-1]), torch.tensor([3]))), "got -1..-1"),
        (lambda: task_with(windows=Windows(torch.tensor([1]), torch.tensor([], dtype=int))),
         "windows.validation: .* got none"),
        (lambda: task_with(windows=Windows(torch.tensor([1]), torch.tensor([9]))),
         "expected training targets that differ, got 1"),
        (lambda: task_with(series=series_of(60, 4).fill_(math.nan)), "series: expected finite"),
        (lambda: task_with(token_bound=2.0), "tokens: expected norms <= 2, got"),
        (lambda: task_with(token_bound=0.0), "token_bound: expected a finite number > 0"),
        (lambda: autoregressive_task(4, 40, seed=0, split="time", length=3), "length: .* got 3"),
        (lambda: series_of(5, 0), "lag: expected an integer >= 1, got 0"),
        (lambda: series_of(0, 2), "length: expected an integer >= 1, got 0"),
        (lambda: series_of(5, 2, coefficient=1.0), "coefficient: .* got 1.0"),
        (lambda: series_of(5, 2, innovation_variance=0.0), "innovation_variance: .* > 0, got 0.0"),
        (lambda: split_windows(40, 5, split="time", gap=4), "gap: expected an integer >= 5, got 4"),
        (lambda: split_windows(40, 5, split="shuffled"), "one of 'time', 'random'"),
        (lambda: split_windows(40, 5, split="random"), "generator: expected one"),
        (lambda: split_windows(40, 5, split="random", gap=9), "gap: .* None"),
        (lambda: split_windows(40, 5, split="time", validation_fraction=1.0), "got 1.0"),
        (lambda: split_windows(40, 5, split="time", validation_fraction=0.001), "got 0.001"),
        (lambda: split_windows(1, 5, split="time"), "windows: expected an integer >= 2"),
        (lambda: targets_seen(Windows(torch.tensor([1]), torch.tensor([])), 3), "got none"),
        (lambda: position_features(0), "length: .* got 0"),
        (lambda: position_features(3, base_period=0.0), "base_period: .* > 0"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_its_value_and_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_one_seed_gives_the_same_numbers_in_every_dtype():
    single, double = (
        autoregressive_task(4, 40, seed=1, split="random", dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    )
    assert torch.equal(single.tokens, double.tokens.float())
    assert torch.equal(single.targets, double.targets.float())
