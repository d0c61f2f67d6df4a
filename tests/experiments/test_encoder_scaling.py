"""The encoder scaling experiment: shape, determinism, bands, and slopes that can miss them."""

from __future__ import annotations

import pandas as pd
import pytest

from attention_dynamics.experiments import encoder_scaling
from attention_dynamics.running import Experiment, sweep


@pytest.fixture(scope="module")
def smoke():
    return sweep(encoder_scaling, "smoke")


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(encoder_scaling, Experiment)
    assert set(encoder_scaling.PROFILES) == {"smoke", "book", "paper"}
    assert encoder_scaling.Config.__dataclass_params__.frozen


def test_smoke_and_book_share_no_seed():
    profiles = encoder_scaling.PROFILES
    assert not set(profiles["smoke"].seeds) & set(profiles["book"].seeds)
    assert len(profiles["book"].seeds) == len(profiles["paper"].seeds) == 20


def test_a_cell_is_a_pure_function_of_config_and_seed():
    config = encoder_scaling.PROFILES["smoke"].configs[0]
    first = encoder_scaling.run(config, 5)
    pd.testing.assert_frame_equal(encoder_scaling.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == encoder_scaling.COLUMNS
    other = encoder_scaling.run(config, 6)
    assert (other["value"] != first["value"]).all()


def test_exponents_share_the_data_and_the_weights(smoke):
    """At one width the logits of the two exponents differ by the factor alone."""
    logits = smoke[smoke["quantity"] == "logit_size"]
    table = logits.pivot(index=["width", "seed"], columns="logit_exponent", values="value")
    widths = table.index.get_level_values("width").to_numpy()
    assert (table[0.5] / table[1.0]).to_numpy() == pytest.approx(widths**0.5, rel=1e-12)


def test_the_summary_compares_slopes_with_the_bands(smoke):
    table = encoder_scaling.summarise(smoke).set_index("quantity")
    assert set(table.index) == set(encoder_scaling.BANDS)
    flat = table.loc["logit_size_half", "slope"]
    assert table.loc["logit_size_one", "slope"] == pytest.approx(flat - 0.5, abs=1e-9)
    doubled = smoke.copy()
    doubled.loc[doubled["quantity"] == "query_key_trace", "value"] *= doubled["width"]
    other = encoder_scaling.summarise(doubled).set_index("quantity")
    moved = other.loc["query_key_trace_one", "slope"] - table.loc["query_key_trace_one", "slope"]
    assert moved == pytest.approx(1, abs=1e-9)
    assert not other.loc["query_key_trace_half", "inside"]


def test_descent_lowers_the_loss_and_runs_where_it_is_asked(smoke):
    losses = smoke[smoke["quantity"] == "loss_ratio"]["value"]
    assert (losses < 1).all()
    config = encoder_scaling.PROFILES["smoke"].configs[0]
    wide = encoder_scaling.Config(width=8, logit_exponent=1.0, trained_width=4, steps=5)
    assert "loss_ratio" not in set(encoder_scaling.run(wide, 0)["quantity"])
    assert "loss_ratio" in set(encoder_scaling.run(config, 0)["quantity"])
