"""The certificate bounds what was achieved, in every run, whatever the query and the noise."""

import itertools
import math

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory import TransportNorms, random_multi_anchor, random_perturbation
from attention_dynamics.theory.convergence import fast_form, paper_form
from attention_dynamics.theory.kernels import empirical_kernel_total, spectrum
from attention_dynamics.theory.trajectory import descent_step, record_trajectory
from attention_dynamics.training import (
    DescentConfig,
    ProjectionSet,
    Radii,
    projected_gradient_descent,
)
from attention_dynamics.training.objective import Objective

KINDS = list(itertools.product(("fixed", "last"), ("tanh", "erf", "erf_plain")))
RHO = Radii(2.0, 2.0, 2.0)


def problem(seed, query="last", activation="tanh", *, n=8, T=4, d=3, m=6, targets="teacher"):
    """A model, tokens, targets and the transported point; all that follows from one seed."""
    if query == "fixed":
        query = query_vector(d, generator=generator(seed, "q"), dtype=torch.float64)
    model = ShallowTransformer.symmetric(
        m, d, query=query, activation=activation, seed=seed, dtype=torch.float64
    )
    tokens = unit_ball_tokens(
        n, T, d, generator=generator(seed, "t"), law="sequence_means", dtype=torch.float64
    )
    transport = random_multi_anchor(
        3, T, d, generator=generator(seed, "a"), norms=TransportNorms(2.0, 2.0, 2.0), query=query,
        activation=activation, dtype=torch.float64,
    )  # fmt: skip
    initial = model.snapshot()
    region = ProjectionSet(initial, RHO)
    star = region.project(initial.plus(transport(initial).scaled(m**-0.5)))
    if targets == "teacher":
        y = ShallowTransformer(star, query=query, activation=activation)(tokens).detach()
        y = y + 0.05 * torch.randn(n, generator=generator(seed, "y"), dtype=torch.float64)
    else:
        y = torch.randn(n, generator=generator(seed, "y"), dtype=torch.float64)
    return model, tokens, y, star


def assert_certified(run):
    bound, average = run.certificate(), run.average_loss
    assert average <= bound.average * (1 + 1e-12)
    assert run.history["loss"].min() <= bound.average
    assert run.averaged_loss <= bound.total * (1 + 1e-12)
    terms = bound.optimisation + bound.approximation + bound.linearisation
    assert bound.total <= terms**2 * (1 + 1e-12)


@pytest.mark.parametrize(("query", "activation"), KINDS)
def test_the_certificate_holds_on_many_runs(query, activation):
    ratios = []
    for seed in range(17):  # times six kinds: more than a hundred runs
        targets = "noise" if seed % 3 == 2 else "teacher"
        size = {"n": 6 + seed, "m": 2 + 2 * (seed % 4), "T": 1 + seed % 5}
        data = problem(seed, query, activation, targets=targets, **size)
        eta = (0.05, 0.3, 1.0)[seed % 3]
        run = record_trajectory(*data[:3], DescentConfig(30, step_size=eta, radii=RHO), data[3])
        assert_certified(run)
        ratios.append(run.certificate().average / run.average_loss)
    assert sorted(ratios)[len(ratios) // 2] < 2.5


@pytest.mark.parametrize(("query", "activation"), KINDS)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_pathwise_certificate_holds_for_every_stochastic_run(query, activation, batch_size):
    noise = []
    for seed in range(4):
        model, tokens, y, star = problem(seed, query, activation, targets="noise")
        config = DescentConfig(30, step_size=0.2, radii=RHO, batch_size=batch_size, seed=seed)
        run = record_trajectory(model, tokens, y, config, star)
        assert run.stochastic
        assert_certified(run)
        noise.append(float(run.history["noise"].abs().sum()))
    assert min(noise) > 0


def test_the_noise_matters_for_a_single_run_and_has_mean_zero():
    model, tokens, y, star = problem(3, targets="noise")
    sums, without = [], 0
    for seed in range(40):
        config = DescentConfig(12, step_size=0.1, radii=RHO, batch_size=1, seed=seed)
        run = record_trajectory(model, tokens, y, config, star)
        sums.append(float(run.history["noise"].sum()))
        # D_tau <= D_0 + eta^2 sum |g|^2 - 2 eta sum <grad L, phi - phi*> is false of single runs.
        squares = run.step_size**2 * float(run.history["step_squared"].sum())
        start = float(run.history["distance_squared"].iloc[0])
        drift = 2 * run.step_size * float(run.history["descent"].sum())
        without += run.final_distance_squared > start + squares - drift
    mean = sum(sums) / len(sums)
    error = math.sqrt(sum((x - mean) ** 2 for x in sums) / len(sums) / (len(sums) - 1))
    assert abs(mean) < 4 * error
    assert without > 0


@pytest.mark.parametrize("batch_size", [None, 3])
def test_the_recorded_run_is_that_of_the_library(batch_size):
    model, tokens, y, star = problem(1)
    config = DescentConfig(25, step_size=0.4, radii=RHO, batch_size=batch_size, seed=5)
    before = model.snapshot()
    run = record_trajectory(model, tokens, y, config, star)
    assert all(torch.equal(a, b) for a, b in zip(before, model.snapshot(), strict=True))
    result = projected_gradient_descent(model, tokens, y, config)
    for own, other in ((run.final, result.final), (run.averaged, result.averaged)):
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        torch.tensor(run.history["loss"].to_numpy()),
        torch.tensor(result.history["loss"].to_numpy()[:-1].copy()),
        rtol=1e-12, atol=0,
    )  # fmt: skip


def test_every_column_satisfies_its_line_of_the_proof():
    for seed, radii in ((0, RHO), (1, Radii(0.3, 0.3, 0.3)), (2, None)):
        model, tokens, y, star = problem(seed, targets="noise")
        star = ProjectionSet(model.snapshot(), radii or RHO).project(star)
        run = record_trajectory(
            model, tokens, y, DescentConfig(30, step_size=1.0, radii=radii), star
        )
        h = run.history
        root = h["loss"].pow(0.5)
        assert (h["descent"] >= 2 * h["loss"] - 2 * root * h["epsilon"] - 1e-13).all()
        assert (h["slack"] >= -1e-12).all()
        assert (h["noise"] == 0).all()
        free = h["active"] == 0
        assert (h["slack"][free].abs() < 1e-12).all()  # without projection it is an equality
        assert (h["slack"][~free] > 0).all()
        assert free.any() if radii != Radii(0.3, 0.3, 0.3) else not free.all()
        following = [*h["distance_squared"].iloc[1:], run.final_distance_squared]
        lost = h["step_squared"] - 2 * h["descent"]
        assert (h["distance_squared"] + lost - h["slack"]).to_list() == pytest.approx(following)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_the_budget_is_what_the_descent_and_the_projection_used_up(batch_size):
    # B = 2 eta sum <grad L_k, phi_k - phi*> + sum slack: without its noise term it would not be.
    model, tokens, y, star = problem(2, targets="noise")
    config = DescentConfig(20, step_size=0.5, radii=RHO, batch_size=batch_size)
    run = record_trajectory(model, tokens, y, config, star)
    h, eta = run.history, run.step_size
    budget = run.progress + eta**2 * h["step_squared"].sum()
    assert budget == pytest.approx(2 * eta * h["descent"].sum() + h["slack"].sum(), rel=1e-9)
    found = run.certificate()
    x = math.sqrt(found.average)
    assert x**2 - x * run.epsilon == pytest.approx(budget / (4 * eta * 20), rel=1e-9)
    assert found.optimisation**2 == pytest.approx(max(0.0, budget) / (4 * eta * 20))
    assert found.total == pytest.approx((x + run.averaging) ** 2)


def test_a_certificate_needs_no_positive_gram_matrix():
    # Each sequence twice with two targets: half of the spectrum is zero, and no kernel bound holds.
    model, tokens, y, star = problem(4, n=10)
    twice, targets = torch.cat((tokens, tokens)), torch.cat((y, y + 0.3))
    K = empirical_kernel_total(model.snapshot(), twice, query="last")
    assert spectrum(K).rank <= 10
    run = record_trajectory(
        model, twice, targets, DescentConfig(50, step_size=0.5, radii=RHO), star
    )
    assert_certified(run)
    assert run.history["loss"].min() > 0.15**2  # no predictor does better on two targets
    assert run.certificate().average < run.history["loss"].iloc[0]


def test_masked_tokens_are_certified_too():
    model, tokens, y, star = problem(6, n=6, T=5)
    mask = torch.arange(5) < torch.tensor([1, 2, 3, 4, 5, 5])[:, None]
    run = record_trajectory(
        model, tokens, y, DescentConfig(20, step_size=0.5, radii=RHO), star, mask=mask
    )
    assert_certified(run)
    other = tokens.masked_fill(~mask[..., None], 7.0)
    again = record_trajectory(
        model, other, y, DescentConfig(20, step_size=0.5, radii=RHO), star, mask=mask
    )
    assert again.certificate() == run.certificate()


@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_measured_ingredients_give_weaker_bounds_that_hold(batch_size):
    for seed in range(6):
        model, tokens, y, star = problem(seed, targets="noise")
        config = DescentConfig(30, step_size=0.05, radii=RHO, batch_size=batch_size)
        run = record_trajectory(model, tokens, y, config, star)
        measured = run.ingredients()
        assert measured.kappa(run.step_size) < 1
        fast = fast_form(measured, run.step_size, run.steps)
        paper = paper_form(measured, run.step_size, run.steps)
        for bound in (fast, paper):
            assert run.average_loss <= bound.average * (1 + 1e-12)
            assert run.averaged_loss <= bound.total * (1 + 1e-12)
        assert run.certificate().average <= fast.average * (1 + 1e-12)


def steps_of(seed=0, eta=0.5):
    model, tokens, y, star = problem(seed, targets="noise")
    region = ProjectionSet(model.snapshot(), RHO)
    before = random_perturbation(model.snapshot(), RHO, generator=generator(seed))
    before = region.project(before)
    model.load(before)
    _, gradient = model.loss_and_gradients(tokens, y)
    return region, before, region.project(before.minus(gradient.scaled(eta))), gradient, star


def test_a_step_is_checked_from_two_iterates():
    _, before, after, gradient, star = steps_of()
    step = descent_step(before, after, gradient, 0.5, star)
    gap = before.minus(star)
    assert step.before == float(gap.inner(gap))
    assert step.slack == step.bound - step.after >= 0
    assert step.bound == pytest.approx(
        step.before - float(gradient.inner(gap)) + 0.25 * float(gradient.inner(gradient))
    )


def test_a_step_that_is_none_is_found():
    region, before, _, gradient, star = steps_of()
    with pytest.raises(ArithmeticError, match=r"exceeds its bound .* not the projection"):
        descent_step(before, before.plus(gradient.scaled(2.0)), gradient, 0.5, star)
    towards = before.minus(star)  # a gradient that would lead to the comparison point in one step
    with pytest.raises(ArithmeticError, match="exceeds its bound"):
        descent_step(before, before, towards, 0.5, star)
    # A comparison point outside of the set: the projection pulls back from it.
    far = region.centre.plus(before.minus(region.centre).scaled(5.0))
    outward = region.centre.minus(before)
    moved = region.project(before.minus(outward))
    with pytest.raises(ArithmeticError, match="comparison lies outside of the projection set"):
        descent_step(before, moved, outward, 1.0, far)


def broken(kind):
    """What a wrong backward pass would return in the place of the gradient."""
    right = Objective.loss_and_gradients

    def wrong(self, phi):
        loss, g = right(self, phi)
        return loss, {
            "sign": g.scaled(-1.0),
            "half": g.scaled(0.5),
            "twice": g.scaled(2.0),
            "block": g._replace(W=torch.zeros_like(g.W)),
            "transposed": g._replace(W=g.W.mT),
        }[kind]

    return wrong


@pytest.mark.parametrize("kind", ["sign", "half", "twice", "block", "transposed"])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_gradient_of_another_function_is_found(monkeypatch, kind, batch_size):
    # The descent inequality holds for any g: only the tangent map tells whose gradient it is.
    model, tokens, y, star = problem(0, "fixed", targets="noise")
    config = DescentConfig(5, step_size=0.1, radii=RHO, batch_size=batch_size)
    monkeypatch.setattr(Objective, "loss_and_gradients", broken(kind))
    with pytest.raises(ArithmeticError, match=r"gradient: .* the tangent map of f gives"):
        record_trajectory(model, tokens, y, config, star)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_alone_is_no_violation(dtype):
    # Without projection the inequality is an equality, so half of the slacks round below zero.
    signs = set()
    for seed in range(8):
        _, before, _, gradient, star = steps_of(seed)
        before, gradient, star = (p.to(dtype=dtype) for p in (before, gradient, star))
        after = before.minus(gradient.scaled(0.5))
        slack = descent_step(before, after, gradient, 0.5, star).slack
        signs.add(math.copysign(1.0, slack) if slack else 0.0)
        assert abs(slack) < 1e3 * torch.finfo(dtype).eps
    assert -1.0 in signs


def test_runs_that_cannot_be_certified_are_refused():
    model, tokens, y, star = problem(0)
    config = DescentConfig(5, radii=RHO)
    with pytest.raises(TypeError, match=r"model: expected float64 parameters, got torch\.float32"):
        record_trajectory(model.float(), tokens.float(), y.float(), config, star)
    model = model.double()
    with pytest.raises(ValueError, match=r"config\.patience: expected None, got 3"):
        record_trajectory(model, tokens, y, DescentConfig(5, patience=3), star)
    far = star.plus(star.scaled(10.0))
    with pytest.raises(ValueError, match="comparison: expected a point of the projection set"):
        record_trajectory(model, tokens, y, config, far)
    assert_certified(record_trajectory(model, tokens, y, DescentConfig(5, step_size=0.1), far))
