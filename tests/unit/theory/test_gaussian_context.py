"""The moments of attention over Gaussian tokens, against direct quadrature and sampling."""

import math

import numpy as np
import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors, attend
from attention_dynamics.theory.gaussian_context import (
    collision_moments,
    context_excess,
    context_exponent,
    mean_collision_moments,
    sampled_excess,
)


def hermite_moments(s, length, nodes=60):
    """p_2 and p_3 - p_2^2 by product Gauss-Hermite quadrature over the tokens' logits."""
    x, weight = np.polynomial.hermite_e.hermegauss(nodes)
    grids = np.meshgrid(*(x,) * length, indexing="ij")
    weights = math.prod(np.meshgrid(*(weight,) * length, indexing="ij"))
    weights = weights / (2 * math.pi) ** (length / 2)
    q = np.stack(grids)
    alpha = np.exp(s * (q - q.max(axis=0)))
    alpha /= alpha.sum(axis=0)
    p_2, p_3 = (alpha**2).sum(axis=0), (alpha**3).sum(axis=0)
    return (weights * p_2).sum(), (weights * (p_3 - p_2**2)).sum()


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.parametrize("s", [0.005, 0.011, 0.3, 1.0])
def test_few_tokens_against_product_quadrature(s, length):
    second, spread = hermite_moments(s, length)
    found = collision_moments(s, (length,))
    assert found.second[0] == pytest.approx(second, rel=1e-7)
    assert found.spread[0] == pytest.approx(spread, rel=1e-3 if s < 0.1 else 1e-6)


@pytest.mark.parametrize(("s", "length"), [(0.7, 16), (1.5, 200), (3.0, 200)])
def test_many_tokens_against_sampling(s, length):
    q = torch.randn(20000, length, generator=generator(0, "moments", length), dtype=torch.float64)
    alpha = torch.softmax(s * q, dim=-1)
    p_2, p_3 = alpha.square().sum(dim=-1), alpha.pow(3).sum(dim=-1)
    found = collision_moments(s, (length,))
    for sample, value in ((p_2, found.second[0]), (p_3 - p_2**2, found.spread[0])):
        assert abs(sample.mean() - value) < 4 * sample.std() / math.sqrt(len(sample))


def test_one_token_and_no_logits():
    for s in (0.0, 0.5, 5.0):
        one = collision_moments(s, (1,))
        assert one.second[0] == pytest.approx(1.0, abs=1e-7)
        assert one.spread[0] == pytest.approx(0.0, abs=1e-7)
    assert collision_moments(0.0, (8.0,)).second[0] == 1 / 8


@pytest.mark.parametrize("s", [0.1, 1.0, 3.0, 8.0, 20.0, 40.0])
def test_the_logistic_bound_at_every_length(s):
    lengths = np.array([2.0, 10.0, 1e3, 1e10, 1e40, 1e100])
    found = collision_moments(s, lengths)
    assert (found.second <= (1 + 1e-7) / (1 + (lengths - 1) * math.exp(-(s**2)))).all()
    assert (found.second * lengths >= 1 - 1e-7).all()


def test_long_contexts_reach_the_effective_sample_size():
    found = collision_moments(1.0, (1e8,))
    assert found.second[0] * 1e8 == pytest.approx(math.e, rel=1e-5)


def test_the_average_over_queries_below_the_threshold():
    found = mean_collision_moments(0.3, (1e8,))
    assert found.second[0] * 1e8 == pytest.approx((1 - 2 * 0.09) ** -0.5, rel=1e-5)


def test_the_exponent_is_continuous_and_is_what_long_contexts_show():
    assert context_exponent(math.sqrt(0.5)) == pytest.approx(1.0)
    assert context_exponent(math.sqrt(0.5) + 1e-9) == pytest.approx(1.0, abs=1e-7)
    for norm in (1.0, 2.0):
        low, high = mean_collision_moments(norm, (1e90, 1e100)).second
        slope = math.log(high / low) / (10 * math.log(10))
        logarithms = 1 / (2 * 95 * math.log(10))  # of the factor (log T)^(-1/2)
        assert slope == pytest.approx(-context_exponent(norm) - logarithms, abs=5e-4)


@pytest.mark.parametrize("centred", [False, True])
def test_the_excess_against_fresh_contexts(centred):
    stream = generator(0, "excess")
    k, length, draws = 3, 12, 10000
    root = torch.randn(k, k, generator=stream, dtype=torch.float64) / 2
    S = root @ root.T + 0.3 * torch.eye(k, dtype=torch.float64)
    A, B, M = (torch.randn(2, k, generator=stream, dtype=torch.float64) for _ in range(3))
    B, M = B / 2, M[:, :2]
    problem = RegressionProblem(M, torch.eye(2, dtype=torch.float64), S)
    x = torch.tensor([[0.8, -0.6]], dtype=torch.float64)
    expected = context_excess(Factors(A, B), problem, x, length, centred=centred)
    tokens = torch.randn(draws, length, k, generator=stream, dtype=torch.float64)
    tokens = tokens @ torch.linalg.cholesky(S).T
    if centred:
        tokens = tokens - tokens.mean(dim=1, keepdim=True)
    pooled = attend(Factors(A, B), x.expand(draws, 2), tokens)
    loss = 0.5 * (pooled @ A.T - x @ M.T).square().sum(dim=-1)
    limit = 0.5 * (x @ B @ S @ A.T - x @ M.T).square().sum()
    assert abs(loss.mean() - limit - expected) < 4 * loss.std() / math.sqrt(draws)


@pytest.mark.parametrize("largest", [4.0, 12.0, 39.0])
def test_the_excess_interpolates_well_at_large_logits(largest):
    eye = torch.eye(1, dtype=torch.float64)
    problem = RegressionProblem(eye, eye, eye)
    x = torch.linspace(0.01, 1.0, 13, dtype=torch.float64)[:, None] * largest
    for length in (3, 10**6):
        found = context_excess(Factors(eye, eye), problem, x, length)
        moments = [collision_moments(float(value), (length,)) for value in x[:, 0]]
        pi, chi = (torch.tensor([float(m[i][0]) for m in moments]).double() for i in (0, 1))
        expected = 0.5 * pi + 0.5 * (pi - 6 * chi) * x[:, 0] ** 2
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("v", [0.3, 1.0])
@pytest.mark.parametrize("length", [1, 2, 12])
def test_sampled_excess_is_unbiased_and_its_control_variate_pays(v, length):
    stream = generator(0, "sampled excess", length)
    k, draws = 3, 40000
    A, M = (torch.randn(2, k, generator=stream, dtype=torch.float64) for _ in range(2))
    root = torch.randn(k, k, generator=stream, dtype=torch.float64) / 2
    S = root @ root.T + 0.3 * torch.eye(k, dtype=torch.float64)
    problem = RegressionProblem(M[:, :2], torch.eye(2, dtype=torch.float64), S)
    B = torch.randn(2, k, generator=stream, dtype=torch.float64)
    x = torch.tensor([[0.8, -0.6]], dtype=torch.float64)
    factors = Factors(A, v * B / (x @ B @ S @ B.T @ x.T).sqrt())  # logits of deviation v
    tokens = torch.randn(draws, length, k, generator=stream, dtype=torch.float64)
    tokens = tokens @ torch.linalg.cholesky(S).T
    found = sampled_excess(factors, problem, x.expand(draws, 2), tokens)
    expected = context_excess(factors, problem, x, length)
    assert abs(found.mean() - expected) < 4 * found.std() / math.sqrt(draws)
    if v < 1 and length > 1:
        pooled = attend(factors, x.expand(draws, 2), tokens) @ A.T
        plain = 0.5 * (pooled - x @ problem.target.T).square().sum(dim=-1)
        assert found.std() < plain.std()


def test_mean_over_queries_weighs_the_spread_by_the_square():
    norm, length = 0.6, 7
    x, weight = np.polynomial.hermite_e.hermegauss(80)
    rows = [collision_moments(norm * abs(float(value)), (length,)) for value in x]
    weight = weight / math.sqrt(2 * math.pi)
    second = sum(w * row.second[0] for w, row in zip(weight, rows, strict=True))
    spread = sum(
        w * (norm * value) ** 2 * row.spread[0]
        for w, value, row in zip(weight, x, rows, strict=True)
    )
    found = mean_collision_moments(norm, (length,))
    assert found.second[0] == pytest.approx(second, rel=1e-7)
    assert found.spread[0] == pytest.approx(spread, rel=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match=r"deviation must lie in \[0, 40\], got -1"):
        collision_moments(-1.0, (4,))
    with pytest.raises(ValueError, match="lengths must be a list of numbers"):
        collision_moments(1.0, (0.5,))
    with pytest.raises(ValueError, match="norm must be positive, got 0"):
        context_exponent(0.0)
    for norm in (0.0, 20.0, math.nan):  # beyond 5 queries that matter would be cut off
        with pytest.raises(ValueError, match="norm must be positive and at most 5"):
            mean_collision_moments(norm, (4,))
    eye = torch.eye(2, dtype=torch.float64)
    batched = Factors(eye.expand(3, 2, 2), eye.expand(3, 2, 2))
    with pytest.raises(ValueError, match="must not be batched"):
        context_excess(batched, RegressionProblem(eye, eye, eye), eye, 4)
