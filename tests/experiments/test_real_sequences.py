"""Real sequences: predictors against loops, kernels against autograd, bands hit and missed."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from attention_dynamics.data import generator, real_task
from attention_dynamics.experiments import _real_models as models
from attention_dynamics.experiments import _real_predictors as predictors
from attention_dynamics.experiments import real_sequences
from attention_dynamics.experiments._recurrence_cells import paired_units
from attention_dynamics.models import recurrence, shallow
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.bounds import indrnn_gradient_bounds
from attention_dynamics.theory.kernel_flow import kernel_descent
from attention_dynamics.theory.kernels import empirical_kernel_total
from attention_dynamics.theory.limit_kernel import limit_kernel
from attention_dynamics.theory.trajectory import record_trajectory
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import Radii
from attention_dynamics.training.recurrent_descent import recurrent_descent

SMALL = real_sequences.PROFILES["smoke"].configs[0]
FREE = Radii(1000.0, 1000.0, 1000.0)


@pytest.fixture(scope="module")
def smoke():
    return sweep(real_sequences, "smoke")


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


def normal(*shape, random):
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def table_of(rows):
    return rows.set_index("quantity")["value"]


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(real_sequences, Experiment)
    assert set(real_sequences.PROFILES) == {"smoke", "book", "paper"}
    assert real_sequences.Config.__dataclass_params__.frozen
    for profile in real_sequences.PROFILES.values():
        contrast = {(c.sequences, c.ball) for c in profile.configs if c.contrast}
        assert contrast == {(s, b) for s in real_sequences.SEQUENCES for b in (True, False)}
        for name in real_sequences.NARROW:
            widths = [c.heads for c in profile.configs if c.sequences == name and c.ball]
            assert len(set(widths)) == len(widths) >= 3


def test_the_bands_are_those_fixed_before_the_run():
    assert {name: band.ends for name, band in real_sequences.BANDS.items()} == {
        "certificate_least": (1.0, None),
        "gradient_least": (1.0, None),
        "slope_digits": (-0.6, -0.4),
        "slope_sunspots": (-0.6, -0.4),
        "correlation": (0.9, None),
        "constant": (None, 0.0),
        "ridge_co2": (0.0, None),
        "ridge_sunspots": (0.0, None),
        "neighbour": (0.0, None),
        "ball": (0.0, None),
    }
    assert real_sequences.PROFILES["book"].seeds == tuple(range(6))


@pytest.mark.parametrize("rank", [9, 3])
def test_descent_coefficients_are_those_of_a_loop(random, rank):
    factor, y = normal(9, rank, random=random), normal(9, random=random)
    kernel = factor @ factor.mT
    eta = predictors.largest_step(kernel, 0.4)
    assert eta == pytest.approx(0.4 * 9 / float(torch.linalg.matrix_norm(kernel, ord=2)))
    alpha = torch.zeros_like(y)
    for _ in range(37):
        alpha = alpha - 2 * eta / 9 * (kernel @ alpha - y)
    found = predictors.descent_coefficients(kernel, y, 37, eta)
    torch.testing.assert_close(found, alpha)
    torch.testing.assert_close(kernel @ found, kernel_descent(kernel, y, 37, eta)[-1])


def test_a_kernel_of_zeros_has_no_step_and_a_bad_fraction_is_named():
    with pytest.raises(ValueError, match="positive eigenvalue"):
        predictors.largest_step(torch.zeros(3, 3), 0.5)
    with pytest.raises(ValueError, match="fraction"):
        predictors.largest_step(torch.eye(3), 0.0)


def test_leave_one_out_leaves_one_out(random):
    x, held, y = (normal(*s, random=random) for s in ((8, 3), (5, 3), (8,)))
    kernel = x @ x.mT + 0.1 * torch.eye(8)
    across = held @ x.mT
    errors = {}
    for share in predictors.PENALTIES:
        penalty = share * float(kernel.trace())
        left = []
        for i in range(8):
            rest = [j for j in range(8) if j != i]
            inner = kernel[rest][:, rest] + penalty * torch.eye(7)
            left.append(y[i] - kernel[i, rest] @ torch.linalg.solve(inner, y[rest]))
        errors[penalty] = float(torch.stack(left).square().sum())
    best = min(errors, key=errors.get)
    forecast, penalty = predictors.ridge_by_leave_one_out(kernel, across, y)
    assert penalty == pytest.approx(best)
    expected = across @ torch.linalg.solve(kernel + best * torch.eye(8), y)
    torch.testing.assert_close(forecast, expected)


def test_linear_ridge_finds_a_line_and_the_neighbour_is_the_nearest(random):
    x, held = normal(30, 2, random=random), normal(7, 2, random=random)
    y = x @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 3
    expected = held @ torch.tensor([2.0, -1.0], dtype=torch.float64) + 3
    torch.testing.assert_close(predictors.linear_ridge(x, held, y), expected, atol=1e-5, rtol=0)
    nearest = [int(((x - h) ** 2).sum(dim=1).argmin()) for h in held]
    torch.testing.assert_close(predictors.nearest_neighbour(x, held, y), y[nearest])


def test_block_bootstrap_joins_blocks_of_neighbours(random):
    values = normal(20, random=random).cumsum(dim=0)
    found = predictors.block_bootstrap(values, 6, draws=50)
    starts = np.random.default_rng(0).integers(0, 15, size=(50, 4))
    means = [np.mean([float(values[s + k]) for s in row for k in range(6)][:20]) for row in starts]
    assert found == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    single = predictors.block_bootstrap(values, 1)
    assert single[1] - single[0] < found[1] - found[0]  # dependence makes the honest one wider
    with pytest.raises(ValueError, match="block: expected at most the 20 values"):
        predictors.block_bootstrap(values, 21)


def test_the_kernel_of_recurrent_units_is_that_of_autograd(random):
    start = paired_units(4, 3, recurrent_init=1.5, generator=random).map(lambda x: x.double())
    tokens = normal(5, 6, 3, random=random)
    rows = []
    for sample in tokens:
        blocks = [block.clone().requires_grad_() for block in start]
        value = recurrence.forward(type(start)(*blocks), sample[None])[0]
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(value, blocks)]))
    jacobian = torch.stack(rows)
    torch.testing.assert_close(models.recurrent_kernel(start, tokens), jacobian @ jacobian.mT)
    eta = models.recurrent_step(start, tokens, 0.3)
    assert eta == pytest.approx(0.3 * 5 / float(torch.linalg.matrix_norm(jacobian, ord=2)) ** 2)


def small_model(task, heads=6):
    shared = models.prepared("sunspots", True, 16, 14, 8, 2)
    return ShallowTransformer.symmetric(
        heads, task.tokens.shape[-1], query=shared.query, seed=3, dtype=torch.float64
    )


def test_the_comparison_point_is_ridge_regression_in_the_tangent_model():
    task = real_task("sunspots", training=16, held=14)
    model = small_model(task)
    initial = model.snapshot()
    star = models.comparison_point(model, task, FREE, 0.7)
    _, slope = torch.func.jvp(
        lambda *phi: shallow.forward(
            Parameters(*phi), task.tokens, query=model.query, validate=False
        ),
        tuple(initial), tuple(star.minus(initial)),
    )  # fmt: skip
    kernel = empirical_kernel_total(initial, task.tokens, query=model.query)
    eye = torch.eye(16, dtype=torch.float64)
    torch.testing.assert_close(slope, kernel @ torch.linalg.solve(kernel + 0.7 * eye, task.targets))


def test_certified_descent_reports_bounds_over_what_they_bound():
    task = real_task("sunspots", training=16, held=14)
    model = small_model(task)
    descent = DescentConfig(12, step_size=0.5, radii=Radii(2.0, 2.0, 2.0))
    final, found = models.certified(model, task, ball=True, descent=descent)
    assert found["average_ratio"] >= 1
    assert found["averaged_ratio"] >= 1
    assert found["gradient_ratio"] >= 1
    first = found["gradient_bound"] / found["gradient_start"]
    assert first >= found["gradient_ratio"] * (1 - 1e-9)
    blocks = [block.clone().requires_grad_() for block in model.snapshot()]
    value = shallow.loss(Parameters(*blocks), task.tokens, task.targets, query=model.query)
    squared = sum(float(g.square().sum()) for g in torch.autograd.grad(value, blocks))
    assert found["gradient_start"] == pytest.approx(math.sqrt(squared))
    R = model.snapshot().U.norm(dim=1) + 2 / math.sqrt(6)
    C = 1 + 2 / math.sqrt(6)
    G2 = 1 + float((C * R.clamp_min(1)).square().mean())
    assert found["gradient_bound"] == pytest.approx(2 * math.sqrt(G2 * float(value.detach())))
    assert final.U.shape == (6, task.tokens.shape[-1])


@pytest.mark.parametrize("ball", [True, False])
def test_what_certified_reports_is_read_off_the_recorded_run(ball):
    task = real_task("sunspots", training=16, held=14, ball=ball)
    model, radii = small_model(task), Radii(0.5, 0.5, 0.5)
    descent = DescentConfig(12, step_size=0.5, radii=radii)
    _, found = models.certified(model, task, ball=ball, descent=descent)
    star = models.comparison_point(model, task, radii, 16 / (2 * 0.5 * 12))
    run = record_trajectory(model, task.tokens, task.targets, descent, star)
    bound, active = run.certificate(), run.history["active"]
    assert found["average_ratio"] == pytest.approx(bound.average / run.average_loss, rel=1e-9)
    assert found["averaged_ratio"] == pytest.approx(bound.total / run.averaged_loss, rel=1e-9)
    assert 0 < found["active_steps"] == sum(active > 0) / 12 < active.mean()
    # G of the chapter on the bounds, with b the longest token outside of the ball
    b = 1.0 if ball else 1.0001 * float(task.tokens.norm(dim=-1).max())
    R = model.snapshot().U.norm(dim=1) + 0.5 / math.sqrt(6)
    C = 1 + 0.5 / math.sqrt(6)
    G2 = 1 + float((C * (b * b * R).clamp_min(b)).square().mean())
    loss = float(task.targets.square().mean())
    assert found["gradient_bound"] == pytest.approx(2 * math.sqrt(G2 * loss))


def test_the_limit_kernels_of_both_sides_average_over_the_same_heads():
    task, query, kernel, held_kernel, error = real_sequences.shared(SMALL)
    both = torch.cat((task.tokens, task.held_tokens))
    whole = limit_kernel(
        both, query=query, generator=generator(0, "real", "kernel", "digits"), points=32,
        randomisations=2,
    )  # fmt: skip
    torch.testing.assert_close(kernel, whole.total[:16, :16])
    torch.testing.assert_close(held_kernel, whole.total[16:, :16])
    largest = whole.standard_error[:16, :16].max()
    assert error == pytest.approx(float(largest / kernel.diagonal().mean()))


def test_units_follow_the_rule_from_the_start_that_is_asked_for():
    task, _, kernel, *_ = real_sequences.shared(SMALL)
    for init in ("1.5", "0.5"):
        config = replace(SMALL, recurrent_init=init)
        found = real_sequences.fit(config, 4)
        start = paired_units(
            4, task.tokens.shape[-1], recurrent_init=float(init),
            generator=generator(4, "real_sequences", "units", 4),
        ).map(lambda block: block.double())  # fmt: skip
        assert set(start.u.abs().tolist()) == {float(init)}
        eta = predictors.largest_step(models.recurrent_kernel(start, task.tokens), 0.25)
        assert found.quantities["recurrent_step_size"] == pytest.approx(eta)
        run = recurrent_descent(start, task.tokens, task.targets, step_size=eta, steps=6)
        values = recurrence.forward(run.final, task.held_tokens)
        torch.testing.assert_close(found.held["recurrent"], values)
    alpha = predictors.descent_coefficients(kernel, task.targets, 6, found.quantities["step_size"])
    left = float((kernel @ alpha - task.targets).square().mean())
    assert found.quantities["training_kernel"] == pytest.approx(left)


def test_recurrent_gradients_against_their_bound():
    task = real_task("sunspots", training=16, held=14)
    start = paired_units(4, 7, recurrent_init=1.5, generator=generator(0, "t")).map(
        lambda block: block.double()
    )
    run = recurrent_descent(start, task.tokens, task.targets, step_size=0.01, steps=2)
    found = models.recurrent_gradients(run, task.tokens)
    bounds = indrnn_gradient_bounds(1.5, 12, token_bound=float(task.tokens.norm(dim=-1).max()))
    G = math.sqrt(1 + bounds.w**2 + bounds.u**2)
    loss = float(task.targets.square().mean())
    assert 10 ** found["recurrent_bound_log10"] == pytest.approx(2 * math.sqrt(loss) * G)
    assert 0 < found["recurrent_gradient_start"] < 10 ** found["recurrent_bound_log10"]


@pytest.mark.parametrize("name", real_sequences.SEQUENCES)
def test_rows_are_what_the_predictions_say(name):
    config = replace(SMALL, sequences=name)
    found, again = (real_sequences.run(config, 5) for _ in range(2))
    pd.testing.assert_frame_equal(found, again)
    assert tuple(found.columns) == real_sequences.COLUMNS
    values, fitted = table_of(found), real_sequences.fit(config, 5)
    task = real_sequences.shared(config).task
    y, f, k = (
        x.numpy()
        for x in (task.held_targets, fitted.held["transformer"], fitted.held["kernel_descent"])
    )
    assert values["error_transformer"] == pytest.approx(np.mean((f - y) ** 2))
    assert values["distance"] == pytest.approx(np.sqrt(np.mean((f - k) ** 2)))
    assert values["distance_relative"] == pytest.approx(values["distance"] / np.sqrt(np.mean(k**2)))
    assert values["correlation"] == pytest.approx(np.corrcoef(f, k)[0, 1])
    assert values["gap_transformer"] == pytest.approx(
        values["error_transformer"] - values["error_ridge"]
    )
    for who in ("transformer", "recurrent", "kernel_descent", "kernel_ridge"):
        gap = (fitted.held[who] - task.held_targets).square()
        gap -= (fitted.held["ridge"] - task.held_targets).square()
        low, high = predictors.block_bootstrap(gap, {"sunspots": 12, "co2": 53}.get(name, 1))
        assert values[f"gap_{who}_lower"] == pytest.approx(low)
        assert values[f"gap_{who}_upper"] == pytest.approx(high)
    root = np.sqrt([values["error_transformer"], values["error_kernel_descent"]])
    assert abs(root[0] - root[1]) <= values["distance"] + 1e-12
    assert ("wrong_transformer" in values) == (name == "digits")
    if name == "digits":
        assert values["wrong_transformer"] == pytest.approx(np.mean(np.sign(f) != y))
    else:
        assert values["error_seasonal"] == pytest.approx(
            np.mean((task.held_features[:, -(task.block - 1)].numpy() - y) ** 2)
        )


def test_certified_and_plain_descent_are_one_descent():
    with_all = table_of(real_sequences.run(SMALL, 1))
    plain = table_of(real_sequences.run(replace(SMALL, contrast=False), 1))
    for quantity in ("error_transformer", "distance", "training_transformer", "step_size"):
        assert plain[quantity] == pytest.approx(with_all[quantity], rel=1e-9)
    assert "error_recurrent" not in plain


def test_model_and_descent_of_a_cell_are_those_of_its_fit():
    config = replace(SMALL, contrast=False)
    task, query, kernel, *_ = real_sequences.shared(config)
    model, descent = real_sequences.model_of(config, 1), real_sequences.descent_of(config)
    assert model.U.shape == (SMALL.heads, task.tokens.shape[-1])
    assert not shallow.forward(model.snapshot(), task.tokens, query=query).any()
    assert descent.steps == SMALL.steps
    assert descent.eta == predictors.largest_step(kernel, 0.25)
    assert descent.radii == Radii(10.0, 10.0, 10.0)
    found = projected_gradient_descent(model, task.tokens, task.targets, descent).final
    for block, expected in zip(found, real_sequences.fit(config, 1).final, strict=True):
        torch.testing.assert_close(block, expected, rtol=1e-9, atol=1e-12)
    assert not torch.equal(real_sequences.model_of(config, 2).U, model.U)


def test_wide_networks_and_few_steps_come_near_the_kernel():
    near = replace(SMALL, contrast=False, steps=3, points=256, randomisations=4)
    distance = [
        np.mean(
            [table_of(real_sequences.run(replace(near, heads=m), s))["distance"] for s in range(4)]
        )
        for m in (16, 1024)
    ]
    assert 4 * distance[1] < distance[0]


def test_smoke_has_every_band_and_survives_parquet(smoke, tmp_path):
    summary = real_sequences.summarise(smoke)
    assert list(summary["quantity"]) == list(real_sequences.BANDS)
    assert np.isfinite(smoke["value"]).all()
    proved = summary.set_index("quantity")["inside"]
    assert proved["gradient_least"]
    smoke.to_parquet(tmp_path / "frame.parquet")
    back = pd.read_parquet(tmp_path / "frame.parquet")
    pd.testing.assert_frame_equal(real_sequences.summarise(back), summary)


def made_up(slope=-0.5, shift=0.0, ratio=1.2):
    """Rows by formula: what the bands predict with the defaults."""
    rows = []
    for config in real_sequences.PROFILES["book"].configs:
        for seed in range(3):
            eps = 0.01 * (seed - 1)
            task = {"digits": 0.1, "co2": 0.2, "sunspots": 0.3}[config.sequences]
            values = {
                "distance": math.exp(eps) * config.heads**slope,
                "correlation": 0.95 + eps + shift / 10,
            }
            if config.contrast:
                values |= {
                    "average_ratio": ratio, "averaged_ratio": ratio + seed, "gradient_ratio": 5.0,
                    "error_transformer": 0.5 + task - shift + eps, "error_constant": 1.0,
                    "gap_transformer": 0.1 + task + eps - 10 * shift,
                    "wrong_transformer": 0.3 + eps - shift, "wrong_neighbour": 0.1,
                    "training_transformer": (2.0 - shift if config.ball else 1.0) + eps,
                }  # fmt: skip
            rows += [
                {"sequences": config.sequences, "ball": config.ball, "heads": config.heads,
                 "contrast": config.contrast, "seed": seed, "quantity": q, "value": v}
                for q, v in values.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def test_summarise_reads_what_was_written():
    summary = real_sequences.summarise(made_up()).set_index("quantity")
    assert summary["inside"].all()
    expected = {
        "certificate_least": 1.2, "gradient_least": 5.0, "slope_digits": -0.5,
        "slope_sunspots": -0.5, "correlation": 0.95, "constant": -0.2, "ridge_co2": 0.3,
        "ridge_sunspots": 0.4, "neighbour": 0.2,
    }  # fmt: skip
    for quantity, value in expected.items():
        assert summary.loc[quantity, "estimate"] == pytest.approx(value)
    logs = [math.log10((2 + e) / (1 + e)) for e in (-0.01, 0, 0.01)]
    assert summary.loc["ball", "estimate"] == pytest.approx(np.mean(logs))
    assert summary.loc["certificate_least", "upper"] == pytest.approx(3.2)


def test_every_band_can_be_missed():
    missed = real_sequences.summarise(made_up(slope=-0.8, shift=1.5, ratio=0.9))
    inside = missed.set_index("quantity")["inside"]
    hit = {"gradient_least", "correlation", "constant"}
    assert set(inside[inside].index) == hit
    other = made_up(shift=-1.0)
    other.loc[other["quantity"] == "gradient_ratio", "value"] = 0.99
    inside = real_sequences.summarise(other).set_index("quantity")["inside"]
    assert not inside[sorted(hit)].any()


def test_an_unknown_quantity_is_refused():
    with pytest.raises(ValueError, match="quantity must be one of certificate_least"):
        real_sequences.estimate(made_up(), "speed")
