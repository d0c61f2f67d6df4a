"""The encoder scaling experiment: shape, determinism, bands, and slopes that can miss them."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.experiments import encoder_scaling
from attention_dynamics.models import wu_encoder
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


@pytest.mark.parametrize("exponent", [0.5, 1.0])
def test_every_quantity_against_the_formula_and_autograd(exponent):
    """Output written as its formula, kernel and descent by automatic differentiation."""
    config = encoder_scaling.Config(
        width=6, logit_exponent=exponent, samples=3, length=4, dimension=2, steps=3
    )
    found = encoder_scaling.run(config, 5).set_index("quantity")["value"]
    stream = generator(5, encoder_scaling.NAME, "data", 3, 4, 2)
    tokens = torch.randn(3, 4, 2, generator=stream, dtype=torch.float64)
    targets = torch.randn(3, generator=stream, dtype=torch.float64)
    start = wu_encoder.initial_parameters(
        6, 2, generator=generator(5, encoder_scaling.NAME, "weights", 6)
    )

    def logits(Q, K, X):
        return 6**-exponent * (X @ Q.T) @ (X @ K.T).T

    def output(Q, K, V, w):
        hidden = [torch.softmax(logits(Q, K, X), dim=1) @ X @ V.T for X in tokens]
        return torch.stack([h.relu().mean(dim=0) @ w for h in hidden]) / 6**0.5

    def attention(Q, K):
        return torch.stack([torch.softmax(logits(Q, K, X), dim=1) for X in tokens])

    rows = torch.autograd.functional.jacobian(output, tuple(start))
    Q, K, V, w = (block.flatten(1) @ block.flatten(1).T for block in rows)
    largest = torch.linalg.eigvalsh(Q + K + V + w)[-1]
    sizes = torch.stack([logits(start.Q, start.K, X) for X in tokens])
    expected = {
        "query_key_trace": (Q + K).trace() / 3,
        "value_trace": V.trace() / 3,
        "output_trace": w.trace() / 3,
        "query_key_share": torch.linalg.eigvalsh(Q + K)[-1] / largest,
        "logit_size": sizes.square().mean().sqrt(),
    }
    blocks, losses = [block.clone().requires_grad_() for block in start], []
    for _ in range(3):
        loss = (output(*blocks) - targets).square().mean()
        losses.append(float(loss.detach()))
        slopes = torch.autograd.grad(loss, blocks)
        with torch.no_grad():
            for block, slope in zip(blocks, slopes, strict=True):
                block -= 0.5 * 3 / (2 * largest) * slope
    before, after = attention(start.Q, start.K), attention(blocks[0], blocks[1])
    expected["attention_change"] = (after - before).norm() / before.norm()
    expected["loss_ratio"] = (output(*blocks) - targets).square().mean() / losses[0]
    assert set(found.index) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value.detach()), rel=1e-9), name
