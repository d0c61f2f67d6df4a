"""Descent without projection: shape, bands, and every quantity against a formula of its own."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments import _without_projection_bounds as bounds
from attention_dynamics.experiments import _without_projection_descent as descent
from attention_dynamics.experiments import _without_projection_training as training
from attention_dynamics.experiments import certificates, without_projection
from attention_dynamics.experiments._teacher_problem import teacher_problem
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii

DOUBLE = {"dtype": torch.float64}
CONFIGS = {c.study: c for c in reversed(without_projection.PROFILES["smoke"].configs)}


@pytest.fixture(scope="module")
def smoke():
    return sweep(without_projection, "smoke")


def problem(seed=0, m=6, n=7, T=4, d=3):
    X = unit_ball_tokens(n, T, d, generator=generator(seed, "X"), law="iid", **DOUBLE)
    y = torch.randn(n, generator=generator(seed, "y"), **DOUBLE)
    start = symmetric_initialisation(m, d, generator=generator(seed, "phi"), **DOUBLE)
    q = query_vector(d, generator=generator(seed, "q"), **DOUBLE)
    return ShallowTransformer(start, query=q), X, y


def by_autograd(model, X, y, phi):
    """Loss and gradient from the model's own formula, through autograd."""
    leaves = Parameters(*(block.clone().requires_grad_() for block in phi))
    loss = (shallow.forward(leaves, X, query=model.query) - y).square().mean()
    return float(loss.detach()), Parameters(*torch.autograd.grad(loss, leaves))


def value(rows, quantity):
    return rows.loc[rows["quantity"] == quantity, "value"].item()


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(without_projection, Experiment)
    assert set(without_projection.PROFILES) == {"smoke", "book", "paper"}
    assert without_projection.Config.__dataclass_params__.frozen
    book = without_projection.PROFILES["book"]
    assert {c.study for c in book.configs} == {
        "radius", "decay", "noise", "certificate", "batch", "covered"
    }  # fmt: skip
    assert {(c.heads, c.samples, c.steps) for c in book.configs if c.study == "radius"} == {
        (64, 200, 300)
    }


def test_bands_sizes_and_seeds_are_those_fixed_before_the_run():
    above, below, same = (1.0, None), (None, 1.0), (1 / 1.22, 1.22)
    assert {name: band.ends for name, band in without_projection.BANDS.items()} == {
        "exit_difference": (None, 0.0),
        "plain_within_norm": below,
        "binding_loss": above,
        "over_ball_farthest": above,
        "over_ball_norm": below,
        "stopped_over_decay": above,
        "plain_over_ball": above,
        "smallest_over_ball": above,
        "plain_over_stopped": above,
        "ball_over_stopped": same,
        "stopped_over_decay_noisy": same,
        "covered_least": above,
        "aligned_tightness": (0.9, 1.0),
        "plain_ratio": above,
        "stopped_ratio": above,
        "stochastic_ratio": above,
        "decay_ratio": above,
        "ball_ratio": above,
        "batch_noise": (-1.1, -0.9),
        "batch_output": (-1.15, -0.85),
        "batch_final": (None, 0.0),
        "batch_samples": (0.0, None),
        "batch_certificate": above,
    }
    profiles = without_projection.PROFILES
    assert profiles["book"].seeds == tuple(range(6))
    assert profiles["paper"].seeds == tuple(range(10))
    assert not set(profiles["smoke"].seeds) & set(profiles["book"].seeds)
    assert {(c.samples, c.steps) for c in profiles["paper"].configs if c.study != "noise"} == {
        (5000, 4000)
    }


@pytest.mark.parametrize("study", CONFIGS)
def test_a_cell_is_a_pure_function_of_config_and_seed(study):
    config = CONFIGS[study]
    first = without_projection.run(config, 5)
    training._shared.cache_clear()
    pd.testing.assert_frame_equal(without_projection.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == without_projection.COLUMNS
    assert first["quantity"].is_unique
    other = without_projection.run(config, 6)
    assert not other["value"].equals(first["value"])


def test_summaries_survive_parquet_and_hold_every_band(smoke, tmp_path):
    smoke.to_parquet(tmp_path / "table.parquet")
    again = without_projection.summarise(pd.read_parquet(tmp_path / "table.parquet"))
    assert list(again["quantity"]) == list(without_projection.BANDS)
    pd.testing.assert_frame_equal(again, without_projection.summarise(smoke))
    proved = ["covered_least", "exit_difference", "aligned_tightness", "plain_ratio",
              "stopped_ratio", "stochastic_ratio", "decay_ratio", "ball_ratio"]  # fmt: skip
    assert again.set_index("quantity").loc[proved, "inside"].all()
    part = without_projection.summarise(smoke[smoke["study"].isin(["radius", "noise"])])
    assert len(part) == 8


def test_wrong_words_are_refused(smoke):
    with pytest.raises(ValueError, match="study: expected one of"):
        without_projection.run(without_projection.Config("width"), 0)
    with pytest.raises(ValueError, match="case: expected 'transported'"):
        without_projection.run(without_projection.Config("covered", case="far"), 0)
    with pytest.raises(ValueError, match="study 'batch' is not in the frame; it holds radius"):
        without_projection.table(smoke[smoke["study"] == "radius"], "batch")


@pytest.mark.parametrize("radii", [Radii(None, None, None), Radii(0.2, 0.1, 0.05)])
def test_the_loop_takes_the_steps_of_projected_gradient_descent(radii):
    model, X, y = problem()
    start = model.snapshot()
    path = descent.descend(Objective.of(model, X, y), start, 0.2, 25, radii=radii)
    known = projected_gradient_descent(model, X, y, DescentConfig(25, step_size=0.2, radii=radii))
    assert all(map(torch.equal, path.final, known.final))
    history = known.history
    np.testing.assert_allclose(path.loss, history["loss"], rtol=1e-12)
    blocks = [f"distance_{b}" for b in "cUW"]
    np.testing.assert_allclose(path.farthest, history[blocks], rtol=1e-12)
    active = history[[f"active_{b}" for b in "cUW"]].sum(axis=1)
    np.testing.assert_array_equal(path.active, active)
    assert (active.sum() > 0) == (radii.c is not None)
    gap = path.final.minus(start)
    assert path.norm[-1] == pytest.approx(math.sqrt(float(gap.inner(gap))))


def test_decay_pulls_toward_the_start():
    model, X, y = problem(1)
    start, eta, decay = model.snapshot(), 0.1, 2.0
    ball = ProjectionSet(start, Radii(0.3, 0.3, 0.3))
    held = Objective.of(model, X[:3], -y[:3])
    path = descent.descend(
        Objective.of(model, X, y), start, eta, 12, radii=ball.radii, decay=decay,
        held=(held,), look=5,
    )  # fmt: skip
    phi, losses = start, []
    for _ in range(12):
        loss, gradient = by_autograd(model, X, y, phi)
        losses.append(loss)
        phi = ball.project(
            phi.minus(gradient.scaled(eta)).minus(phi.minus(start).scaled(eta * decay))
        )
    np.testing.assert_allclose(path.loss[:-1], losses, rtol=1e-12)
    for block, expected in zip(path.final, phi, strict=True):
        torch.testing.assert_close(block, expected, rtol=1e-12, atol=1e-12)
    assert path.looks.tolist() == [0, 5, 10, 12]
    expected = (shallow.forward(phi, X[:3], query=model.query) + y[:3]).square().mean()
    assert path.held[-1, 0] == pytest.approx(float(expected))
    with pytest.raises(ValueError, match="decay: expected step_size"):
        descent.descend(Objective.of(model, X, y), start, eta, 3, decay=10.0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.floats(0.02, 0.9))
def test_before_its_first_action_a_projected_run_is_a_plain_one(seed, share):
    model, X, y = problem(seed)
    start, objective = model.snapshot(), Objective.of(model, X, y)
    plain = descent.descend(objective, start, 0.2, 30)
    radius = share * plain.distance[-1]
    run = descent.descend(objective, start, 0.2, 30, radii=descent.equal_radii(radius))
    k = plain.first_exit(radius)
    assert run.first_action == k <= 30
    np.testing.assert_array_equal(run.loss[:k], plain.loss[:k])
    assert (run.farthest <= radius * (1 + 1e-12)).all()
    wide = descent.equal_radii(1.0001 * plain.distance[-1])
    unheld = descent.descend(objective, start, 0.2, 30, radii=wide)
    assert unheld.first_action == plain.first_exit(1.0001 * plain.distance[-1]) == 31
    assert all(map(torch.equal, unheld.final, plain.final))


def test_a_descent_that_diverges_says_so():
    model, X, y = problem()
    objective = Objective.of(model.float(), X.float(), 1e15 * y.float())
    with pytest.raises(FloatingPointError, match="reduce it"):
        descent.descend(objective, model.snapshot(), 1e30, 5)


def recorded(seed=3, descent_name="ProjGD", **changes):
    kind = certificates.Config("fixed", "tanh", "noisy", descent_name, **changes)
    instance = certificates.draw(kind, seed)
    instance = instance._replace(radii=descent.FREE)
    return instance, certificates.trajectory(instance, kind, seed)


@pytest.mark.parametrize("name", ["ProjGD", "ProjSGD"])
def test_a_prefix_has_the_certificate_of_the_shorter_run(name):
    instance, run = recorded(descent_name=name)
    prefixes = descent.prefix_certificates(run)
    assert len(prefixes) == run.steps
    assert prefixes[-1] == pytest.approx((run.average_loss, run.certificate().average, run.epsilon))
    kind = certificates.Config("fixed", "tanh", "noisy", name)
    for steps in (1, 4):
        shorter = certificates.trajectory(instance._replace(steps=steps), kind, 3)
        expected = (shorter.average_loss, shorter.certificate().average, shorter.epsilon)
        assert prefixes[steps - 1] == pytest.approx(expected)


def test_without_decay_it_is_the_trajectory_certificate():
    instance, run = recorded()
    found = descent.decayed_certificate(
        instance.model, instance.tokens, instance.targets, instance.comparison,
        step_size=instance.step_size, steps=instance.steps, decay=0.0,
    )  # fmt: skip
    assert found == pytest.approx(
        (run.average_loss, run.certificate().average, run.epsilon), rel=1e-9
    )


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 400), st.floats(0.01, 0.8), st.booleans())
def test_the_certificate_of_a_decayed_run_is_a_bound(seed, t, near):
    instance, _ = recorded(seed)
    model, eta, tau = instance.model, instance.step_size, instance.steps
    start = model.snapshot()
    star = instance.comparison if near else start
    found = descent.decayed_certificate(
        model, instance.tokens, instance.targets, star, step_size=eta, steps=tau, decay=t / eta
    )
    # The same from whole trajectories: weights as powers, and the plain sum of the descent terms.
    phi, L, eps2, along = start, [], [], []
    for _ in range(tau):
        loss, g = by_autograd(model, instance.tokens, instance.targets, phi)
        f = shallow.forward(phi, instance.tokens, query=model.query)
        slopes = shallow.per_sample_gradients(phi, instance.tokens, query=model.query)
        gap = phi.minus(star)
        moved = sum(
            (block.flatten(1) @ part.flatten()) for block, part in zip(slopes, gap, strict=True)
        )
        L.append(loss)
        eps2.append(float((f - moved - instance.targets).square().mean()))
        along.append(float(g.inner(gap)))
        phi = phi.minus(g.plus(phi.minus(start).scaled(t / eta)).scaled(eta))
    w = (1 - t) ** np.arange(tau - 1, -1, -1)
    mean, epsilon = w @ L / w.sum(), math.sqrt(w @ eps2 / w.sum())
    # Without a projection the step is an equation: H is 2 eta times the weighted descent.
    head_start = 2 * (w @ along) / w.sum()
    x = (epsilon + math.sqrt(epsilon**2 + head_start)) / 2
    assert found.loss == pytest.approx(mean, rel=1e-9)
    assert found.epsilon == pytest.approx(epsilon)
    assert found.bound == pytest.approx(x**2, rel=1e-7)
    assert found.bound >= found.loss * (1 - 1e-9)


def test_a_certificate_needs_float64():
    instance, _ = recorded()
    with pytest.raises(TypeError, match="expected float64 parameters"):
        descent.decayed_certificate(
            instance.model.float(), instance.tokens, instance.targets, instance.comparison,
            step_size=0.1, steps=2, decay=0.0,
        )  # fmt: skip


def test_hindsight_is_the_best_of_the_tangent_model_over_times_and_decays():
    config = CONFIGS["noise"]
    shared = training._trained(config, 9, "cpu")
    start = shared.start.to(dtype=torch.float64)

    def slopes(data):
        leaves = Parameters(*(block.clone().requires_grad_() for block in start))
        f = shallow.forward(leaves, data.inputs.tokens.double(), query=data.inputs.query.double())
        rows = [torch.autograd.grad(value, leaves, retain_graph=True) for value in f]
        return torch.stack([torch.cat([block.flatten() for block in row]) for row in rows])

    seen, clean = shared.objective, shared.held[1]
    J, K_star, y = slopes(seen), slopes(clean), seen.targets.double()
    n, pull, H = len(J), 2 / len(J) * J.mT @ y, 2 / len(J) * J.mT @ J
    inverse = torch.linalg.pinv(H, hermitian=True)
    eye = torch.eye(len(H), **DOUBLE)
    times = np.geomspace(config.steps * config.step_size / 1000, 60 * 0.8, 200)

    def loss(move):
        return float((K_star @ move - clean.targets.double()).square().mean()) / shared.variance

    flow = [loss((eye - torch.linalg.matrix_exp(-H * t)) @ inverse @ pull) for t in times]
    ridge = [loss(torch.linalg.solve(H + eye / t, pull)) for t in times]
    assert n == 8
    found = without_projection.hindsight(config, 9)
    assert found == pytest.approx((min(flow), min(ridge)), rel=1e-6)
    assert min(flow) < min(flow[0], flow[-1])
    with pytest.raises(ValueError, match="tests: expected at least 1 clean sample, got 0"):
        without_projection.hindsight(CONFIGS["radius"], 9)


@given(st.lists(st.floats(0.1, 9), min_size=1, max_size=20), st.integers(1, 60))
def test_stopping_finds_the_first_minimum_that_stands_for_the_patience(losses, patience):
    looks = 10 * np.arange(len(losses))
    found = training.stopping(np.array(losses), looks, patience)
    for index, loss in enumerate(losses):
        before = losses[:index]
        later = [b for k, b in zip(looks, losses, strict=True)
                 if looks[index] < k <= looks[index] + patience]  # fmt: skip
        if all(loss < b for b in before) and all(b >= loss for b in later):
            assert found == index
            break
    else:
        raise AssertionError("some look has to stand")


@pytest.mark.parametrize("size", [1, 3])
def test_the_noise_of_a_batch_is_the_variance_over_its_size(size):
    slopes = torch.randn(5, 4, generator=generator(0, "slopes"), **DOUBLE)
    found = bounds.gradient_noise(slopes, size, 40000, generator(1, "draws"))
    expected = (slopes - slopes.mean(dim=0)).square().sum(dim=1).mean() / size
    assert found == pytest.approx(float(expected), rel=0.03)


def test_slopes_are_the_gradients_of_the_squared_residuals():
    instance, _ = recorded()
    slopes = bounds._slopes(instance)
    _, gradient = by_autograd(
        instance.model, instance.tokens, instance.targets, instance.model.snapshot()
    )
    expected = torch.cat([block.flatten() for block in gradient])
    torch.testing.assert_close(slopes.mean(dim=0), expected, rtol=1e-9, atol=1e-12)


def test_the_batch_study_averages_over_its_draws():
    config = replace(CONFIGS["batch"], strength=4.0, draws=3)
    rows = without_projection.run(config, 7)
    kind = certificates.Config(
        "fixed", "tanh", "noisy", "ProjSGD", drawn=False, heads=config.heads,
        samples=config.samples, length=config.length, dimension=config.dimension,
        anchors=config.anchors, steps=config.steps, batch_size=4,
    )  # fmt: skip
    instance = certificates.draw(kind, 7)
    runs = [certificates.trajectory(instance, kind, 7000 + draw) for draw in range(3)]
    values = [
        shallow.forward(run.final, instance.tokens, query=instance.model.query) for run in runs
    ]
    assert value(rows, "average_loss") == pytest.approx(np.mean([r.average_loss for r in runs]))
    same = [r.history["loss"].iloc[config.steps // 4] for r in runs]
    assert value(rows, "same_samples_loss") == pytest.approx(np.mean(same))
    ends = [float((v - instance.targets).square().mean()) for v in values]
    assert value(rows, "final_loss") == pytest.approx(np.mean(ends))
    spread = np.var([v.numpy() for v in values], axis=0, ddof=1).mean()
    assert value(rows, "output_variance") == pytest.approx(spread)
    table = pd.DataFrame([certificates._measured(instance, run) for run in runs])
    assert value(rows, "expected_bound") == pytest.approx(certificates.expected_bound(table))


def test_the_ball_of_equal_norm_has_that_norm(smoke):
    rows = without_projection.table(smoke, "decay")
    assert (rows["norm_mismatch"] < 0.05).all()
    assert (rows["norm_reached"] == 1).all()


def test_the_aligned_ball_is_left_as_fast_as_the_lemma_allows(smoke):
    rows = without_projection.table(smoke, "covered")
    aligned = rows[rows["case"] == "aligned"]
    assert (aligned["acted"] == 1).all()
    assert (aligned["slept"] >= aligned["covered"]).all()
    assert (aligned["covered"] >= 0.95 * aligned["slept"] - 1).all()
    for case in ("transported", "start"):
        assert (rows[rows["case"] == case]["slept"] >= rows[rows["case"] == case]["covered"]).all()


def synthetic(study, columns, strengths=(0.0,)):
    records = [
        {"study": study, "heads": 4, "case": "", "strength": s, "seed": seed, "quantity": name,
         "value": column(s) * (1 + 0.01 * seed)}
        for s in strengths for seed in range(4) for name, column in columns.items()
    ]  # fmt: skip
    return pd.DataFrame(records)


def test_estimates_hit_and_miss_their_bands():
    sizes = (1.0, 4.0, 16.0)
    columns = {
        "noise": lambda b: 1 / b, "output_variance": lambda b: b**-1.4,
        "final_loss": lambda b: b**-0.1, "same_samples_loss": lambda b: b**0.5,
        "expected_ratio": lambda b: 0.9 + 0.2 * b,
    }  # fmt: skip
    found = without_projection.summarise(synthetic("batch", columns, sizes)).set_index("quantity")
    assert found.loc["batch_noise", "estimate"] == pytest.approx(-1)
    assert found.loc["batch_output", "estimate"] == pytest.approx(-1.4)
    assert found["inside"].to_dict() == {
        "batch_noise": True, "batch_output": False, "batch_final": True, "batch_samples": True,
        "batch_certificate": True,
    }  # fmt: skip
    low = synthetic("batch", columns | {"expected_ratio": lambda b: 0.9}, sizes)
    assert not without_projection.BANDS["batch_certificate"].contains(
        without_projection.estimate(low, "batch_certificate")
    )
    ratios = {"over_ball_farthest": lambda s: 2 * s, "over_ball_norm": lambda s: 0.5,
              "stopped_over_decay": lambda s: 1.0}  # fmt: skip
    frame = synthetic("decay", ratios, (1.0, 4.0))
    assert without_projection.estimate(frame, "over_ball_farthest").mean == pytest.approx(
        4 * np.exp(np.log(1 + 0.01 * np.arange(4)).mean())
    )
    inside = without_projection.summarise(frame).set_index("quantity")["inside"]
    assert inside.to_dict() == {
        "over_ball_farthest": True, "over_ball_norm": True, "stopped_over_decay": False
    }  # fmt: skip


def test_worst_cases_are_what_is_reported():
    columns = {f"{name}_ratio_{query}": (lambda s, r=r: r)
               for name in ("plain", "stopped", "stochastic", "decay", "ball")
               for query, r in (("fixed", 1.5), ("last", 0.99))}  # fmt: skip
    found = without_projection.summarise(synthetic("certificate", columns))
    assert not found["inside"].any()
    assert found["estimate"].to_numpy() == pytest.approx(0.99)
    frame = synthetic("covered", {"covered": lambda s: 10.0, "slept": lambda s: 10.5})
    frame.loc[frame["seed"] == 2, "value"] = [0.0, 10.0]  # nothing covered: no ratio
    least = without_projection.estimate(frame, "covered_least")
    assert least.mean == least.lower == pytest.approx(1.05)


def test_patience_counts_the_look_at_its_end():
    losses, looks = np.array([3.0, 4.0, 2.0, 5.0, 1.0]), 10 * np.arange(5)
    assert training.stopping(losses, looks, 20) == 4
    assert training.stopping(losses, looks, 19) == 0
    assert training.stopping(losses[2:], looks[2:], 10) == 0


def ends(config, shared, **options):
    """Loss and norm at the end of a run, by the library's own descent where it has one."""
    run = descent.descend(shared.objective, shared.start, config.step_size, config.steps, **options)
    return run.loss[-1], run.norm[-1], run.farthest[-1].max()


def test_decay_is_compared_with_balls_and_the_stopped_run_of_its_own_distance():
    config = CONFIGS["decay"]
    rows, shared = without_projection.run(config, 9), training._trained(config, 9, "cpu")
    loss, norm, farthest = ends(config, shared, decay=config.strength)
    assert value(rows, "loss") == pytest.approx(loss / shared.variance)
    assert value(rows, "farthest") == pytest.approx(farthest)
    ball = ends(config, shared, radii=descent.equal_radii(farthest))[0]
    assert value(rows, "over_ball_farthest") == pytest.approx(loss / ball)
    low, high = 0.1 * farthest, farthest
    for _ in range(40):  # bisection for the ball of equal norm
        middle = (low + high) / 2
        same, reached, _ = ends(config, shared, radii=descent.equal_radii(middle))
        low, high = (middle, high) if reached < norm else (low, middle)
    assert reached == pytest.approx(norm, rel=1e-5)
    assert value(rows, "over_ball_norm") == pytest.approx(loss / same, rel=2e-3)
    k = int(np.flatnonzero(shared.plain.norm >= norm)[0])
    before, after = shared.plain.loss[k - 1], shared.plain.loss[k]
    assert after <= value(rows, "stopped_over_decay") * loss <= before


def test_a_radius_is_measured_in_units_of_the_plain_distance():
    config = replace(CONFIGS["radius"], strength=0.3)
    rows, shared = without_projection.run(config, 9), training._trained(config, 9, "cpu")
    plain = projected_gradient_descent(
        *model_and_data(shared), DescentConfig(config.steps, step_size=config.step_size)
    )
    reach = float(plain.history[[f"distance_{b}" for b in "cUW"]].to_numpy().max())
    assert value(rows, "radius") == pytest.approx(0.3 * reach, rel=1e-5)
    radii = descent.equal_radii(value(rows, "radius"))
    ball = projected_gradient_descent(
        *model_and_data(shared),
        DescentConfig(config.steps, step_size=config.step_size, radii=radii),
    ).history
    ratio = ball["loss"].iloc[-1] / plain.history["loss"].iloc[-1]
    assert value(rows, "loss_ratio") == pytest.approx(ratio, rel=1e-5)
    active = ball[[f"active_{b}" for b in "cUW"]].sum(axis=1)
    assert value(rows, "first_action") == int(np.flatnonzero(active)[0])
    assert value(rows, "active_share") == active.iloc[-1] / (3 * config.heads)
    path = config.step_size * np.sqrt(plain.history["loss"].iloc[:-1]).sum()
    c, U, W = (plain.history[f"distance_{b}"].max() for b in "cUW")
    root, longest = math.sqrt(config.heads), float(shared.start.block_norms().U.max())
    C, R = 1 + c / root, longest + U / root
    speed = max(c, U / C, W / (C * R)) / (2 * path)
    assert value(rows, "path_ratio") == pytest.approx(speed, rel=1e-5)
    assert speed <= 1
    run = descent.descend(
        shared.objective, shared.start, config.step_size, config.steps, radii=radii
    )
    held = shared.held[0]
    ratio = float(held.loss(run.final)) / float(held.loss(shared.plain.final))
    assert value(rows, "held_ratio") == pytest.approx(ratio, rel=1e-5)
    assert value(rows, "norm_ratio") == pytest.approx(run.norm[-1] / shared.plain.norm[-1])


def model_and_data(shared):
    inputs = shared.objective.inputs
    model = ShallowTransformer(shared.start, query=inputs.query)
    return model, inputs.tokens, shared.objective.targets


def test_noise_is_added_to_labels_and_validation_and_the_tests_stay_clean():
    noisy, clean = CONFIGS["noise"], replace(CONFIGS["noise"], noise=0.0)
    one, two = (training._trained(config, 9, "cpu") for config in (noisy, clean))
    stream = generator(9, "without_projection", "noise")
    for a, b in ((one.objective, two.objective), (one.held[0], two.held[0])):
        drawn = torch.randn(len(a.targets), generator=stream)
        expected = noisy.noise * math.sqrt(two.variance) * drawn
        torch.testing.assert_close(a.targets - b.targets, expected, rtol=1e-3, atol=1e-6)
    assert torch.equal(one.held[1].targets, two.held[1].targets)
    assert len(one.held[1].targets) == noisy.tests
    assert one.variance == two.variance
    assert one.variance == pytest.approx(float(two.objective.targets.var(correction=0)))


def test_the_regulariser_is_chosen_on_validation_and_judged_on_tests():
    config = CONFIGS["noise"]
    rows, shared = without_projection.run(config, 9), training._trained(config, 9, "cpu")

    def held(**options):
        final = descent.descend(
            shared.objective, shared.start, config.step_size, config.steps, **options
        ).final
        return [float(some.loss(final)) for some in shared.held]

    reach = shared.plain.distance[-1]
    balls = {s: held(radii=descent.equal_radii(s * reach)) for s in training.SHARES}
    springs = {lam: held(decay=lam) for lam in training.DECAYS}
    balls[1.0] = springs[0.0] = held()
    share, lam = (min(found, key=lambda s: found[s][0]) for found in (balls, springs))
    assert (value(rows, "chosen_share"), value(rows, "chosen_decay")) == (share, lam)
    stopped = value(rows, "test_stopped") * shared.variance
    test = {"plain": balls[1.0][1], "ball": balls[share][1], "smallest": balls[0.125][1],
            "decay": springs[lam][1], "stopped": stopped}  # fmt: skip
    for name, expected in test.items():
        assert value(rows, f"test_{name}") == pytest.approx(expected / shared.variance, rel=1e-5)
    for ratio in ("plain_over_ball", "smallest_over_ball", "plain_over_stopped",
                  "plain_over_decay", "ball_over_stopped"):  # fmt: skip
        above, below = ratio.split("_over_")
        assert value(rows, ratio) == pytest.approx(test[above] / test[below], rel=1e-5)
    expected = test["stopped"] / test["decay"]
    assert value(rows, "stopped_over_decay_noisy") == pytest.approx(expected, rel=1e-5)
    at = training.stopping(shared.plain.held[:, 0], shared.plain.looks, config.patience)
    assert test["stopped"] == pytest.approx(shared.plain.held[at, 1])


def test_regularisers_are_chosen_on_noisy_data_and_judged_on_clean():
    config, seed = CONFIGS["noise"], 14  # a seed on which the clean tests would choose otherwise
    rows, shared = without_projection.run(config, seed), training._trained(config, seed, "cpu")
    problem = teacher_problem(
        "without_projection", seed, samples=44, validation_fraction=36 / 44,
        length=config.length, dimension=config.dimension, token_law=config.token_law,
        query="fixed", activation="tanh", anchors=config.anchors,
        teacher_heads=config.teacher_heads, norms=TransportNorms(3.0, 3.0, 3.0), device="cpu",
    )  # fmt: skip
    validation, tests = shared.held
    assert torch.equal(tests.targets, problem.held_targets[16:])
    spread = float(problem.targets.std(correction=0))
    added = torch.cat((shared.objective.targets - problem.targets,
                       validation.targets - problem.held_targets[:16]))  # fmt: skip
    assert len(added) == 24
    assert float(added.std()) == pytest.approx(config.noise * spread, rel=0.5)
    assert value(rows, "test_start") == pytest.approx(
        float(problem.held_targets[16:].square().mean()) / spread**2
    )

    def judged(**options):
        run = descent.descend(
            shared.objective, shared.start, config.step_size, config.steps, **options
        )
        return float(validation.loss(run.final)), float(tests.loss(run.final)) / spread**2

    plain = judged()
    reach = shared.plain.distance[-1]
    shares = (0.125, 0.1875, 0.25, 0.375, 0.5)
    balls = [judged(radii=descent.equal_radii(share * reach)) for share in shares] + [plain]
    springs = [judged(decay=rate) for rate in (0.01, 0.02, 0.04, 0.08, 0.16)] + [plain]
    at = [looked[0] for looked in shared.plain.held]
    stop = training.stopping(np.array(at), shared.plain.looks, config.patience)
    assert stop != int(shared.plain.held[:, 1].argmin())
    for kind, runs in (("ball", balls), ("decay", springs)):
        chosen, best = min(runs), min(runs, key=lambda run: run[1])
        assert chosen != best
        assert value(rows, f"test_{kind}") == pytest.approx(chosen[1], rel=1e-5)
    ball, decay, stopped = min(balls)[1], min(springs)[1], shared.plain.held[stop, 1] / spread**2
    assert value(rows, "chosen_share") == (*shares, 1.0)[balls.index(min(balls))]
    expected = {
        "test_plain": plain[1],
        "test_stopped": stopped,
        "plain_over_ball": plain[1] / ball,
        "smallest_over_ball": balls[0][1] / ball,
        "plain_over_stopped": plain[1] / stopped,
        "ball_over_stopped": ball / stopped,
        "stopped_over_decay_noisy": stopped / decay,
    }
    for name, number in expected.items():
        assert value(rows, name) == pytest.approx(number, rel=1e-5), name


def test_the_radius_study_reports_its_largest_distance_and_the_quarter_ball():
    columns = {
        "loss_ratio": lambda s: 1 / s, "distance_over_norm": lambda s: s,
        "first_action": lambda s: 10.0, "first_exit": lambda s: 10.0 + (s > 1),
    }  # fmt: skip
    frame = synthetic("radius", columns, (0.25, 1.25))
    seeds = 1 + 0.01 * np.arange(4)
    assert without_projection.estimate(frame, "binding_loss").mean == pytest.approx(
        4 * np.exp(np.log(seeds).mean())
    )
    assert without_projection.estimate(frame, "plain_within_norm").mean == pytest.approx(
        1.25 * seeds.mean()
    )
    assert without_projection.estimate(frame, "exit_difference").mean == pytest.approx(1.03)


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_the_certificate_study_runs_free_stopped_stochastic_decayed_and_in_a_quarter(query):
    config = CONFIGS["certificate"]
    rows = without_projection.run(config, 6)
    kind = certificates.Config(
        query, "tanh", config.case, heads=config.heads, samples=config.samples,
        length=config.length, dimension=config.dimension, teacher_heads=config.teacher_heads,
        steps=config.steps,
    )  # fmt: skip
    instance = certificates.draw(kind, 6)
    free, start, eta = (
        instance._replace(radii=descent.FREE), instance.model.snapshot(), instance.step_size
    )  # fmt: skip
    plain = certificates.trajectory(free, kind, 6)
    reach = max(float(norms.max()) for norms in plain.final.minus(start).block_norms())
    small = descent.equal_radii(0.25 * reach * math.sqrt(start.heads))
    inside = ProjectionSet(start, small).project(instance.comparison)
    runs = {
        "plain": plain,
        "stochastic": certificates.trajectory(free, replace(kind, descent="ProjSGD"), 6),
        "ball": certificates.trajectory(
            instance._replace(radii=small, comparison=inside), kind, 6
        ),
    }  # fmt: skip
    for name, run in runs.items():
        bound = run.certificate().average
        assert value(rows, f"{name}_loss_{query}") == pytest.approx(run.average_loss)
        assert value(rows, f"{name}_ratio_{query}") == pytest.approx(bound / run.average_loss)
        assert value(rows, f"{name}_epsilon_{query}") == pytest.approx(run.epsilon)
    assert runs["ball"].history["active"].sum() > 0
    spring = descent.decayed_certificate(
        instance.model, instance.tokens, instance.targets, instance.comparison,
        step_size=eta, steps=instance.steps, decay=0.1 / eta,
    )  # fmt: skip
    assert value(rows, f"decay_ratio_{query}") == pytest.approx(spring.bound / spring.loss)
    ratios = [some.bound / some.loss for some in descent.prefix_certificates(plain)]
    assert value(rows, f"stopped_ratio_{query}") == pytest.approx(min(ratios))
