"""The sample-maximum experiment: shape, seeds, nested samples, and its two estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attention_dynamics.experiments import get, sample_maximum
from attention_dynamics.experiments.estimates import select
from attention_dynamics.running import Experiment, sweep

SMALL = sample_maximum.PROFILES["smoke"].configs[1]


@pytest.fixture(scope="module")
def smoke():
    return sweep(sample_maximum, "smoke")


def synthetic(sup, rms, noise=0.02):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"samples": n, "seed": seed, "quantity": quantity,
         "value": (1 + seed) * law(n) * np.exp(noise * random.standard_normal())}
        for quantity, law in (("sup_normalised", sup), ("rms", rms))
        for seed in range(8) for n in (128, 1024, 16384)
    )  # fmt: skip


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(sample_maximum, Experiment)
    assert get("sample_maximum") is sample_maximum
    assert set(sample_maximum.PROFILES) == {"smoke", "book", "paper"}
    assert set(sample_maximum.ESTIMATES) == set(sample_maximum.BANDS)


def test_bands_sizes_and_seeds_are_those_fixed_before_the_run():
    bands = {name: band.ends for name, band in sample_maximum.BANDS.items()}
    assert bands == {"sup_normalised": (0.0, 0.15), "rms": (-0.02, 0.02)}
    for name in ("book", "paper"):
        profile = sample_maximum.PROFILES[name]
        assert [config.samples for config in profile.configs] == [2**k for k in range(7, 15)]
        assert profile.seeds == tuple(range(20))
    book, paper = (sample_maximum.PROFILES[name].configs[0] for name in ("book", "paper"))
    assert replace(book, teacher_heads=8192) == paper


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = sample_maximum.run(SMALL, 5)
    sample_maximum._errors.cache_clear()
    pd.testing.assert_frame_equal(sample_maximum.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == sample_maximum.COLUMNS
    assert (sample_maximum.run(SMALL, 6)["value"] != first["value"]).all()


def test_samples_are_nested_and_the_maximum_never_falls(smoke):
    table = select(smoke, "sup").pivot(index="seed", columns="samples", values="value")
    assert (table.diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    cells = smoke.pivot(index=["samples", "seed"], columns="quantity", values="value")
    assert (cells["rms"] <= cells["sup"]).all()
    n = cells.index.get_level_values("samples").to_numpy()
    expected = cells["sup"] / np.sqrt(np.log(2 * n / SMALL.delta))
    np.testing.assert_allclose(cells["sup_normalised"], expected, rtol=1e-12)


def test_more_samples_than_the_pool_are_refused():
    with pytest.raises(ValueError, match="samples: expected 1 to pool = 64, got 65"):
        sample_maximum.run(replace(SMALL, samples=65), 0)


def test_the_spread_is_the_largest_ratio_of_two_sizes():
    frame = synthetic(lambda n: {128: 1.0, 1024: 1.2, 16384: 1.1}[n], lambda n: 1.0, noise=0.0)
    found = sample_maximum.spread_estimate(frame, "sup_normalised")
    assert found.mean == pytest.approx(0.2)
    noisy = sample_maximum.spread_estimate(synthetic(lambda n: 1.0, lambda n: 1.0), "rms")
    assert 0 <= noisy.lower <= noisy.mean <= noisy.upper < 0.1


def test_both_bands_can_be_met_and_missed():
    def log_law(n):
        return math.sqrt(math.log(2 * n / 0.05))

    met = sample_maximum.summarise(synthetic(lambda n: 1.0, lambda n: 1.0, noise=0.005))
    assert met["inside"].tolist() == [True, True]
    missed = sample_maximum.summarise(synthetic(lambda n: 1 / log_law(n), log_law, noise=0.005))
    assert missed["inside"].tolist() == [False, False]
    assert missed["estimate"].iloc[0] == pytest.approx(0.25, abs=0.02)
