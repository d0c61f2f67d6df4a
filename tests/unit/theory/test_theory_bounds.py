"""Constants of the network: never violated on the projection set, and refused outside of it."""

import math

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.indrnn import final_state_gradients
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.theory import (
    UNIT_BALL,
    InputBounds,
    TransportNorms,
    adversarial_perturbation,
    indrnn_gradient_bounds,
    input_bounds,
    linearisation_error,
    network_constants,
    random_perturbation,
)
from attention_dynamics.theory.constants import block_curvature, block_slope, head_lipschitz
from attention_dynamics.training import Radii

d, m = 4, 16


def initial_of(seed=0, heads=m):
    return symmetric_initialisation(heads, d, generator=generator(seed, "m"), dtype=torch.float64)


def sequences(b=1.0):
    """Random tokens of several lengths' worth of weight, and antipodal pairs, of norm b."""
    parts = [
        unit_ball_tokens(40, 6, d, generator=generator(k, "t"), law=law, dtype=torch.float64)
        for k, law in enumerate(("iid", "sphere", "sequence_means"))
    ]
    e = unit_ball_tokens(40, 1, d, generator=generator(9), law="sphere", dtype=torch.float64)
    parts.append(e * torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64)[:, None])
    return b * torch.cat(parts)


def points_of_the_set(initial, radii, query, tokens, activation="tanh"):
    """Random boundary points, and a point that climbed away from the tangent model."""
    for k in range(6):
        yield random_perturbation(initial, radii, generator=generator(k, "boundary"))
    yield adversarial_perturbation(
        initial, radii, tokens, query=query, activation=activation,
        generator=generator(0, "ascent"), candidates=2, steps=10,
    ).parameters  # fmt: skip


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("b", [1.0, 1.4])
def test_constants_are_never_violated(activation, query, b):
    if query == "fixed":
        query = query_vector(d, generator=generator(0, "q"), dtype=torch.float64)
    tokens, initial = sequences(b), initial_of()
    rho, nu = Radii(3.0, 2.0, 2.5), TransportNorms(1.0, 2.0, 0.5)
    common = {"query": query, "activation": activation}
    inputs = input_bounds(tokens, query, token_bound=b)
    constants = network_constants(
        initial, rho, transport_norms=nu, activation=activation, inputs=inputs
    )
    stars = list(points_of_the_set(initial, Radii(nu.c, nu.U, nu.W), query, tokens, activation))
    reached = dict.fromkeys(("gradient", "output", "linearisation", "remainder"), 0.0)
    for phi in points_of_the_set(initial, rho, query, tokens, activation):
        f = shallow.forward(phi, tokens, **common)
        error = linearisation_error(initial, phi, tokens, **common)
        gradients = shallow.per_sample_gradients(phi, tokens, **common)
        squares = sum(g.flatten(1).square().sum(dim=1) for g in gradients)
        reached["gradient"] = max(reached["gradient"], float(squares.max()))
        reached["output"] = max(reached["output"], float(f.abs().max()))
        reached["linearisation"] = max(reached["linearisation"], float(error.abs().max()))
        for star in stars:
            remainder = linearisation_error(phi, star, tokens, **common)
            reached["remainder"] = max(reached["remainder"], float(remainder.abs().max()))
    assert reached["gradient"] <= constants.gradient_squared < 25 * reached["gradient"]
    assert reached["output"] <= constants.output
    assert reached["linearisation"] <= constants.linearisation_error < 40 * reached["linearisation"]
    assert reached["remainder"] <= constants.remainder_error
    assert constants.linearisation_error == constants.linearisation / math.sqrt(m)


def test_constants_are_averages_over_heads():
    initial, rho, nu = initial_of(), Radii(3.0, 2.0, 2.5), TransportNorms(1.0, 2.0, 0.5)
    found = network_constants(initial, rho, inputs=UNIT_BALL, transport_norms=nu)
    C = 1 + 3.0 / math.sqrt(m)
    R = torch.linalg.vector_norm(initial.U, dim=-1) + 2.0 / math.sqrt(m)
    mean = lambda function: sum(function(x) for x in R.tolist()) / m  # noqa: E731
    P, Q = mean(lambda x: block_slope(x, 2.0, 2.5)), mean(lambda x: block_curvature(x, 2.0, 2.5))
    P2, Q2 = mean(lambda x: block_slope(x, 4.0, 3.0)), mean(lambda x: block_curvature(x, 4.0, 3.0))
    assert found.gradient_squared == pytest.approx(1 + C**2 * mean(lambda x: max(1, x**2)))
    assert found.output == pytest.approx(3.0 + P)
    assert found.linearisation == pytest.approx(3.0 * P + Q / 2)
    assert found.remainder == pytest.approx(4.0 * P2 + C * Q2 / 2)
    without = network_constants(initial, rho, inputs=UNIT_BALL)
    assert without.remainder is None
    assert without.remainder_error is None
    assert without.linearisation == found.linearisation


def test_constants_do_not_see_the_sequence_length():
    # The same heads and radii give the same constants: T is not even an argument. What is bounded
    # does not grow with T either: antipodal tokens, the worst case, repeated T/2 times.
    initial = initial_of()
    e = unit_ball_tokens(20, 1, d, generator=generator(9), law="sphere", dtype=torch.float64)
    constants = network_constants(initial, Radii(0.0, 0.0, 0.0), inputs=UNIT_BALL)
    sizes = []
    for T in (2, 16, 256):
        signs = 1.0 - 2.0 * (torch.arange(T, dtype=torch.float64) % 2)
        g = shallow.per_sample_gradients(initial, e * signs[:, None], query="last")
        sizes.append(float(sum(x.flatten(1).square().sum(dim=1) for x in g).max()))
    assert max(sizes) <= constants.gradient_squared
    assert sizes == pytest.approx([sizes[0]] * 3, rel=1e-12)


@pytest.mark.parametrize("block", ["c", "U", "W"])
def test_a_radius_below_the_transport_norm_is_refused(block):
    radii = Radii(**({"c": 2.0, "U": 2.0, "W": 2.0} | {block: 1.0}))
    message = rf"radii\.{block}: expected at least transport_norms\.{block} = 1\.5, got 1; .*raise"
    with pytest.raises(ValueError, match=message):
        network_constants(
            initial_of(), radii, inputs=UNIT_BALL, transport_norms=TransportNorms(1.5, 1.5, 1.5)
        )


@pytest.mark.parametrize("block", ["c", "U", "W"])
def test_a_free_block_has_no_bound(block):
    radii = Radii(**({"c": 2.0, "U": 2.0, "W": 2.0} | {block: None}))
    with pytest.raises(ValueError, match=rf"radii\.{block}: expected a number, got None.*distance"):
        network_constants(initial_of(), radii, inputs=UNIT_BALL)


def test_inputs_beyond_the_unit_ball_need_their_bound():
    tokens, q = sequences(1.4), query_vector(d, generator=generator(0), norm=2.0).double()
    short = q / 2
    with pytest.raises(
        ValueError, match=r"tokens: expected norms <= 1, got 1\.4; pass token_bound"
    ):
        input_bounds(tokens, short)
    with pytest.raises(ValueError, match=r"query: expected a norm <= 1, got 2; pass query_bound=2"):
        input_bounds(tokens, q, token_bound=1.5)
    assert input_bounds(tokens, short, token_bound=1.5) == InputBounds(1.5, 1.0)
    assert input_bounds(tokens, q, token_bound=1.5, query_bound=2.5) == InputBounds(1.5, 2.5)
    assert input_bounds(tokens, "last", token_bound=1.5, scale=0.25) == InputBounds(1.5, 0.375)
    assert input_bounds(sequences(), "last") == InputBounds(1.0, 1.0)
    assert input_bounds(sequences(), short, scale=0.25) == InputBounds(1.0, 0.25)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"query": "first"}, ValueError, "query: expected a tensor of shape .* or 'last'"),
        ({"query": torch.full((d,), math.nan).double()}, ValueError, "query: .*got nan"),
        ({"query": torch.zeros(d + 1).double()}, ValueError, r"query: expected shape \(d,\)"),
        ({"query": torch.zeros(d)}, TypeError, "query: has dtype torch.float32"),
        (
            {"query": "last", "query_bound": 0.5},
            ValueError,
            "query_bound: expected None for query='last', got 0.5; the query is a token",
        ),
        ({"query_bound": -1.0}, ValueError, "query_bound: expected a finite number >= 0, got -1"),
        ({"scale": -1.0}, ValueError, "scale: expected a finite number >= 0, got -1"),
        ({"scale": math.nan}, ValueError, "scale: expected a finite number >= 0, got nan"),
        ({"tokens": sequences()[:0]}, ValueError, "tokens: expected at least one"),
        ({"token_bound": "2"}, TypeError, "token_bound: expected a finite number > 0, got '2'"),
    ],
)
def test_inputs_that_would_make_a_bound_wrong_are_refused(changes, error, message):
    fields = {"tokens": sequences(), "query": torch.zeros(d, dtype=torch.float64)} | changes
    with pytest.raises(error, match=message):
        input_bounds(**fields)


def test_no_constant_can_be_had_without_a_word_on_the_inputs():
    initial, radii = initial_of(), Radii(1.0, 1.0, 1.0)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'inputs'"):
        network_constants(initial, radii)
    with pytest.raises(TypeError, match=r"inputs: expected InputBounds, got Tensor; .*input_bound"):
        network_constants(initial, radii, inputs=sequences())
    with pytest.raises(ValueError, match=r"inputs\.token_bound: expected a finite number > 0"):
        network_constants(initial, radii, inputs=InputBounds(-1.0, 1.0))
    with pytest.raises(TypeError, match=r"radii: expected Radii\(c, U, W\), got \(1, 1, 1\)"):
        network_constants(initial, (1, 1, 1), inputs=UNIT_BALL)


def test_a_longer_ball_gives_larger_constants():
    initial, rho = initial_of(), Radii(2.0, 2.0, 2.0)
    one = network_constants(initial, rho, inputs=UNIT_BALL)
    two = network_constants(initial, rho, inputs=InputBounds(2.0, 1.5))
    assert two.output > one.output
    assert two.linearisation > one.linearisation
    R = torch.linalg.vector_norm(initial.U, dim=-1).numpy() + 2.0 / math.sqrt(m)
    C = 1 + 2.0 / math.sqrt(m)
    lipschitz = head_lipschitz(R, token_bound=2.0, query_bound=1.5)
    assert two.gradient_squared == pytest.approx(1 + C**2 * (lipschitz**2).mean())


@pytest.mark.parametrize("u", [1.5, -1.5, 1.0, -1.0, 0.5, 0.0])
@pytest.mark.parametrize("T", [1, 2, 16])
def test_the_recurrent_bound_in_w_is_attained(u, T):
    # w orthogonal to the tokens keeps the state at 0, where tanh' = 1.
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    signs = torch.sign(torch.tensor(u, dtype=torch.float64)) ** torch.arange(T - 1, -1, -1)
    tokens = signs[:, None] * x
    w = torch.tensor([1.0, 0.0], dtype=torch.float64)
    in_w, _ = final_state_gradients(w, u, tokens[None])
    bound = indrnn_gradient_bounds(u, T).w
    assert float(in_w.norm()) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize(("activation", "s1"), [("tanh", 1.0), ("erf", math.sqrt(2 / math.pi))])
@pytest.mark.parametrize("u", [1.5, -1.0, 0.7])
def test_the_recurrent_bounds_hold(activation, s1, u):
    b, T = 1.5, 8
    bounds = indrnn_gradient_bounds(u, T, 1.0, s1, token_bound=b)
    largest = torch.zeros(2, dtype=torch.float64)
    for k in range(30):
        stream = generator(k, "indrnn")
        tokens = b * unit_ball_tokens(20, T, 2, generator=stream, law="sphere", dtype=torch.float64)
        w = 0.3 * torch.randn(2, generator=stream, dtype=torch.float64)
        in_w, in_u = final_state_gradients(w, u, tokens, activation)
        sizes = torch.stack((in_w.norm(dim=-1).max(), in_u.abs().max()))
        largest = torch.maximum(largest, sizes)
    assert 0 < float(largest[0]) <= bounds.w
    assert 0 < float(largest[1]) <= bounds.u


def test_the_recurrent_bounds_are_geometric_sums():
    for u, T, s1 in ((1.5, 16, 1.0), (0.3, 5, 0.8), (1 + 1e-9, 1000, 1.0), (2.0, 3, 0.5)):
        terms = [(s1 * u) ** k for k in range(T)]
        found = indrnn_gradient_bounds(u, T, 0.7, s1)
        assert found.w == pytest.approx(s1 * sum(terms), rel=1e-12)
        assert found.u == pytest.approx(0.7 * s1 * sum(terms[:-1]), rel=1e-12)
    at_one = indrnn_gradient_bounds(-2.0, 97, 1.0, 0.5)
    assert (at_one.w, at_one.u) == (97 * 0.5, 96 * 0.5)
    assert indrnn_gradient_bounds(1.5, 4).w == 8.125
    assert indrnn_gradient_bounds(1.5, 97).w == pytest.approx(2.4e17, rel=0.01)
    assert indrnn_gradient_bounds(3.0, 10**6).w == math.inf
    assert indrnn_gradient_bounds(1.5, 1).u == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((math.nan, 3), "u: expected a finite number, got nan"),
        ((1.0, 0), "T: expected an integer >= 1, got 0"),
        ((1.0, 2.0), "T: expected an integer >= 1, got 2.0"),
        ((1.0, 3, -1.0), "s0: expected a finite number >= 0"),
        ((1.0, 3, 1.0, math.inf), "s1: expected a finite number >= 0"),
    ],
)
def test_recurrent_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        indrnn_gradient_bounds(*arguments)


def test_invalid_parameters_are_refused():
    initial = initial_of()
    with pytest.raises(ValueError, match=r"initial\.c"):
        network_constants(
            Parameters(initial.c[:3], initial.U, initial.W),
            Radii(1.0, 1.0, 1.0),
            inputs=UNIT_BALL,
        )
