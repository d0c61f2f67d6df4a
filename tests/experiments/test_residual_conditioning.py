r"""The experiment on conditioning: shape, bands, determinism, and what its numbers must satisfy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics import experiments
from attention_dynamics.experiments import residual_conditioning as conditioning
from attention_dynamics.experiments.residual_conditioning import Config
from attention_dynamics.running import Experiment, sweep

DEFAULTS = Config("defaults", 1.0)


@pytest.fixture(scope="module")
def smoke_rows():
    return sweep(conditioning, "smoke")


def table(config, seed=100):
    rows = conditioning.run(config, seed)
    return rows.set_index("quantity")["value"]


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(conditioning, Experiment)
    assert conditioning.NAME not in experiments.names() or (
        experiments.get(conditioning.NAME) is conditioning
    )
    assert set(conditioning.PROFILES) == {"smoke", "book", "paper"}
    assert len(conditioning.PROFILES["book"].seeds) == 20


def test_the_bands_are_those_fixed_before_the_run():
    assert {name: band.ends for name, band in conditioning.BANDS.items()} == {
        "with_by_defaults": (2.0, 4.0),
        "without_by_defaults": (9.0, None),
        "least_gain_by_length": (1.0, None),
        "least_gain_by_dimension": (1.0, None),
        "least_gain_by_value_scale": (1.0, None),
        "least_gain_by_logit_scale": (1.0, None),
        "with_by_logit_scale": (-0.1, 0.1),
        "without_by_logit_scale": (-1.1, -0.9),
        "with_by_spread": (-0.55, -0.45),
        "without_by_spread": (-1.6, -1.4),
        "sine_by_angle": (0.97, 1.05),
        "sigma_2_by_rank": (0.9, 1.1),
        "sigma_4_by_rank": (1.9, 2.1),
        "sigma_7_by_rank": (2.9, 3.1),
    }


def test_a_cell_is_a_pure_function_of_config_and_seed():
    first = conditioning.run(DEFAULTS, 5)
    pd.testing.assert_frame_equal(conditioning.run(DEFAULTS, 5), first, check_exact=True)
    assert tuple(first.columns) == conditioning.COLUMNS
    assert (conditioning.run(DEFAULTS, 6)["value"] != first["value"]).all()


def test_the_conditions_are_those_of_the_formula():
    tokens, parameters, _ = conditioning.draw(DEFAULTS, 7)
    rows = []
    for X in tokens.numpy():
        logits = X @ parameters.Q.numpy() @ parameters.K.numpy().T @ X.T / math.sqrt(8)
        A = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        rows.append(A @ X @ parameters.V.numpy())
    attended, X = np.concatenate(rows), tokens.flatten(0, 1).numpy()
    found = table(DEFAULTS, 7)
    assert found["with_by_defaults"] == pytest.approx(np.linalg.cond(X + attended), rel=1e-9)
    assert found["without_by_defaults"] == pytest.approx(np.linalg.cond(attended), rel=1e-9)
    assert found["tokens_by_defaults"] == pytest.approx(np.linalg.cond(X), rel=1e-9)


def test_scales_share_their_draws_and_leave_what_they_cannot_change():
    small, large = (table(Config("value_scale", scale)) for scale in (0.01, 100.0))
    for name in ("tokens", "without"):
        name = f"{name}_by_value_scale"
        assert small[name] == pytest.approx(large[name], rel=1e-9)
    assert small["with_by_value_scale"] == pytest.approx(small["tokens_by_value_scale"], rel=0.1)


def test_equal_logits_are_singular_without_a_residual():
    found = table(Config("logit_scale", 0.0))
    assert found["without_by_logit_scale"] > 1e14
    assert found["without_by_logit_scale"] <= conditioning.LARGEST_CONDITION
    assert found["with_by_logit_scale"] < 10


def test_the_angle_bound_is_never_passed(smoke_rows):
    ratios = smoke_rows[smoke_rows["quantity"].str.startswith("bound_ratio")]["value"]
    assert (ratios <= 1 + 1e-10).all()
    assert ratios.max() > 0.5


def test_a_common_part_makes_tokens_alike():
    tokens, _, _ = conditioning.draw(replace(DEFAULTS, spread=1e-6), 0)
    own, _, _ = conditioning.draw(DEFAULTS, 0)
    assert (tokens - tokens.mean(dim=1, keepdim=True)).abs().max() < 0.01
    expected = 1e-3 * (own - own.mean(dim=1, keepdim=True))
    torch.testing.assert_close(
        tokens - tokens.mean(dim=1, keepdim=True), expected, rtol=1e-6, atol=1e-12
    )


def test_a_token_keeps_its_variance_whatever_it_shares():
    own, _, _ = conditioning.draw(DEFAULTS, 0)
    shared = [
        (conditioning.draw(replace(DEFAULTS, spread=spread), 0)[0] - spread**0.5 * own) / rest
        for spread, rest in ((0.75, 0.5), (0.36, 0.8))
    ]
    torch.testing.assert_close(shared[0], shared[1])


def made_up(quantity, axis, values):
    return pd.DataFrame(
        {"axis": axis, "size": size, "seed": seed, "quantity": quantity, "value": value}
        for (size, seed), value in values.items()
    )


def test_estimates_on_made_up_tables():
    gains = {(s, seed): 2.0**seed * g for seed in range(4) for s, g in ((1.0, 8.0), (2.0, 1.0))}
    found = conditioning.estimate(
        made_up("gain_by_length", "length", gains), "least_gain_by_length"
    )
    assert found.mean == pytest.approx(2**1.5)  # geometric, of the smaller gain of each seed
    sines = {(d, seed): d + seed for d in (32.0, 128.0) for seed in (0, 1)}
    found = conditioning.estimate(made_up("sine_by_angle", "angle", sines), "sine_by_angle")
    assert found.mean == 128.5
    steep = {(s, seed): s**-1 if s <= 0.01 else 1e9 for s in (0.001, 0.01, 0.1) for seed in (0, 1)}
    frame = made_up("without_by_logit_scale", "logit_scale", steep)
    assert conditioning.estimate(frame, "without_by_logit_scale").mean == pytest.approx(-1)


def test_angles_and_ranks_are_those_of_their_axes():
    chosen = Config("angle", 32.0, samples=1)
    assert (chosen.effective.dimension, chosen.effective.length) == (32, 4)
    rank = Config("rank", 0.05, samples=1, length=16, key_dimension=2)
    tokens, parameters, _ = conditioning.draw(rank.effective, 3)
    X = tokens[0].numpy()
    logits = 0.05 * X @ conditioning.draw(replace(rank, size=1.0).effective, 3)[1].Q.numpy()
    logits = logits @ parameters.K.numpy().T @ X.T / math.sqrt(2)
    A = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    values = np.linalg.svd(A, compute_uv=False)
    found = table(rank, 3)
    for index in (2, 4, 7):
        assert found[f"sigma_{index}_by_rank"] == pytest.approx(values[index - 1], rel=1e-7)


def test_a_summary_has_every_band(smoke_rows):
    summary = conditioning.summarise(smoke_rows)
    assert list(summary["quantity"]) == list(conditioning.BANDS)
    assert (summary["lower"] <= summary["estimate"]).all()
    kept = conditioning.within_range(smoke_rows)
    logits = kept[kept["axis"] == "logit_scale"]["size"]
    assert logits.max() <= conditioning.SMALL_LOGITS


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ValueError, match="axis must be"):
        conditioning.run(replace(DEFAULTS, axis="depth"), 0)
    with pytest.raises(ValueError, match="spread"):
        conditioning.run(Config("spread", 0.0), 0)
