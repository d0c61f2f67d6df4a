r"""The limit of long contexts: shape, determinism, bands, what is known without measuring."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from attention_dynamics.experiments import population_limit
from attention_dynamics.running import Experiment, sweep

SMALL = population_limit.PROFILES["smoke"].configs[0]


@pytest.fixture(scope="module")
def smoke():
    return sweep(population_limit, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(population_limit, Experiment)
    assert set(population_limit.PROFILES) == {"smoke", "book", "paper"}
    assert population_limit.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in population_limit.BANDS.items()} == {
        "excess": (-1.05, -0.95), "gradient_error": (-0.55, -0.45),
    }  # fmt: skip
    assert population_limit.RATIO_BAND.ends == (0.95, 1.05)
    seeds = [set(population_limit.PROFILES[name].seeds) for name in ("smoke", "book")]
    assert not seeds[0] & seeds[1]
    book = population_limit.PROFILES["book"].configs
    assert [config.length for config in book] == [128, 512, 2048]


def test_a_last_block_that_is_not_full_counts_by_its_size(monkeypatch):
    monkeypatch.setattr(population_limit.regression, "loss", lambda *_: 1.0)
    rows = population_limit.run(replace(SMALL, contexts=1, samples=80, block=32), 0)
    assert rows.set_index("quantity").loc["excess", "value"] == 1.0


def test_the_context_is_the_only_difference_between_the_gradients():
    # A few queries are far from their covariance; a long context brings the gradients together.
    long = replace(SMALL, length=16384, samples=1, contexts=1, queries=4)
    rows = population_limit.run(long, 0).set_index("quantity")
    assert rows.loc["gradient_error", "value"] < 0.1


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = population_limit.run(SMALL, 5)
    pd.testing.assert_frame_equal(population_limit.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == population_limit.COLUMNS
    assert (population_limit.run(SMALL, 6)["value"] != first["value"]).all()


def test_blocks_change_the_draws_and_not_their_law():
    small = replace(SMALL, contexts=1, samples=96, block=32)
    whole = replace(small, block=96)
    excess = [population_limit.run(config, 3)["value"][0] for config in (small, whole)]
    # Queries and contexts of a block share one stream, so the draws differ; their law does not.
    assert excess[0] == pytest.approx(excess[1], rel=0.5)


def test_smoke_is_close_to_the_prediction(smoke):
    table = smoke.pivot(index=["length", "seed"], columns="quantity", values="value")
    assert (table > 0).all(axis=None)
    np.testing.assert_allclose(table["ratio"], table["excess"] / table["predicted"])
    assert table["ratio"].between(0.7, 1.4).all()
    predicted = table["predicted"].unstack() * np.array([[64], [128], [256]])
    np.testing.assert_allclose(predicted, predicted.iloc[[0] * 3])  # exactly of order 1/T
    error = table["gradient_error"].groupby("length").mean()
    assert error[64] / error[256] == pytest.approx(2.0, rel=0.35)  # of order T^-1/2, not 1/T
    found = population_limit.ratios(smoke)
    assert list(found) == [64, 128, 256]
    assert all(estimate.seeds == 3 for estimate in found.values())


def synthetic(exponents):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"length": T, "seed": seed, "quantity": quantity,
         "value": (1 + seed) * T**exponent * np.exp(0.01 * random.standard_normal())}
        for quantity, exponent in exponents.items()
        for seed in range(5) for T in (128, 512, 2048)
    )  # fmt: skip


@pytest.mark.parametrize(("exponent", "inside"), [(-0.5, True), (-1.0, False)])
def test_summarise_finds_the_theory_and_reports_a_miss(exponent, inside):
    frame = synthetic({"excess": -1.0, "gradient_error": exponent})
    summary = population_limit.summarise(frame).set_index("quantity")
    assert summary.loc["excess", "inside"]
    assert summary.loc["gradient_error", "inside"] == inside
    assert summary.loc["gradient_error", "slope"] == pytest.approx(exponent, abs=0.03)
