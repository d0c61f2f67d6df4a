r"""The experiment on the number of steps: its descents, its tangent model and its verdicts."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.experiments import _steps_descent, _steps_tangent, steps
from attention_dynamics.experiments.estimates import select
from attention_dynamics.models import shallow
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.running import Experiment, sweep
from attention_dynamics.theory.kernel_flow import kernel_descent
from attention_dynamics.training.descent import DescentConfig, projected_gradient_descent
from attention_dynamics.training.projection import ProjectionSet, Radii

ROOT, CONSTANT = (steps.PROFILES["smoke"].configs[i] for i in (0, 2))
EDGE, UNTRAINED = (steps.PROFILES["smoke"].configs[i] for i in (3, 5))


@pytest.fixture(scope="module")
def smoke():
    return sweep(steps, "smoke")


def at(rows, steps_taken):
    return rows[rows["steps"] == steps_taken].set_index("quantity")["value"]


def double_problem(config, seed=0):
    """The problem of a cell in float64: problem, start, query, kernel by automatic derivatives."""
    given_, initial = steps.problem(config, seed)
    phi, query = initial.to(dtype=torch.float64), given_.query.double()
    X, y = given_.tokens.double(), given_.targets.double()

    def output(c, U, W):
        return shallow.forward(type(phi)(c, U, W), X, query=query, activation=config.activation)

    blocks = torch.func.jacrev(output, argnums=(0, 1, 2))(*phi)
    jacobian = torch.cat([block.reshape(len(y), -1) for block in blocks], dim=1)
    return given_, phi, y, jacobian, output


def training(config, seed=0, radius=3.0):
    given_, initial = steps.problem(config, seed)
    objective, _ = steps.descent_problem(config, given_, initial)
    return given_, objective, ProjectionSet(initial, Radii(radius, radius, radius))


# The shape of the experiment


def test_the_module_has_the_shape_of_an_experiment():
    assert isinstance(steps, Experiment)
    assert set(steps.PROFILES) == {"smoke", "book", "paper"}
    assert steps.Config.__dataclass_params__.frozen
    book, paper = steps.PROFILES["book"], steps.PROFILES["paper"]
    assert book.seeds == paper.seeds == tuple(range(10))
    assert paper.configs[0].numbers_of_steps == (64, 256, 1024, 4096, 16384)
    assert book.configs[0].numbers_of_steps == (64, 256, 1024, 4096)
    assert book.configs[2].numbers_of_steps == (14, 28, 56, 112, 224, 448, 896)


def test_the_bands_are_those_of_the_bound():
    for iterate in ("averaged", "best", "final"):
        assert steps.BANDS[f"{iterate}_root"].ends == (-0.6, -0.4)
        assert steps.BANDS[f"{iterate}_constant"].ends == (-1.15, -0.85)
    assert steps.BANDS["averaged_root_gap"].ends == (-0.1, 0.1)
    assert steps.BANDS["time"].ends == (0.95, 1.05)
    assert steps.BANDS["edge"].ends == (0.9, 1.1)
    assert steps.BANDS["floor"].ends == (None, -0.85)


@pytest.mark.parametrize("config", [ROOT, CONSTANT, EDGE, UNTRAINED], ids=lambda c: c.rule)
def test_a_cell_is_a_pure_function_of_config_and_seed(config):
    first = steps.run(config, 5)
    steps._tangent.cache_clear()
    steps.teacher_problem.cache_clear()
    pd.testing.assert_frame_equal(steps.run(config, 5), first, check_exact=True)
    assert tuple(first.columns) == steps.COLUMNS
    assert not first.duplicated(["steps", "quantity"]).any()
    other = steps.run(config, 6).query(
        "quantity not in ('active_heads', 'edge')"
    )  # both are counted
    assert (other["value"] != first.loc[other.index, "value"]).all()


def test_impossible_configurations_are_refused_by_name():
    with pytest.raises(ValueError, match=r"rule must be one of root.*got 'cosine'"):
        steps.run(replace(ROOT, rule="cosine"), 0)
    with pytest.raises(ValueError, match=r"longest=65 must be a multiple .* = 4"):
        steps.run(replace(ROOT, longest=65), 0)
    with pytest.raises(ValueError, match="m must be even, got m = 5"):
        steps.run(replace(CONSTANT, heads=5), 0)
    with pytest.raises(ValueError, match="samples=10 are too few for a floor at heads=8"):
        steps.run(replace(UNTRAINED, heads=8, samples=10), 0)


# The descent


class Told:
    """An objective that returns the given losses and, once, a gradient."""

    def __init__(self, losses, gradient):
        self.losses, self.gradient = iter(losses), gradient

    def loss_and_gradients(self, _):
        gradient, self.gradient = self.gradient, self.gradient.scaled(0.0)
        return torch.tensor(next(self.losses), dtype=torch.float64), gradient


@pytest.mark.parametrize("radius", [3.0, 0.2])
def test_a_checkpoint_is_what_a_descent_of_that_many_steps_returns(radius):
    given_, objective, region = training(CONSTANT, radius=radius)
    found = _steps_descent.descend(objective, region, 0.7, [3, 10, 40])
    for point in found:
        model = ShallowTransformer(region.centre, query=given_.query)
        config = DescentConfig(point.steps, step_size=0.7, radii=region.radii)
        once = projected_gradient_descent(model, given_.tokens, given_.targets, config)
        losses = once.history["loss"].to_numpy()
        for ours, theirs in zip(point.averaged, once.averaged, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        assert point.best == pytest.approx(once.best_loss, rel=1e-5)
        assert point.final == pytest.approx(losses[-1], rel=1e-5)
        assert point.mean == pytest.approx(losses[:-1].mean(), rel=1e-5)
        moved = once.history[[f"distance_{b}" for b in "cUW"]].to_numpy()[-1].max()
        assert point.distance == pytest.approx(moved, rel=1e-4)
        assert (point.active > 0) == once.history.filter(like="active").to_numpy().any()
    assert (found[-1].active > 0) == (radius < 1)


def test_heads_that_left_their_ball_in_one_step_stay_known():
    _, _, region = training(CONSTANT)
    objective = Told([4.0, 2.0, 2.0, 2.0], region.centre.scaled(1e3))
    first, last = _steps_descent.descend(objective, region, 1.0, [1, 3])
    assert first.active == last.active == 3 * region.centre.heads  # blocks: c, U and W
    assert last.mean == pytest.approx((4.0 + 2.0 + 2.0) / 3)


def test_the_rows_of_a_cell_are_the_losses_over_the_variance():
    given_, objective, region = training(ROOT, seed=3)
    rows = steps.run(ROOT, 3)
    variance = float(given_.targets.double().var(correction=0))
    for k in (16, 64):
        point = _steps_descent.descend(objective, region, 1.75 / math.sqrt(k), [k])[0]
        averaged = shallow.loss(point.averaged, given_.tokens, given_.targets, query=given_.query)
        row = at(rows, k)
        assert row["averaged"] == pytest.approx(float(averaged) / variance, rel=1e-5)
        for name in ("best", "final", "mean"):
            assert row[name] == pytest.approx(getattr(point, name) / variance, rel=1e-6)
    constant = steps.run(CONSTANT, 3)
    last = at(constant, 28)
    assert last["remaining"] == last["best"]
    logs = [math.log(at(constant, k)["averaged"] / at(constant, k)["predicted_averaged"])
            for k in (7, 14, 28)]  # fmt: skip
    assert last["prediction_error"] == pytest.approx(np.sqrt(np.mean(np.square(logs))))


def test_the_best_iterate_of_a_descent_that_rises_is_not_its_last():
    _, objective, region = training(CONSTANT)
    eta = 1.9 / float(steps.tangent_of(CONSTANT, 0).rates.max())
    (point,) = _steps_descent.descend(objective, region, eta, [1])
    losses = []
    phi = region.centre
    for _ in range(2):
        loss, gradient = objective.loss_and_gradients(phi)
        losses.append(float(loss))
        phi = region.project(phi.minus(gradient.scaled(eta)))
    assert point.best == pytest.approx(min(losses), rel=1e-5)
    assert point.final == pytest.approx(losses[-1], rel=1e-4)
    assert point.best < 0.9 * point.final


def test_best_and_last_loss_are_not_confused(monkeypatch):
    def halved(*arguments):
        return [point._replace(best=point.best / 2) for point in _steps_descent.descend(*arguments)]

    monkeypatch.setattr(steps, "descend", halved)
    row = at(steps.run(CONSTANT, 3), 28)
    assert row["best"] == pytest.approx(row["final"] / 2)
    assert row["remaining"] == row["best"]


def test_a_loss_that_overflows_is_an_error():
    _, objective, region = training(CONSTANT)
    free = ProjectionSet(region.centre, Radii(None, None, None))
    with pytest.raises(FloatingPointError, match=r"at step \d+; reduce step_size=1e\+30"):
        _steps_descent.descend(objective, free, 1e30, [5])


def test_what_is_known_without_measuring_holds(smoke):
    trained = smoke[smoke["rule"].isin(steps.RULES)]
    index = ["rule", "heads", "steps", "seed"]
    table = trained.pivot(index=index, columns="quantity", values="value")
    assert (table["best"] <= table["final"]).all()
    assert (table["final"] < table["averaged"]).all()
    assert (table["averaged"] < table["mean"]).all()
    assert (table["predicted_mean"] <= table["bound"]).all()
    assert (table["active_heads"] == 0).all()
    untrained = smoke[smoke["rule"] == "untrained"]
    floors = untrained.pivot(index=["heads", "seed"], columns="quantity", values="value")
    assert (floors["floor"] <= floors["comparator"]).all()


# The edge


def test_tiny_targets_have_their_edge_where_the_kernel_says():
    # Targets of size 1e-3: the network is its tangent, and the largest eigenvalue decides.
    given_, phi, y, jacobian, _ = double_problem(CONSTANT)
    unit = len(y) / float(torch.linalg.eigvalsh(jacobian @ jacobian.mT)[-1])
    model = ShallowTransformer(phi, query=given_.query.double())
    objective = steps.Objective.of(model, given_.tokens.double(), 1e-3 * y)
    region = ProjectionSet(phi, Radii(3.0, 3.0, 3.0))
    found = _steps_descent.edge(objective, region, unit, steps=200, halvings=9)
    assert found == pytest.approx(1.0, abs=0.03)
    assert _steps_descent.first_rise(objective, region, 0.95 * unit, 200) is None
    assert _steps_descent.first_rise(objective, region, 1.5 * unit, 200) <= 5
    assert _steps_descent.first_rise(objective, region, 1.5 * unit, 0) is None


@pytest.mark.parametrize(
    ("losses", "rise"),
    [([3.0, 2.0, 2.0001, 1.0], 2), ([3.0, 2.0, 2.00001, 1.0], None), ([1.0, 2.0, 3.0], 1)],
)
def test_a_rise_is_more_than_rounding(losses, rise):
    _, _, region = training(CONSTANT)
    objective = Told(losses, region.centre.scaled(0.0))
    assert _steps_descent.first_rise(objective, region, 1.0, len(losses) - 1) == rise


def test_the_edge_is_halved_on_a_logarithmic_scale(monkeypatch):
    def rises(objective, region, step_size, steps):
        return 1 if step_size > 2.6 else None  # 1.3 units of 2

    monkeypatch.setattr(_steps_descent, "first_rise", rises)
    # 1 is below, 2^(1/2) above, 2^(1/4) below: the middle of the last two
    assert _steps_descent.edge(None, None, 2.0, 100, 3) == pytest.approx(2**0.375)


def test_the_edge_of_a_cell_is_in_units_of_the_kernel():
    rows = at(steps.run(EDGE, 1), 0)
    _, _, y, jacobian, _ = double_problem(EDGE, 1)
    unit = len(y) / float(torch.linalg.eigvalsh(jacobian @ jacobian.mT)[-1])
    assert rows["edge_step_size"] == pytest.approx(rows["edge"] * unit, rel=1e-4)
    assert 0.8 < rows["edge"] < 1.25


# The tangent model


def test_the_spectrum_and_the_comparator_are_those_of_automatic_differentiation():
    given_, phi, y, jacobian, output = double_problem(UNTRAINED, 2)
    found = steps.tangent_of(UNTRAINED, 2)
    values, vectors = torch.linalg.eigh(jacobian @ jacobian.mT)
    n = len(y)
    # eigenvectors are unique only up to sign and within eigenspaces: compare moments
    for power in (0, 1, 2):
        ours = (found.power * found.rates**power).sum()
        theirs = ((vectors.mT @ y).square() / n * (values / n).clamp_min(0) ** power).sum()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    fit = torch.linalg.lstsq(jacobian, y[:, None], driver="gelsd").solution[:, 0]
    floor = (jacobian @ fit - y).square().mean()
    assert found.floor == pytest.approx(float(floor), rel=1e-5)
    assert found.floor > 0
    step = given_.transport(phi.to(dtype=torch.float32)).scaled(phi.heads**-0.5)
    _, slope = torch.func.jvp(output, tuple(phi), tuple(b.double() for b in step))
    error = float((slope - y).square().mean().sqrt())
    assert found.comparator_error == pytest.approx(error, rel=1e-4)
    assert found.comparator_distance == pytest.approx(float(step.inner(step)), rel=1e-5)
    value = found.ingredients
    assert value.gradient_squared == pytest.approx(float(values[-1]) / n, rel=1e-6)
    rows = at(steps.run(UNTRAINED, 2), 0)
    variance = float(y.var(correction=0))
    assert rows["floor"] == pytest.approx(float(floor) / variance, rel=1e-5)
    assert rows["comparator"] == pytest.approx(error**2 / variance, rel=1e-4)


@pytest.mark.parametrize(("eta", "k"), [(0.3, 1), (0.3, 7), (0.9, 6), (0.9, 7), (1e-9, 50)])
def test_the_losses_of_the_tangent_model_are_those_of_its_descent(eta, k):
    random = torch.Generator().manual_seed(0)
    jacobian = torch.randn(6, 4, generator=random, dtype=torch.float64)
    y = torch.randn(6, generator=random, dtype=torch.float64)
    K = jacobian @ jacobian.mT  # rank 4: two directions never move
    K = K * 6 / torch.linalg.eigvalsh(K)[-1]  # largest rate 1
    values, vectors = torch.linalg.eigh(K)
    model = _steps_tangent.Tangent(values.clamp_min(0) / 6, (y @ vectors).square() / 6, 0.0, 0.0)
    residuals = kernel_descent(K, y, k, eta) - y
    found = _steps_tangent.tangent_losses(model, eta, k)
    expected = {
        "final": residuals[k].square().mean(),
        "averaged": residuals[:k].mean(dim=0).square().mean(),
        "mean": residuals[:k].square().mean(),
    }
    assert found == pytest.approx({key: float(x) for key, x in expected.items()}, rel=1e-9)


def test_a_step_beyond_the_edge_is_refused():
    model = _steps_tangent.Tangent(torch.tensor([0.1, 0.5]), torch.ones(2), 0.0, 0.0)
    with pytest.raises(ValueError, match="expected less than 2, got 2; the tangent model diverges"):
        _steps_tangent.tangent_losses(model, 2.0, 3)


spectra = st.lists(
    st.tuples(st.floats(1e-9, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=6
).filter(lambda pairs: sum(p for _, p in pairs) > 1e-6)


@settings(max_examples=60, deadline=None)
@given(spectra, st.integers(1, 2000), st.floats(0.01, 0.5))
def test_the_iterates_are_ordered_and_their_speed_is_limited(pairs, k, eta):
    x, p = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    model = _steps_tangent.Tangent(x, p, 0.0, 0.0)
    now, later = (_steps_tangent.tangent_losses(model, eta, count) for count in (k, k + 1))
    slack = 1 + 1e-9
    assert now["final"] <= now["averaged"] * slack
    assert now["averaged"] <= now["mean"] * slack
    assert k * now["mean"] <= (k + 1) * later["mean"] * slack
    assert k**2 * now["averaged"] <= (k + 1) ** 2 * later["averaged"] * slack


def test_the_bound_is_the_root_of_the_quadratic_with_the_numbers_of_the_tangent_model():
    rows, found = at(steps.run(CONSTANT, 0), 14), steps.tangent_of(CONSTANT, 0)
    kappa = float(found.rates.max()) * CONSTANT.step_size
    x = math.sqrt(
        rows["bound"] * float(steps.problem(CONSTANT, 0)[0].targets.double().var(correction=0))
    )
    left = (1 - kappa) * x**2 - found.comparator_error * x
    assert left == pytest.approx(
        found.comparator_distance / (4 * CONSTANT.step_size * 14), rel=1e-5
    )


# The verdicts

THEORY = {"root": -0.5, "constant": -1.0}


def synthetic(exponents=None, time=1.0, averaging=2.0, edge=1.0, floor=-1.5, **others):
    exponents = THEORY if exponents is None else exponents
    random = np.random.default_rng(0)
    rows = []

    def add(rule, heads, k, quantity, value, seed):
        rows.append({"rule": rule, "heads": heads, "steps": k, "quantity": quantity, "seed": seed,
                     "step_scale": 1.75, "step_size": 1.0, "value": value})  # fmt: skip

    for seed in range(5):
        size = (1 + seed) * math.exp(0.02 * random.standard_normal())
        for rule, counts in (("root", (64, 256, 1024)), ("constant", (14, 28, 56, 112))):
            for k in counts:
                eta_time = 1.75 * math.sqrt(k) if rule == "root" else k
                loss = size * eta_time ** (exponents[rule] * (2 if rule == "root" else 1))
                loss *= time if rule == "root" else 1.0
                shift = k ** others.get("gap", 0.0)
                wobble = math.exp(0.01 * random.standard_normal())
                for name, factor in (("averaged", averaging), ("best", 1.0), ("final", 1.0)):
                    add(rule, 8, k, name, wobble * factor * loss, seed)
                    add(rule, 8, k, f"predicted_{name}", wobble * factor * loss / shift, seed)
        for m in (4, 8, 16):
            noise = math.exp(0.01 * random.standard_normal())
            add("untrained", m, 0, "floor", noise * m**floor, seed)
            add("constant", m, 112, "remaining", noise * m ** others.get("remaining", -0.3), seed)
            error = noise * m ** others.get("error", -1.0)
            add("constant", m, 112, "prediction_error", error, seed)
        add("edge", 8, 0, "edge", edge * math.exp(0.01 * random.standard_normal()), seed)
    return pd.DataFrame(rows)


def test_summarise_finds_the_rates_of_the_theory_inside_their_bands():
    summary = steps.summarise(synthetic()).set_index("quantity")
    assert list(summary.index) == list(steps.BANDS)
    assert summary["inside"].all()
    found = summary["estimate"]
    assert found["averaged_root"] == pytest.approx(-0.5, abs=0.01)
    assert found["final_constant"] == pytest.approx(-1.0, abs=0.01)
    assert found["averaging_root"] == pytest.approx(2.0, rel=1e-9)
    assert found["time"] == pytest.approx(1.0, abs=0.03)
    assert found["floor"] == pytest.approx(-1.5, abs=0.05)
    assert (summary["seeds"] == 5).all()


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"exponents": {"root": -0.35, "constant": -0.7}, "time": 1.0},
         {f"{i}_{r}" for i in steps.ITERATES for r in steps.RULES}),
        ({"time": 1.2}, {"time"}),
        ({"averaging": 0.9}, {"averaging_root", "averaging_constant"}),
        ({"edge": 1.3}, {"edge"}),
        ({"floor": -0.5}, {"floor"}),
        ({"remaining": 0.2}, {"remaining"}),
        ({"error": 0.2}, {"prediction_error"}),
        ({"gap": 0.2}, {name for name in steps.BANDS if name.endswith("_gap")}),
    ],
)  # fmt: skip
def test_summarise_reports_a_miss(changes, missed):
    summary = steps.summarise(synthetic(**changes)).set_index("quantity")
    assert set(summary.index[~summary["inside"]]) == missed


def test_times_are_averaged_and_averaging_is_judged_at_the_end():
    losses = {("root", 16): 1.0, ("root", 64): 1.21, ("constant", 7): 1.0, ("constant", 14): 1.0}
    factors = {("root", 16): 5.0, ("root", 64): 2.0, ("constant", 7): 9.0, ("constant", 14): 3.0}
    rows = [
        {"rule": rule, "heads": 8, "steps": k, "seed": seed, "step_scale": 1.75, "step_size": 1.0,
         "quantity": name, "value": loss * (factors[rule, k] if name == "averaged" else 1.0)}
        for (rule, k), loss in losses.items()
        for seed in (0, 1)
        for name in ("averaged", "best", "final")
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    assert steps.estimate(frame, "time").mean == pytest.approx(1.1)  # of 1 and 1.21
    assert steps.estimate(frame, "averaging_root").mean == pytest.approx(2.0)
    assert steps.estimate(frame, "averaging_constant").mean == pytest.approx(3.0)


def test_exponents_are_taken_at_the_width_of_both_rules(smoke):
    assert set(steps.main(smoke, "constant")["heads"]) == {8}
    assert set(steps.main(smoke, "root")["heads"]) == {8}
    ratios = steps.time_ratios(smoke)
    assert sorted(set(ratios.index.get_level_values("time"))) == [7.0, 14.0]
    loss = select(steps.main(smoke, "constant"), "final").set_index(["steps", "seed"])["value"]
    root = select(steps.main(smoke, "root"), "final").set_index(["steps", "seed"])["value"]
    assert ratios[14.0, 201] == pytest.approx(math.log(root[64, 201] / loss[14, 201]))
    apart = smoke[(smoke["rule"] != "constant") | (smoke["steps"] == 28)]
    with pytest.raises(ValueError, match="no time step_size"):
        steps.time_ratios(apart)


def test_summarise_reads_every_profile(smoke):
    assert set(steps.summarise(smoke)["quantity"]) == set(steps.BANDS)
