"""Balance, scale and starts of a factorisation against the formulas."""

import math

import pytest
import torch
from factorisation_instances import factors, problem
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.models.regression_problem import RegressionProblem
from attention_dynamics.training.gauge import (
    balance,
    random_initialisation,
    rescale,
    spectral_initialisation,
)


def power(matrix, exponent):
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.pow(exponent)[..., None, :]) @ vectors.mT


def balance_by_formula(U, V):
    P, Q = U.mT @ U, V.mT @ V
    root = power(P, 0.5)
    H = power(P, -0.5) @ power(root @ Q @ root, 0.5) @ power(P, -0.5)
    G = power(H, 0.5)
    return U @ G, V @ torch.linalg.inv(G)


def operator_norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


@given(
    m=st.integers(2, 6), d=st.integers(2, 6), k=st.integers(1, 6), seed=st.integers(0, 10**6),
    batch=st.sampled_from([(), (3,), (2, 2)]),
)  # fmt: skip
def test_balance_keeps_the_product_and_equalises_the_gram_matrices(m, d, k, seed, batch):
    U, V = factors(m, d, k, seed=seed, batch=batch)
    new_U, new_V = balance(U, V)
    torch.testing.assert_close(new_U @ new_V.mT, U @ V.mT, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(new_U.mT @ new_U, new_V.mT @ new_V, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("m", "d", "k"), [(3, 4, 2), (3, 3, 3), (6, 5, 1)])
def test_balance_is_the_geometric_mean_of_the_formula(m, d, k):
    U, V = factors(m, d, k, batch=(5,))
    for found, expected in zip(balance(U, V), balance_by_formula(U, V), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_balanced_factors_are_left_alone_and_a_product_of_lower_rank_is_kept():
    U, V = balance(*factors(4, 4, 3))
    for found, expected in zip(balance(U, V), (U, V), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    U[:, 2] = V[:, 2] = 0
    flat_U, flat_V = balance(U @ torch.diag(torch.tensor([2.0, 3, 1])).double(), V)
    assert torch.isfinite(flat_U).all()
    torch.testing.assert_close(flat_U.mT @ flat_U, flat_V.mT @ flat_V, rtol=1e-9, atol=1e-12)


def test_renormalisation_sets_the_norm_of_V_and_keeps_the_product():
    U, V = factors(4, 5, 3, batch=(2,))
    for new_U, new_V in (rescale(U, V, 0.2), balance(U, V, 0.2)):
        torch.testing.assert_close(operator_norm(new_V), torch.full((2,), 0.2).double())
        torch.testing.assert_close(new_U @ new_V.mT, U @ V.mT)
    even = rescale(U, V, None)
    torch.testing.assert_close(operator_norm(even[0]), operator_norm(even[1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"U": torch.full((3, 2), math.nan)}, "U: expected finite"),
        ({"V": torch.ones(4, 3)}, "V: expected shape"),
        ({"rho": 0.0}, "rho: expected a finite number > 0"),
    ],
)
def test_balance_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        balance(**{"U": torch.ones(3, 2), "V": torch.ones(4, 2), **change})


@pytest.mark.parametrize("rho", [None, 0.2])
@pytest.mark.parametrize(("m", "d", "k"), [(3, 4, 3), (3, 3, 5), (4, 2, 2)])
def test_the_spectral_start_has_the_target_as_its_product(m, d, k, rho):
    task = problem(m, d, k, batch=(2,))
    start = spectral_initialisation(task, rho)
    U, V = task.whiten(start)
    torch.testing.assert_close(U @ V.mT, task.whitened_target)
    assert start.A.shape == (2, m, k)
    if rho is not None:
        torch.testing.assert_close(operator_norm(V), torch.full((2,), rho).double())
    scale = operator_norm(V) / operator_norm(U)
    torch.testing.assert_close(U.mT @ U * scale[:, None, None], V.mT @ V / scale[:, None, None])


def test_a_truncated_spectral_start_is_the_best_approximation():
    task = problem(4, 4, 4)
    U, V = task.whiten(spectral_initialisation(task, 0.2, rank=2))
    L, s, R = torch.linalg.svd(task.whitened_target)
    torch.testing.assert_close(U @ V.mT, (L[:, :2] * s[:2]) @ R[:2])
    assert U[:, 2:].abs().max() < 1e-12
    with pytest.raises(ValueError, match="rank"):
        spectral_initialisation(task, rank=0)


def test_the_spectral_start_from_all_samples_is_least_squares():
    stream = torch.Generator().manual_seed(0)
    X, Z, Y = (
        torch.randn(*shape, generator=stream, dtype=torch.float64)
        for shape in ((40, 4), (60, 3), (40, 3))
    )
    start = spectral_initialisation(RegressionProblem.from_samples(X, Z, Y), 0.2)
    centred = Z - Z.mean(dim=0)
    map_ = start.A @ (centred.T @ centred / 60) @ start.B.T
    assert float((map_.T - torch.linalg.lstsq(X, Y).solution).square().sum()) < 1e-20


@pytest.mark.parametrize("rho", [None, 0.3])
def test_the_random_start_has_the_size_of_the_target_and_one_stream(rho):
    task = problem(3, 5, 4, batch=(2,))
    draw = lambda seed: random_initialisation(  # noqa: E731
        task, rho, generator=torch.Generator().manual_seed(seed)
    )
    U, V = task.whiten(draw(0))
    largest = operator_norm(task.whitened_target)
    torch.testing.assert_close(operator_norm(U) * operator_norm(V), largest)
    expected = largest.sqrt() if rho is None else torch.full((2,), rho).double()
    torch.testing.assert_close(operator_norm(V), expected)
    assert torch.equal(draw(0).A, draw(0).A)
    assert not torch.equal(draw(0).A, draw(1).A)
    with pytest.raises(ValueError, match="rho"):
        random_initialisation(task, -1.0, generator=torch.Generator())
