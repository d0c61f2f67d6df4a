r"""Training with and without the residual: shape, bands, determinism, what is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import residual_training as experiment
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.tangent_spectrum import tangent_kernel
from attention_dynamics.training.residual_descent import gradient_descent, measured_rate

SMALL = experiment.PROFILES["smoke"].configs[0]


@pytest.fixture(scope="module")
def smoke():
    return sweep(experiment, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "book", "paper"}
    assert experiment.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in experiment.BANDS.items()} == {
        "predicted_over_observed": (0.98, 1.08),
        "frozen_law": (0.99, 1.02),
        "failures_feedforward_with": (None, 0.0),
        "failures_all_with": (None, 0.0),
        "slowdown_feedforward": (1.0, None),
        "slowdown_all": (1.0, None),
        "repair_all_without": (1.0, None),
    }


def test_twenty_runs_on_seeds_that_smoke_does_not_use():
    profiles = experiment.PROFILES
    assert not set(profiles["smoke"].seeds) & set(profiles["book"].seeds)
    assert all(config.runs == 20 for config in profiles["book"].configs)


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = experiment.run(SMALL, 5)
    pd.testing.assert_frame_equal(experiment.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == experiment.COLUMNS
    assert (experiment.run(SMALL, 6)["value"] != first["value"]).any()


def test_settings_share_their_data_and_starts():
    one, tokens, targets = experiment.draw(SMALL, 3)
    other, same, also = experiment.draw(replace(SMALL, setting="all", residual=False), 3)
    torch.testing.assert_close(tokens, same, rtol=0, atol=0)
    torch.testing.assert_close(targets, also, rtol=0, atol=0)
    torch.testing.assert_close(one.W1, other.W1, rtol=0, atol=0)
    frozen, _, _ = experiment.draw(replace(SMALL, setting="frozen_limit"), 3)
    assert float(frozen.W1.abs().max()) == 0
    gram = frozen.W2.mT @ frozen.W2 / SMALL.scale**2
    np.testing.assert_allclose(gram, np.broadcast_to(np.eye(8), gram.shape), atol=1e-12)


def test_attention_does_not_move_where_only_the_network_learns(smoke):
    rows = smoke[smoke["setting"] == "feedforward"]
    table = rows.pivot_table(index=["residual", "run"], columns="quantity", values="value")
    np.testing.assert_allclose(table["condition_start"], table["condition_end"], rtol=1e-12)


def test_a_failed_run_counts_with_all_its_steps(smoke):
    table = smoke.pivot_table(
        index=["setting", "residual", "run"], columns="quantity", values="value"
    )
    limit = np.where(table.index.get_level_values("setting") == "frozen_limit", 300, 200)
    assert (table["steps"] <= limit).all()
    assert (table["steps"][table["failed"] == 1] == limit[table["failed"] == 1]).all()


def test_the_prediction_of_the_end_is_the_tangents_own_rate():
    """Where the kernel can't move, prediction and observation are one."""
    config = replace(SMALL, runs=1, steps=400, dimension=4, hidden=4)
    start, tokens, targets = experiment.draw(config, 4)
    kernel = tangent_kernel(start, tokens, config.layer, blocks=("W2",))
    eta = 0.5 / torch.linalg.eigvalsh(kernel)[:, -1]
    found = gradient_descent(
        start, tokens, targets, config.layer, step_size=eta, steps=400, blocks=("W2",)
    )
    values, vectors = torch.linalg.eigh(kernel[0])
    error = experiment.forward(start, tokens, config.layer) - targets
    weights = 0.5 * (vectors.mT @ error.flatten()).square()
    k = torch.arange(401, dtype=torch.float64)
    losses = (1 - eta * values).square() ** k[:, None] @ weights
    fixed = experiment._with_losses(found, 0, 0, losses)
    np.testing.assert_allclose(fixed.losses, found.losses[:, 0], rtol=1e-6, atol=1e-25)
    torch.testing.assert_close(
        measured_rate(fixed), measured_rate(found)[0], rtol=1e-6, atol=0.0, equal_nan=True
    )


def synthetic(failed=0.0, faster=0.5):
    rows = []
    for setting in ("feedforward", "all", "frozen_limit"):
        for residual in (True, False):
            for run in range(6):
                steps = 100.0 * (1 + 0.01 * run) * (faster if residual else 1.0)
                quantities = {
                    "steps": steps, "failed": failed, "condition_start": 60.0 + run,
                    "condition_end": 3.0, "predicted_over_observed": 1.0 + 0.001 * run,
                    "frozen_law": 1.0 + 0.0001 * run,
                }  # fmt: skip
                rows += [
                    {"setting": setting, "residual": residual, "seed": 0, "run": run,
                     "quantity": name, "value": value}
                    for name, value in quantities.items()
                ]  # fmt: skip
    return pd.DataFrame(rows)


def test_summarise_finds_the_theory_inside_its_bands():
    summary = experiment.summarise(synthetic()).set_index("quantity")
    assert summary["inside"].all()
    assert summary.loc["slowdown_all", "estimate"] == pytest.approx(2.0)
    assert summary.loc["repair_all_without", "estimate"] == pytest.approx(20.8, rel=0.01)


def test_summarise_reports_a_miss():
    summary = experiment.summarise(synthetic(failed=1.0, faster=2.0)).set_index("quantity")
    missed = ("failures_all_with", "failures_feedforward_with", "slowdown_all")
    assert not summary.loc[list(missed), "inside"].any()
    assert summary.loc["failures_all_with", "estimate"] == 6


def test_an_unknown_setting_is_refused():
    with pytest.raises(ValueError, match="setting must be"):
        experiment.run(replace(SMALL, setting="some"), 0)
