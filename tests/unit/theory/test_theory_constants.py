"""Constants of one head: sharp ones are reached by construction, the others attacked by ascent."""

import math

import numpy as np
import pytest
import torch

from attention_dynamics.models import shallow
from attention_dynamics.models.activations import ERF, Activation, get_activation
from attention_dynamics.models.attention import (
    attention_weights,
    logits,
    softmax_covariance,
    third_cumulant,
)
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.constants import (
    KAPPA_STAR,
    activation_curvature,
    block_curvature,
    block_slope,
    covariance_trace_bound,
    head_lipschitz,
    head_smoothness,
    third_cumulant_bound,
)

ACTIVATIONS = ("tanh", "erf", "erf_plain")


def unit(x):
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def axis(d, i=0):
    return torch.eye(d, dtype=torch.float64)[i]


@pytest.mark.parametrize("b", [1.0, 2.0])
@pytest.mark.parametrize("r", [0.5, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("d", [1, 4])
def test_trace_is_reached_by_antipodal_tokens(b, r, d):
    tokens = b * torch.stack((axis(d), -axis(d)))[None]
    weights = torch.tensor([[[r, 1 - r]]], dtype=torch.float64)
    M = softmax_covariance(weights, tokens)[0, 0]
    bound = covariance_trace_bound(b * abs(2 * r - 1), token_bound=b)
    for norm in (torch.trace(M), torch.linalg.matrix_norm(M), torch.linalg.matrix_norm(M, 2)):
        assert float(norm) == pytest.approx(bound, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("b", [1.0, 1.7])
@pytest.mark.parametrize("T", [2, 5])
def test_kappa_star_is_reached_by_two_tokens(b, T):
    r = (3 - math.sqrt(3)) / 6
    tokens = torch.zeros(1, T, 3, dtype=torch.float64)
    tokens[0, 0], tokens[0, 1] = b * axis(3), -b * axis(3)
    weights = torch.zeros(1, 1, T, dtype=torch.float64)
    weights[..., 0], weights[..., 1] = r, 1 - r
    e = axis(3)[None]
    kappa3 = float(third_cumulant(weights, tokens, e, e))
    assert kappa3 == pytest.approx(third_cumulant_bound(token_bound=b), rel=1e-13)
    assert third_cumulant_bound() == KAPPA_STAR == pytest.approx(0.7698003589, rel=1e-9)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("R", "b", "b_q"), [(0.4, 1.0, 1.0), (2.5, 1.0, 1.0), (2.0, 1.5, 0.7)])
def test_lipschitz_constant_is_reached(activation, R, b, b_q):
    # Equal tokens orthogonal to U give s1 b, antipodal tokens along U give s1 b^2 b_q R.
    _, s1, _ = get_activation(activation).bounds
    e, f = axis(2, 0), axis(2, 1)
    sequences = torch.stack((torch.stack((b * e, b * e)), torch.stack((b * f, -b * f))))
    parameters = Parameters(
        torch.ones(1, dtype=torch.float64), R * f[None], torch.zeros(1, 2, 2, dtype=torch.float64)
    )
    gradients = shallow.per_sample_gradients(
        parameters, sequences, query=b_q * e, activation=activation
    )
    sizes = (gradients.U.square().sum((1, 2)) + gradients.W.square().sum((1, 2, 3))).sqrt()
    bound = head_lipschitz(R, s1, token_bound=b, query_bound=b_q)
    assert float(sizes.max()) == pytest.approx(bound, rel=1e-13)


def climb(objective, dimension, *, length=3, starts=96, steps=250, seed=0):
    """Largest objective(X, alpha, u, v, p) found by ascent; arguments are free vectors."""
    stream = torch.Generator().manual_seed(seed)
    shapes = [(length, dimension), (length,), (dimension,), (dimension,), (dimension,)]
    leaves = [
        torch.randn((starts, *shape), generator=stream, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]
    optimiser, best = torch.optim.Adam(leaves, lr=0.1), 0.0
    for _ in range(steps):
        optimiser.zero_grad()
        X, logit, u, v, p = leaves
        X = X / torch.linalg.vector_norm(X, dim=-1, keepdim=True).clamp_min(1.0)
        value = objective(X, torch.softmax(logit, dim=-1), unit(u), v, p).abs()
        best = max(best, value.max().item())
        (-value.sum()).backward()
        optimiser.step()
    return best


def head_derivatives(X, alpha, U, V, p):
    """s, s', s'' of one head, written out from M and the third cumulant."""
    mu = (alpha[..., None] * X).sum(dim=1)
    along_U, along_V, along_p = (
        ((X - mu[:, None]) * direction[:, None]).sum(dim=-1) for direction in (U, V, p)
    )
    first = (V * mu).sum(dim=-1) + (alpha * along_U * along_p).sum(dim=-1)
    second = (alpha * along_p * (2 * along_V + along_U * along_p)).sum(dim=-1)
    return (U * mu).sum(dim=-1), first, second


@pytest.mark.parametrize(
    ("activation", "R", "b", "b_q", "reached"),
    [
        ("tanh", 0.5, 1.0, 1.0, 0.6),
        ("tanh", 2.0, 1.0, 1.0, 0.7),
        ("tanh", 6.0, 1.0, 1.0, 0.88),
        ("erf", 4.0, 1.0, 1.0, 0.8),
        ("tanh", 2.0, 2.0, 1.5, 0.8),
    ],
)
def test_smoothness_holds_and_is_not_far_from_what_ascent_reaches(activation, R, b, b_q, reached):
    sigma = get_activation(activation)

    def second_derivative(X, alpha, u, v, p):
        V, Z = unit(torch.cat((v, p), dim=-1)).chunk(2, dim=-1)
        s, first, second = head_derivatives(b * X, alpha, R * u, V, b_q * Z)
        return sigma.second(s) * first**2 + sigma.first(s) * second

    bound = head_smoothness(R, activation, token_bound=b, query_bound=b_q)
    assert reached * bound < climb(second_derivative, 3) <= bound


@pytest.mark.parametrize(
    ("r_U", "r_W", "R"), [(1, 1, 0.3), (1, 1, 2.0), (3, 0.5, 1), (0.2, 2, 1.5)]
)
def test_block_slope_is_sharp_and_block_curvature_holds(r_U, r_W, R):
    b, b_q, sigma = 1.3, 0.7, get_activation("tanh")

    def slope(X, alpha, u, v, p):
        return head_derivatives(b * X, alpha, R * u, r_U * unit(v), b_q * r_W * unit(p))[1]

    def curvature(X, alpha, u, v, p):
        s, first, second = head_derivatives(b * X, alpha, R * u, r_U * unit(v), b_q * r_W * unit(p))
        return sigma.second(s) * first**2 + sigma.first(s) * second

    bounds = {"token_bound": b, "query_bound": b_q}
    P, Q = block_slope(R, r_U, r_W, **bounds), block_curvature(R, r_U, r_W, "tanh", **bounds)
    assert 0.999 * P < climb(slope, 3) <= P * (1 + 1e-12)
    assert 0.6 * Q < climb(curvature, 3) <= Q


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("A", "B"), [(1, 1), (3, 0.1), (0.1, 5), (1, 0), (0, 2), (0, 0)])
def test_activation_curvature_is_the_supremum(activation, A, B):
    sigma = get_activation(activation)
    s = torch.linspace(-6, 6, 400001, dtype=torch.float64)
    supremum = float((sigma.second(s).abs() * A + sigma.first(s).abs() * B).max())
    exact = activation_curvature(A, B, activation)
    assert exact == pytest.approx(supremum, rel=1e-9)
    _, s1, s2 = sigma.bounds
    assert exact <= (s2 * A + s1 * B) * (1 + 1e-15)


def test_an_activation_of_ones_own_gets_the_simple_bound():
    sine = Activation("sin", torch.sin, torch.cos, lambda x: -torch.sin(x), (1.0, 1.0, 1.0))
    assert activation_curvature(2.0, 3.0, sine) == 5.0
    assert head_smoothness(0.0, sine) == pytest.approx(1.0 + 1.0)


def test_unit_radii_reproduce_the_joint_constants():
    # max over r_U^2 + r_W^2 = 1 of P_r is the Lipschitz constant, of the curvature is lambda.
    angle = np.linspace(0, math.pi / 2, 4001)
    for R in (0.3, 1.0, 2.5):
        slopes = [block_slope(R, math.cos(t), math.sin(t)) for t in angle]
        assert max(slopes) == pytest.approx(head_lipschitz(R), rel=1e-6)
        curvature = np.sin(2 * angle) + KAPPA_STAR * R * np.sin(angle) ** 2
        eigenvalue = (KAPPA_STAR * R + math.hypot(KAPPA_STAR * R, 2)) / 2
        assert curvature.max() == pytest.approx(eigenvalue, rel=1e-6)


@pytest.mark.parametrize("b", [0.5, 2.0])
def test_rescaling_is_what_a_change_of_units_gives(b):
    # With X = b X' and q = b_q q' the head sees U' = b U, V' = b V and p' = b b_q Z q'.
    R, b_q = 1.7, 0.6
    assert head_lipschitz(R, token_bound=b, query_bound=b_q) == pytest.approx(
        max(b, b**2 * b_q * R)
    )
    r_U, r_W = 0.8, 1.1
    assert block_slope(R, r_U, r_W, token_bound=b, query_bound=b_q) == pytest.approx(
        block_slope(b * R, b * r_U, b * b_q * r_W)
    )
    assert block_curvature(R, r_U, r_W, token_bound=b, query_bound=b_q) == pytest.approx(
        block_curvature(b * R, b * r_U, b * b_q * r_W)
    )
    # Along unit (V, Z) the curvature is a quadratic form in (|V|, |Z|), and the slope is L.
    angle = np.linspace(0, math.pi / 2, 4001)
    form = 2 * b**2 * b_q * np.sin(angle) * np.cos(angle)
    form += KAPPA_STAR * b**3 * b_q**2 * R * np.sin(angle) ** 2
    expected = activation_curvature(max(b, b**2 * b_q * R) ** 2, form.max())
    found = head_smoothness(R, token_bound=b, query_bound=b_q)
    assert found == pytest.approx(expected, rel=1e-6)


def test_block_slope_is_the_supremum_on_both_sides_of_its_case_distinction():
    a = np.linspace(0, 1, 100001)
    for k in (0.3, 0.49, 0.51, 0.75, 0.99, 1.5):  # the cases meet at 2 k = r_U
        assert block_slope(k, 1.0, 1.0) == pytest.approx((a + k * (1 - a**2)).max(), rel=1e-9)


def test_arrays_give_arrays_and_numbers_numbers():
    R = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    for function in (
        head_lipschitz,
        head_smoothness,
        lambda x: block_slope(x, 1.0, 2.0),
        lambda x: block_curvature(x, 1.0, 2.0),
    ):
        many = function(R)
        assert many.shape == (3,)
        assert isinstance(function(0.5), float)
        assert [function(x) for x in R.tolist()] == many.tolist()


def test_large_arguments_do_not_overflow_into_a_small_bound():
    assert activation_curvature(1e200, 1.0) == pytest.approx(1e200 * KAPPA_STAR)
    assert activation_curvature(1e200, 1.0, "erf") == pytest.approx(1e200 * ERF.bounds[2])


def test_a_pooled_norm_may_pass_its_bound_by_the_rounding_of_float32():
    assert covariance_trace_bound(1 + 1e-7) == 0.0
    with pytest.raises(ValueError, match="pooled_norm"):
        covariance_trace_bound(1 + 1e-5)


def test_radius_0_and_query_0_are_allowed():
    assert block_slope(2.0, 0.0, 0.0) == 0.0
    assert block_curvature(2.0, 0.0, 0.0) == 0.0
    assert block_slope(2.0, 1.5, 1.0, query_bound=0.0) == 1.5
    assert block_slope(0.0, 0.0, 1.0) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: head_lipschitz(-1.0), "value_norm: expected finite numbers >= 0, got -1.0"),
        (lambda: head_lipschitz([1.0, math.nan]), "value_norm: .* got nan"),
        (lambda: head_lipschitz(1.0, token_bound=0.0), "token_bound: expected a finite number > 0"),
        (lambda: head_lipschitz(1.0, query_bound=-1.0), "query_bound: expected a finite number"),
        (lambda: head_lipschitz(1.0, s1=math.inf), "s1: expected a finite number"),
        (lambda: block_slope(1.0, -1.0, 1.0), "radius_U: expected a finite number"),
        (lambda: block_curvature(1.0, 1.0, math.nan), "radius_W: expected a finite number"),
        (lambda: activation_curvature(-1.0, 1.0), "first: expected finite numbers"),
        (lambda: activation_curvature(1.0, 1.0, "relu"), "activation: expected one of"),
        (lambda: covariance_trace_bound(1.5), "pooled_norm: expected at most token_bound = 1.0"),
        (lambda: third_cumulant_bound(token_bound=math.nan), "token_bound: expected"),
    ],
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_random_heads_respect_every_constant():
    stream = torch.Generator().manual_seed(0)
    tokens = unit(torch.randn(40, 6, 3, generator=stream, dtype=torch.float64))
    W = 3 * torch.randn(20, 3, 3, generator=stream, dtype=torch.float64)
    U = torch.randn(20, 3, generator=stream, dtype=torch.float64)
    weights = attention_weights(logits(tokens, W, "last"))
    mu = torch.linalg.vector_norm(weights @ tokens, dim=-1)
    M = softmax_covariance(weights, tokens)
    trace = M.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    assert (trace <= torch.as_tensor(covariance_trace_bound(mu.clamp_max(1.0))) + 1e-14).all()
    assert (torch.linalg.matrix_norm(M) <= trace + 1e-14).all()
    assert (third_cumulant(weights, tokens, unit(U), unit(U)).abs() <= KAPPA_STAR).all()
