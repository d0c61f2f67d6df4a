r"""The linearisation experiment: shape, bands, determinism, and what its numbers must satisfy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics import experiments
from attention_dynamics.data import generator
from attention_dynamics.experiments import linearisation
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.linearisation import linearised

SMALL = linearisation.PROFILES["smoke"].configs[-1]


@pytest.fixture(scope="module")
def smoke_rows():
    return sweep(linearisation, "smoke")


def pairs(frame, smaller, larger):
    table = frame.pivot_table(index=["size", "seed"], columns="quantity", values="value")
    return table[smaller].dropna(), table[larger].dropna()


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(linearisation, Experiment)
    assert experiments.get("linearisation") is linearisation
    assert set(linearisation.PROFILES) == {"smoke", "book", "paper"}
    assert linearisation.Config.__dataclass_params__.frozen


def test_the_bands_are_those_of_the_theory():
    assert {name: band.ends for name, band in linearisation.BANDS.items()} == {
        "adversarial_by_radius": (1.85, 2.15),
        "random_by_radius": (1.85, 2.15),
        "adversarial_by_length": (-0.1, 0.1),
        "adversarial_by_length_iid": (-0.1, 0.1),
        "comparator_by_heads": (-1.15, -0.85),
        "trained_by_heads": (-1.15, -0.85),
        "training_gap_by_heads": (-1.15, -0.85),
    }


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = linearisation.run(SMALL, 5)
    pd.testing.assert_frame_equal(linearisation.run(SMALL, 5), first, check_exact=True)
    assert tuple(first.columns) == linearisation.COLUMNS
    assert (linearisation.run(SMALL, 6)["value"] != first["value"]).mean() > 0.8


def test_a_summary_has_every_band_and_small_radii_only(smoke_rows):
    summary = linearisation.summarise(smoke_rows)
    assert list(summary["quantity"]) == list(linearisation.BANDS)
    far = smoke_rows[smoke_rows["axis"] == "radius"].assign(size=2.0)
    kept = linearisation.within_range(pd.concat([smoke_rows, far]))
    assert kept[kept["axis"] == "radius"]["size"].max() <= linearisation.SMALL_RADIUS
    assert len(kept) == len(smoke_rows)


@pytest.mark.parametrize("suffix", ["radius", "length", "length_iid"])
def test_the_adversary_beats_chance_and_stays_below_the_bound(smoke_rows, suffix):
    random, adversarial = pairs(smoke_rows, f"random_by_{suffix}", f"adversarial_by_{suffix}")
    assert (random < adversarial).all()
    adversarial, bound = pairs(smoke_rows, f"adversarial_by_{suffix}", f"bound_by_{suffix}")
    assert (adversarial <= bound).all()


def test_a_trained_network_stays_within_its_radius_and_its_bound(smoke_rows):
    trained, bound = pairs(smoke_rows, "trained_by_heads", "bound_by_heads")
    assert (trained <= bound).all()
    table = smoke_rows.pivot_table(index=["size", "seed"], columns="quantity", values="value")
    travelled = table[[f"distance_{block}_by_heads" for block in "cUW"]].dropna()
    assert (travelled <= SMALL.radius * (1 + 1e-9)).all(axis=None)
    assert (travelled > 0).all(axis=None)


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="axis must be"):
        linearisation.run(replace(SMALL, axis="depth"), 0)


def test_descent_of_the_tangent_model_is_descent_in_its_parameters():
    initial = symmetric_initialisation(
        6, 3, generator=generator(0, "tangent descent"), dtype=torch.float64
    )
    tokens, query = linearisation._inputs(replace(SMALL, heads=6), 0, initial.U.device)
    targets = torch.linspace(-1, 1, len(tokens), dtype=torch.float64)
    kernel = linearisation.empirical_kernel_total(initial, tokens, query=query)
    phi, eta = initial, 0.3
    for _ in range(5):
        residual = linearised(initial, phi, tokens, query=query) - targets
        gradient = shallow.vjp(initial, tokens, 2 * residual / len(tokens), query=query)
        phi = phi.minus(gradient.scaled(eta))
    expected = linearised(initial, phi, tokens, query=query)
    found = linearisation.tangent_descent(kernel, targets, eta, 5)
    np.testing.assert_allclose(found, expected, rtol=1e-10)
