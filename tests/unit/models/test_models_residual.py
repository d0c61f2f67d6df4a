"""The residual layer: formulas, closed-form gradients, switches, seeds, errors at the boundary."""

import math
from dataclasses import replace

import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models import attention, residual
from attention_dynamics.models.residual import ResidualConfig, ResidualParameters

SMALL = ResidualConfig(dimension=6, key_dimension=3, hidden=7)
SWITCHES = [(a, f) for a in (True, False) for f in (True, False)]


def gaussian(*shape, name="tokens", seed=0):
    return torch.randn(*shape, generator=generator(seed, "residual", name), dtype=torch.float64)


def point(config=SMALL, seed=0, **options):
    return residual.init_parameters(config, generator(seed, "point"), **options)


def by_formula(parameters, X, config):
    """F of one sequence, query by query."""
    Q, K, V, W1, W2 = parameters
    rows = []
    for t in range(X.shape[0]):
        scores = torch.stack([X[t] @ Q @ K.T @ X[u] for u in range(X.shape[0])])
        weights = scores.mul(config.key_dimension**-0.5).exp()
        z = sum(w * (X[u] @ V) for u, w in enumerate(weights / weights.sum()))
        z = z + X[t] if config.attention_residual else z
        u = z @ W1
        h = config.slope * u + (1 - config.slope) / config.softness * (
            ((1 + (config.softness * u).exp()) / 2).log()
        )
        f = h @ W2
        rows.append(f + z if config.feedforward_residual else f)
    return torch.stack(rows)


@pytest.mark.parametrize(("attend", "feed"), SWITCHES)
@pytest.mark.parametrize(("slope", "softness"), [(0.5, 1.0), (1.0, 2.0), (0.2, 3.0)])
def test_forward_and_gradients_are_the_formula_and_its_autograd(attend, feed, slope, softness):
    config = replace(
        SMALL, attention_residual=attend, feedforward_residual=feed, slope=slope, softness=softness
    )
    X, Y = gaussian(2, 4, 6), gaussian(2, 4, 6, name="targets")
    leaves = ResidualParameters(*(block.requires_grad_() for block in point(config)))
    expected = torch.stack([by_formula(leaves, x, config) for x in X])
    torch.testing.assert_close(residual.forward(leaves, X, config), expected, rtol=0, atol=1e-13)
    value = 0.5 * (expected - Y).square().sum()
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    with torch.no_grad():
        loss, closed = residual.loss_and_gradients(leaves, X, Y, config)
    torch.testing.assert_close(loss, value.detach(), rtol=1e-14, atol=0)
    for name, left, right in zip(residual.BLOCKS, closed, gradients, strict=True):
        error = (left - right).abs().max() / right.abs().max()
        assert error < 1e-12, f"{name}: {error}"


def test_softmax_and_covariance_product_are_those_of_one_query_attention():
    X, C = gaussian(2, 4, 6), gaussian(2, 4, 6, name="cotangent")
    parameters = point()
    passed = residual.layers(parameters, X, SMALL)
    logits = SMALL.logit_factor * (X @ parameters.Q) @ (X @ parameters.K).mT
    torch.testing.assert_close(passed.attention, attention.attention_weights(logits))
    reach = (C @ parameters.W2.mT) * residual.phi_first(passed.U, SMALL)
    directions = (reach @ parameters.W1.mT + C) @ parameters.V.mT
    moved = attention.covariance_product(passed.attention, X, directions)
    gradients = residual.vjp(parameters, X, C, SMALL)
    expected = SMALL.logit_factor * torch.einsum("nta,ntb,bk->ak", X, moved, parameters.K)
    torch.testing.assert_close(gradients.Q, expected, rtol=1e-12, atol=1e-13)
    expected = SMALL.logit_factor * torch.einsum("nta,ntb,bk->ak", moved, X, parameters.Q)
    torch.testing.assert_close(gradients.K, expected, rtol=1e-12, atol=1e-13)


def test_jvp_is_autograds_and_the_transpose_of_vjp():
    X, C, tangent = gaussian(2, 4, 6), gaussian(2, 4, 6, name="cotangent"), point(seed=1)
    parameters = point()
    _, expected = torch.func.jvp(
        lambda *blocks: residual.forward(ResidualParameters(*blocks), X, SMALL, validate=False),
        tuple(parameters),
        tuple(tangent),
    )
    pushed = residual.jvp(parameters, X, tangent, SMALL)
    torch.testing.assert_close(pushed, expected, rtol=1e-12, atol=1e-13)
    pulled = residual.vjp(parameters, X, C, SMALL)
    torch.testing.assert_close((pushed * C).sum(), pulled.inner(tangent), rtol=1e-12, atol=0)


def test_seeds_along_a_leading_axis_are_the_seeds_one_by_one():
    points = [point(seed=seed) for seed in range(3)]
    X, Y = gaussian(3, 2, 4, 6), gaussian(3, 2, 4, 6, name="targets")
    stacked = residual.stack_parameters(points)
    for tokens in (X, X[0]):
        losses, gradients = residual.loss_and_gradients(stacked, tokens, Y, SMALL)
        for seed, single in enumerate(points):
            own = tokens[seed] if tokens.ndim == 4 else tokens
            loss, expected = residual.loss_and_gradients(single, own, Y[seed], SMALL)
            torch.testing.assert_close(losses[seed], loss, rtol=1e-13, atol=0)
            for left, right in zip(gradients, expected, strict=True):
                torch.testing.assert_close(left[seed], right, rtol=1e-12, atol=1e-13)
    assert residual.attention_output(stacked, X, SMALL).shape == (3, 8, 6)
    # One layer on several batches of data: a gradient a batch.
    _, gradients = residual.loss_and_gradients(points[0], X, Y, SMALL)
    assert gradients.V.shape == (3, 6, 6)


def test_one_token_attends_to_itself():
    X, parameters = gaussian(3, 1, 6), point()
    passed = residual.layers(parameters, X, SMALL)
    assert (passed.attention == 1).all()
    torch.testing.assert_close(passed.Z, X @ parameters.V + X)
    gradients = residual.vjp(parameters, X, gaussian(3, 1, 6, name="cotangent"), SMALL)
    assert (gradients.Q == 0).all()
    assert (gradients.K == 0).all()
    assert (gradients.V != 0).all()


def test_zero_queries_and_keys_are_stationary_and_pool_uniformly():
    X, Y = gaussian(2, 4, 6), gaussian(2, 4, 6, name="targets")
    parameters = point(scales=(0, 0, 1, 1, 1))
    assert torch.equal(
        residual.layers(parameters, X, SMALL).attention,
        torch.full((2, 4, 4), 0.25, dtype=torch.float64),
    )
    _, gradients = residual.loss_and_gradients(parameters, X, Y, SMALL)
    assert (gradients.Q == 0).all()
    assert (gradients.K == 0).all()
    # Without residuals every token of a sequence then gets the same output.
    bare = replace(SMALL, attention_residual=False, feedforward_residual=False)
    outputs = residual.forward(parameters, X, bare)
    torch.testing.assert_close(outputs, outputs[:, :1].expand(-1, 4, -1), rtol=0, atol=1e-13)


def test_the_activation_is_exact_in_its_tails_and_odd_up_to_an_even_part():
    u = torch.linspace(-60, 60, 241, dtype=torch.float64, requires_grad=True)
    for slope, softness in ((0.5, 1.0), (0.1, 4.0), (1.0, 1.0)):
        config = replace(SMALL, slope=slope, softness=softness)
        value = residual.phi(u, config)
        (first,) = torch.autograd.grad(value.sum(), u)
        torch.testing.assert_close(residual.phi_first(u, config), first)
        odd = (value - residual.phi(-u, config)) / 2
        torch.testing.assert_close(odd, (1 + slope) / 2 * u, rtol=1e-13, atol=1e-13)
        assert residual.phi(torch.zeros(1, dtype=torch.float64), config) == 0
        assert (first >= slope).all()
        assert (first <= 1).all()
        second = residual.phi_second(u, config)
        assert second.max() <= config.curvature * (1 + 1e-15)
        if slope < 1:
            assert second.max() >= config.curvature * (1 - 1e-12)
    # log(1 + e^-25) / 2, which a softplus that turns linear at 20 drops
    config = replace(SMALL, slope=0.5)
    tail = residual.phi(torch.tensor([25.0], dtype=torch.float64), config)
    expected = 12.5 + 0.5 * (25 + math.log1p(math.exp(-25)) - math.log(2))
    assert abs(tail.item() - expected) < 4e-15 * expected


def test_initialisation_scales_blocks_and_orthogonal_columns():
    config = ResidualConfig(dimension=40, key_dimension=20, hidden=60)
    drawn = point(config, scales=(1, 2, 3, 0, 5))
    for block, scale in zip(drawn, (1, 2, 3, 0, 5), strict=True):
        assert block.std() * block.shape[0] ** 0.5 == pytest.approx(scale, rel=0.1)
    orthogonal = point(config, scales=(1, 1, 1, 1, 5), orthogonal_w2=True).W2
    torch.testing.assert_close(orthogonal.T @ orthogonal, 25 * torch.eye(40).double())
    single = point(config, dtype=torch.float32)
    torch.testing.assert_close(single.V.double(), point(config).V, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_is_kept_and_never_mixed(dtype):
    X, parameters = gaussian(2, 4, 6).to(dtype), point(dtype=dtype)
    loss, gradients = residual.loss_and_gradients(parameters, X, X, SMALL)
    assert {loss.dtype, *(block.dtype for block in gradients)} == {dtype}
    other = torch.float64 if dtype == torch.float32 else torch.float32
    with pytest.raises(TypeError, match="Q: has dtype"):
        residual.forward(point(dtype=other), X, SMALL)


def test_errors_name_the_argument():
    X, parameters = gaussian(2, 4, 6), point()
    with pytest.raises(ValueError, match=r"tokens: expected shape \(\.\.\., n, T, d\) with d = 6"):
        residual.forward(parameters, X[..., :5], SMALL)
    with pytest.raises(ValueError, match="tokens: expected no empty axis"):
        residual.forward(parameters, X[:, :0], SMALL)
    with pytest.raises(ValueError, match=r"tokens: expected finite values, got nan at index"):
        residual.forward(parameters, X.index_fill(1, torch.tensor([1]), torch.nan), SMALL)
    with pytest.raises(ValueError, match=r"W1: expected shape \(\.\.\., 6, 7\)"):
        residual.forward(parameters._replace(W1=parameters.W2), X, SMALL)
    with pytest.raises(ValueError, match="targets: expected shape"):
        residual.loss(parameters, X, X[:, :3], SMALL)
    with pytest.raises(ValueError, match="leading axes that broadcast"):
        residual.forward(residual.stack_parameters([parameters] * 2), gaussian(3, 2, 4, 6), SMALL)
    with pytest.raises(ValueError, match=r"slope: expected a number in \(0, 1\]"):
        replace(SMALL, slope=1.5)
    with pytest.raises(ValueError, match="hidden: expected an integer >= 1"):
        replace(SMALL, hidden=0)
    with pytest.raises(ValueError, match="orthogonal_w2: expected hidden >= dimension"):
        point(replace(SMALL, hidden=5), orthogonal_w2=True)
    with pytest.raises(ValueError, match="scales: expected 5 numbers"):
        point(scales=(1, 1))
