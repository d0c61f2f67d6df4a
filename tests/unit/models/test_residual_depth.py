"""Stacks of residual layers: the five wirings, one batch for all, gradients, boundary errors."""

from dataclasses import replace

import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models import residual, residual_depth
from attention_dynamics.models.residual import ResidualConfig, ResidualParameters
from attention_dynamics.models.residual_depth import WIRINGS, DepthParameters, Wiring, wiring
from attention_dynamics.theory.tangent_spectrum import depth_lambda_max, lambda_max

CONFIG = ResidualConfig(dimension=6, key_dimension=3, hidden=7)
L = 3


def gaussian(name="tokens"):
    return torch.randn(2, 4, 6, generator=generator(0, "depth", name), dtype=torch.float64)


def point(name, layers=L, seed=0):
    drawn = residual_depth.init_depth(
        CONFIG, wiring(name, layers), layers, generator(seed, "depth point")
    )
    if name == "rezero":  # off its start, where the weights are dead
        drawn = drawn._replace(gains=drawn.gains + torch.linspace(0.3, 0.9, layers).double())
    return drawn


def by_formula(parameters, X, name):
    """The output of one sequence, layer by layer and query by query."""

    def N(x):
        return x / (x.square().mean() + residual_depth.EPSILON) ** 0.5 if name == "rmsnorm" else x

    r = 0.0 if name == "none" else 1.0
    for Q, K, V, W1, W2, gain in zip(*parameters, strict=True):
        read = [N(x) for x in X]
        rows = []
        for t, x in enumerate(X):
            scores = torch.stack([read[t] @ Q @ K.T @ other for other in read]) / 3**0.5
            weights = torch.softmax(scores, dim=0)
            z = r * x + gain * sum(w * (other @ V) for w, other in zip(weights, read, strict=True))
            rows.append(r * z + gain * residual.phi(N(z) @ W1, CONFIG) @ W2)
        X = torch.stack(rows)
    return X


@pytest.mark.parametrize("name", WIRINGS)
def test_forward_is_the_formula_and_gradients_are_its_derivatives(name):
    X, Y, wired = gaussian(), gaussian("targets"), wiring(name, L)
    leaves = DepthParameters(*(block.requires_grad_() for block in point(name)))
    expected = torch.stack([by_formula(leaves, x, name) for x in X])
    stack = residual_depth.forward(leaves, X, CONFIG, wired)
    assert stack.X.shape == stack.Z.shape == (L, 2, 4, 6)
    torch.testing.assert_close(stack.X[-1], expected, rtol=1e-12, atol=1e-12)
    value = 0.5 * (expected - Y).square().sum()
    slopes = torch.autograd.grad(value, leaves)
    loss, gradients = residual_depth.loss_and_gradients(leaves, X, Y, CONFIG, wired)
    torch.testing.assert_close(loss, value.detach(), rtol=1e-12, atol=0)
    for left, right in zip(gradients[:5], slopes[:5], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-11)
    expected = slopes[5] if name == "rezero" else torch.zeros(L, dtype=torch.float64)
    torch.testing.assert_close(gradients.gains, expected, rtol=1e-10, atol=1e-11)


def test_one_plain_layer_is_the_residual_layer():
    X, Y, wired = gaussian(), gaussian("targets"), wiring("plain", 1)
    deep = point("plain", layers=1)
    single = ResidualParameters(*(block[0] for block in deep[:5]))
    stack = residual_depth.forward(deep, X, CONFIG, wired)
    passed = residual.layers(single, X, CONFIG)
    torch.testing.assert_close(stack.X[0], passed.F, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(stack.Z[0], passed.Z, rtol=1e-13, atol=1e-13)
    _, gradients = residual_depth.loss_and_gradients(deep, X, Y, CONFIG, wired)
    _, expected = residual.loss_and_gradients(single, X, Y, CONFIG)
    for left, right in zip(gradients[:5], expected, strict=True):
        torch.testing.assert_close(left[0], right, rtol=1e-10, atol=1e-11)
    top = depth_lambda_max(deep, X, CONFIG, wired, generator=generator(0, "v"), iterations=20)
    expected = lambda_max(single, X, CONFIG, generator=generator(0, "v"), iterations=20)
    torch.testing.assert_close(top, expected, rtol=1e-8, atol=0)


def test_a_batch_of_wirings_and_seeds_is_one_by_one():
    drawn = [point(name, seed=seed) for seed, name in enumerate(WIRINGS)]
    batch = DepthParameters(*(torch.stack(blocks) for blocks in zip(*drawn, strict=True)))
    wired = residual_depth.stack_wirings([wiring(name, L) for name in WIRINGS])
    X, Y = gaussian(), gaussian("targets")
    losses, gradients = residual_depth.loss_and_gradients(batch, X, Y, CONFIG, wired)
    growth = residual_depth.growth(residual_depth.forward(batch, X, CONFIG, wired), X)
    assert growth.shape == (5, L)
    top = depth_lambda_max(batch, X, CONFIG, wired, generator=generator(0, "v"), iterations=60)
    for i, (name, single) in enumerate(zip(WIRINGS, drawn, strict=True)):
        alone = wiring(name, L)
        loss, expected = residual_depth.loss_and_gradients(single, X, Y, CONFIG, alone)
        torch.testing.assert_close(losses[i], loss, rtol=1e-12, atol=0)
        for left, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(left[i], right, rtol=1e-9, atol=1e-10)
        own = depth_lambda_max(single, X, CONFIG, alone, generator=generator(1, "v"), iterations=60)
        torch.testing.assert_close(top[i], own, rtol=3e-2, atol=0)


@pytest.mark.parametrize("name", ["scaled", "rezero"])
def test_the_largest_eigenvalue_is_that_of_the_jacobian_of_what_is_trained(name):
    parameters, X, wired = point(name), gaussian(), wiring(name, L)
    jacobian = torch.func.jacrev(
        lambda *blocks: residual_depth.forward(
            DepthParameters(*blocks), X, CONFIG, wired, validate=False
        ).X[-1].flatten(),
        argnums=tuple(range(6)),
    )(*parameters)  # fmt: skip
    trained = jacobian if name == "rezero" else jacobian[:5]
    J = torch.cat([block.flatten(1) for block in trained], dim=1)
    expected = torch.linalg.matrix_norm(J, ord=2) ** 2
    top = depth_lambda_max(parameters, X, CONFIG, wired, generator=generator(0, "v"), iterations=60)
    torch.testing.assert_close(top, expected, rtol=1e-3, atol=0)
    assert top <= expected * (1 + 1e-12)


def test_rezero_starts_as_the_identity_and_moves_its_gains_only():
    wired = wiring("rezero", L)
    start = residual_depth.init_depth(CONFIG, wired, L, generator(0, "rezero"))
    X, Y = gaussian(), gaussian("targets")
    stack = residual_depth.forward(start, X, CONFIG, wired)
    assert (stack.X == X).all()
    assert (stack.Z == X).all()
    _, gradients = residual_depth.loss_and_gradients(start, X, Y, CONFIG, wired)
    assert all((block == 0).all() for block in gradients[:5])
    assert (gradients.gains != 0).all()


@pytest.mark.parametrize("name", ["plain", "scaled", "rmsnorm"])
def test_the_mean_square_grows_within_its_bounds_however_extreme_the_tokens(name):
    """One token, one coordinate, tokens alike, zero among them, sizes from 1e-6 to 1e6."""
    for layers, T, d, size in ((1, 1, 1, 1.0), (2, 2, 1, 1e6), (5, 3, 4, 1e-6), (3, 6, 2, 1e3)):
        config, wired = ResidualConfig(d, 1, d), wiring(name, layers)
        stream = generator(T, "extreme depth")
        X = size * torch.randn(1, T, d, generator=stream, dtype=torch.float64)
        X[:, 1:2] = 0
        drawn = [residual_depth.init_depth(config, wired, layers, stream) for _ in range(400)]
        batch = DepthParameters(*(torch.stack(blocks) for blocks in zip(*drawn, strict=True)))
        grown = residual_depth.growth(residual_depth.forward(batch, X, config, wired), X)
        assert torch.isfinite(grown).all()
        most = {
            "plain": (2.0 * (1 + T)) ** layers,
            "scaled": 2.718281828459045 ** ((1 + T) / 2),
            "rmsnorm": 1 + 2 * layers * T * d / float(X.square().sum()),
        }
        assert grown[:, -1].mean() <= 1.2 * most[name]  # a sample mean: heavy tails
        assert grown[:, -1].mean() >= 0.9


def test_the_wirings_are_those_of_the_docstring():
    assert wiring("none", 2) == Wiring(0, 1, 0, 0)
    assert wiring("plain", 2) == Wiring(1, 1, 0, 0)
    assert wiring("scaled", 2) == Wiring(1, 0.5, 0, 0)
    assert wiring("rezero", 2) == Wiring(1, 0, 1, 0)
    assert wiring("rmsnorm", 2) == Wiring(1, 1, 0, 1)


def test_rms_normalised_tokens_have_mean_square_one():
    x = 50 * gaussian()
    normal = residual_depth.rms_normalised(x)
    torch.testing.assert_close(normal.square().mean(-1), torch.ones(2, 4).double())
    assert (normal.square().mean(-1) <= 1).all()
    assert (residual_depth.rms_normalised(0 * x) == 0).all()


def test_errors_name_the_argument():
    X, parameters, wired = gaussian(), point("plain"), wiring("plain", L)
    with pytest.raises(ValueError, match=r"name: expected one of 'none', .*got 'post'"):
        wiring("post", L)
    with pytest.raises(ValueError, match="layers: expected an integer >= 1"):
        wiring("plain", 0)
    with pytest.raises(ValueError, match="tokens: expected shape"):
        residual_depth.forward(parameters, X[..., :4], CONFIG, wired)
    with pytest.raises(ValueError, match=r"W1: expected shape \(3, 6, 8\)"):
        residual_depth.forward(parameters, X, replace(CONFIG, hidden=8), wired)
    with pytest.raises(ValueError, match=r"Q: expected shape \(2, 6, 3\), the leading axes"):
        residual_depth.forward(parameters._replace(gains=torch.ones(2).double()), X, CONFIG, wired)
    with pytest.raises(TypeError, match="gains: has dtype"):
        residual_depth.forward(parameters, X.float(), CONFIG, wired)
    with pytest.raises(ValueError, match="targets: expected shape"):
        residual_depth.loss(parameters, X, X[:1], CONFIG, wired)
    with pytest.raises(ValueError, match=r"tokens: expected no empty axis, got \(2, 0, 6\)"):
        residual_depth.forward(parameters, X[:, :0], CONFIG, wired)
    one_gain = parameters._replace(gains=parameters.gains[0])
    with pytest.raises(ValueError, match=r"gains: expected shape \(\.\.\., L\) with L >= 1, got"):
        residual_depth.forward(one_gain, X, CONFIG, wired)
    seeds = DepthParameters(*(block.expand(3, *block.shape) for block in parameters))
    with pytest.raises(ValueError, match=r"leading axes that broadcast with \(3,\)"):
        residual_depth.forward(seeds, X.expand(2, *X.shape), CONFIG, wired)
    with pytest.raises(ValueError, match="iterations: expected an integer >= 1"):
        depth_lambda_max(parameters, X, CONFIG, wired, generator=generator(0, "v"), iterations=0)
