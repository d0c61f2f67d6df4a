"""The tangent kernel of the residual layer: closed form, autograd and power iteration agree."""

from dataclasses import replace

import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models import residual
from attention_dynamics.models.residual import BLOCKS, ResidualConfig, ResidualParameters
from attention_dynamics.theory.tangent_spectrum import (
    feedforward_kernel,
    lambda_max,
    tangent_kernel,
)

CONFIG = ResidualConfig(dimension=5, key_dimension=2, hidden=6)


def instance(seeds=2, config=CONFIG):
    stream = generator(0, "tangent spectrum")
    points = [residual.init_parameters(config, stream) for _ in range(seeds)]
    X = torch.randn(seeds, 2, 3, config.dimension, generator=stream, dtype=torch.float64)
    return residual.stack_parameters(points), X


def autograd_kernel(parameters, X, config, blocks):
    jacobian = torch.func.jacrev(
        lambda *point: residual.forward(
            ResidualParameters(*point), X, config, validate=False
        ).flatten(),
        argnums=tuple(range(5)),
    )(*parameters)
    chosen = [J.flatten(1) for name, J in zip(BLOCKS, jacobian, strict=True) if name in blocks]
    return sum(J @ J.T for J in chosen)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("blocks", [BLOCKS, ("W1", "W2"), ("Q",)])
def test_kernels_are_autograds_for_every_seed(switch, blocks):
    config = replace(CONFIG, attention_residual=switch, feedforward_residual=switch)
    parameters, X = instance(config=config)
    kernel = tangent_kernel(parameters, X, config, blocks=blocks)
    for seed in range(2):
        single = ResidualParameters(*(block[seed] for block in parameters))
        expected = autograd_kernel(single, X[seed], config, blocks)
        torch.testing.assert_close(kernel[seed], expected, rtol=1e-11, atol=1e-12)
        if blocks == ("W1", "W2"):
            closed = feedforward_kernel(single, X[seed], config)
            torch.testing.assert_close(closed, expected, rtol=1e-11, atol=1e-12)
    if blocks == ("W1", "W2"):
        torch.testing.assert_close(feedforward_kernel(parameters, X, config), kernel)


def test_the_closed_form_is_the_sum_in_its_docstring():
    parameters, X = instance(1)
    single = ResidualParameters(*(block[0] for block in parameters))
    passed = residual.layers(single, X[0], CONFIG)
    Z, U, H = (block.flatten(0, 1) for block in (passed.Z, passed.U, passed.H))
    slopes, W2 = residual.phi_first(U, CONFIG), single.W2
    expected = torch.einsum("ij,ko,ik,jk,kp->iojp", Z @ Z.T, W2, slopes, slopes, W2)
    expected = expected + torch.einsum("ij,op->iojp", H @ H.T, torch.eye(5).double())
    actual = feedforward_kernel(single, X[0], CONFIG)
    torch.testing.assert_close(actual, expected.reshape(30, 30))


@pytest.mark.parametrize("blocks", [BLOCKS, ("W1", "W2")])
def test_power_iteration_reaches_the_largest_eigenvalue_from_below(blocks):
    parameters, X = instance(4)
    top = torch.linalg.eigvalsh(tangent_kernel(parameters, X, CONFIG, blocks=blocks))[..., -1]
    for iterations, accuracy in ((3, 0.5), (400, 1e-6)):
        found = lambda_max(
            parameters, X, CONFIG, generator=generator(1, "v"), blocks=blocks,
            iterations=iterations,
        )  # fmt: skip
        assert (found <= top * (1 + 1e-12)).all()
        assert (found >= top * (1 - accuracy)).all()


def test_a_dead_block_has_the_eigenvalue_zero():
    parameters, X = instance(1)
    dead = parameters._replace(K=torch.zeros_like(parameters.K))
    assert lambda_max(dead, X, CONFIG, generator=generator(1, "v"), blocks=("Q",)) == 0


def test_errors_name_the_argument():
    parameters, X = instance(1)
    with pytest.raises(ValueError, match=r"blocks: expected one of 'Q', .*got 'W3'"):
        tangent_kernel(parameters, X, CONFIG, blocks=("W3",))
    with pytest.raises(ValueError, match="blocks: expected a list of names"):
        lambda_max(parameters, X, CONFIG, generator=generator(0, "v"), blocks=())
    with pytest.raises(ValueError, match="iterations: expected an integer >= 1"):
        lambda_max(parameters, X, CONFIG, generator=generator(0, "v"), iterations=0)
