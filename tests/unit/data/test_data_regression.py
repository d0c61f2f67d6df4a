"""Regression tasks: conditioning as asked for, laws of samples, seeds, errors."""

import math

import pytest
import torch

from attention_dynamics.data.regression import RegressionSample, regression_problem, sample
from attention_dynamics.data.streams import generator
from attention_dynamics.models.population import RegressionProblem


def task(outputs=3, dimension=4, k=None, *, condition=10.0, noise=0.3, seed=0, **options):
    return regression_problem(
        outputs, dimension, k, condition=condition, noise=noise,
        generator=generator(seed, "task"), **options,
    )  # fmt: skip


def drawn(problem, samples=6, length=8, *, seed=0, **options):
    return sample(problem, samples, length, generator=generator(seed, "sample"), **options)


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e4])
def test_the_query_covariance_is_conditioned_as_asked(condition):
    values = torch.linalg.eigvalsh(task(condition=condition).query_covariance)
    assert float(values[-1] / values[0]) == pytest.approx(condition, rel=1e-9)
    assert float(values.mean()) == pytest.approx(1.0)
    ratios = values[1:] / values[:-1]
    torch.testing.assert_close(ratios, ratios[:1].expand(3), rtol=1e-8, atol=0)


@pytest.mark.parametrize(("outputs", "dimension"), [(3, 4), (4, 2), (1, 1), (5, 5)])
def test_the_target_is_conditioned_as_asked(outputs, dimension):
    values = torch.linalg.svdvals(
        task(outputs, dimension, condition=1.0, target_condition=7.0).target
    )
    assert float(values[0]) == pytest.approx(1.0)
    smallest = 1.0 if min(outputs, dimension) == 1 else 1 / 7
    assert float(values[-1]) == pytest.approx(smallest)


def test_tokens_have_the_covariance_of_queries_where_they_can():
    problem = task()
    assert torch.equal(problem.token_covariance, problem.query_covariance)
    assert torch.equal(task(k=4).token_covariance, problem.query_covariance)
    other = task(k=2, condition=5.0).token_covariance
    values = torch.linalg.eigvalsh(other)
    assert other.shape == (2, 2)
    assert float(values[1] / values[0]) == pytest.approx(5.0)
    assert float(values.mean()) == pytest.approx(1.0)


def test_directions_are_uniform():
    # An entry of Sigma has standard deviation about 1, one of the target about 0.4.
    stream = generator(0, "task")
    drawn = [
        regression_problem(3, 4, condition=50.0, noise=0.0, generator=stream) for _ in range(200)
    ]
    mean = sum(problem.query_covariance for problem in drawn) / 200
    torch.testing.assert_close(mean, torch.eye(4).double(), rtol=0, atol=4 / 200**0.5)
    assert (sum(problem.target for problem in drawn) / 200).abs().max() < 4 * 0.4 / 200**0.5


def test_a_seed_names_a_problem():
    assert torch.equal(task().target, task().target)
    assert not torch.equal(task().target, task(seed=1).target)
    single = task(dtype=torch.float32)
    assert torch.equal(single.target, task().target.float())
    # The condition number changes the covariance and nothing else.
    assert torch.equal(task(condition=1.0).target, task(condition=1e4).target)


def test_shapes():
    problem = task(3, 4, 2)
    shared, own = drawn(problem), drawn(problem, shared=False)
    assert [tuple(value.shape) for value in shared] == [(6, 4), (8, 2), (6, 3)]
    assert [tuple(value.shape) for value in own] == [(6, 4), (6, 8, 2), (6, 3)]
    assert shared.shared
    assert not own.shared
    assert drawn(task(dtype=torch.float32)).contexts.dtype == torch.float32


@pytest.mark.parametrize("shared", [True, False])
def test_a_batch_of_problems_gives_a_batch_of_samples(shared):
    many = RegressionProblem.stack([task(seed=seed, noise=0.1 * seed) for seed in range(3)])
    value = drawn(many, shared=shared)
    assert value.queries.shape == (3, 6, 4)
    assert value.contexts.shape == ((3, 8, 4) if shared else (3, 6, 8, 4))
    # Without noise the targets of the first entry are its linear map.
    torch.testing.assert_close(value.targets[0], value.queries[0] @ many.target[0].mT)
    apart = value.targets[2] - value.queries[2] @ many.target[2].mT
    assert 0.05 < float(apart.std()) < 0.5


@pytest.mark.parametrize("shared", [True, False])
def test_the_first_samples_keep_their_contexts(shared):
    value = drawn(task(), shared=shared)
    first = value.first(4)
    assert isinstance(first, RegressionSample)
    assert torch.equal(first.queries, value.queries[:4])
    assert torch.equal(first.targets, value.targets[:4])
    assert torch.equal(first.contexts, value.contexts if shared else value.contexts[:4])


def test_second_moments_are_those_of_the_problem():
    problem = task(condition=5.0, noise=0.5)
    value = drawn(problem, 60_000, 60_000, centred=False)
    for moments, expected in (
        (torch.cov(value.queries.mT), problem.query_covariance),
        (torch.cov(value.contexts.mT), problem.token_covariance),
        (torch.cov((value.targets - value.queries @ problem.target.mT).mT),
         0.25 * torch.eye(3).double()),
    ):  # fmt: skip
        torch.testing.assert_close(moments, expected, rtol=0, atol=0.05)
    cross = value.queries.mT @ value.contexts / 60_000
    assert cross.abs().max() < 0.05


@pytest.mark.parametrize("shared", [True, False])
def test_centred_contexts_have_mean_zero(shared):
    value = drawn(task(), shared=shared)
    assert value.contexts.mean(dim=-2).abs().max() < 1e-14
    raw = drawn(task(), shared=shared, centred=False)
    torch.testing.assert_close(
        value.contexts, raw.contexts - raw.contexts.mean(dim=-2, keepdim=True)
    )


def test_correlated_tokens_are_stationary():
    value = drawn(task(condition=1.0), 4000, 5, shared=False, centred=False, correlation=0.8)
    tokens = value.contexts[..., 0]
    covariance = torch.cov(tokens.mT)
    lags = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    torch.testing.assert_close(covariance, 0.8 ** lags.double(), rtol=0, atol=0.12)
    torch.testing.assert_close(
        drawn(task(), correlation=0.0).contexts, drawn(task()).contexts, rtol=0, atol=0
    )


def test_the_same_seed_gives_the_same_queries_whatever_the_contexts():
    base = drawn(task())
    for options in ({"shared": False}, {"centred": False}, {"correlation": 0.5}, {"length": 20}):
        other = drawn(task(), **options)
        assert torch.equal(other.queries, base.queries)
        assert torch.equal(other.targets, base.targets)


def test_least_squares_of_many_samples_is_the_problem():
    problem = task(noise=0.1)
    estimate = RegressionProblem.from_samples(*drawn(problem, 20_000, 20_000))
    torch.testing.assert_close(estimate.target, problem.target, rtol=0, atol=0.01)
    assert estimate.noise == pytest.approx(0.1, rel=0.02)
    torch.testing.assert_close(
        estimate.token_covariance, problem.token_covariance, rtol=0, atol=0.1
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": 0}, "outputs: expected an integer >= 1, got 0"),
        ({"dimension": 0}, "dimension: expected an integer >= 1, got 0"),
        ({"k": 0}, "context_dimension: expected an integer >= 1, got 0"),
        ({"condition": 0.5}, "condition: expected a condition number >= 1, got 0.5"),
        ({"condition": math.inf}, "condition: expected a finite number > 0, got inf"),
        ({"target_condition": 0.0}, "target_condition: expected a finite number > 0, got 0"),
        ({"noise": -1.0}, "noise: expected a finite number >= 0, got -1.0; it is a standard"),
    ],
)
def test_problems_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        task(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "samples: expected an integer >= 1, got 0"),
        ({"length": 0}, "length: expected an integer >= 1, got 0"),
        ({"correlation": 1.0}, r"correlation: expected a number in \[0, 1\), got 1.0"),
        ({"correlation": -0.1}, "correlation: expected a finite number >= 0, got -0.1"),
    ],
)
def test_samples_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        drawn(task(), **changes)


def test_a_condition_number_needs_two_dimensions():
    assert float(task(2, 1, 1, condition=1.0).query_covariance) == 1.0
    with pytest.raises(ValueError, match=r"condition: .* dimension 1 has .* got 5.0"):
        task(2, 1, condition=5.0)


def test_a_generator_is_asked_for():
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, got int"):
        regression_problem(2, 2, condition=1.0, noise=0.0, generator=3)
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, got NoneType"):
        sample(task(), 2, 2, generator=None)
