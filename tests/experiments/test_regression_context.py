"""The experiment on finite contexts and samples: shape, bands, determinism, what must hold."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from attention_dynamics.experiments import regression_context
from attention_dynamics.running import Experiment, sweep

SMALL = regression_context.PROFILES["smoke"].configs


@pytest.fixture(scope="module")
def smoke_rows():
    return sweep(regression_context, "smoke")


def values(frame, quantity):
    return frame[frame["quantity"] == quantity]["value"]


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(regression_context, Experiment)
    assert set(regression_context.PROFILES) == {"smoke", "book", "paper"}
    assert regression_context.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in regression_context.BANDS.items()} == {
        "first_order_0.3": (0.95, 1.05),
        "exact_0.3": (0.95, 1.05),
        "exact_0.5": (0.9, 1.1),
        "exact_0.8": (0.9, 1.1),
        "exact_1.2": (0.9, 1.1),
        "risk": (0.9, 1.15),
        "distortion": (0.8, 1.2),
        "risk_after_drift": (0.9, 1.15),
        "loss_fall": (0.0, None),
        "inside_small": (None, 0.05),
        "inside_large": (0.95, None),
        "prompt_loss": (0.9, 1.1),
        "prompt_noise": (1.0, None),
    }


@pytest.mark.parametrize("part", ["context", "floor", "drift", "basin", "prompts"])
def test_a_cell_is_a_pure_function_of_config_and_seed(part):
    config = next(config for config in SMALL if config.part == part)
    first = regression_context.run(config, 5)
    pd.testing.assert_frame_equal(regression_context.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == regression_context.COLUMNS


def test_a_summary_has_every_band(smoke_rows):
    summary = regression_context.summarise(smoke_rows)
    assert set(regression_context.BANDS) <= set(summary["quantity"])
    assert summary.loc[summary["quantity"] == "samples", "inside"].isna().all()


def test_no_step_is_refused_and_training_pays(smoke_rows):
    assert (values(smoke_rows, "rejected") == 0).all()
    started, ended = values(smoke_rows, "risk_at_start"), values(smoke_rows, "risk")
    assert ended.mean() < started.mean()


def test_the_basin_is_entered_with_more_samples(smoke_rows):
    assert values(smoke_rows, "inside_small").mean() < 0.2
    assert values(smoke_rows, "inside_large").mean() > 0.9


def test_another_part_is_refused():
    with pytest.raises(ValueError, match="part must be one of"):
        _ = replace(SMALL[0], part="size").effective
