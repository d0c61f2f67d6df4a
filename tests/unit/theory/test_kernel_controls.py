"""The kernels of the two controls: against Jacobians of networks that share nothing with them."""

import itertools

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.parameters import Parameters, independent_initialisation
from attention_dynamics.theory.kernel_controls import (
    linearised_attention_kernel,
    linearised_features,
    shared_attention_kernel,
)
from attention_dynamics.theory.kernels import empirical_kernel

n, T, d, m = 5, 6, 3, 7
double = {"dtype": torch.float64}
tokens = unit_ball_tokens(n, T, d, generator=generator(0, "controls", "tokens"), **double)
fixed = query_vector(d, generator=generator(0, "controls", "query"), norm=0.8, **double)
heads = independent_initialisation(m, d, generator=generator(0, "controls", "heads"), **double)
heads = heads._replace(c=torch.linspace(-1.5, 1, m, **double))


def gram(function, parameters, query):
    """The blocks of the kernel from the Jacobian of a function of one sample and its query."""
    queries = tokens[:, -1] if query == "last" else fixed.expand(n, -1)
    jacobians = torch.func.vmap(
        torch.func.jacrev(function, argnums=(0, 1, 2)), in_dims=(None, None, None, 0, 0)
    )(*parameters, tokens, queries)
    return [block.flatten(1) @ block.flatten(1).mT for block in jacobians]


@pytest.mark.parametrize("query", [fixed, "last"], ids=["fixed", "last"])
@pytest.mark.parametrize(("activation", "scale"), [("tanh", 1.0), ("erf", 0.4)])
def test_shared_attention_is_the_contraction_of_jacobians(query, activation, scale):
    shared = heads._replace(W=heads.W[:1])
    sigma = get_activation(activation)

    def network(c, U, W, x, q):
        a = torch.softmax(scale * x @ (W[0] @ q), dim=0) @ x
        return c @ sigma.value(U @ a) / m**0.5

    kernel = shared_attention_kernel(
        shared, tokens, query=query, activation=activation, scale=scale
    )
    for found, expected in zip(kernel, gram(network, shared, query), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("query", [fixed, "last"], ids=["fixed", "last"])
@pytest.mark.parametrize(("activation", "scale"), [("tanh", 1.0), ("erf", 0.4)])
def test_linearised_attention_is_the_contraction_of_jacobians(query, activation, scale):
    sigma = get_activation(activation)

    def network(c, U, W, x, q):
        logits = scale * (x @ (W @ q).mT)  # (T, m)
        a = ((1 + logits - logits.mean(dim=0)) / T).mT @ x
        return c @ sigma.value((U * a).sum(-1)) / m**0.5

    kernel = linearised_attention_kernel(
        heads, tokens, query=query, activation=activation, scale=scale
    )
    for found, expected in zip(kernel, gram(network, heads, query), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_the_mean_over_signs_of_the_shared_kernel_is_that_of_heads_with_equal_w():
    total = 0
    for signs in itertools.product((-1.0, 1.0), repeat=m):
        signed = Parameters(torch.tensor(signs, **double), heads.U, heads.W[:1])
        total = total + shared_attention_kernel(signed, tokens, query=fixed).total / 2**m
    equal = Parameters(torch.ones(m, **double), heads.U, heads.W[:1].expand(m, -1, -1))
    torch.testing.assert_close(
        total, empirical_kernel(equal, tokens, query=fixed).total, rtol=1e-11, atol=1e-13
    )


def test_softmax_and_linear_attention_agree_to_second_order_in_small_logits():
    gaps = []
    for scale in (1e-2, 1e-3):
        exact = empirical_kernel(heads, tokens, query=fixed, scale=scale)
        linear = linearised_attention_kernel(heads, tokens, query=fixed, scale=scale)
        gaps.append(float((exact.U - linear.U).norm()))
    assert 80 < gaps[0] / gaps[1] < 120


def test_linear_weights_leave_the_unit_ball():
    large = heads._replace(W=50 * heads.W)
    features = linearised_features(large, tokens, query=fixed)
    assert features.a.norm(dim=-1).max() > 1


def test_the_shared_kernel_wants_one_matrix():
    with pytest.raises(ValueError, match="W"):
        shared_attention_kernel(heads, tokens, query=fixed)
