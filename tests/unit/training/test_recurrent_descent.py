"""Descent on recurrent units: autograd's steps, honest records, divergence reported."""

import math

import pytest
import torch

from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.training.recurrent_descent import recurrent_descent


def problem(n=7, T=5, m=4, d=3, seed=0, dtype=torch.float64):
    stream = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype)

    phi = RecurrentParameters(draw(m, d), draw(m), draw(m))
    return phi, draw(n, T, d), draw(n), (draw(n - 2, T, d), draw(n - 2))


def value(w, u, c, tokens, sigma=torch.tanh):
    h = torch.zeros(len(tokens), len(u), dtype=tokens.dtype)
    for t in range(tokens.shape[1]):
        h = sigma(tokens[:, t] @ w.T + u * h)
    return h @ c / len(u) ** 0.5


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("activation", ["tanh", "erf"])
def test_the_steps_are_those_of_autograd(held, activation):
    phi, X, y, validation = problem()

    def sigma(z):
        return torch.tanh(z) if activation == "tanh" else torch.erf(z / math.sqrt(2))

    start = phi.clone()
    run = recurrent_descent(
        phi, X, y, step_size=0.1, steps=6, validation=validation if held else None,
        activation=activation,
    )  # fmt: skip
    blocks = [block.clone().requires_grad_() for block in start]
    monitored, iterates = [], []
    for k in range(7):
        loss = (value(*blocks, X, sigma) - y).square().mean()
        gradients = torch.autograd.grad(loss, blocks)
        row = run.history.iloc[k]
        assert row["step"] == k
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-12)
        for name, gradient in zip("wuc", gradients, strict=True):
            assert row[f"gradient_{name}"] == pytest.approx(gradient.norm().item(), rel=1e-10)
        if held:
            loss = (value(*blocks, validation[0], sigma) - validation[1]).square().mean()
            assert row["validation_loss"] == pytest.approx(loss.item(), rel=1e-12)
        else:
            assert math.isnan(row["validation_loss"])
        monitored.append(loss.item())
        iterates.append([block.detach().clone() for block in blocks])
        if k < 6:
            with torch.no_grad():
                for block, gradient in zip(blocks, gradients, strict=True):
                    block -= 0.1 * gradient
    best = monitored.index(min(monitored))
    assert (run.best_step, run.diverged, len(run.history)) == (best, False, 7)
    assert run.best_loss == pytest.approx(min(monitored), rel=1e-12)
    for found, expected in ((run.initial, start), (run.final, iterates[-1]),
                            (run.best, iterates[best]), (phi, start)):  # fmt: skip
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_the_best_iterate_is_the_one_of_the_validation_set():
    phi, X, y, _ = problem()
    wrong = (X, value(*phi, X))  # the start is right on it, learning y leads away
    run = recurrent_descent(phi, X, y, step_size=0.05, steps=20, validation=wrong)
    losses = run.history["validation_loss"]
    assert run.best_step == losses.idxmin() != run.history["loss"].idxmin()
    assert run.best_loss == losses.min()


def test_a_descent_that_diverges_is_reported_and_stopped():
    phi, X, y, validation = problem(dtype=torch.float32)
    run = recurrent_descent(phi, X, y, step_size=1e10, steps=9, validation=validation)
    assert run.diverged
    assert 2 <= len(run.history) < 10
    assert run.history.notna().all(axis=None)
    assert all(torch.isfinite(block).all() for block in run.final)
    last = recurrent_descent(
        phi, X, y, step_size=1e10, steps=len(run.history) - 1, validation=validation
    )
    assert not last.diverged
    assert all(torch.equal(a, b) for a, b in zip(last.final, run.final, strict=True))


def exploding():
    phi = RecurrentParameters(torch.zeros(1, 1), torch.full((1,), 1e30), torch.ones(1))
    return phi, torch.ones(2, 9, 1), torch.ones(2)


def test_a_start_that_is_not_finite_is_an_error():
    # w = 0 keeps every state at 0 and every slope at 1: the gradient is 1e30^8
    with pytest.raises(FloatingPointError, match=r"'gradient_w': inf.* before the first step"):
        recurrent_descent(*exploding(), step_size=0.1, steps=3)


def call(**changes):
    phi, X, y, validation = problem()
    options = {"step_size": 0.1, "steps": 2, "validation": validation} | changes
    return recurrent_descent(
        options.pop("phi", phi), options.pop("tokens", X), options.pop("targets", y), **options
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"steps": 0}, ValueError, "steps: expected an integer >= 1, got 0"),
        ({"step_size": 0.0}, ValueError, "step_size: expected a finite number > 0, got 0.0"),
        ({"targets": torch.zeros(6).double()}, ValueError, "targets: .* n = 7, got .6,."),
        ({"targets": torch.full((7,), math.nan).double()}, ValueError, "targets: .* finite"),
        ({"tokens": torch.full((7, 2, 3), math.inf).double()}, ValueError, "tokens: .* finite"),
        ({"tokens": torch.zeros(7, 2, 4).double()}, ValueError, "tokens: .* d = 3"),
        ({"validation": (torch.zeros(3, 2, 3).double(), torch.zeros(2).double())}, ValueError,
         "validation targets: .* n = 3"),
        ({"targets": torch.zeros(7)}, TypeError, "targets: .*float32"),
        ({"phi": problem()[0].map(lambda b: b * math.nan)}, ValueError, "parameters.w: .* finite"),
        ({"engine": "fast"}, ValueError, "fast"),
        ({"activation": "relu"}, ValueError, "relu"),
    ],
)  # fmt: skip
def test_errors(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)
