"""One step against the formulas, written in (A, B) and with plain inverses."""

import warnings
from dataclasses import replace

import pytest
import torch
from factorisation_instances import factors, problem

from attention_dynamics.models.population import population_loss_and_gradients
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.gauge import balance, rescale, spectral_initialisation
from attention_dynamics.training.structure_aware import Scheme, step

ETA = 0.3
SIZES = [(3, 4, 3), (4, 4, 4), (5, 3, 2)]


def quiet(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Scheme(*arguments, **options)


def stepped(start, task, scheme):
    return step(start, population_loss_and_gradients(start, task)[1], task, scheme)


def close(found, expected, rtol=1e-9):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-10)


def whitened_gradients(start, task):
    U, V = task.whiten(start)
    error = U @ V.mT - task.whitened_target
    return U, V, error @ V, error.mT @ U


@pytest.mark.parametrize(("m", "d", "k"), SIZES)
def test_plain_and_whitened_steps_are_their_formulas(m, d, k):
    task, start = problem(m, d, k), factors(m, d, k)
    G_A, G_B = population_loss_and_gradients(start, task)[1]
    S, Sigma = task.token_covariance, task.query_covariance
    expected = Factors(start.A - ETA * G_A, start.B - ETA * G_B)
    close(stepped(start, task, Scheme("none", ETA)), expected)
    expected = Factors(
        start.A - ETA * G_A @ S.inverse(), start.B - ETA * Sigma.inverse() @ G_B @ S.inverse()
    )
    close(stepped(start, task, Scheme("whiten", ETA)), expected)


@pytest.mark.parametrize(("m", "d", "k"), SIZES)
def test_the_scaled_step_is_its_formula(m, d, k):
    task, (A, B) = problem(m, d, k), factors(m, d, k)
    G_A, G_B = population_loss_and_gradients(Factors(A, B), task)[1]
    S, Sigma = task.token_covariance, task.query_covariance
    expected = Factors(
        A - ETA * G_A @ (S @ B.T @ Sigma @ B @ S).inverse(),
        B - ETA * Sigma.inverse() @ G_B @ (S @ A.T @ A @ S).inverse(),
    )
    close(stepped(Factors(A, B), task, Scheme("scaled", ETA)), expected)


@pytest.mark.parametrize(("m", "d", "k"), [*SIZES, (3, 2, 5)])
def test_the_damped_step_is_its_formula(m, d, k):
    task, start, c = problem(m, d, k), factors(m, d, k), 0.1
    U, V, G_U, G_V = whitened_gradients(start, task)
    P, Q, identity = U.T @ U, V.T @ V, torch.eye(k, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(Q)
    root = torch.where(values > 1e-12, values.clamp_min(1e-12) ** -0.5, 0)
    strength = c * torch.linalg.matrix_norm(G_U @ (vectors * root) @ vectors.T)
    ratio = torch.linalg.matrix_norm(U, 2) / torch.linalg.matrix_norm(V, 2)
    expected = task.unwhiten(
        U - ETA * G_U @ (Q + strength / ratio * identity).inverse(),
        V - ETA * G_V @ (P + strength * ratio * identity).inverse(),
    )
    close(stepped(start, task, Scheme("scaled", ETA, damping=c)), expected)


def test_the_error_obeys_the_exact_recursion():
    task, start = problem(4, 4, 4), factors(4, 4, 4)
    U, V = task.whiten(start)
    X = U @ V.T
    E = X - task.whitened_target
    new_U, new_V = task.whiten(stepped(start, task, Scheme("scaled", ETA)))
    expected = (1 - 2 * ETA) * E + ETA**2 * E @ X.inverse() @ E
    torch.testing.assert_close(new_U @ new_V.T - task.whitened_target, expected)


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_the_product_after_a_scaled_step_does_not_know_the_scale(damping):
    task, start = problem(), factors()
    scheme = Scheme("scaled", ETA, damping=damping)
    products = []
    for size in (1.0, 0.1, 30.0):
        U, V = task.whiten(stepped(Factors(start.A * size, start.B / size), task, scheme))
        products.append(U @ V.T)
    torch.testing.assert_close(products[1], products[0])
    torch.testing.assert_close(products[2], products[0])


def test_the_undamped_product_does_not_know_the_gauge_at_all():
    task, start = problem(), factors()
    H = factors(3, 3, 3, seed=5).A
    U, V = task.whiten(start)
    moved = task.unwhiten(U @ H, V @ H.inverse().T)
    first, second = (task.whiten(stepped(f, task, Scheme("scaled", ETA))) for f in (start, moved))
    torch.testing.assert_close(first[0] @ first[1].T, second[0] @ second[1].T)


@pytest.mark.parametrize("preconditioner", ["none", "whiten", "scaled"])
def test_the_regulariser_adds_its_gradient(preconditioner):
    task, start, weight = problem(), factors(), 0.7
    loss_gradients = population_loss_and_gradients(start, task)[1]
    leaves = Factors(*(block.clone().requires_grad_() for block in start))
    U, V = task.whiten(leaves)
    penalty = weight / 8 * (U.T @ U - V.T @ V).square().sum()
    extra = Factors(*torch.autograd.grad(penalty, leaves))
    expected = step(start, loss_gradients.zip(extra, torch.add), task, Scheme(preconditioner, ETA))
    close(stepped(start, task, quiet(preconditioner, ETA, regulariser=weight)), expected)


@pytest.mark.parametrize("preconditioner", ["none", "whiten", "scaled"])
def test_with_rho_the_step_is_taken_at_the_even_scale(preconditioner):
    task, start = problem(), factors(size=0.5)
    weight = 0.0 if preconditioner == "scaled" else 0.2
    damping = 0.1 if preconditioner == "scaled" else 0.0
    free = Scheme(preconditioner, 0.05, damping=damping, regulariser=weight)
    even = task.unwhiten(*rescale(*task.whiten(start), None))
    expected = rescale(*task.whiten(stepped(even, task, free)), 0.4)
    close(task.whiten(stepped(start, task, replace(free, rho=0.4))), expected)


def test_balance_follows_the_step():
    task, start = problem(), factors()
    expected = balance(*task.whiten(stepped(start, task, Scheme("whiten", 0.05))))
    found = task.whiten(stepped(start, task, Scheme("whiten", 0.05, balance=True)))
    close(found, expected)
    found = task.whiten(
        stepped(start, task, Scheme("scaled", 0.05, damping=0.1, rho=0.3, balance=True))
    )
    scale = torch.linalg.matrix_norm(found[0], 2) / 0.3
    torch.testing.assert_close(found[0].T @ found[0] / scale, found[1].T @ found[1] * scale)


def test_a_batch_is_its_instances_and_the_dtype_is_kept():
    scheme = Scheme("scaled", ETA, damping=0.1, rho=0.3)
    task, start = problem(batch=(3,)), factors(batch=(3,))
    together = stepped(start, task, scheme)
    for i in range(3):
        one = type(task)(
            task.target[i], task.query_covariance[i], task.token_covariance[i], task.noise
        )
        alone = stepped(start.map(lambda block, i=i: block[i]), one, scheme)
        close(together.map(lambda block, i=i: block[i]), alone)
    narrow = stepped(factors(dtype=torch.float32), problem(dtype=torch.float32), scheme)
    assert narrow.A.dtype == torch.float32
    close(narrow.to(dtype=torch.float64), stepped(factors(), problem(), scheme), rtol=2e-3)


def test_a_batch_may_have_a_step_size_for_each_entry():
    task, start = problem(batch=(2,)), factors(batch=(2,))
    rates = torch.tensor([0.1, 0.02], dtype=torch.float64)
    for preconditioner in ("none", "whiten", "scaled"):
        together = stepped(start, task, Scheme(preconditioner, rates))
        for i in range(2):
            alone = stepped(start, task, Scheme(preconditioner, float(rates[i])))
            close(together.map(lambda b, i=i: b[i]), alone.map(lambda b, i=i: b[i]))
    with pytest.raises(ValueError, match="step_size"):
        Scheme("none", torch.tensor([0.1, 0.0]))


def test_at_the_minimum_every_step_stands_still():
    task = problem(4, 4, 4)
    minimum = spectral_initialisation(task, 0.3)
    for scheme in (
        Scheme("none", ETA), Scheme("whiten", ETA), Scheme("scaled", ETA),
        Scheme("scaled", ETA, damping=0.1), Scheme("scaled", ETA, rho=0.3, balance=True),
    ):  # fmt: skip
        close(stepped(minimum, task, scheme), minimum, rtol=1e-8)


def test_plain_steps_need_no_inverse_of_a_covariance():
    task = problem(3, 4, 3)
    singular = type(task)(
        task.target, torch.diag(torch.tensor([1.0, 1, 1, 0])).double(), task.token_covariance
    )
    assert torch.isfinite(stepped(factors(), singular, Scheme("none", 0.1, rho=0.4)).A).all()
    with pytest.raises(ValueError, match="query_covariance"):
        stepped(factors(), singular, Scheme("whiten", 0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preconditioner": "newton"}, "preconditioner: expected one of"),
        ({"step_size": 0.0}, "step_size: expected a finite number > 0"),
        ({"damping": -1.0}, "damping: expected a finite number >= 0"),
        ({"preconditioner": "whiten", "damping": 0.1}, "damping: expected 0 with"),
        ({"regulariser": -0.1}, "regulariser: expected"),
        ({"rho": 0.0}, "rho: expected a finite number > 0"),
    ],
)
def test_a_scheme_names_the_field_that_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        Scheme(**{"preconditioner": "scaled", "step_size": 0.5, **options})


def test_a_scheme_warns_past_the_threshold_and_of_a_stiff_regulariser():
    with pytest.warns(UserWarning, match=r"rho = 0\.71"):
        Scheme("scaled", 0.5, rho=0.71)
    with pytest.warns(UserWarning, match="regulariser"):
        Scheme("scaled", 0.5, regulariser=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Scheme("scaled", 0.5, rho=0.7)
        Scheme("whiten", 0.5, regulariser=1.0)


def test_more_columns_than_the_target_need_damping_or_whitening():
    task, start = problem(3, 4, 5), factors(3, 4, 5)
    with pytest.raises(ValueError, match="k = 5"):
        stepped(start, task, Scheme("scaled", ETA))
    for scheme in (Scheme("scaled", ETA, damping=0.1), Scheme("whiten", 0.01)):
        assert torch.isfinite(stepped(start, task, scheme).A).all()


@pytest.mark.parametrize("size", [1e70, 3.0])
def test_a_step_that_explodes_is_refused(size):
    task, start = problem(), factors(size=size)
    scheme = Scheme("whiten", 1e3, rho=0.5)
    with pytest.raises(ArithmeticError, match="1 of 1 steps"):
        stepped(start, task, scheme)


def test_gradients_that_are_not_finite_are_refused():
    start = factors()
    bad = start._replace(A=start.A * float("nan"))
    with pytest.raises(ValueError, match=r"gradients\.A"):
        step(start, bad, problem(), Scheme("none", 0.1))
