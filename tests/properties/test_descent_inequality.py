"""The inequalities behind the convergence proof, at each step of real descents."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.theory import (
    TransportNorms,
    input_bounds,
    linearisation_error,
    network_constants,
    random_multi_anchor,
)
from attention_dynamics.training import ProjectionSet, Radii

n, T, d, m = 16, 4, 3, 6


def setting(seed):
    tokens = unit_ball_tokens(n, T, d, generator=generator(seed, "t"), dtype=torch.float64)
    targets = 2 * torch.randn(n, generator=generator(seed, "y"), dtype=torch.float64)
    initial = symmetric_initialisation(m, d, generator=generator(seed, "i"), dtype=torch.float64)
    return tokens, targets, initial


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    eta=st.floats(1e-3, 5.0),
    rho=st.tuples(*(st.floats(0.01, 4.0),) * 3),
    share=st.floats(0.0, 1.0),
)
def test_each_step_descends_towards_every_point_of_the_set(seed, eta, rho, share):
    # |phi_{k+1} - phi*|^2 <= |phi_k - phi*|^2 - 2 eta <grad, phi_k - phi*> + eta^2 |grad|^2
    tokens, targets, initial = setting(seed)
    region = ProjectionSet(initial, Radii(*rho))
    noise = symmetric_initialisation(m, d, generator=generator(seed, "s"), dtype=torch.float64)
    star = region.project(initial.plus(noise.scaled(3 * share)))
    phi = initial
    for _ in range(8):
        _, gradient = shallow.loss_and_gradients(phi, tokens, targets, query="last")
        after = region.project(phi.minus(gradient.scaled(eta)))
        gap, next_gap = phi.minus(star), after.minus(star)
        bound = gap.inner(gap) - 2 * eta * gradient.inner(gap) + eta**2 * gradient.inner(gradient)
        assert float(next_gap.inner(next_gap)) <= float(bound) + 1e-11 * (1 + eta**2)
        phi = after


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), eta=st.floats(0.01, 1.0))
def test_the_gradient_of_the_loss_is_below_its_bound(seed, eta):
    # |grad L|^2 <= 4 G^2 L on the projection set
    tokens, targets, initial = setting(seed)
    radii = Radii(2.0, 2.0, 2.0)
    region = ProjectionSet(initial, radii)
    G2 = network_constants(initial, radii, inputs=input_bounds(tokens, "last")).gradient_squared
    phi = initial
    for _ in range(8):
        loss, gradient = shallow.loss_and_gradients(phi, tokens, targets, query="last")
        assert float(gradient.inner(gradient)) <= 4 * G2 * float(loss)
        phi = region.project(phi.minus(gradient.scaled(eta)))


@pytest.mark.parametrize("seed", range(6))
def test_the_gradient_points_away_from_the_transported_point(seed):
    # <grad L, phi - phi*> = (2/n) sum r (r - a + e) >= 2 L - 2 sqrt(L) rms(a - e), where
    # r = f - y, a = f* - y and |e| <= E_rem / sqrt m is the remainder of the expansion at phi.
    tokens, targets, initial = setting(seed)
    nu = TransportNorms(1.0, 1.0, 1.0)
    transport = random_multi_anchor(
        3, T, d, generator=generator(seed, "a"), norms=nu, query="last", dtype=torch.float64
    )
    star = initial.plus(transport(initial).scaled(1 / math.sqrt(m)))
    radii = Radii(nu.c, nu.U, nu.W)
    region = ProjectionSet(initial, radii)
    assert region.contains(star, atol=1e-12)
    f_star = shallow.forward(star, tokens, query="last")
    constants = network_constants(
        initial, radii, transport_norms=nu, inputs=input_bounds(tokens, "last")
    )
    assert constants.remainder_error is not None
    phi = initial
    for _ in range(15):
        loss, gradient = shallow.loss_and_gradients(phi, tokens, targets, query="last")
        r, a = shallow.forward(phi, tokens, query="last") - targets, f_star - targets
        e = linearisation_error(phi, star, tokens, query="last")
        assert float(e.abs().max()) <= constants.remainder_error
        descent = float(gradient.inner(phi.minus(star)))
        assert descent == pytest.approx(float(2 * (r * (r - a + e)).mean()), rel=1e-10, abs=1e-13)
        eps = float((a - e).square().mean().sqrt())
        assert descent >= 2 * float(loss) - 2 * math.sqrt(float(loss)) * eps - 1e-13
        phi = region.project(phi.minus(gradient.scaled(0.5)))
