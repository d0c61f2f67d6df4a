"""Bounds of a stack against automatic differentiation, random and extremal tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.models import shallow_stack
from attention_dynamics.models.stack_parameters import stack_initialisation
from attention_dynamics.theory.constants import head_lipschitz
from attention_dynamics.theory.stack_bounds import (
    attention_lipschitz,
    layer_constants,
    stack_constants,
)


def moved(depth, heads, d, size, seed, start="paired"):
    g = torch.Generator().manual_seed(seed)
    phi = stack_initialisation(depth, heads, d, generator=g, start=start, dtype=torch.float64)
    return phi, phi.map(
        lambda block: block + size * torch.randn(block.shape, generator=g, dtype=torch.float64)
    )


def tokens_in_ball(count, length, d, seed, bound=1.0):
    g = torch.Generator().manual_seed(seed + 1)
    X = torch.randn(count, length, d, generator=g, dtype=torch.float64)
    return bound * X / X.norm(dim=-1, keepdim=True).clamp_min(1)


seeds = st.integers(0, 2**31 - 1)


@given(seeds, st.integers(1, 7), st.sampled_from([0.3, 1.0, 2.0]), st.sampled_from([0.2, 1, 4]))
def test_attention_amplifies_no_more_than_its_bound(seed, length, bound, size):
    X = tokens_in_ball(1, length, 3, seed, bound)[0]
    W = size * torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).double()

    def attended(X):
        return torch.softmax(X @ W @ X[-1], dim=0) @ X

    J = torch.autograd.functional.jacobian(attended, X)  # (d, T, d)
    v = torch.randn(3, generator=torch.Generator().manual_seed(seed + 2)).double()
    along = torch.einsum("k,ktd->td", v / v.norm(), J).norm(dim=-1).sum()  # best moves of length 1
    limit = attention_lipschitz(float(torch.linalg.matrix_norm(W, ord=2)), token_bound=bound)
    assert along <= limit * (1 + 1e-12)


def test_the_bound_of_attention_is_reached_by_long_sequences():
    e, u = torch.eye(2, dtype=torch.float64)
    b, w = 1.5, 0.8
    sign = torch.tensor([-1.0, 1.0] * 2000, dtype=torch.float64)[:, None]
    W = w * (torch.outer(e, u) + torch.outer(u, e))
    z = b * b * w
    dX = (e + sign * z * u) / math.sqrt(1 + z * z)
    dX[-1] = u
    _, found = torch.func.jvp(
        lambda X: torch.softmax(X @ W @ X[-1], dim=0) @ X, (b * sign * e,), (dX,)
    )
    assert found.norm() > 0.9995 * attention_lipschitz(w, token_bound=b)


@given(seeds, st.sampled_from([0.003, 0.03, 0.3]), st.sampled_from(["tanh", "erf", "erf_plain"]))
def test_a_layer_is_within_its_constants(seed, size, activation):
    start, now = moved(2, 6, 3, size, seed)
    b = 1.3
    X = tokens_in_ball(1, 5, 3, seed, b)
    constants = layer_constants(start.inner[0], now.inner[0], token_bound=b, activation=activation)

    def added(X, layer=now.inner[0]):
        one = now._replace(inner=(layer,))
        return shallow_stack.hidden_tokens(one, X, activation=activation)[1] - X

    assert added(X).norm(dim=-1).max() <= constants.output
    J = torch.autograd.functional.jacobian(lambda X: added(X)[0, 2, 1], X)
    assert J.norm(dim=-1).sum() <= constants.lipschitz
    blocks = [block.clone().requires_grad_() for block in now.inner[0]]
    value = added(X, type(now.inner[0])(*blocks))[0, 2, 1]
    slopes = torch.autograd.grad(value, blocks)
    assert math.sqrt(sum(float(g.square().sum()) for g in slopes)) <= constants.gradient


@given(seeds, st.integers(1, 4), st.sampled_from([0.003, 0.03]))
def test_gradients_and_tokens_of_a_stack_are_within_their_bounds(seed, depth, size):
    start, now = moved(depth, 4, 2, size, seed)
    X = tokens_in_ball(1, 6, 2, seed)
    constants = stack_constants(start, now)
    for hidden, limit in zip(shallow_stack.hidden_tokens(now, X), constants.tokens, strict=True):
        assert hidden.norm(dim=-1).max() <= limit * (1 + 1e-12)
    found = shallow_stack.vjp(now, X, torch.ones(1, dtype=torch.float64)).layer_norms()
    for norm, limit in zip(found.tolist(), constants.gradients, strict=True):
        assert norm <= limit


def test_at_the_start_a_stack_has_the_bound_of_one_layer():
    start, _ = moved(4, 8, 3, 0.0, 0)
    constants = stack_constants(start, start)
    assert constants.tokens == (1.0,) * 4
    assert constants.gradients[:3] == (0.0,) * 3
    heads = head_lipschitz(start.readout.U.norm(dim=1).numpy())
    assert constants.gradients[3] == pytest.approx(np.sqrt(1 + (heads**2).mean()), rel=1e-12)


def test_the_constants_are_linear_in_a_small_distance_and_grow_with_it():
    start, near = moved(1, 8, 3, 1e-6, 0)
    far = near.zip(start, lambda a, b: b + 2 * (a - b))
    one, two = (layer_constants(start.readout, phi.readout, token_bound=1.0) for phi in (near, far))
    assert two.output == pytest.approx(2 * one.output, rel=1e-4)
    assert two.lipschitz == pytest.approx(2 * one.lipschitz, rel=1e-4)


def test_without_pairs_there_is_no_bound():
    start, now = moved(2, 4, 3, 0.1, 0, "mixed")
    with pytest.raises(ValueError, match="paired heads"):
        stack_constants(start, now)
    with pytest.raises(ValueError, match="token_bound"):
        attention_lipschitz(1.0, token_bound=0.0)
