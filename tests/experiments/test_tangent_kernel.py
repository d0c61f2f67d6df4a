r"""The tangent kernel experiment: shape, determinism, bands, what is known beforehand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments import tangent_kernel
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.kernels import empirical_kernel
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii

SMALL = tangent_kernel.PROFILES["smoke"].configs[1]
EXPONENTS = {
    "kernel_error": -0.5,
    "spread_independent": -0.5,
    "spread_linear": -0.5,
    "spread_shared": -0.02,
    "attention_trace": 0.0,
    "attention_trace_half": -1.0,
    "attention_trace_one": -2.0,
    "uniform_distance_half": -0.5,
    "flow_error": -0.5,
}


@pytest.fixture(scope="module")
def smoke():
    return sweep(tangent_kernel, "smoke")


def table_of(frame):
    return frame.pivot(index=["heads", "seed"], columns="quantity", values="value")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(tangent_kernel, Experiment)
    assert set(tangent_kernel.PROFILES) == {"smoke", "book", "paper"}
    assert tangent_kernel.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    half = (-0.6, -0.4)
    assert {name: band.ends for name, band in tangent_kernel.BANDS.items()} == {
        "kernel_error": half,
        "spread_independent": half,
        "spread_linear": half,
        "spread_shared": (0.5, None),
        "attention_trace": (-0.1, 0.1),
        "attention_trace_half": (-1.15, -0.85),
        "attention_trace_one": (-2.15, -1.85),
        "uniform_distance_half": half,
        "flow_error": half,
    }


def test_smoke_and_book_share_no_seed_and_the_widths_pass_2048():
    profiles = tangent_kernel.PROFILES
    assert not set(profiles["smoke"].seeds) & set(profiles["book"].seeds)
    for name in ("book", "paper"):
        assert max(config.heads for config in profiles[name].configs) >= 2048


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = tangent_kernel.run(SMALL, 5)
    tangent_kernel._problem.cache_clear()
    pd.testing.assert_frame_equal(tangent_kernel.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == tangent_kernel.COLUMNS
    other = tangent_kernel.run(SMALL, 6)
    assert (other["value"] != first["value"]).all()


def test_wide_networks_are_not_trained():
    rows = tangent_kernel.run(replace(SMALL, flow_heads=SMALL.heads - 1), 5)
    assert "flow_error" not in set(rows["quantity"])


def test_what_is_known_without_measuring_holds(smoke):
    table = table_of(smoke)
    assert (table > 0).all(axis=None)
    assert (table["limit_standard_error"] < 0.02).all()
    assert (table["attention_trace"] <= 1.5).all()  # the limit is at most s_1^2 = 1
    scaled = table["attention_trace_half"] * table.index.get_level_values("heads")
    assert (scaled < 1.5).all()
    assert (table["attention_trace_one"] < table["attention_trace_half"]).all()


def test_a_limit_has_no_error_and_a_kernel_twice_as_large_errs_by_one(monkeypatch):
    problem = tangent_kernel._problem(replace(SMALL, **tangent_kernel._IRRELEVANT), 5, "cpu")
    draws = tangent_kernel._Draws(SMALL, 5, problem)
    for factor, expected in ((1.0, 0.0), (2.0, 1.0)):
        monkeypatch.setattr(tangent_kernel, "_empirical", lambda *_, by=factor: by * problem.limit)
        found = tangent_kernel._convergence(SMALL, problem, draws)["kernel_error"]
        assert found == pytest.approx(expected)


def test_the_trace_is_that_of_the_kernels_of_the_same_networks():
    problem = tangent_kernel._problem(replace(SMALL, **tangent_kernel._IRRELEVANT), 5, "cpu")
    draws = tangent_kernel._Draws(SMALL, 5, problem)
    found = tangent_kernel._scaled(SMALL, problem, draws)
    for name, beta in (("", 0), ("_half", -0.5), ("_one", -1)):
        kernels = [
            empirical_kernel(
                draws("paired", k), problem.tokens, query=problem.query, scale=SMALL.heads**beta
            )
            for k in range(SMALL.networks)
        ]
        expected = sum(float(kernel.W.diagonal().mean()) for kernel in kernels) / len(kernels)
        assert found[f"attention_trace{name}"] == pytest.approx(expected, rel=1e-12)


def test_the_spread_of_a_known_sample():
    one = torch.eye(2, dtype=torch.float64)
    spread = tangent_kernel._spread([one, 2 * one, 3 * one])
    assert spread == pytest.approx(0.5)


def test_descent_is_that_of_the_library_without_projection():
    double = {"dtype": torch.float64}
    tokens = unit_ball_tokens(6, 4, 3, generator=generator(0, "t"), **double)
    query = query_vector(3, generator=generator(0, "q"), **double)
    phi = symmetric_initialisation(8, 3, generator=generator(0, "p"), **double)
    targets = torch.linspace(-1, 1, 6, **double)
    values = tangent_kernel.descent_values(phi, tokens, targets, 5, 0.3, query=query)
    model = ShallowTransformer(phi, query=query)
    config = DescentConfig(steps=5, step_size=0.3, radii=Radii(None, None, None))
    history = projected_gradient_descent(model, tokens, targets, config).history
    losses = (values - targets).square().mean(dim=1)
    np.testing.assert_allclose(losses[:5], history["loss"].to_numpy()[:5], rtol=1e-12)


def synthetic(exponents):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"heads": m, "seed": seed, "quantity": quantity,
         "value": (1 + seed) * m**exponent * np.exp(0.02 * random.standard_normal())}
        for quantity, exponent in exponents.items()
        for seed in range(5) for m in (16, 64, 256, 1024)
    )  # fmt: skip


def test_summarise_finds_the_theory_inside_its_bands():
    summary = tangent_kernel.summarise(synthetic(EXPONENTS)).set_index("quantity")
    assert summary["inside"].all()
    slopes = summary[summary["statistic"] == "slope"]["estimate"]
    np.testing.assert_allclose(slopes, [EXPONENTS[name] for name in slopes.index], atol=0.03)
    ratio = summary.loc["spread_shared", "estimate"]
    assert ratio == pytest.approx(64**-0.02, rel=0.05)


@pytest.mark.parametrize(
    ("quantity", "exponent"),
    [("spread_shared", -0.5), ("spread_independent", 0.0), ("attention_trace_half", 0.0)],
)
def test_summarise_reports_a_miss(quantity, exponent):
    frame = synthetic({**EXPONENTS, quantity: exponent})
    summary = tangent_kernel.summarise(frame).set_index("quantity")
    assert not summary.loc[quantity, "inside"]
    assert summary.drop(quantity)["inside"].all()


def test_every_band_is_measured(smoke):
    assert set(tangent_kernel.BANDS) <= set(smoke["quantity"])
