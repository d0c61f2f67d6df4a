"""The theorem as arithmetic: its algebra, its rates, its limits, and what it says of real descents.

Linear least squares are the theorem without a linearisation error, so they attack its skeleton.
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory import UNIT_BALL, InputBounds, random_perturbation
from attention_dynamics.theory.convergence import (
    Ingredients,
    fast_form,
    paper_form,
    path_length,
    path_length_limit,
    steps_without_projection,
)
from attention_dynamics.training import DescentConfig, Radii, projected_gradient_descent

sizes = st.floats(0.0, 10.0)
ingredients = st.builds(
    Ingredients, distance_squared=sizes, gradient_squared=st.floats(0.1, 50.0),
    approximation=sizes, linearisation=sizes, averaging=sizes, size=sizes,
)  # fmt: skip
kappas, numbers = st.floats(1e-3, 0.99), st.integers(1, 10**9)


@given(ingredients, kappas, numbers)
def test_the_fast_form_solves_the_quadratic_of_the_proof(given_, kappa, steps):
    eta = kappa / given_.gradient_squared
    found = fast_form(given_, eta, steps)
    x = math.sqrt(found.average)
    left = (1 - given_.kappa(eta)) * x**2 - given_.epsilon * x
    scale = x**2 + given_.epsilon * x
    assert left == pytest.approx(
        given_.distance_squared / (4 * eta * steps), rel=1e-9, abs=1e-9 * scale
    )
    terms = found.optimisation + found.approximation + found.linearisation
    assert found.total <= terms**2 * (1 + 1e-9)
    assert found.total >= found.average
    longest = max(found.optimisation, found.approximation, found.linearisation)
    assert math.sqrt(found.total) >= longest * (1 - 1e-9)


@given(ingredients, kappas, numbers)
def test_the_terms_of_the_paper_form_add_up(given_, kappa, steps):
    eta = kappa / given_.gradient_squared
    found = paper_form(given_, eta, steps)
    S = given_.size
    assert found.total == pytest.approx(
        found.optimisation + found.approximation + found.linearisation
    )
    assert found.average == pytest.approx(
        given_.distance_squared / (4 * eta * steps)
        + eta * given_.gradient_squared * S**2
        + given_.epsilon * S
    )


@given(
    ingredients, kappas, numbers, st.sampled_from(sorted(Ingredients.__dataclass_fields__)),
    st.floats(1.0, 1.5), st.sampled_from([fast_form, paper_form]),
)  # fmt: skip
def test_both_forms_grow_with_each_ingredient_and_fall_with_the_steps(
    given_, kappa, steps, name, share, form
):
    eta = kappa / given_.gradient_squared / 1.5
    base = form(given_, eta, steps)
    more = form(replace(given_, **{name: share * getattr(given_, name)}), eta, steps)
    assert base.total <= more.total * (1 + 1e-12)
    assert form(given_, eta, 2 * steps).total <= base.total * (1 + 1e-12)


def test_the_rate_is_one_over_tau_at_a_constant_step_and_its_root_otherwise():
    exact = Ingredients(4.0, 2.0, 0.0, 0.0, 0.0, 3.0)
    for tau in (100, 10**4, 10**6):
        assert fast_form(exact, 0.25, tau).average == pytest.approx(4.0 / (4 * 0.5 * 0.25 * tau))
        kappa = 2.0 / math.sqrt(tau)
        assert fast_form(exact, tau**-0.5, tau).average * math.sqrt(tau) == pytest.approx(
            4.0 / (4 * (1 - kappa))
        )
        assert paper_form(exact, tau**-0.5, tau).average * math.sqrt(tau) == pytest.approx(
            4.0 / 4 + 2.0 * 9.0
        )


def test_the_limits_are_the_errors_that_no_descent_removes():
    given_ = Ingredients(4.0, 2.0, 0.3, 0.2, 0.1, 3.0)
    limit = fast_form(given_, 0.25, math.inf)
    assert limit.average == pytest.approx((0.5 / 0.5) ** 2)
    assert limit.total == pytest.approx((0.5 / 0.5 + 0.1) ** 2)
    assert limit.optimisation == 0.0
    assert fast_form(given_, 0.25, 10**15).total == pytest.approx(limit.total, rel=1e-6)
    small = fast_form(given_, 1e-9, math.inf)  # a vanishing step ends at the comparison point
    assert small.average == pytest.approx(0.5**2, rel=1e-6)
    perfect = replace(given_, approximation=0.0, linearisation=0.0, averaging=0.0)
    assert fast_form(perfect, 0.25, math.inf).total == 0.0


def test_what_the_forms_do_not_cover_is_refused():
    given_ = Ingredients(4.0, 2.0, 0.3, 0.2, 0.1, 3.0)
    with pytest.raises(ValueError, match=r"step_size: expected kappa .* < 1, got 1 .*below 0\.5"):
        fast_form(given_, 0.5, 10)
    assert paper_form(given_, 0.5, 10).total > 0
    for form in (fast_form, paper_form):
        with pytest.raises(ValueError, match="steps: expected a number >= 1, got 0"):
            form(given_, 0.1, 0)
        with pytest.raises(ValueError, match="step_size: expected a finite number > 0"):
            form(given_, 0.0, 10)
    with pytest.raises(ValueError, match="size: expected a finite number >= 0, got -1"):
        replace(given_, size=-1.0)
    with pytest.raises(ValueError, match="the path has no bound"):
        steps_without_projection(given_, 0.5, 1.0)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 8), p=st.integers(1, 6),
    kappa=st.floats(0.05, 0.95), steps=st.integers(1, 60), noise=st.sampled_from([0.0, 0.1, 2.0]),
    copies=st.booleans(),
)  # fmt: skip
def test_linear_least_squares_never_exceed_the_bound(seed, n, p, kappa, steps, noise, copies):
    # Repeated rows with different targets: the Gram matrix is singular, and that is allowed.
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(n, p, generator=g, dtype=torch.float64)
    A = torch.cat((A, A)) if copies else A
    star = torch.randn(p, generator=g, dtype=torch.float64)
    y = A @ star + noise * torch.randn(len(A), generator=g, dtype=torch.float64)
    G2 = float(A.square().sum(-1).max())
    radius, phi, losses, total = float(star.norm()), torch.zeros(p).double(), [], torch.zeros(p)
    for _ in range(steps):
        losses.append(float((A @ phi - y).square().mean()))
        total = total + phi
        phi = phi - kappa / G2 * 2 * A.T @ (A @ phi - y) / len(A)
        phi = phi * min(1.0, radius / float(phi.norm().clamp_min(1e-300)))
    eps = float((A @ star - y).square().mean().sqrt())
    size = G2**0.5 * radius + float(y.abs().max())
    found = Ingredients(radius**2, G2, eps, 0.0, 0.0, size)
    bound = fast_form(found, kappa / G2, steps)
    average = sum(losses) / steps
    assert average <= bound.average * (1 + 1e-9)
    assert float((A @ (total / steps) - y).square().mean()) <= bound.total * (1 + 1e-9)
    assert average <= paper_form(found, kappa / G2, steps).average * (1 + 1e-9)


def test_one_sample_comes_close_to_the_bound():
    # One row, one parameter, a small step: the loss decays and only the factor of a sum is lost.
    ratio = []
    for steps in (2, 20, 200):
        eta = 0.5 / steps
        phi, losses = 0.0, []
        for _ in range(steps):
            losses.append((phi - 1.0) ** 2)
            phi -= eta * 2 * (phi - 1.0)
        bound = fast_form(Ingredients(1.0, 1.0, 0.0, 0.0, 0.0, 1.0), eta, steps)
        ratio.append(bound.average / (sum(losses) / steps))
    assert all(1.0 <= r < 1.6 for r in ratio)


@given(ingredients, kappas, st.floats(0.0, 100.0))
def test_the_number_of_steps_without_projection_is_exact(given_, kappa, limit):
    if given_.epsilon * limit + given_.distance_squared == 0.0:
        return
    eta = kappa / given_.gradient_squared
    steps = steps_without_projection(given_, eta, limit)
    if steps > 0:
        assert path_length(given_, eta, steps) <= limit
    if limit > 0:
        assert path_length(given_, eta, steps + 1) > limit
    lengths = [path_length(given_, eta, k) for k in (1, 2, 5, 50)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(lengths))
    explicit = eta * 5 * given_.epsilon / (1 - kappa) + 0.5 * math.sqrt(
        eta * 5 * given_.distance_squared / (1 - kappa)
    )
    assert lengths[2] <= explicit * (1 + 1e-9)


def test_a_start_that_is_exact_never_moves():
    nothing = Ingredients(0.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    with pytest.raises(OverflowError, match="starts at an exact solution"):
        steps_without_projection(nothing, 0.1, 1.0)
    assert steps_without_projection(nothing, 0.1, 0.0) == 0


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
@pytest.mark.parametrize("query", ["fixed", "last"])
def test_no_head_moves_faster_than_the_limit_allows(activation, query):
    # eta |d_i L| <= (rho/sqrt m) eta sqrt(L) / S_max, at random points of the set, any targets.
    m, d, radii = 8, 3, Radii(1.0, 2.0, 1.5)
    q = query_vector(d, generator=generator(0), dtype=torch.float64) if query == "fixed" else "last"
    sigma = get_activation(activation)
    fastest = 0.0
    for seed in range(12):
        model = ShallowTransformer.symmetric(
            m, d, query=q, activation=activation, seed=seed, dtype=torch.float64
        )
        initial = model.snapshot()
        limit = path_length_limit(
            radii, m, float(initial.block_norms().U.max()), inputs=UNIT_BALL, activation=sigma
        )
        e = unit_ball_tokens(6, 1, d, generator=generator(seed), law="sphere", dtype=torch.float64)
        tokens = e * torch.tensor([1.0, -1, 1, -1], dtype=torch.float64)[:, None]
        targets = 10 * torch.randn(6, generator=generator(seed, "y"), dtype=torch.float64)
        model.load(random_perturbation(initial, radii, generator=generator(seed, "p")))
        loss, gradient = model.loss_and_gradients(tokens, targets)
        for norms, rho in zip(gradient.block_norms(), (1.0, 2.0, 1.5), strict=True):
            speed = float(norms.max()) / (rho / math.sqrt(m)) * limit / math.sqrt(float(loss))
            fastest = max(fastest, speed)
    assert 0.05 < fastest <= 1.0


@pytest.mark.parametrize("activation", ["tanh", "erf_plain"])
def test_the_limit_has_the_speed_of_each_block(activation):
    s0, s1, _ = get_activation(activation).bounds
    (b, b_q), m, top, c = InputBounds(1.5, 0.5), 16, 3.0, 2.0
    speeds = {
        "c": lambda rho: s0,
        "U": lambda rho: (c + rho.c / 4) * s1 * b,
        "W": lambda rho: (c + rho.c / 4) * s1 * b**2 * b_q * (top + rho.U / 4),
    }
    for block, speed in speeds.items():
        rho = Radii(**({"c": 1e3, "U": 1e7, "W": 1e12} | {block: 0.7}))
        found = path_length_limit(
            rho, m, top, inputs=InputBounds(b, b_q), coefficient=c, activation=activation
        )
        assert found == pytest.approx(0.7 / (2 * speed(rho)))


def test_the_averaged_iterate_of_the_paper_form_pays_for_two_linearisations():
    # L(average) <= L_lin(average) + 2 S E <= mean L_lin + 2 S E <= mean L + 4 S E, E = averaging/2.
    given_ = Ingredients(2.0, 3.0, 0.5, 0.25, averaging=0.75, size=4.0)
    found = paper_form(given_, 0.1, 10)
    assert found.average == pytest.approx(2.0 / 4.0 + 0.1 * 3.0 * 16.0 + 0.75 * 4.0)
    assert found.total - found.average == pytest.approx(4 * 4.0 * 0.75 / 2)


def test_the_limit_is_the_tightest_block():
    radii, m = Radii(1.0, 2.0, 1.5), 16
    C, R = 1 + 1.0 / 4, 3.0 + 2.0 / 4
    expected = min(1.0 / 2, 2.0 / (2 * C * 1.5), 1.5 / (2 * C * 1.5**2 * 0.5 * R))
    found = path_length_limit(radii, m, 3.0, inputs=InputBounds(1.5, 0.5))
    assert found == pytest.approx(expected)
    assert path_length_limit(Radii(0.0, 1.0, 1.0), m, 3.0, inputs=UNIT_BALL) == 0.0
    with pytest.raises(ValueError, match=r"radii\.W: expected a number, got None"):
        path_length_limit(Radii(1.0, 1.0, None), m, 3.0, inputs=UNIT_BALL)


def test_a_path_below_the_limit_is_never_projected_and_a_longer_one_can_be():
    m, d, radii = 8, 3, Radii(0.5, 0.5, 0.5)
    acted = {False: 0, True: 0}
    for seed in range(10):
        model = ShallowTransformer.symmetric(m, d, query="last", seed=seed, dtype=torch.float64)
        limit = path_length_limit(
            radii, m, float(model.snapshot().block_norms().U.max()), inputs=UNIT_BALL
        )
        tokens = unit_ball_tokens(5, 4, d, generator=generator(seed), dtype=torch.float64)
        targets = torch.randn(5, generator=generator(seed, "y"), dtype=torch.float64)
        for eta in (0.002, 0.5):
            result = projected_gradient_descent(
                ShallowTransformer.symmetric(m, d, query="last", seed=seed, dtype=torch.float64),
                tokens, targets, DescentConfig(30, step_size=eta, radii=radii),
            )  # fmt: skip
            history = result.history
            length = eta * float(history["loss"].iloc[:-1].pow(0.5).sum())
            active = int(history[["active_c", "active_U", "active_W"]].to_numpy().sum())
            assert active == 0 or length > limit
            acted[length > limit] += active > 0
    assert acted[False] == 0
    assert acted[True] > 0
