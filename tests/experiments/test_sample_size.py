r"""The sample-size experiment: its error field, the width it needs, the two fits, the bands."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.experiments import _sample_field, growth, sample_size
from attention_dynamics.experiments.estimates import select
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.transport import transported_function

SMALL = next(c for c in sample_size.PROFILES["smoke"].configs if c.samples == 64 and c.steps)
CASES = tuple(sample_size.CASES)


@pytest.fixture(scope="module")
def smoke():
    return sweep(sample_size, "smoke")


def forget():
    _sample_field.problem_of.cache_clear()
    _sample_field.running.cache_clear()


def value(rows, quantity):
    return select(rows, quantity)["value"].item()


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(sample_size, Experiment)
    assert set(sample_size.PROFILES) == {"smoke", "book", "paper"}
    assert sample_size.Config.__dataclass_params__.frozen


def test_bands_sizes_and_seeds_are_those_fixed_before_the_run():
    assert {name: band.ends for name, band in sample_size.BANDS.items()} == {
        "power_ball": (None, 0.15),
        "power_minus_log_ball": (0.0, None),
        "rms_ball": (-0.03, 0.03),
        "small_minus_independent": (None, -0.05),
        "sphere_minus_independent": (-0.03, 0.03),
        "over_gaussian_ball": (0.9, 1.1),
        "over_gaussian_small": (0.9, 1.1),
        "over_gaussian_sphere": (0.9, 1.1),
        "growth_minus_gaussian_ball": (-0.03, 0.03),
        "training_loss": (-0.05, 0.05),
    }
    book, paper = (sample_size.PROFILES[name] for name in ("book", "paper"))
    assert book.seeds == tuple(range(16))
    assert paper.seeds == tuple(range(20))

    def exponents(profile, case):
        return [round(math.log2(c.samples)) for c in profile.configs if c.case == case]

    assert [exponents(paper, case) for case in CASES] == [list(range(7, 17))] * 3
    assert exponents(book, "ball") == list(range(7, 14))
    assert exponents(book, "small") == exponents(book, "sphere") == list(range(7, 12))
    sizes = {(c.most_heads, c.teacher_heads) for c in paper.configs}
    assert sizes == {(1024, 8192)}
    assert {c.case for c in book.configs if c.steps} == {"ball"}


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = sample_size.run(SMALL, 5)
    forget()
    sample_size.run(replace(SMALL, samples=16), 5)  # what is kept of it must change no number
    pd.testing.assert_frame_equal(sample_size.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == sample_size.COLUMNS
    assert first["quantity"].is_unique
    other = sample_size.run(SMALL, 6)
    assert (other["value"] != first["value"]).all()


def test_a_cell_that_continues_is_the_cell_that_starts():
    config = replace(SMALL, samples=300, steps=0)  # no power of two, more than two blocks
    forget()
    alone = sample_size.run(config, 1)
    forget()
    for n in (100, 256, 128):
        sample_size.run(replace(config, samples=n), 1)
    pd.testing.assert_frame_equal(sample_size.run(config, 1), alone, check_exact=True)


@pytest.mark.parametrize("samples", [37, 300])
def test_errors_and_field_are_those_of_all_samples_at_once(samples):
    config = replace(SMALL, samples=samples, steps=0)
    setting = sample_size._setting(config)
    problem = _sample_field.problem_of(setting, 3, "cpu")
    found = _sample_field.running(setting, 3, "cpu", samples)
    X = _sample_field.sample_tokens(setting, 3, "cpu", 0, samples)
    assert X.shape == (samples, 16, 8)
    target = problem.teacher(X).double()
    for largest, squares, N in zip(found.largest, found.squares, setting.pairs, strict=True):
        networks = problem.heads.heads // N
        errors = []
        for k in range(networks):
            part = problem.heads.map(lambda block: block[k * N : (k + 1) * N])  # noqa: B023
            errors.append(transported_function(X, problem.transport, part).double() - target)
        e = torch.stack(errors)
        torch.testing.assert_close(largest.double(), e.abs().amax(1), rtol=1e-3, atol=1e-6)
        assert squares == pytest.approx(float(e.square().sum(1).mean()), rel=1e-3)
    z = torch.stack([
        transported_function(
            X, problem.transport,
            problem.teacher.parameters.map(lambda block: block[i : i + 1]),  # noqa: B023
        )
        for i in range(problem.teacher.heads)
    ], dim=1).double()  # fmt: skip
    G = (z - z.mean(1, keepdim=True)) @ problem.weights.double() / math.sqrt(z.shape[1])
    torch.testing.assert_close(found.gaussian.double(), G.abs().amax(0), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.field_sum, G.sum(0), rtol=1e-3, atol=1e-3)
    share = float(G.mean(0).square().mean() / G.square().mean())
    assert found.common_share(samples) == pytest.approx(share, rel=1e-3)


def test_a_part_of_the_list_of_samples_is_that_part():
    setting = sample_size._setting(SMALL)
    whole = _sample_field.sample_tokens(setting, 0, "cpu", 0, 400)
    for start, stop in ((0, 5), (100, 300), (128, 256), (300, 301)):
        part = _sample_field.sample_tokens(setting, 0, "cpu", start, stop)
        assert torch.equal(part, whole[start:stop])
    held = _sample_field.sample_tokens(setting, 0, "cpu", 0, 400, role="held")
    assert not torch.isclose(held, whole).any(dim=-1).any()


def test_the_rows_are_what_the_docstring_says():
    config = replace(SMALL, steps=0)
    rows = sample_size.run(config, 2)
    setting = sample_size._setting(config)
    problem = _sample_field.problem_of(setting, 2, "cpu")
    found = _sample_field.running(setting, 2, "cpu", config.samples)
    held = _sample_field.sample_tokens(setting, 2, "cpu", 0, 512, role="scale")
    variance = problem.teacher.standard_error(held).square().mean() * config.teacher_heads
    assert value(rows, "scale") == pytest.approx(math.sqrt(variance), rel=1e-5)
    at = setting.pairs.index(config.heads // 2)
    unit = math.sqrt(variance * (2 / config.heads + 1 / config.teacher_heads))
    assert value(rows, "sup") == pytest.approx(float(found.largest[at].mean()) / unit, rel=1e-5)
    rms = math.sqrt(found.squares[at] / config.samples)
    assert value(rows, "rms") == pytest.approx(rms / unit, rel=1e-5)
    gaussian = float(found.gaussian.mean()) / math.sqrt(variance)
    assert value(rows, "gaussian_sup") == pytest.approx(gaussian, rel=1e-5)
    assert value(rows, "width_gaussian") == pytest.approx(
        2 * (gaussian / config.sup_tolerance) ** 2, rel=1e-5
    )
    # At the width that is needed, the error interpolated between its neighbours is the tolerance.
    heads = [2 / (1 / N + 1 / config.teacher_heads) for N in setting.pairs]
    errors = [float(largest.mean()) / math.sqrt(variance) for largest in found.largest]
    needed = value(rows, "width_sup")
    assert heads[0] < needed < heads[-1]
    between = np.interp(math.log(needed), np.log(heads), np.log(errors))
    assert math.exp(between) == pytest.approx(config.sup_tolerance, rel=1e-5)


def test_pairs_of_a_symmetric_network_are_the_independent_heads_of_the_field():
    setting = sample_size._setting(SMALL)
    problem = _sample_field.problem_of(setting, 0, "cpu")
    X = _sample_field.sample_tokens(setting, 0, "cpu", 0, 20)
    paired = symmetric_initialisation(8, 8, generator=torch.Generator().manual_seed(0))
    half = paired.map(lambda block: block[:4])
    both, one = (transported_function(X, problem.transport, phi) for phi in (paired, half))
    torch.testing.assert_close(both, one)


def test_samples_are_nested_and_maxima_never_fall(smoke):
    for case in CASES:
        rows = smoke[smoke["case"] == case]
        for quantity in ("sup", "gaussian_sup", "width_sup"):
            table = select(rows, quantity).pivot(index="seed", columns="samples", values="value")
            assert (table.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
        assert select(rows, "scale").groupby("seed")["value"].nunique().eq(1).all()


def test_training_runs_where_it_is_asked_for_only(smoke):
    trained = select(smoke, "training_loss")
    assert set(trained["case"]) == {"ball"}
    assert set(trained["samples"]) == {16, 64}
    assert (select(smoke, "validation_loss")["value"] > 0).all()
    start = value(sample_size.run(replace(SMALL, steps=1), 0), "training_loss")
    longer = value(sample_size.run(replace(SMALL, steps=200), 0), "training_loss")
    assert longer < 0.9 * start


# Growth


@given(st.floats(0.05, 2.0), st.floats(0.3, 3.0), st.floats(2.0, 1e4))
@settings(max_examples=50, deadline=None)
def test_the_width_of_a_power_law_is_exact(slope, scale, target):
    heads = [8.0, 16.0, 32.0, 64.0, 128.0]
    errors = [scale * m**-slope for m in heads]
    found = growth.width_needed(heads, errors, scale * target**-slope)
    if heads[0] <= target <= heads[-1]:
        assert found == pytest.approx(target, rel=1e-6)
    end = 8.0 if target < 8 else 128.0
    if not heads[0] <= target <= heads[-1]:
        assert found == pytest.approx(end * (end / target) ** (-2 * slope), rel=1e-6)


def test_the_width_is_the_last_crossing():
    heads, errors = [8, 16, 32, 64], [1.0, 0.4, 0.8, 0.2]
    assert growth.width_needed(heads, errors, 0.5) == pytest.approx(
        32 * 2 ** (math.log(1.6) / math.log(4))
    )
    with pytest.raises(ValueError, match="tolerance and errors must be positive, got 0"):
        growth.width_needed(heads, errors, 0.0)


N = [2.0**k for k in range(7, 17)]


def test_each_law_is_recognised_by_its_own_fit():
    power = growth.growth_fits(N, [3 * n**0.12 for n in N])
    assert power.power == pytest.approx(0.12)
    assert power.power_residual < 1e-12 < 1.0 < power.log_residual
    log = growth.growth_fits(N, [5 + 2 * math.log(n) for n in N])
    assert log.log_residual < 1e-9 < 1.0 < log.power_residual
    below = growth.growth_fits(N, [math.log(n) - 3 for n in N])  # a may be negative
    assert below.log_residual < 1e-6
    flat = growth.growth_fits(N, [7.0] * len(N))
    assert flat.power == pytest.approx(0)
    assert flat.log_residual < 1e-6
    with pytest.raises(ValueError, match="samples: expected at least 3 sizes, got 2"):
        growth.growth_fits(N[:2], N[:2])


def test_residuals_are_mean_squares_of_the_logarithm_in_per_cent():
    noise = 0.01 * np.array([1.0, -1.0, -1.0, 1.0])  # orthogonal to 1 and to log n
    found = growth.growth_fits([2, 4, 8, 16], list(np.exp(noise + 0.1 * np.log([2, 4, 8, 16]))))
    assert found.power_residual == pytest.approx(1.0, rel=1e-6)
    # The best logarithm: a plain search over the ratio of a and b, b by the mean of the logarithm.
    y = noise + 0.1 * np.log([2, 4, 8, 16])
    best = min(
        float(np.var(y - np.log(np.log([2, 4, 8, 16]) + r))) for r in np.geomspace(0.01, 1e3, 20001)
    )
    assert found.log_residual == pytest.approx(1e4 * best, rel=1e-4)


def test_the_largest_of_independent_normals():
    assert growth.expected_maximum(1) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-9)
    # E max(|G|, |G'|) = (|G| + |G'| + ||G| - |G'||)/2 in expectation, by symmetry 2/sqrt(pi).
    assert growth.expected_maximum(2) == pytest.approx(2 / math.sqrt(math.pi), rel=1e-9)
    stream = torch.Generator().manual_seed(0)
    normal = torch.randn(4000, 256, generator=stream, dtype=torch.float64)
    assert growth.expected_maximum(256) == pytest.approx(
        float(normal.abs().amax(1).mean()), rel=0.01
    )
    assert growth.expected_maximum(2**16) < math.sqrt(2 * math.log(2**17))
    squares = [growth.expected_maximum(int(n)) ** 2 for n in N]
    expected = np.polyfit(np.log(N), np.log(squares), 1)[0]
    assert growth.independent_power(N) == pytest.approx(expected)
    assert 0.12 < expected < 0.15


def test_a_difference_of_two_means_has_the_covariance_of_one():
    """1/N + 1/M, by all draws with replacement from four heads at two inputs."""
    z = np.random.default_rng(0).standard_normal((4, 2))
    covariance = np.cov(z.T, bias=True)
    total = np.zeros((2, 2))
    for draw in itertools.product(range(4), repeat=5):  # N = 2, M = 3
        e = z[list(draw[:2])].mean(0) - z[list(draw[2:])].mean(0)
        total += np.outer(e, e)
    np.testing.assert_allclose(total / 4**5, covariance * (1 / 2 + 1 / 3))


# Bands


def synthetic(law, rms=0.0, sup=1.0, training=0.0, cases=CASES, noise=0.003):
    """Widths by a law of n, and standardised errors that are ``sup`` times the Gaussian ones."""
    random, rows = np.random.default_rng(0), []
    for case, seed, n in itertools.product(cases, range(8), N):
        m = (1 + seed) * law(n)
        values = {
            "width_sup": m, "width_rms": n**rms, "gaussian_sup": math.sqrt(m),
            "sup": sup * math.sqrt(m), "training_loss": n**training, "validation_loss": 1 / n,
        }  # fmt: skip
        if case != "ball":
            values = {k: v for k, v in values.items() if "loss" not in k}
        for quantity, exact in values.items():
            factor = math.exp(noise * random.standard_normal())
            rows.append({"case": case, "seed": seed, "samples": n, "quantity": quantity,
                         "value": exact * factor})  # fmt: skip
    return pd.DataFrame(rows)


def inside(frame):
    return sample_size.summarise(frame).set_index("quantity")["inside"]


def test_bands_can_be_met():
    found = inside(synthetic(lambda n: growth.expected_maximum(int(n)) ** 2))
    assert found.drop("small_minus_independent").all()
    assert not found["small_minus_independent"]


def test_bands_can_be_missed():
    found = inside(synthetic(lambda n: n**0.3, rms=0.05, sup=1.2, training=0.1))
    assert found["growth_minus_gaussian_ball"]  # the two grow alike here
    assert not found.drop("growth_minus_gaussian_ball").any()
    frame = synthetic(lambda n: 1.0)
    sup = frame["quantity"] == "sup"
    frame.loc[sup, "value"] *= frame.loc[sup, "samples"] ** 0.02
    assert not inside(frame)["growth_minus_gaussian_ball"]


def test_a_power_is_no_logarithm_and_saturation_is_seen():
    found = inside(synthetic(lambda n: n**0.1))
    assert not found["power_minus_log_ball"]
    assert found["power_ball"]
    assert inside(synthetic(lambda n: 1.0))["small_minus_independent"]


def test_estimates_are_the_formulas():
    frame = synthetic(lambda n: n**0.1, rms=0.02, sup=1.05, training=0.03, noise=0.0)
    expected = {
        "power_ball": 0.1,
        "rms_ball": 0.02,
        "over_gaussian_small": 1.05,
        "growth_minus_gaussian_sphere": 0.0,
        "sphere_minus_independent": 0.1 - growth.independent_power(N),
        "training_loss": 0.03,
        "validation_loss": -1.0,
    }
    for name, number in expected.items():
        found = sample_size.estimate(frame, name)
        assert found.mean == pytest.approx(number, abs=1e-9), name
        assert found.seeds == 8
    fits = growth.growth_fits(N, [n**0.1 for n in N])
    found = sample_size.estimate(frame, "power_minus_log_ball")
    assert found.mean == pytest.approx(fits.power_residual - fits.log_residual)


def test_a_case_that_was_not_run_has_no_row_and_a_stored_table_gives_the_same(smoke, tmp_path):
    table = sample_size.summarise(smoke)
    assert table["quantity"].tolist() == list(sample_size.BANDS)
    smoke.to_parquet(tmp_path / "rows.parquet")
    again = sample_size.summarise(pd.read_parquet(tmp_path / "rows.parquet"))
    pd.testing.assert_frame_equal(again, table)
    ball = sample_size.summarise(smoke[smoke["case"] == "ball"])
    assert not ball["quantity"].str.contains("small|sphere").any()
    assert len(ball) == 6
    with pytest.raises(ValueError, match="name"):
        sample_size.estimate(smoke, "speed_ball")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"case": "cube"}, "case"),
        ({"samples": 0}, "samples"),
        ({"most_heads": 48}, "most_heads: expected 8 times a power of two, got 48"),
        ({"heads": 12}, "heads"),
        ({"replicas": 0}, "replicas"),
        ({"gaussian_draws": 0}, "gaussian_draws"),
        ({"sup_tolerance": 0.0}, "sup_tolerance"),
        ({"steps": -1}, "steps"),
    ],
)
def test_what_is_out_of_range_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        sample_size.run(replace(SMALL, **change), 0)
