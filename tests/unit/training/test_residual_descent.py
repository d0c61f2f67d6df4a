"""Descent on the residual layer: many seeds at once, divergence flagged, rates fitted."""

import math
from dataclasses import replace

import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models import residual
from attention_dynamics.models.residual import ResidualConfig, ResidualParameters
from attention_dynamics.theory.tangent_spectrum import lambda_max, tangent_kernel
from attention_dynamics.training.residual_descent import (
    ResidualRun,
    gradient_descent,
    measured_rate,
    steps_to,
)

CONFIG = ResidualConfig(dimension=8, key_dimension=4, hidden=10)


def instance(seeds=3, config=CONFIG):
    stream = generator(0, "residual descent")
    points = [residual.init_parameters(config, stream) for _ in range(seeds)]
    data = torch.randn(2, seeds, 2, 3, 8, generator=stream, dtype=torch.float64)
    return residual.stack_parameters(points), data[0], data[1]


def single(parameters, seed):
    return ResidualParameters(*(block[seed] for block in parameters))


def test_a_batch_of_seeds_is_the_seeds_one_by_one():
    parameters, X, Y = instance()
    eta = torch.tensor([1e-3, 2e-3, 3e-3], dtype=torch.float64)
    batch = gradient_descent(parameters, X, Y, CONFIG, step_size=eta, steps=30, every=7)
    assert batch.steps.tolist() == [0, 7, 14, 21, 28, 30]
    for seed in range(3):
        theta = start = single(parameters, seed)
        losses = []
        for step in range(31):
            loss, gradient = residual.loss_and_gradients(theta, X[seed], Y[seed], CONFIG)
            if step in batch.steps:
                losses.append(loss)
            if step < 30:
                theta = theta.plus(gradient, -float(eta[seed]))
        torch.testing.assert_close(batch.losses[:, seed], torch.stack(losses))
        for left, right in zip(single(batch.final, seed), theta, strict=True):
            torch.testing.assert_close(left, right)
        torch.testing.assert_close(batch.distances[-1, seed], theta.plus(start, -1.0).norm())
    assert not batch.diverged.any()


def test_only_the_named_blocks_move():
    parameters, X, Y = instance(1)
    run = gradient_descent(parameters, X, Y, CONFIG, step_size=1e-3, steps=3, blocks=("W1", "W2"))
    moved = [not torch.equal(a, b) for a, b in zip(run.final, parameters, strict=True)]
    assert moved == [False, False, False, True, True]


def test_one_start_on_several_batches_of_data_gets_a_leading_axis():
    parameters, X, Y = instance()
    run = gradient_descent(single(parameters, 0), X, Y, CONFIG, step_size=1e-3, steps=2)
    assert run.losses.shape == (3, 3)
    assert run.final.V.shape == (3, 8, 8)
    alone = gradient_descent(single(parameters, 0), X[0], Y[0], CONFIG, step_size=1e-3, steps=2)
    assert alone.losses.shape == (3,)
    torch.testing.assert_close(alone.losses, run.losses[:, 0])


def test_divergence_is_flagged_frozen_and_keeps_to_its_seed():
    parameters, X, Y = instance()
    eta = torch.tensor([1e-3, 10.0, 1e200], dtype=torch.float64)
    run = gradient_descent(parameters, X, Y, CONFIG, step_size=eta, steps=60)
    assert run.diverged.tolist() == [False, True, True]
    assert torch.isinf(run.losses[-1, 1:]).all()
    assert torch.isfinite(run.losses[:, 0]).all()
    alone = gradient_descent(single(parameters, 0), X[0], Y[0], CONFIG, step_size=1e-3, steps=60)
    torch.testing.assert_close(run.losses[:, 0], alone.losses)
    assert torch.isnan(measured_rate(run)[1:]).all()
    assert torch.isinf(steps_to(run, 1e-3)[1:]).all()


def test_a_nan_is_flagged_and_does_not_move():
    parameters, X, Y = instance(2)
    broken = parameters._replace(V=parameters.V.clone())
    broken.V[1, 0, 0] = torch.nan
    run = gradient_descent(broken, X, Y, CONFIG, step_size=1e-3, steps=4)
    assert run.diverged.tolist() == [False, True]
    assert torch.equal(run.final.W1[1], parameters.W1[1])
    assert torch.isfinite(run.losses[:, 0]).all()


def test_a_loss_that_is_infinite_at_the_start_is_flagged():
    parameters, X, Y = instance(2)
    huge = parameters._replace(W2=parameters.W2.clone())
    huge.W2[1] = 1e200
    assert torch.isinf(residual.loss(huge, X, Y, CONFIG)).tolist() == [False, True]
    run = gradient_descent(huge, X, Y, CONFIG, step_size=1e-3, steps=4)
    assert run.diverged.tolist() == [False, True]
    assert torch.equal(run.final.W2[1], huge.W2[1])
    assert torch.isnan(measured_rate(run)[1])
    assert torch.isinf(steps_to(run, 0.5)[1])


@pytest.mark.parametrize("eta", [10.0, 1e200, 1e308])
def test_what_diverges_is_left_at_the_last_step_within_the_limit(eta):
    parameters, X, Y = instance(1)
    run = gradient_descent(parameters, X, Y, CONFIG, step_size=eta, steps=60)
    assert run.diverged.all()
    assert torch.isfinite(run.distances).all()
    last = residual.loss(run.final, X, Y, CONFIG)
    assert last <= 1e6 * run.losses[0]
    # One more step leaves the limit.
    gradient = residual.loss_and_gradients(run.final, X, Y, CONFIG)[1]
    gone = residual.loss(run.final.plus(gradient, -eta), X, Y, CONFIG, validate=False)
    assert not gone <= 1e6 * run.losses[0]


def test_two_over_lambda_max_separates_convergence_from_divergence():
    # A linear model: slope 1 makes phi the identity, and only W_2 moves.
    config = replace(CONFIG, slope=1.0)
    parameters, X, Y = instance(3, config)
    top = lambda_max(
        parameters, X, config, generator=generator(0, "v"), blocks=("W2",), iterations=500
    )
    below, above = (
        gradient_descent(parameters, X, Y, config, step_size=f / top, steps=400, blocks=("W2",))
        for f in (1.9, 2.1)
    )
    assert (below.losses[-1] < below.losses[0]).all()
    assert above.diverged.all()


def test_the_measured_rate_is_the_smallest_eigenvalue_of_the_kernel_at_the_end():
    # W_2 alone and more hidden units than rows: exactly linear, factor (1 - eta lambda_min)^2.
    parameters, X, Y = instance(3)
    kernel = tangent_kernel(parameters, X, CONFIG, blocks=("W2",))
    values = torch.linalg.eigvalsh(kernel)
    eta = 0.5 / values[..., -1]
    run = gradient_descent(
        parameters, X, Y, CONFIG, step_size=eta, steps=20000, blocks=("W2",), every=20
    )
    predicted = -2 * torch.log1p(-eta * values[..., 0])
    rate = measured_rate(run, window=(1e-18, 1e-6))
    torch.testing.assert_close(rate, predicted, rtol=0.05, atol=0)


def exponential(factors, steps=200):
    k = torch.arange(steps + 1)
    losses = torch.tensor(factors, dtype=torch.float64) ** k[:, None]
    none = torch.zeros(len(factors), dtype=torch.bool)
    return ResidualRun(k, losses, losses, None, none)


def test_rates_and_steps_of_exact_exponentials():
    run = exponential([0.9, 0.5, 0.9999])
    rate = measured_rate(run)
    torch.testing.assert_close(rate[:2], -torch.tensor([0.9, 0.5]).double().log())
    assert math.isnan(rate[2])  # never below 1e-2: no rate
    assert steps_to(run, 1e-3).tolist() == [66.0, 10.0, math.inf]


def test_what_comes_after_the_floor_is_not_fitted():
    run = exponential([0.5])
    run.losses[70:] = 1e-10  # a loss that comes up again
    torch.testing.assert_close(measured_rate(run), torch.tensor([math.log(2)]).double())


def test_nothing_to_learn_is_no_error():
    parameters, X, _ = instance(1)
    Y = residual.forward(parameters, X, CONFIG)
    run = gradient_descent(parameters, X, Y, CONFIG, step_size=1e-3, steps=2)
    assert (run.losses == 0).all()
    assert not run.diverged.any()
    assert torch.isnan(measured_rate(run)).all()


def test_errors_name_the_argument():
    parameters, X, Y = instance(1)
    for eta in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="step_size: expected finite numbers > 0"):
            gradient_descent(parameters, X, Y, CONFIG, step_size=eta, steps=2)
    with pytest.raises(ValueError, match="steps: expected an integer >= 1"):
        gradient_descent(parameters, X, Y, CONFIG, step_size=0.1, steps=0)
    with pytest.raises(ValueError, match="every: expected an integer >= 1"):
        gradient_descent(parameters, X, Y, CONFIG, step_size=0.1, steps=2, every=0)
    with pytest.raises(ValueError, match="blocks: expected one of"):
        gradient_descent(parameters, X, Y, CONFIG, step_size=0.1, steps=2, blocks=("A",))
    with pytest.raises(ValueError, match="window: expected 0 < low < high"):
        measured_rate(exponential([0.5]), window=(1.0, 0.1))
