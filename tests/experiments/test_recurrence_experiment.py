"""The recurrent contrast: cells against autograd, baselines against NumPy, bands hit and missed."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.data import autoregressive_task, generator
from attention_dynamics.experiments import _recurrence_cells as cells
from attention_dynamics.experiments import recurrence
from attention_dynamics.experiments._recurrence_saturation import log_slope
from attention_dynamics.models import recurrence as units_model
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.running import Experiment, Store, sweep
from attention_dynamics.running.store import read_results

SMALL = recurrence.PROFILES["smoke"].configs[0]
UNITS = replace(SMALL, model="recurrent", recurrent_init="1.5")
BASELINES = ("constant", "naive", "oracle", "ridge")


@pytest.fixture(scope="module")
def smoke():
    return sweep(recurrence, "smoke")


def table_of(rows):
    return rows.set_index("quantity")["value"]


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(recurrence, Experiment)
    assert recurrence.NAME == "recurrence"
    assert set(recurrence.PROFILES) == {"smoke", "book", "paper", "variants"}
    assert recurrence.Config.__dataclass_params__.frozen


def test_the_paper_profile_has_the_papers_sizes():
    profile = recurrence.PROFILES["paper"]
    assert profile.seeds == tuple(range(20))
    assert [(c.lag, c.model, c.recurrent_init) for c in profile.configs] == [
        (lag, *model)
        for lag in (4, 16, 72, 96)
        for model in (("transformer", "none"), ("recurrent", "1.5"))
    ]
    expected = {
        "split": "time", "token_bound": 0.0, "units": 64, "samples": 5000,
        "validation_fraction": 0.2, "coefficient": 0.9, "innovation_variance": 0.1,
        "position_pairs": 8, "base_period": 32.0, "steps": 5000, "step_size": 0.05,
    }  # fmt: skip
    for config in profile.configs:
        assert {name: getattr(config, name) for name in expected} == expected


def test_the_other_profiles_hold_the_same_comparisons():
    variants, book = (recurrence.PROFILES[name] for name in ("variants", "book"))
    assert variants.seeds == book.seeds == tuple(range(5))
    assert set(recurrence.PROFILES["paper"].configs) < set(variants.configs)
    sized = {replace(c, units=64, samples=5000, steps=5000) for c in book.configs}
    assert sized < set(variants.configs)
    rest = set(variants.configs) - set(recurrence.PROFILES["paper"].configs)
    assert {c.recurrent_init for c in rest if c.model == "recurrent"} == set(recurrence.INITS)
    assert {c.split for c in rest} == {"time", "random"}
    assert {c.token_bound for c in rest} == {0.0, 5.0}


def test_the_bands_are_those_fixed_before_the_run():
    assert {name: band.ends for name, band in recurrence.BANDS.items()} == {
        "short_lag": (0.0, None),
        "long_lag_72": (None, 0.0),
        "long_lag_96": (None, 0.0),
        "long_lag_72_normal": (None, 0.0),
        "long_lag_96_normal": (None, 0.0),
        "gradient_growth": (None, 0.1),
        "recurrent_rate": (-0.05, 0.05),
        "saturation": (None, pytest.approx(-1.0798, abs=1e-4)),
        "leak": (0.0, None),
        "ball": (0.0, None),
    }
    assert recurrence.LEAK_RIDGE.ends == (0.0, None)
    assert recurrence.LEAK_SEEDS == tuple(range(200))


@pytest.mark.parametrize("config", [SMALL, UNITS])
def test_a_cell_is_a_pure_function_of_config_and_seed(config):
    first = recurrence.run(config, 5)
    pd.testing.assert_frame_equal(recurrence.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == recurrence.COLUMNS
    assert first["quantity"].is_unique
    other = table_of(recurrence.run(config, 6))
    moved = ["validation_minimum", "gradient_start", *BASELINES]
    assert (other[moved] != table_of(first)[moved]).all()


def test_every_cell_of_a_seed_and_lag_sees_the_same_series(smoke):
    rows = smoke[smoke["quantity"].isin(BASELINES)]
    counts = rows.groupby(["lag", "split", "seed", "quantity"])["value"].nunique()
    assert (counts == 1).all()
    across = rows[rows["split"] == "time"].groupby(["lag", "quantity"])["value"].nunique()
    assert (across == 3).all()


def test_what_is_known_without_measuring_holds(smoke):
    keys = ["lag", "model", "recurrent_init", "split", "token_bound", "seed"]
    table = smoke.pivot(index=keys, columns="quantity", values="value")
    assert (table["validation_minimum"] <= table["validation_final"]).all()
    assert (table["gradient_mean"] <= table["gradient_max"]).all()
    np.testing.assert_allclose(table["spike"], table["gradient_max"] / table["gradient_mean"])
    flat = table.reset_index()
    time, dealt = (flat[flat["split"] == s]["targets_seen"] for s in ("time", "random"))
    assert (time == 0).all()
    assert (dealt > 0.5).all()
    inside = flat[flat["token_bound"] > 0]
    assert (inside["token_norm"] <= 1).all()
    assert (flat[flat["token_bound"] == 0]["token_norm"] > math.sqrt(8)).all()
    assert flat["diverged"].isna().equals(flat["model"] == "transformer")


def autograd_norm(f, parameters, task):
    blocks = [block.clone().double().requires_grad_() for block in parameters]
    loss = (f(*blocks, task.tokens.double()) - task.targets.double()).square().mean()
    gradients = torch.autograd.grad(loss, blocks)
    return math.sqrt(sum(g.square().sum().item() for g in gradients)), loss.item()


def attention(c, U, W, X):
    weights = torch.softmax(torch.einsum("ntd,mde,ne->nmt", X, W, X[:, -1]), dim=-1)
    pooled = torch.einsum("nmt,ntd->nmd", weights, X)
    return (torch.tanh((pooled * U).sum(-1)) * c).sum(-1) / len(c) ** 0.5


def recurrent(w, u, c, X):
    h = torch.zeros(len(X), len(u), dtype=X.dtype)
    for t in range(X.shape[1]):
        h = torch.tanh(X[:, t] @ w.T + u * h)
    return h @ c / len(u) ** 0.5


@pytest.mark.parametrize("config", [SMALL, UNITS, replace(UNITS, recurrent_init="normal")])
def test_the_first_gradient_is_that_of_autograd_and_the_start_is_zero(config):
    task = recurrence.task_of(config, 3)
    stream = generator(3, "recurrence", config.model)
    if config.model == "transformer":
        f, start = attention, symmetric_initialisation(4, 17, generator=stream)
    else:
        init = config.recurrent_init
        init = init if init == "normal" else float(init)
        f = recurrent
        start = recurrence.paired_units(4, 17, recurrent_init=init, generator=stream)
    norm, loss = autograd_norm(f, start, task)
    found = table_of(recurrence.run(config, 3))
    assert found["gradient_start"] == pytest.approx(norm, rel=1e-4)
    assert loss == pytest.approx(1.0)  # f = 0, and targets have mean square 1 on training windows


def test_units_are_paired_and_share_what_the_initial_weights_do_not_say():
    starts = {
        init: recurrence.paired_units(8, 3, recurrent_init=init, generator=generator(0, "u"))
        for init in ("normal", 1.5, 0.5)
    }
    for init, (w, u, c) in starts.items():
        assert torch.equal(w[:4], w[4:])
        assert torch.equal(u[:4], u[4:])
        assert torch.equal(c[:4], -c[4:])
        assert torch.equal(w, starts["normal"].w)
        assert torch.equal(c, starts["normal"].c)
        if init != "normal":
            assert torch.equal(u.abs(), torch.full((8,), float(init)))
        values = units_model.forward(RecurrentParameters(w, u, c), torch.randn(5, 6, 3))
        assert values.abs().max() < 1e-6
    with pytest.raises(ValueError, match="units: must be even to be paired, got 5; take 6"):
        recurrence.paired_units(5, 3, recurrent_init=1.5, generator=generator(0))


def test_norms_of_a_hand_made_history():
    history = pd.DataFrame(
        {"step": [0, 1, 2], "loss": [3.0, 2.0, 1.5], "validation_loss": [2.0, 1.0, 4.0],
         "gradient_w": [3.0, 0.0, 6.0], "gradient_u": [4.0, 0.0, 8.0],
         "gradient_c": [0.0, 1.0, 0.0]}
    )  # fmt: skip
    assert cells.measures(history) == pytest.approx(
        {"validation_minimum": 1.0, "validation_final": 4.0, "training_final": 1.5,
         "best_step": 1.0, "gradient_start": 5.0, "gradient_mean": 16 / 3, "gradient_max": 10.0,
         "spike": 30 / 16}
    )  # fmt: skip


@pytest.mark.parametrize("split", ["time", "random"])
def test_baselines_are_those_of_numpy(split):
    task = autoregressive_task(3, 60, seed=1, split=split, dtype=torch.float64, length=5)
    found = recurrence.baseline_errors(task, 3, 0.9, penalty=2.5)
    y, held = task.targets.numpy(), task.held_targets.numpy()
    lagged = task.held_values[:, 2].numpy()
    X = (task.values.numpy() - task.mean) / task.deviation
    Z = (task.held_values.numpy() - task.mean) / task.deviation
    # ridge with a free intercept, as an augmented least-squares problem
    rows = np.vstack([np.c_[X, np.ones(len(X))], np.c_[np.sqrt(2.5) * np.eye(5), np.zeros(5)]])
    weights = np.linalg.lstsq(rows, np.r_[y, np.zeros(5)], rcond=None)[0]
    assert found == pytest.approx(
        {
            "constant": np.mean(held**2),
            "naive": np.mean(((lagged - task.mean) / task.deviation - held) ** 2),
            "oracle": np.mean(((0.9 * lagged - task.mean) / task.deviation - held) ** 2),
            "ridge": np.mean((Z @ weights[:5] + weights[5] - held) ** 2),
        },
        rel=1e-9,
    )


def test_the_oracle_reaches_the_floor_and_the_naive_forecast_nearly():
    tasks = [autoregressive_task(2, 4000, seed=s, split="time") for s in range(4)]
    rows = [pd.Series(recurrence.baseline_errors(t, 2, 0.9)) * t.deviation**2 for t in tasks]
    errors = pd.DataFrame(rows).mean()  # in units of the series, whose innovations have 0.1
    assert errors["oracle"] == pytest.approx(0.1, abs=5 * 0.1 * math.sqrt(2 / 3200))
    assert errors["naive"] / errors["oracle"] == pytest.approx(0.2 / 0.19, abs=0.02)
    assert errors["ridge"] / errors["oracle"] == pytest.approx(1.0, abs=0.02)


def test_the_mean_log_factor_is_that_of_the_products_of_back_propagation():
    stream = generator(0, "factor")
    w, c = torch.randn(3, 2, generator=stream).double(), torch.ones(3).double()
    u = torch.tensor([1.5, -0.7, 0.2]).double()
    X = torch.randn(4, 6, 2, generator=stream).double()
    found = recurrence.mean_log_factor(RecurrentParameters(w, u, c), X)
    for i in range(3):
        logs = []
        for x in X:
            h = torch.zeros(()).double()
            for token in x:
                z = (w[i] @ token + u[i] * h).requires_grad_()
                (slope,) = torch.autograd.grad(torch.tanh(z), z)
                logs.append((u[i] * slope).abs().log().item())
                h = torch.tanh(z).detach()
        assert found[i].item() == pytest.approx(np.mean(logs), rel=1e-12)


def test_the_logarithm_of_the_slope_does_not_underflow():
    z = torch.tensor([0.0, 0.3, -2.0, 400.0], dtype=torch.float64)
    near = [math.log(1 - math.tanh(x) ** 2) for x in (0.3, 2.0)]
    expected = torch.tensor([0.0, *near, 2 * math.log(2) - 800], dtype=torch.float64)
    torch.testing.assert_close(log_slope(z), expected, rtol=1e-12, atol=0)


@given(st.floats(0.1, 3.0), st.floats(0.1, 6.0), st.sampled_from([1, -1]))
def test_the_saturation_bound_is_the_worst_state_for_every_weight(size, norm, sign):
    g = np.linspace(-12, 12, 200_001)
    density = np.exp(-0.5 * g**2) / math.sqrt(2 * math.pi) * (g[1] - g[0])
    worst = np.maximum(np.abs(norm * g) - size, 0)  # |r g + u h| at the best h in [-1, 1]
    expected = math.log(size) - 2 * density @ (worst + np.log1p(np.exp(-2 * worst)) - math.log(2))
    found = recurrence.saturation_bound(sign * size, norm)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found <= recurrence.saturation_bound(size, 0.9 * norm) <= math.log(size) + 1e-12


def test_no_unit_and_no_series_passes_the_saturation_bound():
    for lag in (4, 72):
        task = autoregressive_task(lag, 40, seed=0, split="time")
        start = recurrence.paired_units(
            4000, 17, recurrent_init=1.5, generator=generator(0, "many")
        )
        found = recurrence.mean_log_factor(start, task.tokens[:4])
        error = found.std() / math.sqrt(2000)
        assert found.mean() + 5 * error < recurrence.SATURATION


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0.0, 1.0), r"abs\(u\): .* > 0"), ((1.0, -1.0), "norm: "), ((1.0, math.inf), "norm: ")],
)
def test_the_saturation_bound_refuses_what_it_does_not_cover(arguments, message):
    with pytest.raises(ValueError, match=message):
        recurrence.saturation_bound(*arguments)


def test_tokens_of_length_zero_leave_the_recurrent_weight_alone():
    assert recurrence.saturation_bound(-1.5, 0.0) == pytest.approx(math.log(1.5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recurrent_init": "1.5"}, "recurrent_init: got '1.5' with model = 'transformer'"),
        ({"model": "recurrent"}, "recurrent_init: got 'none' with model = 'recurrent'"),
        ({"model": "recurrent", "recurrent_init": "uniform"}, "recurrent_init: expected 'normal'"),
        ({"model": "recurrent", "recurrent_init": "-1"}, "recurrent_init: expected 'normal'"),
        ({"model": "gru", "recurrent_init": "1.5"}, "model: expected one of 'transformer'"),
        ({"units": 5}, "m must be even, got m = 5"),
        ({"split": "shuffled"}, "split: expected one of 'time', 'random'"),
        ({"token_bound": 2.0}, "tokens: expected norms <= 2"),
        ({"lag": 0}, "lag: expected an integer >= 1"),
        ({"coefficient": 1.0}, "coefficient: "),
        ({"steps": 0}, "steps: "),
    ],
)
def test_a_field_out_of_its_range_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        recurrence.run(replace(SMALL, **changes), 0)


def test_recurrent_units_that_diverge_are_counted_and_not_hidden():
    found = table_of(recurrence.run(replace(UNITS, step_size=1e25), 0))
    assert found["diverged"] == 1.0
    assert np.isfinite(found).all()
    assert table_of(recurrence.run(UNITS, 0))["diverged"] == 0.0


def synthetic(shift=0.0, growth=0.0, rate=0.0, factor=-2.0, seeds=4):
    """A table in which every difference of a band is ``shift``, up to its sign, and noise."""
    random = np.random.default_rng(0)
    rows = []
    for config in recurrence.PROFILES["variants"].configs:
        for seed in range(seeds):
            attends, T = config.model == "transformer", config.lag + 1
            error = 0.5 + 0.01 * random.standard_normal() + 0.05 * seed
            if attends:
                error += shift if config.lag == 4 else -shift
            if config.split == "random":
                error -= shift
            if config.token_bound:
                error += shift
            if config.recurrent_init in ("1.0", "0.5"):
                error += 100.0  # no band looks at them
            quantities = {"validation_minimum": error}
            quantities["gradient_max"] = (1 + seed) * T**growth
            quantities["gradient_mean"] = (1 + seed) * math.exp(rate * T)
            if not attends:
                other = config.recurrent_init != "1.5" or config.token_bound > 0
                quantities["log_factor_start"] = (99.0 if other else factor) + 0.01 * seed
            rows += [
                {**vars(config), "experiment": "recurrence", "seed": seed, "quantity": q,
                 "value": v}
                for q, v in quantities.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)[list(recurrence.COLUMNS)]


def verdicts(frame):
    return recurrence.summarise(frame).set_index("quantity")


def test_a_table_as_theory_says_is_inside_every_band():
    summary = verdicts(synthetic(shift=0.2, growth=-0.1, rate=0.01))
    assert set(summary.index) == set(recurrence.BANDS)
    assert summary["inside"].all()
    assert (summary["seeds"] == 4).all()
    expected = {
        "short_lag": 0.2, "long_lag_72": -0.2, "long_lag_96": -0.2, "long_lag_72_normal": -0.2,
        "long_lag_96_normal": -0.2, "gradient_growth": -0.1, "recurrent_rate": 0.01,
        "saturation": -1.985, "leak": 0.2, "ball": 0.2,
    }  # fmt: skip
    for quantity, value in expected.items():
        assert summary.loc[quantity, "estimate"] == pytest.approx(value, abs=0.02), quantity
    exact = ["gradient_growth", "recurrent_rate", "saturation"]  # these have no noise
    for quantity in exact:
        assert summary.loc[quantity, "estimate"] == pytest.approx(expected[quantity], abs=1e-9)


def test_a_table_that_contradicts_theory_is_outside_of_every_band():
    summary = verdicts(synthetic(shift=-0.2, growth=0.3, rate=0.08, factor=-0.5))
    assert not summary["inside"].any()


def test_no_effect_is_inside_of_no_band_of_a_sign():
    summary = verdicts(synthetic())
    signs = ["short_lag", "leak", "ball", *(f"long_lag_{x}" for x in ("72", "96_normal"))]
    assert not summary.loc[signs, "inside"].any()


def test_a_profile_without_variants_has_the_rows_it_can_have():
    frame = synthetic(shift=0.2)
    usual = frame["recurrent_init"].isin(["none", "1.5"]) & (frame["split"] == "time")
    paper = frame[usual & (frame["token_bound"] == 0)]
    summary = verdicts(paper)
    assert list(summary.index) == [
        "short_lag", "long_lag_72", "long_lag_96", "gradient_growth", "recurrent_rate",
        "saturation",
    ]  # fmt: skip
    both = pd.concat([paper, frame], ignore_index=True)
    pd.testing.assert_frame_equal(recurrence.summarise(both), recurrence.summarise(frame))
    assert recurrence.estimate(frame[frame["model"] == "recurrent"], "gradient_growth") is None
    assert recurrence.estimate(frame[frame["model"] == "transformer"], "saturation") is None


def test_a_table_read_back_gives_the_same_summary(smoke, tmp_path):
    sweep(recurrence, "smoke", directory=tmp_path)
    frame, _ = read_results(tmp_path)
    pd.testing.assert_frame_equal(recurrence.summarise(frame), recurrence.summarise(smoke))
    assert set(recurrence.summarise(smoke)["quantity"]) == set(recurrence.BANDS)
    assert Store(tmp_path, recurrence.COLUMNS).columns == recurrence.COLUMNS
