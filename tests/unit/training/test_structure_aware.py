"""Descent on the population and on samples: records, rates, and what it refuses."""

import math
import warnings

import pytest
import torch
from factorisation_instances import covariance, factors, problem

from attention_dynamics.data.regression import RegressionSample
from attention_dynamics.models import regression
from attention_dynamics.models.population import population_loss, population_loss_and_gradients
from attention_dynamics.models.regression import Factors
from attention_dynamics.models.regression_problem import RegressionProblem
from attention_dynamics.training.structure_aware import (
    Scheme,
    descend,
    first_step,
    random_initialisation,
    spectral_initialisation,
    step,
)

DAMPED = Scheme("scaled", 0.5, damping=0.1, rho=0.2)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def near(task, size, seed=0):
    """A start whose product is within a relative distance ``size`` of the target."""
    N = task.whitened_target
    noise = torch.randn(N.shape, generator=generator(seed), dtype=N.dtype)
    moved = N @ (torch.eye(N.shape[-1]) + size * noise / torch.linalg.matrix_norm(noise, 2))
    shifted = RegressionProblem(
        moved @ task.inverse_query_root, task.query_covariance, task.token_covariance
    )
    return spectral_initialisation(shifted)


def data(seed=0, n=120, length=300, dimension=4, outputs=3):
    stream = generator(seed)
    truth = RegressionProblem(
        torch.randn(outputs, dimension, generator=stream, dtype=torch.float64),
        covariance(dimension, 10.0, stream),
        torch.eye(dimension, dtype=torch.float64),
        0.3,
    )
    draw = lambda *shape: torch.randn(*shape, generator=stream, dtype=torch.float64)  # noqa: E731
    X, Z = draw(n, dimension) @ truth.query_root, draw(length, dimension)
    Y = X @ truth.target.T + 0.3 * draw(n, outputs)
    return truth, RegressionSample(X, Z - Z.mean(dim=0), Y)


def test_the_records_are_those_of_the_iterates():
    task, start = problem(batch=(2,)), factors(batch=(2,), size=0.3)
    run = descend(start, task, DAMPED, 4)
    at = start
    for number in range(5):
        loss, gradients = population_loss_and_gradients(at, task)
        torch.testing.assert_close(run.loss[number], loss)
        torch.testing.assert_close(run.risk[number] + task.noise_loss, loss)
        U, V = task.whiten(at)
        error = torch.linalg.matrix_norm(U @ V.mT - task.whitened_target)
        relative = error / torch.linalg.matrix_norm(task.whitened_target)
        torch.testing.assert_close(run.distance[number], relative)
        torch.testing.assert_close(run.excess[number], relative.square())
        torch.testing.assert_close(run.norm[number], torch.linalg.matrix_norm(V, 2))
        if number < 4:
            at = step(at, gradients, task, DAMPED)
    assert torch.equal(run.factors.A, at.A)
    assert torch.isinf(run.effective).all()
    assert not run.rejected.any()


def test_first_steps_and_the_tolerance():
    values = torch.tensor([[3.0, 3.0], [1.0, 2.0], [0.5, 2.0]])
    assert first_step(values, 1.0).tolist() == [1, -1]
    assert first_step(values, torch.tensor([3.0, 2.0])).tolist() == [0, 1]
    task = problem(4, 4, 4)
    run = descend(near(task, 0.3), task, DAMPED, 50, tolerance=1e-6)
    assert len(run.loss) == int(run.steps_to(1e-6)) + 1 < 10
    assert run.excess[-1] <= 1e-6 < run.excess[-2]


def test_a_refused_step_stops_its_instance_and_no_other():
    task = RegressionProblem.stack([problem(4, 4, 4), problem(4, 4, 4)])
    good = spectral_initialisation(task, 0.2)
    bad = random_initialisation(task, 1e-4, generator=generator(1))
    flags = torch.tensor([False, True])[:, None, None]
    start = good.zip(bad, lambda a, b: torch.where(flags, b, a))
    run = descend(start, task, Scheme("whiten", 50.0, rho=0.2), 6)
    assert run.rejected.tolist() == [False, True]
    assert torch.isfinite(run.loss).all()
    assert (run.loss[-1, 1] == run.loss[-2, 1]).all()


@pytest.mark.parametrize(("eta", "factor"), [(0.1, 0.8), (0.3, 0.4), (2 / 3, 1 / 3)])
@pytest.mark.parametrize("condition", [1.0, 1000.0])
def test_the_asymptotic_factor_knows_no_condition_number(eta, factor, condition):
    task = problem(4, 4, 4, condition=condition)
    steps = round(-7 / math.log10(factor))
    run = descend(near(task, 0.2), task, Scheme("scaled", eta), steps)
    slope = torch.log10(run.risk[-1] / run.risk[-1 - steps // 3]) / (steps // 3)
    assert float(slope) == pytest.approx(2 * math.log10(factor), rel=0.01)


def test_a_latent_width_of_the_rank_has_its_own_factor():
    task = problem(3, 9, 3, condition=50.0)
    stream = generator(3)
    start = spectral_initialisation(task)
    start = start.map(
        lambda block: block + 0.02 * torch.randn(block.shape, generator=stream, dtype=block.dtype)
    )
    run = descend(start, task, Scheme("scaled", 0.5), 24)
    slope = torch.log10(run.risk[-1] / run.risk[-9]) / 8
    assert float(slope) == pytest.approx(2 * math.log10(0.5), rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_the_local_theorem_holds_along_a_run(seed):
    task, eta = problem(5, 5, 5, condition=100.0, seed=seed), 0.4
    run_from = near(task, 0.5, seed)
    run = descend(run_from, task, Scheme("scaled", eta), 8)
    bound = (1 - eta) ** (4 * torch.arange(9, dtype=torch.float64)) * run.risk[0]
    assert (run.risk <= bound * (1 + 1e-9) + 1e-25).all()


def trapped_start(task):
    """The target with the sign of its smallest direction turned round."""
    L, s, R = torch.linalg.svd(task.whitened_target)
    s[-1] *= -0.5
    return task.unwhiten(L * s.abs().sqrt(), R.T * s.abs().sqrt() * s.sign())


def test_an_undamped_start_with_a_negative_eigenvalue_is_refused():
    task = problem(4, 4, 4)
    start = trapped_start(task)
    with pytest.raises(ValueError, match="1 eigenvalues on the negative real axis"):
        descend(start, task, Scheme("scaled", 0.3), 5)
    run = descend(start, task, Scheme("scaled", 0.3), 40, check=False)
    U, V = task.whiten(run.factors)
    ratio = torch.linalg.det(U @ V.T) / torch.linalg.det(task.whitened_target)
    assert float(ratio) < 0
    assert run.excess[-1] > 1e-4
    U, V = task.whiten(start)
    skewed = task.unwhiten(U * torch.arange(1.0, 5.0), V / torch.arange(1.0, 5.0))
    assert descend(skewed, task, DAMPED, 40).excess[-1] < 1e-12


def test_balance_after_every_step_keeps_the_sign_of_the_determinant():
    task = problem(4, 4, 4)
    balanced = Scheme("scaled", 0.5, damping=0.1, rho=0.2, balance=True)
    run = descend(trapped_start(task), task, balanced, 40)
    U, V = task.whiten(run.factors)
    assert float(torch.linalg.det(U @ V.T) / torch.linalg.det(task.whitened_target)) < 1e-12
    assert run.excess[-1] > 1e-4
    assert descend(near(task, 0.5), task, balanced, 40).excess[-1] < 1e-12


def test_fewer_columns_than_the_rank_warn_with_the_rate_of_the_gap():
    task = problem(4, 4, 2)
    s = task.singular_values
    with pytest.warns(UserWarning, match=f"sigma_k allows|{float(s[2] / s[1]):.3g}"):
        run = descend(spectral_initialisation(task), task, Scheme("scaled", 0.5), 3)
    floor = s[2:].square().sum() / s.square().sum()
    torch.testing.assert_close(run.excess[-1], floor)


@pytest.mark.parametrize("own", [False, True])
def test_on_a_sample_the_loss_is_that_of_the_layer_and_the_risk_that_of_the_truth(own):
    truth, sample = data()
    if own:
        contexts = torch.randn(120, 100, 4, generator=generator(2), dtype=torch.float64)
        sample = sample._replace(contexts=contexts)
    known = RegressionProblem.from_samples(*sample)
    start = random_initialisation(known, 0.2, generator=generator(1))
    run = descend(start, known, DAMPED, 3, sample=sample, truth=truth)
    torch.testing.assert_close(run.loss[0], regression.loss(start, *sample))
    torch.testing.assert_close(run.loss[-1], regression.loss(run.factors, *sample))
    loss = population_loss(run.factors, truth)
    torch.testing.assert_close(run.risk[-1] + truth.noise_loss, loss)
    sizes = regression.effective_sample_size(
        start, sample.queries, known.token_covariance, sample.contexts.shape[-2]
    )
    torch.testing.assert_close(run.effective[0], sizes.mean())


def test_a_subset_start_descends_to_the_risk_of_least_squares():
    truth, sample = data(n=240, length=600)
    subset = RegressionProblem.from_samples(
        sample.queries[:30], sample.contexts, sample.targets[:30]
    )
    known = RegressionProblem.from_samples(*sample)
    shown = RegressionProblem(truth.target, truth.query_covariance, known.token_covariance, 0.3)
    start = spectral_initialisation(subset, 0.2)
    run = descend(start, known, Scheme("scaled", 0.5, damping=0.2, rho=0.2), 12,
                  sample=sample, truth=shown)  # fmt: skip
    least = (known.target - truth.target) @ truth.query_root
    floor = least.square().sum() / 2
    assert run.risk[0] > 2 * floor
    assert 0.7 < float(run.risk[-1] / floor) < 1.4
    assert run.distance[-1] < run.distance[0]


def test_a_batch_of_samples_is_its_instances():
    pairs = [data(seed) for seed in range(2)]
    together = RegressionSample(
        *(torch.stack(blocks) for blocks in zip(*(s for _, s in pairs), strict=True))
    )
    known = RegressionProblem.from_samples(*together)
    start = random_initialisation(known, 0.2, generator=generator(0))
    run = descend(start, known, DAMPED, 4, sample=together)
    for i, (_, sample) in enumerate(pairs):
        alone = descend(
            start.map(lambda block, i=i: block[i]), RegressionProblem.from_samples(*sample),
            DAMPED, 4, sample=sample,
        )  # fmt: skip
        torch.testing.assert_close(run.loss[:, i], alone.loss)
        torch.testing.assert_close(run.excess[:, i], alone.excess)


def test_a_short_context_is_warned_of():
    _, sample = data(length=20)
    known = RegressionProblem.from_samples(*sample)
    start = spectral_initialisation(known, 0.2)
    with pytest.warns(UserWarning, match="effective sample size"):
        descend(start, known, DAMPED, 1, sample=sample)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        descend(start, known, DAMPED, 1, sample=sample, check=False)


def test_bad_arguments_are_named():
    task = problem()
    with pytest.raises(ValueError, match="steps: expected an integer >= 0"):
        descend(factors(), task, DAMPED, -1)
    bad = Factors(factors().A * math.nan, factors().B)
    with pytest.raises(ValueError, match=r"factors\.A"):
        descend(bad, task, DAMPED, 1)
    with pytest.raises(ValueError, match="k = 5"):
        descend(factors(3, 4, 5), problem(3, 4, 5), Scheme("scaled", 0.5), 1)


@pytest.mark.parametrize(("damping", "trapped"), [(0.1, True), (0.12, True), (0.13, False)])
def test_damping_below_a_quarter_of_the_step_size_has_an_attracting_cycle(damping, trapped):
    # The first direction is solved and holds the scale, which in one dimension is the whole gauge.
    one = torch.eye(2, dtype=torch.float64)
    task = RegressionProblem(one, one, one)
    scheme = Scheme("scaled", 0.5, damping=damping)
    start = Factors(one * torch.tensor([1.0, 0.4]), one * torch.tensor([1.0, -0.41]))
    run = descend(start, task, scheme, 400)
    assert bool(run.excess[-1] > 0.1) == trapped
