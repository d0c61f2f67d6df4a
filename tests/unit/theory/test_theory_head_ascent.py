"""The adversary of the tangent model: its gradient in closed form, and how samples are ranked."""

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models._network import prepare
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.theory import linearisation
from attention_dynamics.theory._head_ascent import Displacements, HeadAscent
from attention_dynamics.training import Radii

m, d, T = 6, 4, 5
LIMITS = (0.5, 0.7, 0.9)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=generator(seed, "normal"), dtype=torch.float64)


def ascent_of(activation="tanh", seed=0):
    g = generator(seed, "ascent")
    initial = independent_initialisation(m, d, generator=g, dtype=torch.float64)
    row = unit_ball_tokens(1, T, d, generator=g, dtype=torch.float64)[0]
    query = query_vector(d, generator=g, norm=1.3, dtype=torch.float64)
    return HeadAscent(initial, row, query, get_activation(activation), LIMITS)


def error_by_formula(ascent, c, U, p):
    """E of one head and displacement after the other, by the model itself and its tangent."""

    def head(i, U, p):
        alpha = torch.softmax(ascent.row @ (ascent.initial.W[i] @ ascent.query + p), dim=0)
        return ascent.sigma.value(U @ (alpha @ ascent.row))

    rows = []
    for k in range(c.shape[0]):
        for i in range(m):
            c0, U0, zero = ascent.initial.c[i], ascent.initial.U[i], torch.zeros(d).double()
            h0, slope = torch.func.jvp(
                lambda V, z, i=i: head(i, V, z), (U0, zero), (U[k, i], p[k, i])
            )
            moved = (c0 + c[k, i]) * head(i, U0 + U[k, i], p[k, i])
            rows.append(moved - c0 * h0 - c[k, i] * h0 - c0 * slope)
    return torch.stack(rows).reshape(-1, m)


@pytest.mark.parametrize("activation", ["tanh", "erf"])
def test_the_gradient_is_that_of_automatic_differentiation(activation):
    ascent = ascent_of(activation)
    point = [normal(3, *shape, seed=k) for k, shape in enumerate([(m,), (m, d), (m, d)])]
    leaves = [block.clone().requires_grad_() for block in point]
    expected = error_by_formula(ascent, *leaves)
    by_autograd = torch.autograd.grad(expected.sum(), leaves)
    value, gradient = ascent.error(Displacements(*point))
    assert torch.allclose(value, expected, rtol=1e-11, atol=1e-14)
    for found, block in zip(gradient, by_autograd, strict=True):
        assert torch.allclose(found, block, rtol=1e-11, atol=1e-14)


def test_it_climbs_to_the_boundary_in_the_direction_of_its_sign():
    ascent = ascent_of()
    k = 64  # every second one climbs the other sign
    start = Displacements(normal(k, m), normal(k, m, d, seed=1), normal(k, m, d, seed=2))
    signs = torch.tensor([1.0, -1.0]).double().repeat(k // 2)[:, None]
    short, _ = ascent.climb(signs, start, 1)
    value, point = ascent.climb(signs, start, 40)
    assert (value >= short).all()
    assert torch.allclose(value, signs * ascent.error(point)[0], rtol=1e-13)
    sizes = [norms.squeeze() for norms in point.norms()]
    for size, limit in zip(sizes, (0.5, 0.7, 0.9 * 1.3), strict=True):
        assert float(size.max()) <= limit * (1 + 1e-12)
        assert float(size.min()) >= limit * (1 - 1e-9)
    # no random displacement of the same size does better than the best start of a head
    random = Displacements(normal(500, m), normal(500, m, d, seed=4), normal(500, m, d, seed=5))
    limits = (0.5, 0.7, 0.9 * 1.3)
    random = Displacements(
        *(b / n * limit for b, n, limit in zip(random, random.norms(), limits, strict=True))
    )
    error = ascent.error(random)[0]
    assert (value[signs[:, 0] > 0].amax(dim=0) >= error.amax(dim=0)).all()
    assert (value[signs[:, 0] < 0].amax(dim=0) >= (-error).amax(dim=0)).all()


def test_the_two_signs_of_a_pair_are_one_problem():
    # (c, delta_c) -> (-c, -delta_c) flips e: the sup of e for c is that of -e for -c.
    ascent = ascent_of()
    flipped = HeadAscent(
        ascent.initial._replace(c=-ascent.initial.c), ascent.row, ascent.query, ascent.sigma, LIMITS
    )
    start = Displacements(normal(4, m), normal(4, m, d, seed=1), normal(4, m, d, seed=2))
    signs = torch.ones(4, 1).double()
    value, point = ascent.climb(signs, start, 20)
    other, image = flipped.climb(-signs, start._replace(c=-start.c), 20)
    assert torch.equal(value, other)
    assert torch.equal(point.c, -image.c)
    assert torch.equal(point.p, image.p)


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("masked", [False, True])
def test_samples_are_ranked_by_the_second_derivative(query, masked):
    g = generator(0, "rank")
    initial = symmetric_initialisation(m, d, generator=g, dtype=torch.float64)
    tokens = unit_ball_tokens(200, T, d, generator=g, dtype=torch.float64)
    q = query_vector(d, generator=g, dtype=torch.float64) if query == "fixed" else "last"
    mask = torch.arange(T) < torch.arange(200)[:, None] % T + 1 if masked else None
    direction = Parameters(normal(m), normal(m, d, seed=1), normal(m, d, d, seed=2))
    second = shallow.head_second_derivative(
        initial, tokens, direction.U, direction.W, query=q, scale=0.7, mask=mask
    )
    expected = second.abs().mean(dim=-1).argsort(descending=True).tolist()
    sigma, inputs, _ = prepare(initial, tokens, q, "tanh", mask, True)
    for engine in ("auto", "reference"):
        assert (
            linearisation._by_second_order(initial, inputs, sigma, 0.7, direction, engine)
            == expected
        )


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("draw", [symmetric_initialisation, independent_initialisation])
def test_twins_and_engines_leave_the_tangent_model_as_it_is(query, draw):
    g = generator(0, "tangent")
    initial = draw(m, d, generator=g, dtype=torch.float64)
    initial = initial._replace(c=initial.c * torch.linspace(0.5, 2, m).double())
    tokens = unit_ball_tokens(20, T, d, generator=g, dtype=torch.float64)
    q = query_vector(d, generator=g, dtype=torch.float64) if query == "fixed" else "last"
    moved = linearisation.random_perturbation(initial, Radii(1.0, 1.0, 1.0), generator=g)
    expected = shallow.forward(initial, tokens, query=q, scale=0.7) + shallow.jvp(
        initial, tokens, moved.minus(initial), query=q, scale=0.7
    )
    for engine in ("auto", "eager", "reference"):
        found = linearisation.linearised(initial, moved, tokens, query=q, scale=0.7, engine=engine)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)
    assert linearisation._merged(initial, moved)[0].shape[0] == (
        m // 2 if draw is symmetric_initialisation else m
    )
