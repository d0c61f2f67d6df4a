"""The experiment on finite contexts and samples: shape, bands, determinism, what must hold."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.data.regression import regression_problem, sample
from attention_dynamics.experiments import _trained_context as trained
from attention_dynamics.experiments import regression_context
from attention_dynamics.experiments.estimates import t_interval
from attention_dynamics.models import regression
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.training.structure_aware import spectral_initialisation

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


def test_the_basin_is_measured_in_units_of_its_bound(smoke_rows):
    # cond 1, sigma_min(N) = 1/2, noise 1, m = d = 4: n* = 4 (2 + 2)^2 / (1/2)^2 = 256
    at = smoke_rows[(smoke_rows["part"] == "basin") & (smoke_rows["condition"] == 1.0)]
    samples = at[at["quantity"] == "samples"].groupby("size")["value"].unique()
    assert {size: list(found) for size, found in samples.items()} == {0.125: [32.0], 2.0: [512.0]}


def test_closed_forms_are_near_what_is_sampled(smoke_rows):
    for quantity in ("exact_0.3", "exact_0.5", "first_order_0.3", "prompt_loss"):
        assert values(smoke_rows, quantity).mean() == pytest.approx(1.0, abs=0.1), quantity


def test_the_distortion_is_split_into_what_a_linear_layer_absorbs_and_the_rest():
    stream = generator(0, "split")
    problem = regression_problem(4, 4, condition=3.0, noise=0.0, generator=stream)
    queries = torch.randn(40, 4, generator=stream, dtype=torch.float64) @ problem.query_root
    contexts = torch.randn(30, 4, generator=stream, dtype=torch.float64)
    own = replace(problem, token_covariance=contexts.mT @ contexts / 30)
    true = spectral_initialisation(own, 0.6)
    linear, cross = trained._linear_part(true, own, queries, contexts)
    rest = regression.forward(true, queries, contexts) - queries @ problem.target.mT
    projector = queries @ torch.linalg.pinv(queries)
    assert linear == pytest.approx(float((projector @ rest).square().sum()) / 80, rel=1e-9)
    assert cross == pytest.approx(0.0, abs=1e-12)
    # an error that undoes the linear fit: the cross term is minus twice the linear part
    shift = torch.linalg.lstsq(queries, rest).solution.mT
    moved = replace(own, target=problem.target + shift)
    assert trained._linear_part(true, moved, queries, contexts)[1] == pytest.approx(-2 * linear)


def test_the_distortion_is_what_the_softmax_adds_to_a_linear_layer():
    # average over contexts: the layer at the truth of each context's covariance, against the
    # closed form to first order in 1/T
    ratios = []
    for seed in range(60):
        stream = generator(seed, "distortion test")
        problem = regression_problem(3, 3, condition=2.0, noise=0.0, generator=stream)
        data = sample(problem, 400, 400, generator=stream)
        own = replace(problem, token_covariance=data.contexts.mT @ data.contexts / 400)
        true = spectral_initialisation(own, 0.3)
        added = regression.loss(true, *data)
        ratios.append(float(added) / trained._distortion(true, own, 400))
    found = t_interval(ratios)
    assert found.lower < 1.0 < found.upper + 0.05
    assert found.upper - found.lower < 0.3


def test_another_part_is_refused():
    with pytest.raises(ValueError, match="part must be one of"):
        _ = replace(SMALL[0], part="size").effective
