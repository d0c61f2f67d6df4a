"""Laws of attention for regression and of its population problem, on every input."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from regression_instances import (
    factors_of,
    instances,
    loss_by_formula,
    problem_of,
)

from attention_dynamics.data.regression import regression_problem, sample
from attention_dynamics.data.streams import generator
from attention_dynamics.models import population, regression
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors

TIGHT = {"rtol": 1e-11, "atol": 1e-11}
SIZES = st.integers(1, 4)
SEEDS = st.integers(0, 2**20)


@st.composite
def problems(draw, **fixed):
    """A problem of random sizes with well conditioned covariances, and factors for it."""
    sizes = [fixed.get(name) or draw(SIZES) for name in ("outputs", "dimension", "k")]
    problem = problem_of(*sizes, seed=draw(SEEDS), noise=draw(st.sampled_from([0.0, 0.3, 2.0])))
    return problem, factors_of(problem, seed=draw(SEEDS), scale=draw(st.sampled_from([0.1, 1.0])))


def gauge(size, seed):
    """An invertible matrix that is far from singular."""
    g = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn((size, size), generator=g, dtype=torch.float64))
    return Q * (0.5 + torch.rand(size, generator=g, dtype=torch.float64))


def within(problem, factors, radius):
    """The factors with ||V|| = radius."""
    V = problem.whiten(factors)[1]
    return factors._replace(B=factors.B * radius / torch.linalg.matrix_norm(V, ord=2))


@given(instances())
def test_the_closed_gradient_is_that_of_the_formula(instance):
    loss, gradients = regression.loss_and_gradients(*instance.arguments, instance.targets)
    instance.factors.map(lambda block: block.requires_grad_())
    expected = loss_by_formula(instance)
    torch.testing.assert_close(loss, expected.detach(), **TIGHT)
    torch.testing.assert_close(
        tuple(gradients), torch.autograd.grad(expected, instance.factors), **TIGHT
    )


@given(instances(), st.randoms(use_true_random=False))
def test_the_order_of_the_tokens_does_not_matter(instance, random):
    order = list(range(instance.length))
    random.shuffle(order)
    torch.testing.assert_close(
        regression.attend(instance.factors, instance.queries, instance.contexts[..., order, :]),
        regression.attend(*instance.arguments),
        **TIGHT,
    )


@given(instances(), st.floats(-10, 10))
def test_a_shift_of_the_tokens_shifts_the_pooled_token(instance, shift):
    moved = regression.attend(instance.factors, instance.queries, instance.contexts + shift)
    torch.testing.assert_close(moved - shift, regression.attend(*instance.arguments), **TIGHT)


@given(instances())
def test_the_pooled_token_stays_in_the_box_of_the_tokens(instance):
    pooled = regression.attend(*instance.arguments)
    tokens = instance.contexts if not instance.shared else instance.contexts[None]
    assert (pooled <= tokens.amax(dim=-2) + 1e-12).all()
    assert (pooled >= tokens.amin(dim=-2) - 1e-12).all()
    kept = regression.participation_ratio(*instance.arguments)
    assert (kept >= 1 - 1e-12).all()
    assert (kept <= instance.length + 1e-12).all()


@given(instances(), SEEDS)
def test_tokens_may_change_their_coordinates(instance, seed):
    # z -> H z with B -> B H^-1 and A -> A H^-1 leaves the output.
    H = gauge(instance.context_dimension, seed)
    inverse = torch.linalg.inv(H)
    factors = Factors(instance.factors.A @ inverse, instance.factors.B @ inverse)
    torch.testing.assert_close(
        regression.forward(factors, instance.queries, instance.contexts @ H.mT),
        regression.forward(*instance.arguments),
        rtol=1e-9,
        atol=1e-9,
    )


@given(problems(), SEEDS)
def test_the_population_loss_has_a_gauge(pair, seed):
    problem, (A, B) = pair
    H = gauge(problem.context_dimension, seed)
    S = problem.token_covariance
    moved = Factors(A @ H, B @ S @ torch.linalg.inv(H).mT @ torch.linalg.inv(S))
    torch.testing.assert_close(
        population.population_loss(moved, problem),
        population.population_loss(Factors(A, B), problem),
        rtol=1e-8,
        atol=1e-8,
    )


@given(problems())
def test_the_gradients_are_orthogonal_to_the_gauge(pair):
    # d/dH at H = I: A' G_A equals (S^-1 G_B' B S) in whitened form U' G_U = G_V' V.
    problem, factors = pair
    _, gradients = population.population_loss_and_gradients(factors, problem)
    U, V = problem.whiten(factors)
    G_U = gradients.A @ problem.inverse_token_root
    G_V = problem.inverse_query_root @ gradients.B @ problem.inverse_token_root
    torch.testing.assert_close(U.mT @ G_U, (V.mT @ G_V).mT, rtol=1e-8, atol=1e-8)


@given(problems())
def test_no_factors_beat_the_minimum(pair):
    problem, factors = pair
    assert population.population_loss(factors, problem) >= problem.minimum - 1e-12
    assert problem.minimum >= problem.noise_loss
    assert problem.rank <= min(problem.outputs, problem.dimension)


@given(problems())
def test_whitening_the_problem_changes_nothing(pair):
    # In whitened factors both covariances are the identity and the target is N.
    problem, factors = pair
    white = RegressionProblem(
        problem.whitened_target,
        torch.eye(problem.dimension).double(),
        torch.eye(problem.context_dimension).double(),
        problem.noise,
    )
    whitened = within(white, Factors(*problem.whiten(factors)), 0.4)
    plain = problem.unwhiten(*whitened)
    for function in (population.population_loss, population.finite_context_threshold):
        torch.testing.assert_close(
            function(whitened, white), function(plain, problem), rtol=1e-8, atol=1e-8
        )
    torch.testing.assert_close(
        population.finite_context_correction(whitened, white, 10, centred=True),
        population.finite_context_correction(plain, problem, 10, centred=True),
        rtol=1e-8,
        atol=1e-8,
    )


@given(problems(), st.floats(0.01, 0.7))
def test_the_correction_is_one_over_T_below_the_threshold(pair, radius):
    problem, factors = pair
    inside = within(problem, factors, radius)
    ten, hundred = (
        population.finite_context_correction(inside, problem, length) for length in (10, 100)
    )
    torch.testing.assert_close(ten, 10 * hundred, **TIGHT)
    centred = population.finite_context_correction(inside, problem, 10, centred=True)
    U, _ = problem.whiten(inside)
    torch.testing.assert_close(ten - centred, U.square().sum() / 20, rtol=1e-9, atol=1e-9)
    outside = within(problem, factors, 0.5**0.5 + radius)
    assert population.finite_context_correction(outside, problem, 10) == math.inf


@given(problems())
def test_centred_contexts_cost_the_balanced_amount_at_small_logits(pair):
    # At U V' = N, for v -> 0, the excess tends to (|U|^2 |V|^2 + |N|^2) / (2T).
    problem, factors = pair
    _, V = problem.whiten(within(problem, factors, 1e-3))
    U, _ = problem.whiten(factors)
    target = (U @ V.mT) @ problem.inverse_query_root
    fitted = RegressionProblem(target, problem.query_covariance, problem.token_covariance)
    actual = population.finite_context_correction(problem.unwhiten(U, V), fitted, 1, centred=True)
    law = 0.5 * (U.square().sum() * V.square().sum() + (U @ V.mT).square().sum())
    torch.testing.assert_close(actual, law, rtol=1e-4, atol=1e-12)


@given(st.integers(0, 200), st.integers(4, 9), st.integers(1, 3), st.booleans())
def test_least_squares_is_the_minimum_of_its_own_problem(seed, samples, outputs, shared):
    # Half the mean squared residual of any linear map is the population loss of the estimate.
    problem = regression_problem(
        outputs, 3, 3, condition=3.0, noise=0.5, generator=generator(seed, "task")
    )
    x = sample(problem, samples, 6, shared=shared, generator=generator(seed, "sample"))
    estimate = RegressionProblem.from_samples(*x)
    factors = factors_of(estimate, seed=seed)
    linear = factors.A @ estimate.token_covariance @ factors.B.mT
    residual = x.targets - x.queries @ linear.mT
    assert float(population.population_loss(factors, estimate)) == pytest.approx(
        float(residual.square().sum()) / (2 * samples), rel=1e-9
    )


@given(st.integers(1, 3), st.integers(3, 5), st.integers(0, 100))
def test_too_few_samples_are_always_refused_and_a_ridge_always_helps(samples, dimension, seed):
    problem = regression_problem(
        2, dimension, condition=2.0, noise=0.1, generator=generator(seed, "task")
    )
    short = dimension - 2
    few = sample(problem, min(samples, dimension - 1), 9, generator=generator(seed, "a"))
    brief = sample(problem, 9, short, generator=generator(seed, "b"))
    for x, name in ((few, "queries"), (brief, "contexts")):
        with pytest.raises(ValueError, match=f"{name}: the sample covariance is singular"):
            RegressionProblem.from_samples(*x)
        ridged = RegressionProblem.from_samples(*x, ridge=1e-3)
        assert torch.isfinite(ridged.inverse_query_root).all()
        assert torch.isfinite(ridged.inverse_token_root).all()


@given(st.floats(1, 1e8), st.integers(2, 6), st.integers(0, 50))
def test_roots_of_ill_conditioned_covariances(condition, dimension, seed):
    problem = regression_problem(
        2, dimension, condition=condition, noise=0.0, generator=generator(seed, "task")
    )
    root, inverse = problem.query_root, problem.inverse_query_root
    torch.testing.assert_close(root @ root, problem.query_covariance, rtol=0, atol=1e-13)
    apart = root @ inverse - torch.eye(dimension).double()
    assert apart.abs().max() < 1e-15 * 100 * condition**0.5
    assert problem.rank == min(2, dimension)
