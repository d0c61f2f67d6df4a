"""The depth experiment: shape, fixed bands and seeds, groups of seeds, and its estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import residual_depth as experiment
from attention_dynamics.models.residual_depth import WIRINGS
from attention_dynamics.running import Experiment, sweep

SMALL = experiment.PROFILES["smoke"].configs[1]


@pytest.fixture(scope="module")
def smoke():
    return sweep(experiment, "smoke")


def synthetic(values, noise=0.01):
    """A frame with values[what][wiring](L) and multiplicative noise."""
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"layers": L, "seed": seed, "quantity": f"{what}_{name}",
         "value": law(L) * np.exp(noise * random.standard_normal())}
        for what, laws in values.items() for name, law in laws.items()
        for L in (1, 2, 3, 4) for seed in range(6)
    )  # fmt: skip


def predicted():
    deep = {name: (lambda L, i=i: 10.0**i) for i, name in enumerate(experiment.DEEP)}
    loss = dict(deep)
    loss["none"] = lambda L: 10**1.5 if L == 1 else 1e4
    top = {name: (lambda L: 1.0) for name in WIRINGS} | {"plain": lambda L: 4.0**L}
    return {"condition": deep, "loss": loss, "lambda": top}


def test_the_module_has_the_shape_of_an_experiment(smoke):
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "book", "paper"}
    assert tuple(smoke.columns) == experiment.COLUMNS
    assert list(experiment.summarise(smoke)["quantity"]) == list(experiment.BANDS)


def test_sizes_seeds_and_bands_are_those_fixed_before_the_run():
    for name, steps in (("book", 100), ("paper", 400)):
        profile = experiment.PROFILES[name]
        assert [config.layers for config in profile.configs] == [1, 2, 3, 4]
        assert {config.steps for config in profile.configs} == {steps}
        assert profile.seeds == tuple(range(20))
        assert profile.configs[0].fraction == 0.5
    ends = {name: band.ends for name, band in experiment.BANDS.items()}
    assert ends.pop("lambda_plain_by_layers") == (math.log10(25 / 16), None)
    assert ends.pop("lambda_scaled_by_layers") == (None, math.log10(25 / 16))
    assert len(ends) == 16
    assert set(ends.values()) == {(0.0, None)}
    assert "loss_none_over_scaled_single" in ends
    assert "loss_none_over_plain_deep" in ends


def test_a_cell_depends_on_its_configuration_and_seed_alone():
    first = experiment.run(SMALL, 102)
    experiment._group.cache_clear()
    pd.testing.assert_frame_equal(experiment.run(SMALL, 102), first, check_exact=True)
    # Another batch of seeds gives the same numbers, up to the power iteration's start.
    alone = experiment.run(replace(SMALL, together=1, iterations=60), 102)
    longer = experiment.run(replace(SMALL, iterations=60), 102)
    np.testing.assert_allclose(alone["value"], longer["value"], rtol=5e-2)
    assert (experiment.run(SMALL, 103)["value"] != first["value"]).any()


def test_what_is_measured_at_the_start(smoke):
    table = smoke.pivot(index=["layers", "seed"], columns="quantity", values="value")
    assert (table["growth_rezero"] == 1).all()
    assert (table["condition_rezero"] < table["condition_none"]).all()
    assert (table.filter(like="diverged") == 0).all(axis=None)
    assert (table.filter(like="loss") > 0).all(axis=None)
    assert (table.filter(like="condition") <= 2**52).all(axis=None)


def test_divergence_is_flagged_and_capped():
    frame = experiment.run(replace(SMALL, fraction=1e9, steps=8), 100)
    values = frame.set_index("quantity")["value"]
    for name in WIRINGS:
        assert values[f"diverged_{name}"] == 1, name
        assert values[f"loss_{name}"] == 1e6, name


def test_singular_outputs_have_a_finite_condition_number():
    Z = torch.ones(2, 3, 3, dtype=torch.float64)
    assert (experiment._condition(Z) <= 2**52).all()
    assert (experiment._condition(Z) > 1e15).all()


def test_bands_can_be_met_and_missed():
    met = experiment.summarise(synthetic(predicted()))
    assert met["inside"].all(), met
    values = predicted()
    values["condition"]["plain"] = lambda L: 1e-3 if L == 3 else 1e3
    values["lambda"]["plain"] = lambda L: 1.2**L
    missed = experiment.summarise(synthetic(values)).set_index("quantity")["inside"]
    assert not missed["condition_plain_over_rmsnorm_deep"]
    assert missed["condition_plain_over_rmsnorm_single"]
    assert not missed["lambda_plain_by_layers"]
    assert missed.sum() == 16


def test_a_slope_is_taken_per_layer():
    found = experiment.slope_per_layer(synthetic(predicted(), noise=0.0), "lambda_plain")
    assert found.mean == pytest.approx(math.log10(4))
