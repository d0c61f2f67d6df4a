r"""The kernel against the length of its sequences: shape, determinism, bands, what is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.experiments import kernel_length
from attention_dynamics.running import Experiment, sweep

SMALL = kernel_length.PROFILES["smoke"].configs[0]
EXPONENTS = {"top_fixed": -1.0, "top_last": 0.0, "top_means": -0.01}


@pytest.fixture(scope="module")
def smoke():
    return sweep(kernel_length, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(kernel_length, Experiment)
    assert set(kernel_length.PROFILES) == {"smoke", "book", "paper"}
    assert kernel_length.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in kernel_length.BANDS.items()} == {
        "top_fixed": (-1.15, -0.85), "top_last": (-0.1, 0.1), "top_means": (-0.1, 0.1),
    }  # fmt: skip
    assert kernel_length.SLOPE_FROM == 64
    seeds = [set(kernel_length.PROFILES[name].seeds) for name in ("smoke", "book")]
    assert not seeds[0] & seeds[1]


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = kernel_length.run(SMALL, 5)
    pd.testing.assert_frame_equal(kernel_length.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == kernel_length.COLUMNS
    assert (kernel_length.run(SMALL, 6)["value"] != first["value"]).all()


def test_what_is_known_without_measuring_holds(smoke):
    table = smoke.pivot(index=["length", "seed"], columns="quantity", values="value")
    for case in kernel_length.CASES:
        assert (table[f"diagonal_{case}"] <= 2.05).all()  # s_0^2 + s_1^2
        assert (table[f"top_{case}"] < table[f"diagonal_{case}"]).all()
        assert (table[f"effective_rank_{case}"].between(1, SMALL.samples)).all()
        assert (table[f"bottom_{case}"] > -1e-12).all()


def test_a_constant_kernel_has_no_centred_part_and_rank_one():
    found = kernel_length._spectral(torch.ones(5, 5, dtype=torch.float64))
    assert abs(found["top"]) < 1e-15
    assert found["effective_rank"] == pytest.approx(1)
    assert found["diagonal"] == 1


def synthetic(exponents):
    random = np.random.default_rng(0)
    return pd.DataFrame(
        {"length": T, "seed": seed, "quantity": quantity,
         "value": (1 + seed) * T**exponent * np.exp(0.02 * random.standard_normal())}
        for quantity, exponent in exponents.items()
        for seed in range(5) for T in (4, 64, 256, 1024)
    )  # fmt: skip


def test_summarise_finds_the_theory_and_looks_at_long_sequences_only():
    frame = synthetic(EXPONENTS)
    frame.loc[frame["length"] == 4, "value"] = 1e6
    summary = kernel_length.summarise(frame).set_index("quantity")
    assert summary["inside"].all()
    np.testing.assert_allclose(summary["slope"], list(EXPONENTS.values()), atol=0.03)


def test_summarise_reports_a_miss():
    frame = synthetic({**EXPONENTS, "top_means": -1.0})
    summary = kernel_length.summarise(frame).set_index("quantity")
    assert not summary.loc["top_means", "inside"]
    assert summary.drop("top_means")["inside"].all()
