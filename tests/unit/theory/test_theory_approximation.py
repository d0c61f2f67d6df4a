"""Concentration of the heads and the approximation bound, against samples."""

import math

import pytest
import torch
from scipy import stats

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.parameters import (
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.theory import (
    UNIT_BALL,
    InputBounds,
    Teacher,
    TransportNorms,
    approximation_bound,
    approximation_error,
    head_contributions,
    input_bounds,
    random_multi_anchor,
    target_bound,
    value_radius,
    value_radius_bound,
)
from attention_dynamics.theory.constants import block_slope

NORMS = TransportNorms(1.0, 2.0, 1.5)


@pytest.mark.parametrize("paired", [True, False])
def test_value_radius_covers_with_the_probability_asked_for(paired):
    heads, d, delta, draws = 8, 3, 0.1, 4000
    N = heads // 2 if paired else heads
    R0 = value_radius(heads, d, delta, paired=paired)
    U = torch.randn(draws, N, d, generator=generator(0, "U", N), dtype=torch.float64)
    covered = float((torch.linalg.vector_norm(U, dim=-1).amax(dim=1) <= R0).double().mean())
    assert abs(covered - 0.9) < 4 * math.sqrt(0.09 / draws)


@pytest.mark.parametrize("heads", [2, 64, 2**20])
@pytest.mark.parametrize("d", [1, 8, 100])
@pytest.mark.parametrize("delta", [0.5, 0.05, 1e-12])
def test_the_elementary_radius_is_larger_and_below_2_root_D(heads, d, delta):
    exact, simple = value_radius(heads, d, delta), value_radius_bound(heads, d, delta)
    D = d + math.log(heads / delta)
    assert 0 < exact <= simple <= 2 * math.sqrt(D)
    log_coverage = heads / 2 * math.log1p(-stats.chi2.sf(exact**2, d))
    assert log_coverage == pytest.approx(math.log1p(-delta), rel=1e-6)


@pytest.fixture(scope="module")
def setting():
    d, T = 4, 6
    query = query_vector(d, generator=generator(0, "q"), dtype=torch.float64)
    transport = random_multi_anchor(
        4, T, d, generator=generator(0, "a"), norms=NORMS, query=query, dtype=torch.float64
    )
    tokens = unit_ball_tokens(64, T, d, generator=generator(0, "t"), dtype=torch.float64)
    return transport, tokens, Teacher(transport, generator=generator(0, "teacher"), heads=20000)


def test_no_head_contributes_more_than_g(setting):
    transport, tokens, teacher = setting
    z = head_contributions(tokens, transport, teacher.parameters).abs().amax(dim=0).numpy()
    R = torch.linalg.vector_norm(teacher.parameters.U, dim=-1)
    assert (z <= NORMS.c + block_slope(R, NORMS.U, NORMS.W)).all()


def test_the_target_is_below_its_bound(setting):
    _, tokens, teacher = setting
    assert float(teacher(tokens).abs().max()) <= target_bound(NORMS, 4, inputs=UNIT_BALL)


@pytest.mark.parametrize("inputs", [UNIT_BALL, InputBounds(1.5, 0.5)])
@pytest.mark.parametrize("activation", ["tanh", "erf"])
def test_moments_and_bias_are_expectations_over_U(inputs, activation):
    d, heads, delta_prime = 4, 2, 0.3  # so few heads that the tail is seen
    bound = approximation_bound(
        NORMS, heads, d, delta=0.1, delta_prime=delta_prime, activation=activation, inputs=inputs
    )
    b, b_q = inputs
    s1 = 1.0 if activation == "tanh" else math.sqrt(2 / math.pi)
    U = torch.randn(400000, d, generator=generator(0, "U"), dtype=torch.float64)
    R = torch.linalg.vector_norm(U, dim=-1).numpy()
    g = NORMS.c + s1 * block_slope(R, NORMS.U, NORMS.W, token_bound=b, query_bound=b_q)
    outside = R > bound.value_radius
    linear = NORMS.c + s1 * (b * NORMS.U + b**2 * b_q * NORMS.W * R)
    error = 5 / math.sqrt(R.size)
    assert bound.second_moment == pytest.approx((g**2).mean(), abs=error * (g**2).std())
    assert target_bound(NORMS, d, activation=activation, inputs=inputs) == pytest.approx(
        g.mean(), abs=error * g.std()
    )
    tail = linear * outside
    assert bound.bias == pytest.approx(tail.mean(), abs=error * tail.std())
    assert bound.bias >= (g * outside).mean() - error * (g * outside).std()
    assert bound.head_bound == pytest.approx(
        NORMS.c
        + s1 * block_slope(bound.value_radius, NORMS.U, NORMS.W, token_bound=b, query_bound=b_q)
    )


@pytest.mark.parametrize("paired", [True, False])
def test_the_bound_holds_over_draws_of_the_heads(setting, paired):
    transport, tokens, teacher = setting
    values, errors = teacher.evaluate(tokens)
    draw = symmetric_initialisation if paired else independent_initialisation
    for heads in (8, 64):
        bound = approximation_bound(
            NORMS,
            heads,
            4,
            samples=64,
            delta=0.05,
            delta_prime=0.05,
            paired=paired,
            inputs=input_bounds(tokens, transport.query),
        )
        assert bound.sup is not None
        for k in range(40):
            parameters = draw(heads, 4, generator=generator(k, "m", heads), dtype=torch.float64)
            found = approximation_error(values, transport, parameters, tokens)
            slack = 5 * float(errors.max())
            assert found.sup <= bound.sup + slack
            assert found.rms <= bound.rms + slack


def test_n_enters_the_maximum_only_and_through_its_logarithm():
    def bound(n, heads=64):
        return approximation_bound(
            NORMS, heads, 4, samples=n, delta=0.05, delta_prime=0.05, inputs=UNIT_BALL
        )

    small, large = bound(100), bound(10**6)
    assert small.rms == large.rms
    ratio = (large.sup - large.bias) / (small.sup - small.bias)
    assert ratio == pytest.approx(math.sqrt(math.log(4e7) / math.log(4e3)), rel=1e-12)
    none = bound(None)
    assert none.sup is None
    assert none.rms == small.rms


def test_the_bound_has_the_formula_of_hoeffding_and_mcdiarmid():
    given = {"samples": 500, "delta": 0.02, "delta_prime": 0.05, "inputs": UNIT_BALL}
    found = approximation_bound(NORMS, 64, 4, **given)
    B, V, bias = found.head_bound, found.second_moment, found.bias
    assert found.sup == pytest.approx(2 * B * math.sqrt(math.log(2 * 500 / 0.02) / 64) + bias)
    assert found.rms == pytest.approx(
        math.sqrt(V / 32) + B * math.sqrt(2 * math.log(1 / 0.02) / 32) + bias
    )
    assert found.value_radius == value_radius(64, 4, 0.05)
    halves = approximation_bound(NORMS, 32, 4, **given, paired=False)
    assert halves == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 7}, "heads: expected an even number of paired heads, got 7; pass paired=False"),
        ({"heads": 0}, "heads: expected an integer >= 2, got 0"),
        ({"dimension": 0}, "dimension: expected an integer >= 1, got 0"),
        ({"delta": 0.0}, r"delta: expected a probability in \(0, 1\), got 0.0"),
        ({"delta_prime": 1.0}, r"delta_prime: expected a probability in \(0, 1\), got 1.0"),
        ({"samples": 0}, "samples: expected an integer >= 1, got 0"),
        ({"activation": "relu"}, "activation: expected one of"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, message):
    fields = {
        "norms": NORMS, "heads": 8, "dimension": 3, "delta": 0.1, "delta_prime": 0.1, "samples": 9,
        "inputs": UNIT_BALL,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        approximation_bound(**(fields | changes))
