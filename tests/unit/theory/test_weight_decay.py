"""Weight decay toward the start: the algebra, its limits, and descents that attack it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.bounds import UNIT_BALL
from attention_dynamics.theory.convergence import Ingredients, fast_form, path_length_limit
from attention_dynamics.theory.weight_decay import (
    decay_without_projection,
    decayed_form,
    effective_steps,
)
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii

GIVEN = Ingredients(4.0, 2.0, 0.3, 0.2, 0.1, 3.0)


@given(st.floats(1e-3, 0.9), st.integers(1, 300), st.floats(1e-3, 1.0))
def test_the_effective_steps_are_the_sum_of_the_weights(step_size, steps, decay):
    share = step_size * decay
    weights = [(1 - share) ** (steps - 1 - k) for k in range(steps)]
    found = effective_steps(step_size, steps, decay)
    assert found == pytest.approx(math.fsum(weights), rel=1e-9)
    assert 1.0 <= found * (1 + 1e-12)
    assert found <= min(steps, 1 / share) * (1 + 1e-12)


def test_no_decay_is_the_theorem_and_a_long_run_has_the_horizon_of_the_decay():
    assert effective_steps(0.1, 50, 0.0) == 50
    assert effective_steps(0.1, math.inf, 0.0) == math.inf
    assert decayed_form(GIVEN, 0.25, 50, 0.0) == fast_form(GIVEN, 0.25, 50)
    assert decayed_form(GIVEN, 0.25, 50, 1e-12).total == pytest.approx(
        fast_form(GIVEN, 0.25, 50).total
    )
    assert effective_steps(0.1, math.inf, 0.2) == pytest.approx(1 / 0.02)
    exact = Ingredients(4.0, 2.0, 0.0, 0.0, 0.0, 3.0)
    floor = decayed_form(exact, 1e-6, math.inf, 0.2)  # the price of the decay alone
    assert floor.average == pytest.approx(0.2 * 4.0 / 4, rel=1e-4)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6), n=st.integers(1, 8), p=st.integers(1, 6),
    kappa=st.floats(0.05, 0.6), share=st.floats(1e-4, 0.3), steps=st.integers(1, 80),
    noise=st.sampled_from([0.0, 0.1, 2.0]),
)  # fmt: skip
def test_decayed_least_squares_never_exceed_the_bound(seed, n, p, kappa, share, steps, noise):
    g = torch.Generator().manual_seed(seed)
    A = torch.randn(n, p, generator=g, dtype=torch.float64)
    star = torch.randn(p, generator=g, dtype=torch.float64)
    y = A @ star + noise * torch.randn(n, generator=g, dtype=torch.float64)
    G2 = float(A.square().sum(-1).max())
    eta, phi, losses = kappa / G2, torch.zeros(p).double(), []
    for _ in range(steps):
        losses.append((A @ phi - y).square().mean())
        phi = (1 - share) * phi - eta * 2 * A.T @ (A @ phi - y) / n
    weights = (1 - share) ** torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    weighted = float(weights @ torch.stack(losses) / weights.sum())
    eps = float((A @ star - y).square().mean().sqrt())
    given_ = Ingredients(float(star @ star), G2, eps, 0.0, 0.0, 1.0)
    bound = decayed_form(given_, eta, steps, share / eta)
    assert weighted <= bound.average * (1 + 1e-9)


def test_the_bound_is_nearly_reached():
    # One sample, y = 1, a small step: the loss follows exp(-2 t), and the sum reaches 1/4.
    eta, decay, phi, losses = 1e-3, 1e-3, 0.0, []
    for _ in range(4000):
        losses.append((phi - 1.0) ** 2)
        phi = (1 - eta * decay) * phi - eta * 2 * (phi - 1.0)
    given_ = Ingredients(1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    bound = decayed_form(given_, eta, 4000, decay).average
    weights = [(1 - eta * decay) ** (3999 - k) for k in range(4000)]
    weighted = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
    assert 0.98 * bound <= weighted <= bound


@given(
    st.floats(0.01, 5), st.floats(0.1, 9), st.floats(0, 1), st.floats(0.001, 0.5),
    st.floats(0.3, 50),
)  # fmt: skip
def test_the_smallest_decay_solves_the_condition(D0, G2, eps, kappa, limit):
    given_, eta = Ingredients(D0, G2, eps, 0.0, 0.0, 1.0), kappa / G2
    r = eta * (eps / limit + D0 / (4 * limit**2))
    if math.sqrt(r) > 1 - math.sqrt(kappa) - 1e-6:
        return
    decay = decay_without_projection(given_, eta, limit)
    length = math.sqrt(decayed_form(given_, eta, math.inf, decay).average) / decay
    assert length == pytest.approx(limit, rel=1e-6)
    less = 0.99 * decay
    longer = math.sqrt(decayed_form(given_, eta, math.inf, less).average) / less
    assert longer > limit


def test_heads_stay_inside_under_the_smallest_decay():
    m, d, radii = 4096, 2, Radii(3.0, 3.0, 3.0)
    phi = symmetric_initialisation(m, d, generator=generator(0), dtype=torch.float64)
    query = query_vector(d, generator=generator(1), dtype=torch.float64)
    tokens = unit_ball_tokens(8, 4, d, generator=generator(2), dtype=torch.float64)
    targets = torch.linspace(-1, 1, 8, dtype=torch.float64)
    model = ShallowTransformer(phi, query=query)
    limit = path_length_limit(radii, m, float(phi.block_norms().U.max()), inputs=UNIT_BALL)
    given_ = Ingredients(0.1, 4.0, 0.1, 0.0, 0.0, 1.0)
    decay, eta = decay_without_projection(given_, 0.05, limit), 0.05
    objective, region, x = Objective.of(model, tokens, targets), ProjectionSet(phi, radii), phi
    for _ in range(200):
        gradient = objective.loss_and_gradients(x)[1]
        x = x.minus(gradient.plus(x.minus(phi).scaled(decay)).scaled(eta))
        assert region.contains(x)


def test_what_has_no_bound_is_refused():
    with pytest.raises(ValueError, match=r"decay: expected step_size \* decay < 1, got 1"):
        effective_steps(0.5, 10, 2.0)
    with pytest.raises(ValueError, match="steps: expected a number >= 1, got 0"):
        effective_steps(0.5, 0, 0.1)
    with pytest.raises(ValueError, match="decay: expected a finite number >= 0, got -1"):
        effective_steps(0.5, 10, -1.0)
    with pytest.raises(ValueError, match="kappa"):
        decayed_form(GIVEN, 0.4, 10, 1.0)  # kappa = 0.8, and 0.8 / 0.6 >= 1
    with pytest.raises(ValueError, match="take a smaller step_size or larger radii"):
        decay_without_projection(GIVEN, 0.25, 0.1)
    with pytest.raises(ValueError, match="limit: expected a finite number > 0"):
        decay_without_projection(GIVEN, 0.25, 0.0)
