"""The ablation experiment: shape, grid, bands, and what its numbers must satisfy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import regression_ablation as experiment
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.running import Experiment, read_results, sweep

SMALL = experiment.PROFILES["smoke"].configs[0]
SEEDS = range(1000, 1002)


@pytest.fixture(scope="module")
def smoke_rows():
    return sweep(experiment, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "tuning", "book", "paper"}
    assert experiment.Config.__dataclass_params__.frozen


def test_bands_and_seeds_are_those_that_were_asked():
    ends = {name: band.ends for name, band in experiment.BANDS.items()}
    assert ends == {"end_spectral": (0.9, 1.15), "end_random": (0.9, 1.15)}
    measured = set(experiment.PROFILES["book"].seeds)
    assert measured == set(experiment.PROFILES["paper"].seeds) == set(range(20))
    assert measured.isdisjoint(experiment.PROFILES["tuning"].seeds)


def test_every_tuned_method_has_the_same_right_to_a_grid():
    grid = pd.DataFrame([vars(config) for config in experiment.PROFILES["tuning"].configs])
    for _, rows in grid.groupby(["method", "start"]):
        assert rows["steps"].nunique() == 1
        assert rows["rho"].nunique() == 2
        assert rows["rate"].max() / rows["rate"].min() >= 6
    sizes = grid.groupby("method").size()
    assert sizes["adam"] == sizes["muon"] == 48


def test_the_tuned_settings_are_the_stored_ones_that_the_rule_chooses():
    stored = Path(__file__).parents[2] / "results" / "regression_ablation" / "tuning"
    chosen = experiment.best(read_results(stored)[0])
    keys = ["method", "start", "rho", "rate", "decay"]
    written = pd.DataFrame([vars(config) for config in experiment.TUNED])[keys]
    pd.testing.assert_frame_equal(
        chosen[keys].reset_index(drop=True),
        written.sort_values(["method", "start"]).reset_index(drop=True),
    )


def test_a_cell_does_not_depend_on_its_block_but_for_rounding():
    first = experiment.run(SMALL, 1001)
    pd.testing.assert_frame_equal(experiment.run(SMALL, 1001), first, check_exact=True)
    assert tuple(first.columns) == experiment.COLUMNS
    alone = experiment.run(replace(SMALL, block=1), 1001)
    np.testing.assert_allclose(alone["value"], first["value"], rtol=1e-6)


def test_every_configuration_has_its_line(smoke_rows):
    lines = experiment.table(smoke_rows)
    assert len(lines) == len(experiment.PROFILES["smoke"].configs)
    assert (lines["unreached"] <= lines["seeds"]).all()
    reached = smoke_rows[smoke_rows["quantity"] == "step_reached"]
    assert (reached["value"] <= reached["steps"] + 1).all()
    assert list(experiment.summarise(smoke_rows)["quantity"]) == list(experiment.BANDS)


def test_the_rule_takes_fewest_steps_and_then_the_lowest_risk():
    values = {0.1: (5, 2.0), 0.2: (3, 1.3), 0.3: (3, 1.1)}
    rows = pd.DataFrame(
        {"method": "adam", "without": "nothing", "start": "random", "rho": 0.2, "rate": rate,
         "decay": False, "steps": 9, "seed": seed, "quantity": quantity, "value": value}
        for rate, (steps, end) in values.items()
        for seed in range(3)
        for quantity, value in (
            ("step_reached", steps), ("end", end), ("reached", 1), ("failed", 0)
        )
    )  # fmt: skip
    assert experiment.best(rows)["rate"].tolist() == [0.3]


def test_the_risk_of_least_squares_is_that_of_its_map():
    task = experiment.draw(SMALL, SEEDS)
    for place in range(2):
        X, Y = task.data.queries[place], task.data.targets[place]
        error = torch.linalg.lstsq(X, Y).solution.T - task.truth.target[place]
        risk = 0.5 * torch.trace(error @ task.truth.query_covariance[place] @ error.T)
        torch.testing.assert_close(task.floor[place], risk)
    assert not torch.allclose(task.subset.target, task.known.target)


@pytest.mark.parametrize(("name", "norm"), [("spectral", 0.2), ("large", 2.0), ("random", 0.2)])
def test_starts_have_their_norm(name, norm):
    task = experiment.draw(SMALL, SEEDS)
    factors = experiment.start(replace(SMALL, start=name), SEEDS, task)
    seen = task.known if name == "random" else task.subset
    norms = torch.linalg.matrix_norm(seen.whiten(factors)[1], 2)
    torch.testing.assert_close(norms, torch.full((2,), norm, dtype=torch.float64))


def test_the_skewed_start_has_the_product_of_the_spectral_one():
    task = experiment.draw(SMALL, SEEDS)
    products = []
    for name in ("spectral", "skewed"):
        A, B = experiment.start(replace(SMALL, start=name), SEEDS, task)
        products.append(A @ task.known.token_covariance @ B.mT)
    torch.testing.assert_close(*products)


def test_what_is_taken_away_is_gone():
    task = experiment.draw(SMALL, SEEDS)

    def made(method, without):
        return experiment.optimiser(replace(SMALL, method=method, without=without), task)

    assert (made("scaled", "nothing").damping, made("scaled", "damping").damping) == (0.2, 0.0)
    assert made("scaled", "renormalisation").rho is None
    assert made("whiten", "nothing").regulariser == 1.0
    assert made("whiten", "regulariser").regulariser == 0.0
    both = made("whiten", "both")
    assert both.rho is None
    assert both.regulariser == 0.0
    with pytest.raises(ValueError, match="method must be"):
        made("newton", "nothing")


def test_the_whole_method_reaches_least_squares_on_a_small_task():
    config = replace(SMALL, steps=15, samples=100, length=200, dimension=4)
    run, floor = experiment.trace(config, SEEDS)
    assert isinstance(experiment.draw(config, SEEDS).truth, RegressionProblem)
    assert (run.risk[0] / floor > 1.5).all()
    assert (run.risk[-1] / floor < 1.4).all()
