"""Plain descent, Adam and Muon against the steps and the optimisers they stand for."""

import math

import pytest
import torch
from factorisation_instances import factors, problem
from torch.optim import _muon

from attention_dynamics.models.population import population_loss, population_loss_and_gradients
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.regression_baselines import (
    MUON_COEFFICIENTS,
    Adam,
    Muon,
    gradient_descent,
    orthogonalised,
    stable_step_size,
)
from attention_dynamics.training.structure_aware import (
    Scheme,
    descend,
    first_step,
    spectral_initialisation,
)


@pytest.mark.parametrize("steps", [0, 1, 63, 64, 130])
def test_plain_descent_takes_the_steps_of_the_scheme(steps):
    task, start = problem(3, 4, 2, batch=(2,)), factors(3, 4, 2, size=0.3, batch=(2,))
    eta = float(stable_step_size(task).min())
    slow = descend(start, task, Scheme("none", eta), steps, check=False)
    fast = gradient_descent(start, task, eta, steps)
    torch.testing.assert_close(fast.excess, slow.excess, rtol=1e-8, atol=1e-12)


def test_step_sizes_and_problems_are_broadcast_and_runs_end_on_their_own():
    task, start = problem(4, 4, 4, condition=3.0, batch=(3,)), factors(4, 4, 4, size=0.3)
    rates = stable_step_size(task) * torch.tensor([[0.5], [1.0], [300.0]]).double()
    run = gradient_descent(start, task, rates, 3000, tolerance=1e-4)
    assert run.excess.shape[1:] == run.diverged.shape == (3, 3)
    assert run.diverged[2].all()
    assert not run.diverged[:2].any()
    ended = first_step(run.excess, 1e-4)
    assert (ended[0] > ended[1]).all()
    assert (ended[2] == -1).all()
    for i in range(2):
        for j in range(3):
            one = type(task)(
                task.target[j], task.query_covariance[j], task.token_covariance[j], 0.1
            )
            alone = gradient_descent(start, one, float(rates[i, j]), 3000, tolerance=1e-4)
            assert int(ended[i, j]) == int(first_step(alone.excess, 1e-4))
            assert (run.excess[int(ended[i, j]) :, i, j] <= 1e-4).all()


def test_an_unfinished_run_says_so():
    task = problem(4, 4, 4, condition=100.0)
    run = gradient_descent(factors(4, 4, 4, size=0.1), task, stable_step_size(task), 100,
                           tolerance=1e-6)  # fmt: skip
    assert len(run.excess) == 101
    assert int(first_step(run.excess, 1e-6)) == -1
    assert not run.diverged


@pytest.mark.parametrize(("m", "d", "k"), [(3, 4, 3), (4, 4, 4), (5, 3, 3)])
def test_the_stable_step_size_is_below_the_inverse_of_the_sharpness(m, d, k):
    task = problem(m, d, k)
    start = spectral_initialisation(task)
    flat = torch.cat([block.flatten() for block in start])

    def loss(vector):
        A, B = vector[: m * k].reshape(m, k), vector[m * k :].reshape(d, k)
        return population_loss(Factors(A, B), task)

    sharpness = torch.linalg.eigvalsh(torch.func.hessian(loss)(flat))[-1]
    assert 0.5 <= float(stable_step_size(task) * sharpness) <= 1 + 1e-9


def torch_run(optimiser, schedule, start, task, steps):
    leaves = [block.clone().requires_grad_() for block in start]
    own = optimiser(leaves)
    rates = torch.optim.lr_scheduler.LambdaLR(own, schedule)
    for _ in range(steps):
        for leaf, gradient in zip(
            leaves, population_loss_and_gradients(Factors(*leaves), task)[1], strict=True
        ):
            leaf.grad = gradient.detach()
        own.step()
        rates.step()
    return [leaf.detach() for leaf in leaves]


@pytest.mark.parametrize("decay", [None, 12])
def test_adam_is_that_of_torch(decay):
    task, start = problem(), factors()
    schedule = (lambda k: 1.0) if decay is None else (lambda k: 1 - k / decay)
    expected = torch_run(lambda p: torch.optim.Adam(p, lr=0.03), schedule, start, task, 9)
    found = descend(start, task, Adam(0.03, decay_steps=decay), 9).factors
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", [None, 12])
def test_muon_is_that_of_torch_up_to_its_half_precision(decay, monkeypatch):
    # torch iterates in bfloat16, and the directions of small singular values feel it at once.
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda g, *_: orthogonalised(g))
    task, start = problem(4, 5, 3), factors(4, 5, 3)
    schedule = (lambda k: 1.0) if decay is None else (lambda k: 1 - k / decay)
    expected = torch_run(
        lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.0), schedule, start, task, 9
    )
    found = descend(start, task, Muon(0.02, decay_steps=decay), 9).factors
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("m", "k"), [(4, 3), (3, 4), (8, 8)])
def test_newton_schulz_is_that_of_torch_in_half_precision(m, k):
    matrix = torch.eye(m, k, dtype=torch.float64) + 0.2 * factors(m, k, k).A
    expected = _muon._zeropower_via_newtonschulz(matrix, MUON_COEFFICIENTS, 5, 1e-7)
    found = orthogonalised(matrix)
    assert torch.linalg.matrix_norm(found - expected) < 0.03 * torch.linalg.matrix_norm(found)


def test_newton_schulz_brings_singular_values_near_one():
    matrix = factors(6, 4, 4, batch=(5,)).A
    L, s, R = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(matrix)
    values = (L.mT @ found @ R.mT).diagonal(dim1=-2, dim2=-1)
    large = s > 0.1 * s[..., :1]
    assert ((values > 0.6) & (values < 1.3))[large].all()
    torch.testing.assert_close(orthogonalised(matrix.mT), found.mT)
    assert (orthogonalised(torch.zeros(2, 3)) == 0).all()


@pytest.mark.parametrize("make", [Adam, Muon])
def test_a_rule_descends_on_a_batch_as_on_its_instances(make):
    task, start = problem(batch=(2,)), factors(batch=(2,))
    run = descend(start, task, make(0.02), 30)
    assert (run.loss[-1] < run.loss[0]).all()
    one = type(task)(task.target[1], task.query_covariance[1], task.token_covariance[1], 0.1)
    alone = descend(start.map(lambda block: block[1]), one, make(0.02), 30)
    torch.testing.assert_close(run.loss[:, 1], alone.loss)


def test_bad_numbers_are_named():
    task = problem()
    with pytest.raises(ValueError, match="step_size"):
        gradient_descent(factors(), task, 0.0, 3)
    with pytest.raises(ValueError, match="steps"):
        gradient_descent(factors(), task, 0.1, -3)
    with pytest.raises(ValueError, match=r"factors\.B"):
        gradient_descent(factors()._replace(B=factors().B * math.nan), task, 0.1, 3)
    for make in (Adam, Muon):
        with pytest.raises(ValueError, match="learning_rate"):
            make(0.0)
        with pytest.raises(ValueError, match="decay_steps"):
            make(0.1, decay_steps=0)
