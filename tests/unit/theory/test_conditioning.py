r"""Conditioning of the attention output: against the formulas, at the edges, and out of range."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.theory import conditioning as cond

double = {"dtype": torch.float64}


def gaussian(*shape, name="tokens"):
    return torch.randn(*shape, generator=generator(0, "conditioning", name, *shape), **double)


def test_the_spectrum_is_that_of_numpy():
    output = gaussian(3, 4, 6)
    found = cond.attention_spectrum(output)
    for index in range(3):
        values = np.linalg.svd(output[index].numpy(), compute_uv=False)
        np.testing.assert_allclose(found.singular_values[index], values, rtol=1e-12)
        np.testing.assert_allclose(found.condition[index], np.linalg.cond(output[index]))
    torch.testing.assert_close(found.smallest, found.singular_values[:, -1])


def test_more_rows_than_columns_and_equal_rows_are_singular():
    tall = cond.attention_spectrum(gaussian(5, 3))
    assert tall.smallest == 0
    assert tall.condition == math.inf
    assert cond.attention_spectrum(torch.zeros(2, 3, **double)).condition == math.inf
    equal = cond.attention_spectrum(torch.ones(2, 3, **double))
    assert equal.condition > 1e15


def test_the_sine_is_that_of_an_explicit_minimum():
    tokens, value = gaussian(2, 7), gaussian(7, 7, name="value")
    found = cond.principal_sine(tokens, value)
    basis = torch.linalg.qr(tokens.mT)[0]
    image = torch.linalg.qr(value.mT @ tokens.mT)[0]
    angle = torch.linspace(0, torch.pi, 4001, **double)
    unit = basis @ torch.stack((angle.cos(), angle.sin()))
    distance = (unit - image @ (image.mT @ unit)).norm(dim=0)
    assert found <= distance.min()
    torch.testing.assert_close(found, distance.min(), rtol=1e-6, atol=0)


def test_the_sine_knows_neither_the_scale_of_a_value_matrix_nor_the_basis_of_the_tokens():
    tokens, value = gaussian(3, 8), gaussian(8, 8, name="value")
    mixed = gaussian(3, 3, name="mix") @ tokens
    for other in (
        cond.principal_sine(tokens, 1e-9 * value),
        cond.principal_sine(tokens, -1e9 * value),
        cond.principal_sine(mixed, value),
    ):
        torch.testing.assert_close(other, cond.principal_sine(tokens, value), rtol=1e-9, atol=0)


def test_edges_of_the_sine():
    tokens = gaussian(3, 8)
    assert cond.principal_sine(tokens, torch.zeros(8, 8, **double)) == pytest.approx(1, rel=1e-14)
    assert cond.principal_sine(tokens, torch.eye(8, **double)) < 1e-14
    assert cond.principal_sine(torch.zeros(2, 8, **double), torch.eye(8, **double)) == 1
    assert cond.principal_sine(gaussian(5, 8), gaussian(8, 8)) == 0
    assert cond.angle_bound(gaussian(9, 8), gaussian(8, 8)) == 0
    turn = torch.zeros(4, 4, **double)
    turn[0, 2] = turn[1, 3] = 1.0  # x W_V lies in the last two coordinates
    assert cond.principal_sine(torch.eye(4, **double)[:2], turn) == pytest.approx(1, rel=1e-14)


def test_a_repeated_token_leaves_the_sine_of_the_others():
    tokens, value = gaussian(2, 8), gaussian(8, 8, name="value")
    repeated = torch.cat((tokens, tokens[:1]))
    torch.testing.assert_close(
        cond.principal_sine(repeated, value), cond.principal_sine(tokens, value)
    )
    assert cond.angle_bound(repeated, value) < 1e-14


def test_the_worst_attention_attains_the_minimum_over_all_matrices():
    tokens, value = gaussian(20, 3, 8), gaussian(20, 8, 8, name="value")
    A = cond.worst_attention(tokens, value)
    attained = cond.attention_spectrum(tokens + A @ tokens @ value).smallest
    image = torch.linalg.qr((tokens @ value).mT)[0]
    projected = tokens - tokens @ image @ image.mT
    expected = cond.attention_spectrum(projected).smallest
    torch.testing.assert_close(attained, expected, rtol=1e-10, atol=0)
    assert (attained >= cond.angle_bound(tokens, value) * (1 - 1e-10)).all()
    for scale in (0.01, 1.0, 100.0):
        B = scale * gaussian(20, 3, 3, name="attention")
        other = cond.attention_spectrum(tokens + B @ tokens @ value).smallest
        assert (other >= attained * (1 - 1e-10)).all()


def test_the_angle_bound_holds_for_ill_conditioned_tokens_and_values():
    tokens = torch.logspace(0, -6, 3, **double)[:, None] * gaussian(50, 3, 8)
    value = torch.logspace(0, -6, 8, **double)[:, None] * gaussian(50, 8, 8, name="value")
    A = cond.worst_attention(tokens, value)
    worst = cond.attention_spectrum(tokens + A @ tokens @ value).smallest
    bound = cond.angle_bound(tokens, value)
    assert (bound > 0).all()
    assert (bound <= worst * (1 + 1e-6)).all()


def test_one_token_in_one_dimension_can_be_cancelled():
    one, value = torch.full((1, 1), 2.0, **double), torch.full((1, 1), 0.5, **double)
    assert cond.angle_bound(one, value) == 0
    assert cond.worst_attention(one, value) == pytest.approx(-2)
    assert cond.condition_bound(one, value, 1.0) == math.inf
    assert cond.attention_spectrum(one).condition == 1


def test_orthonormal_tokens_attain_the_angle_bound():
    tokens = torch.linalg.qr(gaussian(8, 3))[0].mT
    value = gaussian(8, 8, name="value")
    output = tokens + cond.worst_attention(tokens, value) @ tokens @ value
    torch.testing.assert_close(
        cond.attention_spectrum(output).smallest,
        cond.angle_bound(tokens, value),
        rtol=1e-10,
        atol=0,
    )


def test_the_condition_bound_holds_and_is_infinite_without_an_angle():
    tokens, value = gaussian(50, 3, 8), gaussian(50, 8, 8, name="value")
    A = torch.softmax(gaussian(50, 3, 3, name="logits"), dim=-1)
    condition = cond.attention_spectrum(tokens + A @ tokens @ value).condition
    assert (condition <= cond.condition_bound(tokens, value, 3**0.5)).all()
    norm = torch.linalg.matrix_norm(A, 2)
    assert (condition <= cond.condition_bound(tokens, value, norm)).all()
    assert cond.condition_bound(gaussian(5, 8), gaussian(8, 8), 1.0) == math.inf


def test_the_condition_bound_is_its_formula_for_tokens_on_axes():
    tokens = torch.diag(torch.tensor([3.0, 2.0, 0.0, 0.0], **double))[:2]
    turn = torch.zeros(4, 4, **double)
    turn[0, 2], turn[1, 3] = 5.0, 4.0  # orthogonal to the tokens: the sine is 1
    assert cond.condition_bound(tokens, turn, 0.7) == pytest.approx((3 + 0.7 * 15) / 2)
    turn[0, 0] = 5.0  # the image of the first axis now lies at 45 degrees to it
    assert cond.principal_sine(tokens, turn) == pytest.approx(0.5**0.5)
    expected = (3 + 0.7 * 15 * 2**0.5) / (2 * 0.5**0.5)
    assert cond.condition_bound(tokens, turn, 0.7) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("left", "right"), [((), (5,)), ((5,), ()), ((1,), (5,)), ((3, 1), (4,)), ((5,), (2, 1))]
)
def test_batches_of_tokens_and_value_matrices_broadcast(left, right):
    tokens, value = gaussian(*left, 2, 6), gaussian(*right, 6, 6, name="value")
    batch = torch.broadcast_shapes(left, right)
    all_tokens, all_values = tokens.expand(*batch, 2, 6), value.expand(*batch, 6, 6)
    norm = torch.full(batch, 0.5, **double)
    for function in (
        cond.principal_sine,
        cond.angle_bound,
        cond.worst_attention,
        lambda X, V: cond.condition_bound(X, V, norm),
    ):
        found = function(tokens, value)
        assert found.shape[: len(batch)] == batch
        pairs = zip(all_tokens.reshape(-1, 2, 6), all_values.reshape(-1, 6, 6), strict=True)
        expected = [
            function(X, V).flatten()[0] if function is not cond.worst_attention else function(X, V)
            for X, V in pairs
        ]
        torch.testing.assert_close(
            found.reshape(len(expected), *found.shape[len(batch) :]), torch.stack(expected)
        )


def test_the_gaussian_bound_is_its_formula():
    t = math.sqrt(2 * math.log(2 / 0.1))
    tangent = (math.sqrt(48) - math.sqrt(2) - t) / (2 * math.sqrt(2) + t)
    expected = tangent / math.hypot(1, tangent)
    assert cond.gaussian_sine_bound(2, 50, 0.1) == pytest.approx(expected, rel=1e-12)
    assert cond.gaussian_sine_bound(100, 4, 0.1) == 0
    assert cond.gaussian_sine_limit(3, 24) == 0.75


def test_the_gaussian_bound_holds_and_lies_below_the_limit():
    M, d, count, failure = 2, 64, 400, 0.1
    value = gaussian(count, d, d, name="value")
    sines = cond.principal_sine(torch.eye(d, **double)[:M].expand(count, M, d), value)
    bound = cond.gaussian_sine_bound(M, d, failure)
    assert 0 < bound < cond.gaussian_sine_limit(M, d)
    assert (sines < bound).double().mean() <= failure
    assert cond.gaussian_sine_bound(8, 16, 0.5) == 0
    assert cond.gaussian_sine_limit(9, 16) == 0


@pytest.mark.parametrize("degree", [0, 1, 2])
@pytest.mark.parametrize("s", [1e-3, 0.3, 2.0])
def test_the_remainder_is_the_tail_of_the_exponential_series(degree, s):
    found = cond.softmax_rank_bound(degree, s, 2)
    tail = sum(s**q / math.factorial(q) for q in range(degree + 1, 60))
    assert found.rank == [1, 3, 6][degree]
    assert found.remainder == pytest.approx(math.exp(s) * tail, rel=1e-11)


def test_the_rank_bound_holds_for_softmax_matrices():
    s, d_k = 0.7, 2
    keys, queries = gaussian(40, 12, d_k), gaussian(40, 12, d_k, name="queries")
    logits = queries @ keys.mT
    logits = s * logits / logits.abs().amax(dim=(-1, -2), keepdim=True)
    values = torch.linalg.svdvals(torch.softmax(logits, dim=-1))
    for degree in (0, 1, 2):
        bound = cond.softmax_rank_bound(degree, s, d_k)
        assert (values[:, bound.rank] <= bound.remainder).all()


def test_edges_of_the_rank_bound():
    assert cond.softmax_rank_bound(3, 0.0, 4).remainder == 0
    assert cond.softmax_rank_bound(0, 400.0, 4).remainder == math.inf


def test_one_precision_and_one_device_are_kept():
    tokens, value = gaussian(2, 6).float(), gaussian(6, 6, name="value").float()
    assert cond.angle_bound(tokens, value).dtype == torch.float32
    assert cond.angle_bound(tokens.half(), value.half()).dtype == torch.float32
    assert cond.attention_spectrum(tokens.bfloat16()).condition.dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cond.attention_spectrum(torch.ones(3)), "output: expected shape"),
        (lambda: cond.attention_spectrum(torch.full((2, 2), torch.nan)), "finite"),
        (lambda: cond.attention_spectrum(torch.ones(0, 3)), "no spectrum"),
        (lambda: cond.angle_bound(torch.ones(2, 3), torch.ones(2, 2)), "value: expected shape"),
        (lambda: cond.worst_attention(torch.ones(2, 3), torch.ones(3, 2)), "value"),
        (lambda: cond.angle_bound(torch.ones(3, 2, 4), torch.ones(2, 4, 4)), "batch"),
        (lambda: cond.condition_bound(torch.ones(1, 2), torch.eye(2), -1.0), "attention_norm"),
        (
            lambda: cond.condition_bound(
                torch.ones(1, 2), torch.eye(2), torch.tensor(float("nan"))
            ),
            "attention_norm",
        ),
        (lambda: cond.gaussian_sine_limit(0, 4), "rows"),
        (lambda: cond.gaussian_sine_bound(1, 4, 1.0), "failure"),
        (lambda: cond.softmax_rank_bound(-1, 1.0, 2), "degree"),
        (lambda: cond.softmax_rank_bound(0, -1.0, 2), "logit_bound"),
        (lambda: cond.softmax_rank_bound(0, 1.0, 0), "key_dimension"),
    ],
)
def test_what_is_out_of_range_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_mixed_precision_is_refused():
    with pytest.raises(TypeError, match="value"):
        cond.angle_bound(torch.ones(2, 3), torch.ones(3, 3, **double))
