r"""The certified runs: shape, bands, determinism, and that a broken bound would be seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import residual_certificates as experiment
from attention_dynamics.models.residual import (
    ResidualParameters,
    forward,
    loss_and_gradients,
    stack_parameters,
)
from attention_dynamics.running import Experiment, sweep

SMALL = experiment.PROFILES["smoke"].configs[0]
SETTINGS = ("Z_with", "Z_slowest", "Z_without", "H_with", "H_without")


@pytest.fixture(scope="module")
def smoke():
    return sweep(experiment, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "book", "paper"}
    assert experiment.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in experiment.BANDS.items()} == {
        "violations": (None, 0.0),
        "least_speed_Z_with": (70.0, None),
        "speed_Z_slowest": (70.0, 74.0),
    }


def test_the_full_profile_holds_a_hundred_runs_of_two_thousand_steps():
    full = experiment.PROFILES["paper"]
    assert sum(config.runs for config in full.configs) * len(full.seeds) == 100
    assert min(config.steps for config in full.configs) >= 2000
    assert tuple(config.setting for config in full.configs) == SETTINGS
    assert not set(full.seeds) & set(experiment.PROFILES["smoke"].seeds)


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = experiment.run(SMALL, 5)
    pd.testing.assert_frame_equal(experiment.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == experiment.COLUMNS
    assert (experiment.run(SMALL, 6)["value"] != first["value"]).any()


def test_nothing_is_violated_and_the_ratios_say_so(smoke):
    table = smoke.pivot_table(
        index=["route", "residual", "targets", "run"], columns="quantity", values="value"
    )
    assert (table["violations"] == 0).all()
    assert (table["loss_over_bound"] < 1).all()
    assert (table["path_over_rho"] < 1).all()
    assert (table["gradient_over_pl"] > 1).all()
    assert (table["speed"] > 1).all()
    assert [len(experiment.of_setting(smoke, name)) for name in SETTINGS] == [18] * 5


def test_the_slowest_targets_leave_the_error_along_one_singular_direction():
    config = replace(SMALL, targets="slowest")
    one, normal = experiment.start(config, 0, 0), experiment.start(SMALL, 0, 0)
    assert one.certificate.error == pytest.approx(normal.certificate.error)
    found = experiment.descend([one], config)
    assert float(found["gradient_over_pl"][0, 0]) == pytest.approx(36.0, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "factor", "broken"), [("mu", 200.0, 1), ("rho", 1e-3, 1), ("mu", 30.0, 0)]
)
def test_a_certificate_that_promises_too_much_is_caught(name, factor, broken):
    config = replace(SMALL, targets="slowest", runs=1)
    one = experiment.start(config, 0, 0)
    promise = replace(one.certificate, **{name: factor * getattr(one.certificate, name)})
    found = experiment.descend([replace(one, certificate=promise)], config)
    assert (int(found["violations"][0]) > 0) == bool(broken)


def test_a_start_that_fits_already_breaks_nothing():
    config = replace(SMALL, runs=1, steps=3)
    one = experiment.start(config, 0, 0)
    (fitted,) = forward(stack_parameters([one.parameters]), one.tokens[None], config.layer)
    found = experiment.descend([replace(one, targets=fitted)], config)
    assert not found["loss"].any()
    assert int(found["violations"][0]) == 0


def test_a_run_that_turns_to_nan_is_a_violation(monkeypatch):
    one = experiment.start(replace(SMALL, runs=1), 0, 0)

    def spoiled(*arguments, **options):
        loss, gradient = loss_and_gradients(*arguments, **options)
        return loss * torch.nan, gradient

    monkeypatch.setattr(experiment, "loss_and_gradients", spoiled)
    found = experiment.descend([one], SMALL)
    assert int(found["violations"][0]) == SMALL.steps + 1


def test_the_descent_is_gradient_descent():
    one = experiment.start(replace(SMALL, runs=1), 1, 0)
    found = experiment.descend([one], replace(SMALL, steps=3))
    theta, losses, length = one.parameters, [], 0.0
    for _ in range(4):
        loss, gradient = loss_and_gradients(theta, one.tokens, one.targets, SMALL.layer)
        losses.append(float(loss))
        theta = ResidualParameters(
            *(a - one.certificate.eta * b for a, b in zip(theta, gradient, strict=True))
        )
        length += one.certificate.eta * float(gradient.norm())
    np.testing.assert_allclose(found["loss"][:, 0], losses, rtol=1e-12)
    assert float(found["path"][-1, 0]) < length


def test_summarise_counts_violations_and_reports_a_miss(smoke):
    summary = experiment.summarise(smoke).set_index("quantity")
    assert list(summary.index) == list(experiment.BANDS)
    assert summary.loc["violations", "inside"]
    assert summary.loc["violations", "runs"] == 10
    spoiled = smoke.copy()
    spoiled.loc[spoiled.index[spoiled["quantity"] == "violations"][0], "value"] = 1.0
    summary = experiment.summarise(spoiled).set_index("quantity")
    assert not summary.loc["violations", "inside"]


def test_a_scale_that_is_not_certified_is_refused():
    with pytest.raises(ValueError, match="margin"):
        experiment.start(replace(SMALL, margin=0.5), 0, 0)
