"""The population problem: loss, gradients, whitening, estimates, finite contexts, errors."""

import math

import pytest
import torch
from regression_instances import Instance, covariance, factors_of, problem_of

from attention_dynamics.models import population, regression
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors

TIGHT = {"rtol": 1e-11, "atol": 1e-11}
SIZES = pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 2, 2), (4, 2, 5), (1, 1, 1)])


def loss_by_formula(factors, problem):
    """Half the trace of E Sigma E' and of the noise, with no root of a matrix."""
    E = factors.A @ problem.token_covariance @ factors.B.mT - problem.target
    return 0.5 * torch.trace(E @ problem.query_covariance @ E.mT) + (
        0.5 * problem.outputs * problem.noise**2
    )


@SIZES
def test_loss_and_gradients_are_the_formula_and_its_derivative(sizes):
    problem = problem_of(*sizes)
    factors = factors_of(problem).map(lambda block: block.requires_grad_())
    expected = loss_by_formula(factors, problem)
    loss, gradients = population.population_loss_and_gradients(factors, problem)
    torch.testing.assert_close(loss, expected, **TIGHT)
    torch.testing.assert_close(population.population_loss(factors, problem), expected, **TIGHT)
    expected_gradients = torch.autograd.grad(expected, factors)
    torch.testing.assert_close(tuple(gradients), expected_gradients, **TIGHT)


@SIZES
def test_whitened_factors_make_it_a_matrix_factorisation(sizes):
    problem = problem_of(*sizes)
    factors = factors_of(problem)
    U, V = problem.whiten(factors)
    E = U @ V.mT - problem.whitened_target
    risk = population.excess_risk(factors, problem)
    torch.testing.assert_close(risk, 0.5 * E.square().sum(), **TIGHT)
    torch.testing.assert_close(
        population.population_loss(factors, problem), risk + problem.noise_loss, **TIGHT
    )
    torch.testing.assert_close(problem.unwhiten(U, V), factors, **TIGHT)


def test_the_roots_are_roots():
    problem = problem_of()
    for root, inverse, matrix in (
        (problem.query_root, problem.inverse_query_root, problem.query_covariance),
        (problem.token_root, problem.inverse_token_root, problem.token_covariance),
    ):
        torch.testing.assert_close(root @ root, matrix, **TIGHT)
        torch.testing.assert_close(root @ inverse, torch.eye(len(root)).double(), **TIGHT)
        torch.testing.assert_close(root, root.mT, **TIGHT)


def test_more_latent_dimensions_than_rank_are_no_singularity():
    # k > min(m, d): V has a kernel, and a scaled step divides by it, but the problem is sound.
    problem = problem_of(2, 3, 5)
    factors = factors_of(problem)
    _, V = problem.whiten(factors)
    assert torch.linalg.matrix_rank(V.mT @ V) == 3
    torch.testing.assert_close(problem.unwhiten(*problem.whiten(factors)), factors, **TIGHT)
    torch.testing.assert_close(problem.minimum, problem.noise_loss, **TIGHT)
    assert (problem.rank, problem.latent_rank) == (2, 5)


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_the_minimum_is_reached_by_the_truncated_singular_values(k):
    problem = problem_of(3, 4, k)
    P, s, Q = torch.linalg.svd(problem.whitened_target, full_matrices=False)
    r = min(k, 3)
    U, V = torch.zeros(3, k).double(), torch.zeros(4, k).double()
    U[:, :r], V[:, :r] = P[:, :r] * s[:r], Q[:r].mT
    reached = population.population_loss(problem.unwhiten(U, V), problem)
    torch.testing.assert_close(problem.minimum, reached, **TIGHT)
    # A latent width at the rank leaves the noise alone.
    assert (problem.minimum > problem.noise_loss + 1e-6) == (k < 3)
    torch.testing.assert_close(problem.singular_values, s, **TIGHT)


def test_a_singular_token_covariance_lowers_the_latent_rank():
    problem = problem_of(3, 4, 4, token_rank=2)
    assert (problem.latent_rank, problem.rank) == (2, 3)
    tail = problem.singular_values[2].square() / 2
    torch.testing.assert_close(problem.minimum, problem.noise_loss + tail, **TIGHT)


def test_the_minimum_of_a_batch_is_that_of_each_entry():
    # Entries whose token covariances have different ranks leave different tails.
    problems = [problem_of(3, 4, 4, token_rank=rank, seed=rank) for rank in (4, 2, 1)]
    many = RegressionProblem.stack(problems)
    expected = torch.stack([problem.minimum for problem in problems])
    torch.testing.assert_close(many.minimum, expected, **TIGHT)
    assert many.latent_rank == 1
    crossed = RegressionProblem(
        torch.stack([problem.target for problem in problems])[:, None],
        problems[0].query_covariance,
        many.token_covariance[:2],
    )
    assert crossed.minimum.shape == crossed.batch_shape == (3, 2)


def test_the_rank_is_that_of_the_whitened_target():
    assert problem_of(3, 4).rank == 3
    assert problem_of(3, 4, query_rank=2).rank == 2
    low = problem_of(3, 4).target
    low[2] = low[0] + low[1]
    S = torch.eye(2).double()
    assert RegressionProblem(low, torch.eye(4).double(), S).rank == 2
    assert RegressionProblem(0 * low, torch.eye(4).double(), S).rank == 0
    tiny = torch.eye(3, 4).double() * torch.tensor([[1.0], [1e-8], [1e-20]]).double()
    assert RegressionProblem(tiny, torch.eye(4).double(), S).rank == 2  # rounding, not smallness


def test_the_noise_is_a_standard_deviation():
    problem = problem_of(3, noise=0.5)
    assert float(problem.noise_loss) == pytest.approx(3 * 0.25 / 2)


def test_singular_covariances_are_allowed_until_an_inverse_is_asked_for():
    problem = problem_of(query_rank=3, token_rank=1)
    factors = factors_of(problem)
    loss, _ = population.population_loss_and_gradients(factors, problem)
    torch.testing.assert_close(loss, loss_by_formula(factors, problem), **TIGHT)
    with pytest.raises(ValueError, match=r"query_covariance: .* singular, rank 3 of 4.* n >= d"):
        _ = problem.inverse_query_root
    with pytest.raises(ValueError, match=r"token_covariance: .* singular, rank 1 of 2.* T > k"):
        problem.unwhiten(*problem.whiten(factors))


def test_one_singular_entry_of_a_batch_is_found():
    S = torch.stack((covariance(2, 0), covariance(2, 0, rank=1)))
    problem = RegressionProblem(torch.ones(3, 4).double(), covariance(4, 1), S)
    with pytest.raises(ValueError, match="token_covariance: the covariance is singular, rank 1"):
        _ = problem.inverse_token_root


def test_a_batch_is_its_entries():
    problems = [problem_of(seed=seed, noise=0.1 * (seed + 1)) for seed in range(3)]
    many = RegressionProblem.stack(problems)
    factors = [factors_of(problem, seed=seed) for seed, problem in enumerate(problems)]
    together = Factors(torch.stack([f.A for f in factors]), torch.stack([f.B for f in factors]))
    assert many.batch_shape == (3,)
    loss, gradients = population.population_loss_and_gradients(together, many)
    V = many.whiten(together)[1]
    small = together._replace(B=together.B * (0.5 / torch.linalg.matrix_norm(V, 2))[:, None, None])
    correction = population.finite_context_correction(small, many, 50)
    for i, problem in enumerate(problems):
        expected = population.population_loss_and_gradients(factors[i], problem)
        actual = (loss[i], gradients.map(lambda block, i=i: block[i]))
        torch.testing.assert_close(actual, expected, **TIGHT)
        torch.testing.assert_close(many.minimum[i], problem.minimum, **TIGHT)
        one = population.finite_context_correction(small.map(lambda b, i=i: b[i]), problem, 50)
        torch.testing.assert_close(correction[i], one, **TIGHT)


def test_factors_may_have_more_batch_axes_than_the_problem():
    problem = problem_of()
    one = factors_of(problem)
    many = one.map(lambda block: torch.stack((block, 2 * block, -block))[:, None])
    loss, gradients = population.population_loss_and_gradients(many, problem)
    assert loss.shape == (3, 1)
    assert gradients.B.shape == (3, 1, 4, 2)
    expected = population.population_loss(one.map(torch.neg), problem)
    torch.testing.assert_close(loss[2, 0], expected, **TIGHT)


def test_moving_and_casting():
    problem = problem_of()
    single = problem.to(dtype=torch.float32, device="cpu")
    assert single.target.dtype == single.query_root.dtype == torch.float32
    factors = factors_of(problem)
    loss = population.population_loss(factors.to(dtype=torch.float32), single)
    torch.testing.assert_close(
        loss.double(), population.population_loss(factors, problem), rtol=1e-5, atol=1e-5
    )
    batched = RegressionProblem.stack([problem, problem])
    assert batched.to(dtype=torch.float32).noise.dtype == torch.float32


def test_nothing_is_bound_to_the_cpu():
    problem = problem_of().to(device="meta")
    factors = factors_of(problem_of()).to(device="meta")
    loss, gradients = population.population_loss_and_gradients(factors, problem)
    correction = population.finite_context_correction(factors, problem, 64)
    margin = population.finite_context_threshold(factors, problem)
    moved = problem.unwhiten(*problem.whiten(factors))
    values = (loss, correction, margin, problem.noise_loss, *gradients, *moved)
    assert {value.device.type for value in values} == {"meta"}
    x = Instance(samples=9, batch=(2,))
    samples = (value.to(device="meta") for value in (x.queries, x.contexts, x.targets))
    assert RegressionProblem.from_samples(*samples).target.device.type == "meta"


# From samples


@pytest.mark.parametrize("shared", [True, False])
def test_the_estimate_is_least_squares(shared):
    x = Instance(samples=30, length=12, shared=shared)
    problem = RegressionProblem.from_samples(x.queries, x.contexts, x.targets)
    least_squares = torch.linalg.lstsq(x.queries, x.targets)
    torch.testing.assert_close(problem.target, least_squares.solution.mT, **TIGHT)
    torch.testing.assert_close(problem.query_covariance, x.queries.mT @ x.queries / 30, **TIGHT)
    residual = x.targets - x.queries @ problem.target.mT
    assert float(problem.noise_loss) == pytest.approx(float(residual.square().sum() / 60))
    contexts = x.contexts[None] if shared else x.contexts
    covariances = [torch.cov(Z.mT, correction=0) for Z in contexts]
    torch.testing.assert_close(problem.token_covariance, sum(covariances) / len(contexts), **TIGHT)


def test_the_token_covariance_is_the_slope_of_attention_at_zero_logits():
    x = Instance(samples=8, length=9)
    problem = RegressionProblem.from_samples(x.queries, x.contexts, x.targets)
    small = x.factors._replace(B=1e-7 * x.factors.B)
    moved = regression.attend(small, x.queries, x.contexts) - x.contexts.mean(dim=0)
    slope = x.queries @ x.factors.B @ problem.token_covariance
    torch.testing.assert_close(1e7 * moved, slope, rtol=1e-5, atol=1e-5)


def test_samples_in_batches():
    x = Instance(samples=9, length=7, batch=(2,))
    many = RegressionProblem.from_samples(x.queries, x.contexts, x.targets)
    assert many.batch_shape == (2,)
    for i in range(2):
        one = x.entry(i)
        problem = RegressionProblem.from_samples(one.queries, one.contexts, one.targets)
        torch.testing.assert_close(many.target[i], problem.target, **TIGHT)
        assert float(many.noise[i]) == pytest.approx(problem.noise)


@pytest.mark.parametrize("shared", [True, False])
def test_singular_samples_need_an_explicit_ridge(shared):
    few = Instance(samples=3, length=12, shared=shared)
    with pytest.raises(
        ValueError, match=r"queries: the sample covariance .* rank 3 of 4.*n = 3, d = 4.* ridge > 0"
    ):
        RegressionProblem.from_samples(few.queries, few.contexts, few.targets)
    problem = RegressionProblem.from_samples(few.queries, few.contexts, few.targets, ridge=0.1)
    G = few.queries.mT @ few.queries / 3 + 0.1 * torch.eye(4).double()
    expected = torch.linalg.solve(G, few.queries.mT @ few.targets / 3).mT
    torch.testing.assert_close(problem.target, expected, **TIGHT)
    torch.testing.assert_close(problem.query_covariance, G, **TIGHT)


@pytest.mark.parametrize("length", [1, 2])
def test_contexts_as_short_as_their_dimension_are_singular(length):
    # The mean takes one degree of freedom: T <= k, not T < k.
    x = Instance(samples=9, length=length)
    with pytest.raises(ValueError, match=rf"contexts: .*T = {length}, k = 2: take T > k.* ridge"):
        RegressionProblem.from_samples(x.queries, x.contexts, x.targets)
    enough = Instance(samples=9, length=3)
    RegressionProblem.from_samples(enough.queries, enough.contexts, enough.targets)


def test_dependent_coordinates_are_singular_at_any_sample_size():
    x = Instance(samples=500, length=20)
    x.queries[:, 3] = x.queries[:, 0] - x.queries[:, 1]
    with pytest.raises(ValueError, match=r"queries: .* rank 3 of 4"):
        RegressionProblem.from_samples(x.queries, x.contexts, x.targets)


def test_samples_that_do_not_fit_are_refused():
    x = Instance(samples=9)
    with pytest.raises(ValueError, match=r"targets: .* n = 9, got \(8, 3\)"):
        RegressionProblem.from_samples(x.queries, x.contexts, x.targets[:8])
    with pytest.raises(ValueError, match=r"ridge: expected a finite number >= 0, got -1"):
        RegressionProblem.from_samples(x.queries, x.contexts, x.targets, ridge=-1.0)
    with pytest.raises(ValueError, match=r"queries: expected finite values"):
        RegressionProblem.from_samples(x.queries * math.nan, x.contexts, x.targets)


# Finite contexts


def correction_by_formula(factors, problem, length):
    """D/T [tr(A S A')/2 + tr(C Q C')/2 - tr((C - M) Q C')], Q = (Sigma^-1 - 2 B S B')^-1."""
    A, B = factors
    S, Sigma = problem.token_covariance, problem.query_covariance
    P, C = B @ S @ B.mT, A @ S @ B.mT
    D = torch.linalg.det(torch.eye(len(Sigma)).double() - 2 * Sigma @ P) ** -0.5
    Q = torch.linalg.inv(torch.linalg.inv(Sigma) - 2 * P)
    traces = 0.5 * torch.trace(A @ S @ A.mT) + 0.5 * torch.trace(C @ Q @ C.mT)
    return D / length * (traces - torch.trace((C - problem.target) @ Q @ C.mT))


def with_radius(factors, problem, radius):
    """The factors with B scaled to ||V|| = radius."""
    V = problem.whiten(factors)[1]
    return factors._replace(B=factors.B * radius / torch.linalg.matrix_norm(V, 2))


@SIZES
@pytest.mark.parametrize("radius", [0.1, 0.5, 0.7])
def test_the_correction_is_its_formula(sizes, radius):
    problem = problem_of(*sizes)
    factors = with_radius(factors_of(problem), problem, radius)
    actual = population.finite_context_correction(factors, problem, 64)
    torch.testing.assert_close(actual, correction_by_formula(factors, problem, 64), **TIGHT)
    margin = population.finite_context_threshold(factors, problem)
    assert float(margin) == pytest.approx(0.5 - radius**2)


@pytest.mark.parametrize("centred", [False, True])
def test_the_correction_is_what_fresh_contexts_cost(centred):
    problem = problem_of(2, 2, 2, noise=0.0)
    A, B = factors = with_radius(factors_of(problem), problem, 0.3)
    S = problem.token_covariance
    length, samples = 128, 10_000
    g = torch.Generator().manual_seed(3)
    x = torch.randn((samples, 2), generator=g, dtype=torch.float64) @ problem.query_root
    z = torch.randn((samples, length, 2), generator=g, dtype=torch.float64) @ problem.token_root
    mean = z.mean(dim=1) if centred else torch.zeros(samples, 2).double()
    limit, y = x @ (A @ S @ B.mT).mT, x @ problem.target.mT
    finite = regression.forward(factors, x, z - mean[:, None])
    paired = 0.5 * ((finite - y).square() - (limit - y).square()).sum(dim=-1)
    # The fluctuation of first order, sum w (z - S b) / (T E w) less the mean, has expectation 0.
    b = x @ B
    w = torch.exp((z @ b[..., None])[..., 0] - 0.5 * ((b @ S) * b).sum(dim=-1, keepdim=True))
    first = (w[..., None] * (z - (b @ S)[:, None])).mean(dim=1) - mean
    paired = paired - ((limit - y) * (first @ A.mT)).sum(dim=-1)
    predicted = population.finite_context_correction(factors, problem, length, centred=centred)
    error = paired.std() / samples**0.5
    size = problem.whiten(factors)[0].square().sum() / (2 * length)
    assert error < 0.03 * size
    assert (paired.mean() - predicted).abs() < 4 * error + 0.05 * size


@pytest.mark.parametrize("radius", [0.5**0.5 + 1e-9, 0.8, 3.0])
def test_past_the_threshold_the_correction_is_infinite(radius):
    problem = problem_of(3, 4, 2)
    factors = with_radius(factors_of(problem), problem, radius)
    assert population.finite_context_correction(factors, problem, 64) == math.inf
    assert population.finite_context_threshold(factors, problem) < 0


def test_two_directions_past_the_threshold_do_not_pass_for_none():
    # det(I - 2 V V') is positive again: the sign of the determinant is no test.
    identity = torch.eye(2).double()
    problem = RegressionProblem(identity, identity, identity)
    factors = Factors(identity, identity)
    assert torch.linalg.det(identity - 2 * factors.B @ factors.B.mT) > 0
    assert population.finite_context_correction(factors, problem, 64) == math.inf


def test_the_correction_of_singular_covariances():
    problem = problem_of(query_rank=3, token_rank=1)
    factors = with_radius(factors_of(problem), problem, 0.5)
    near = RegressionProblem(
        problem.target,
        problem.query_covariance + 1e-9 * torch.eye(4).double(),
        problem.token_covariance + 1e-9 * torch.eye(2).double(),
        problem.noise,
    )
    torch.testing.assert_close(
        population.finite_context_correction(factors, problem, 64),
        population.finite_context_correction(factors, near, 64),
        rtol=1e-6,
        atol=0,
    )


def test_a_mixed_batch_is_infinite_where_it_must_be():
    problem = problem_of()
    one = factors_of(problem)
    both = [with_radius(one, problem, radius) for radius in (0.5, 0.9)]
    factors = Factors(torch.stack([f.A for f in both]), torch.stack([f.B for f in both]))
    factors.map(lambda block: block.requires_grad_())
    value = population.finite_context_correction(factors, problem, 64)
    assert torch.isfinite(value).tolist() == [True, False]
    gradient = torch.autograd.grad(value[0], factors.A)[0]
    assert torch.isfinite(gradient).all()


# Errors


def test_problems_that_are_none_are_refused():
    M, eye = torch.ones(3, 4).double(), torch.eye(4).double()
    S = torch.eye(2).double()
    with pytest.raises(ValueError, match=r"query_covariance: .* d = 4, got \(3, 3\)"):
        RegressionProblem(M, torch.eye(3).double(), S)
    with pytest.raises(ValueError, match=r"token_covariance: .* k = 3, got \(2, 3\)"):
        RegressionProblem(M, eye, torch.ones(2, 3).double())
    with pytest.raises(ValueError, match=r"query_covariance: .* symmetric .* pass 0.5"):
        RegressionProblem(M, eye + torch.diag(torch.ones(3), 1), S)
    with pytest.raises(ValueError, match=r"token_covariance: expected eigenvalues >= 0, got -1"):
        RegressionProblem(M, eye, torch.diag(torch.tensor([1.0, -1.0]).double()))
    with pytest.raises(ValueError, match=r"target: expected finite values, got nan"):
        RegressionProblem(M * math.nan, eye, S)
    with pytest.raises(TypeError, match=r"token_covariance: has dtype torch.float32"):
        RegressionProblem(M, eye, torch.eye(2))
    with pytest.raises(ValueError, match=r"noise: expected a finite number >= 0, got -1"):
        RegressionProblem(M, eye, S, -1.0)
    with pytest.raises(ValueError, match=r"noise: expected standard deviations >= 0, got -1"):
        RegressionProblem(M, eye, S, torch.tensor([1.0, -1.0]))
    with pytest.raises(ValueError, match=r"problems: expected at least one"):
        RegressionProblem.stack([])


def test_factors_of_another_size_are_refused():
    problem = problem_of(3, 4, 2)
    A, B = factors_of(problem)
    for function in (
        population.population_loss,
        population.population_loss_and_gradients,
        population.excess_risk,
        population.finite_context_threshold,
    ):
        with pytest.raises(ValueError, match=r"factors.B: .* d = 4, .*got \(3, 2\)"):
            function(Factors(A, B[:3]), problem)
        with pytest.raises(ValueError, match=r"factors.A: .* m = 3, .*got \(2, 2\)"):
            function(Factors(A[:2], B), problem)
        with pytest.raises(TypeError, match=r"factors.A: has dtype torch.float32"):
            function(Factors(A.float(), B.float()), problem)
        with pytest.raises(ValueError, match=r"factors.A: expected finite values"):
            function(Factors(A * math.inf, B), problem)
    with pytest.raises(ValueError, match="length: expected an integer >= 1, got 0"):
        population.finite_context_correction(Factors(A, B), problem, 0)
