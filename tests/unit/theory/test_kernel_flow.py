"""The predictions of a constant kernel: matrix powers, a linear model, and the limit between."""

import pytest
import torch

from attention_dynamics.theory.kernel_flow import kernel_descent, kernel_flow

double = {"dtype": torch.float64}
n = 6
features = torch.randn(n, 9, generator=torch.Generator().manual_seed(0), **double)
K = features @ features.mT / 9
y = torch.linspace(-1, 2, n, **double)


def test_the_flow_is_the_matrix_exponential():
    times = (0.0, 0.7, 5.0)
    for t, found in zip(times, kernel_flow(K, y, times), strict=True):
        expected = y - torch.linalg.matrix_exp(-2 * K * t / n) @ y
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_descent_is_that_of_a_model_linear_in_its_parameters():
    theta, eta, values = torch.zeros(9, **double), 0.3, []
    for _ in range(8):
        f = features @ theta / 3
        values.append(f)
        theta = theta - eta * 2 / n * features.mT @ (f - y) / 3
    found = kernel_descent(K, y, 7, eta)
    torch.testing.assert_close(found, torch.stack(values), rtol=1e-11, atol=1e-13)


def test_small_steps_are_the_flow():
    gaps = [
        (kernel_descent(K, y, steps, 2.0 / steps)[-1] - kernel_flow(K, y, [2.0])[0]).norm()
        for steps in (100, 200)
    ]
    assert 1.9 < gaps[0] / gaps[1] < 2.1


def test_a_direction_without_eigenvalue_never_moves():
    singular = torch.ones(n, n, **double)
    moved = kernel_flow(singular, y - y.mean(), [1e6])[0]
    assert moved.abs().max() < 1e-6


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="kernel"):
        kernel_flow(K[:, :3], y, [1.0])
    with pytest.raises(ValueError, match="times"):
        kernel_flow(K, y, [-1.0])
    with pytest.raises(ValueError, match="step_size"):
        kernel_descent(K, y, 3, 0.0)
