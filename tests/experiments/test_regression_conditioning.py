"""The conditioning experiment: shape, bands, blocks of seeds, what its numbers must satisfy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import regression_conditioning as experiment
from attention_dynamics.running import Experiment, sweep

SMALL = experiment.PROFILES["smoke"].configs[0]


@pytest.fixture(scope="module")
def smoke_rows():
    return sweep(experiment, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(experiment, Experiment)
    assert set(experiment.PROFILES) == {"smoke", "book", "paper"}
    assert experiment.Config.__dataclass_params__.frozen
    assert set(experiment.PROFILES["book"].seeds) == set(range(20))


def test_the_bands_are_those_that_were_asked():
    ends = {name: band.ends for name, band in experiment.BANDS.items()}
    for c in ("0.1", "0.15"):
        for condition in ("1", "10", "100", "1000", "10000"):
            assert ends.pop(f"median_{c}_{condition}") == (None, 6.0)
            assert ends.pop(f"maximum_{c}_{condition}") == (None, 12.0)
        assert ends.pop(f"growth_{c}") == (None, 2.0)
    assert ends == {"gradient_least_100": (20001.0, None)}


@pytest.mark.parametrize("method", ["damped", "gradient", "whiten"])
def test_a_cell_does_not_depend_on_its_block_but_for_rounding(method):
    config = replace(SMALL, method=method, start="random", limit=20)
    first = experiment.run(config, 1001)
    pd.testing.assert_frame_equal(experiment.run(config, 1001), first, check_exact=True)
    assert tuple(first.columns) == experiment.COLUMNS
    alone = experiment.run(replace(config, block=1), 1001)
    np.testing.assert_allclose(alone["value"][:4], first["value"][:4], rtol=1e-9)


def test_every_configuration_has_its_rows_and_its_line(smoke_rows):
    assert set(smoke_rows["quantity"]) == {
        "steps", "finished", "failed", "excess_first", "excess_last",
    }  # fmt: skip
    lines = experiment.table(smoke_rows)
    assert len(lines) == len(experiment.PROFILES["smoke"].configs)
    assert (lines["least"] <= lines["median"]).all()
    assert (lines["median"] <= lines["most"]).all()
    wide = smoke_rows.pivot_table(
        index=["method", "start", "damping", "relative", "condition", "limit", "seed"],
        columns="quantity", values="value",
    ).reset_index()  # fmt: skip
    finished = wide["finished"] == 1
    assert (wide["excess_last"][finished] <= experiment.LEVEL).all()
    assert (wide["steps"][~finished] == wide["limit"][~finished] + 1).all()
    assert (wide["failed"][finished] == 0).all()


def test_a_summary_speaks_of_what_the_rows_hold(smoke_rows):
    summary = experiment.summarise(smoke_rows)
    assert list(summary["quantity"]) == list(experiment.BANDS)
    few = experiment.summarise(smoke_rows[smoke_rows["condition"] == 10.0])
    assert list(few["quantity"]) == [
        "median_0.1_10", "median_0.15_10", "maximum_0.1_10", "maximum_0.15_10",
    ]  # fmt: skip


def test_estimates_on_a_made_up_table():
    rows = pd.DataFrame(
        {
            "method": "damped", "start": start, "damping": 0.1, "condition": condition,
            "dimension": 4, "seed": seed, "quantity": "steps",
            "value": 2.0 * condition**0.25 + seed,
        }
        for start in ("random", "spectral")
        for condition in (1.0, 10000.0)
        for seed in range(20)
    )  # fmt: skip
    assert experiment.estimate(rows, "median_0.1_1").mean == 11.5
    assert experiment.estimate(rows, "maximum_0.1_10000").interval == (20.0, 39.0)
    assert experiment.estimate(rows, "growth_0.1").mean == pytest.approx(29.5 / 11.5)
    assert experiment.estimate(rows, "growth_0.15") is None


def test_problems_of_one_seed_share_all_but_the_eigenvalues():
    easy, hard = (
        experiment.problems(replace(SMALL, condition=condition), range(2))
        for condition in (1.0, 100.0)
    )
    torch.testing.assert_close(easy.target, hard.target)
    torch.testing.assert_close(
        torch.linalg.cond(hard.query_covariance), torch.full((2,), 100.0).double()
    )


def test_starts_have_their_norm():
    for method, start in (("damped", "random"), ("damped", "spectral"), ("gradient", "random")):
        config = replace(SMALL, method=method, start=start)
        task = experiment.problems(config, range(2))
        U, V = task.whiten(experiment.starts(config, range(2), task))
        norms = torch.linalg.matrix_norm(V, 2)
        if method == "gradient":
            torch.testing.assert_close(norms, torch.linalg.matrix_norm(U, 2))
        elif start == "random":
            torch.testing.assert_close(norms, torch.full((2,), config.rho).double())
        else:
            assert ((norms / config.rho - 1).abs() < 1).all()


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="method must be"):
        experiment.run(replace(SMALL, method="newton"), 0)
