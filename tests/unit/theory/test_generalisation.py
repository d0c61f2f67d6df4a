"""The loss on new sequences: Rademacher complexities by simulation, and gaps of real fits."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory import UNIT_BALL, InputBounds, input_bounds, network_constants
from attention_dynamics.theory.generalisation import (
    expected_tangent_complexity,
    generalisation_bound,
    tangent_complexity,
)
from attention_dynamics.training import DescentConfig, Radii, projected_gradient_descent

RHO = Radii(1.0, 2.0, 1.5)


def simulated(initial, tokens, query, activation, radii=RHO, draws=400, seed=0):
    """sqrt(n) E sup (1/n) sum eps_j f_lin(X_j): the supremum over the balls is a sum of norms."""
    m, n = initial.heads, len(tokens)
    gradients = shallow.per_sample_gradients(initial, tokens, query=query, activation=activation)
    signs = torch.randint(0, 2, (draws, n), generator=generator(seed, "signs")).double() * 2 - 1
    total = torch.zeros(draws, dtype=torch.float64)
    for block, rho in zip(gradients, (radii.c, radii.U, radii.W), strict=True):
        sums = (signs @ block.reshape(n, -1)).reshape(draws, m, -1)
        total += rho / math.sqrt(m) * sums.norm(dim=-1).sum(dim=-1)
    return float(total.mean()) / math.sqrt(n)


def sequences(n, T, d, b=1.0, seed=0):
    """Half of them antipodal pairs of random directions, half random tokens."""
    e = unit_ball_tokens(n // 2, 1, d, generator=generator(seed), law="sphere", dtype=torch.float64)
    pairs = e * (1.0 - 2.0 * (torch.arange(T, dtype=torch.float64) % 2))[:, None]
    rest = unit_ball_tokens(
        n - n // 2, T, d, generator=generator(seed, "t"), law="sequence_means", dtype=torch.float64
    )
    return b * torch.cat((pairs, rest))


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("b", [1.0, 1.5])
def test_no_sample_has_a_larger_complexity(activation, query, b):
    m, d = 8, 3
    q = query_vector(d, generator=generator(0), dtype=torch.float64) if query == "fixed" else "last"
    inputs = input_bounds(sequences(20, 4, d, b), q, token_bound=b)
    for seed in range(4):
        phi = symmetric_initialisation(m, d, generator=generator(seed), dtype=torch.float64)
        tokens = sequences(20, 4, d, b, seed)
        found = simulated(phi, tokens, q, activation)
        bound = tangent_complexity(phi, RHO, inputs=inputs, activation=activation)
        assert found <= bound
        for delta in (0.5, 0.05):
            free = expected_tangent_complexity(
                m, RHO, delta=delta, inputs=inputs, activation=activation
            )
            if delta == 0.05:
                assert found <= free


def test_the_complexity_is_nearly_attained():
    # Orthogonal repeated tokens give r_u, antipodal ones along U_i give r_w R: here one of each.
    m, d, n = 2, 2, 400
    phi = symmetric_initialisation(m, d, generator=generator(1), dtype=torch.float64)
    unit = phi.U[0] / phi.U[0].norm()
    radii = Radii(0.0, 0.0, 1.5)
    tokens = torch.stack((unit, -unit)).repeat(n, 1, 1)
    query = torch.tensor([1.0, 0.0], dtype=torch.float64)
    level = Parameters(phi.c, phi.U, torch.zeros_like(phi.W))  # equal weights
    found = simulated(level, tokens, query, "tanh", radii)
    bound = tangent_complexity(level, radii, inputs=UNIT_BALL)
    # The mean of |sum of n signs| is sqrt(2 n/pi) and not sqrt n: nothing else is lost.
    assert found / bound == pytest.approx(math.sqrt(2 / math.pi), rel=0.06)


def test_the_root_of_squares_replaces_the_sum_of_the_blocks():
    m, d = 16, 4
    phi = symmetric_initialisation(m, d, generator=generator(0), dtype=torch.float64)
    norms = phi.block_norms().U
    expected = 1.0 + float((4.0 + (1.5 * norms).square()).sqrt().mean())
    assert tangent_complexity(phi, RHO, inputs=UNIT_BALL) == pytest.approx(expected)
    assert expected < 1.0 + 2.0 + 1.5 * float(norms.mean())
    b, b_q = 1.5, 0.5
    rescaled = 1.0 + b * float((4.0 + (b * b_q * 1.5 * norms).square()).sqrt().mean())
    found = tangent_complexity(phi, RHO, inputs=InputBounds(b, b_q))
    assert found == pytest.approx(rescaled)


def test_the_a_priori_complexity_covers_in_every_dimension():
    # E over the sample is simulated on a large fixed one; the bound must not grow with d.
    delta, m, draws = 0.2, 4, 40
    bound = expected_tangent_complexity(m, RHO, delta=delta, inputs=UNIT_BALL)
    for d in (1, 4, 24):
        covered = 0
        for seed in range(draws):
            phi = symmetric_initialisation(m, d, generator=generator(seed, d), dtype=torch.float64)
            covered += simulated(phi, sequences(16, 4, d), "last", "tanh", draws=60) <= bound
        assert covered >= draws * (1 - delta)
    assert expected_tangent_complexity(2**40, RHO, delta=delta, inputs=UNIT_BALL) == pytest.approx(
        1.0 + math.hypot(2.0, 1.5), rel=1e-5
    )
    wide = symmetric_initialisation(64, 24, generator=generator(0), dtype=torch.float64)
    assert tangent_complexity(wide, RHO, inputs=UNIT_BALL) > 2 * expected_tangent_complexity(
        64, RHO, delta=delta, inputs=UNIT_BALL
    )


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_gap_of_a_fit_to_random_labels_is_bounded(clipped, batch_size):
    d, T, m, Y, radii = 3, 4, 16, 1.0, Radii(2.0, 2.0, 2.0)
    largest = 0.0
    for seed in range(6):
        n = (2, 6, 20)[seed % 3]
        tokens = unit_ball_tokens(n + 2000, T, d, generator=generator(seed), law="sequence_means")
        signs = torch.randint(0, 2, (n + 2000,), generator=generator(seed, "y")).float() * 2 - 1
        model = ShallowTransformer.symmetric(m, d, query="last", seed=seed)
        initial = model.snapshot()
        config = DescentConfig(60, step_size=1.0, radii=radii, batch_size=batch_size)
        result = projected_gradient_descent(model, tokens[:n], Y * signs[:n], config)
        constants = network_constants(initial, radii, inputs=UNIT_BALL)
        complexity = tangent_complexity(initial, radii, inputs=UNIT_BALL)
        bound = generalisation_bound(
            constants, complexity, n, target_bound=Y, delta=0.05, clipped=clipped
        )
        for phi in (result.final, result.averaged, result.best):
            f = shallow.forward(phi, tokens, query="last")
            training = float((f[:n] - Y * signs[:n]).square().mean())
            f = f.clamp(-Y, Y) if clipped else f
            population = float((f[n:] - Y * signs[n:]).square().mean())
            largest = max(largest, (population - training) / bound.total)
            assert population - training <= bound.total
    assert largest > 1e-3


def constants_of(m=64, d=4):
    phi = symmetric_initialisation(m, d, generator=generator(0), dtype=torch.float64)
    return network_constants(phi, RHO, inputs=UNIT_BALL)


def test_the_terms_have_their_formulas():
    constants = constants_of()
    found = generalisation_bound(constants, 5.0, 100, target_bound=2.0, delta=0.1)
    S = constants.output + 2.0
    assert found.complexity == pytest.approx(4 * S * 5.0 / 10)
    assert found.linearisation == pytest.approx(4 * S * constants.linearisation / 8)
    assert found.deviation == pytest.approx(S**2 * math.sqrt(math.log(10) / 200))
    assert found.total == pytest.approx(sum(found[:3]))
    clipped = generalisation_bound(constants, 5.0, 100, target_bound=2.0, delta=0.1, clipped=True)
    assert clipped.complexity == pytest.approx(found.complexity * 4.0 / S)


@given(
    n=st.integers(1, 10**9), complexity=st.floats(0, 50), Y=st.floats(0, 10),
    delta=st.floats(1e-9, 0.9), clipped=st.booleans(),
)  # fmt: skip
def test_more_samples_and_heads_help(n, complexity, Y, delta, clipped):
    constants = constants_of()
    common = {"target_bound": Y, "clipped": clipped}
    base = generalisation_bound(constants, complexity, n, delta=delta, **common).total
    assert generalisation_bound(constants, complexity, 2 * n, delta=delta, **common).total <= base
    assert generalisation_bound(constants, complexity, n, delta=delta / 2, **common).total >= base
    wide = replace(constants, heads=10**12)
    assert generalisation_bound(wide, complexity, n, delta=delta, **common).total <= base


def test_in_the_limit_nothing_is_left():
    constants = replace(constants_of(), heads=10**16)
    assert generalisation_bound(constants, 5.0, 10**16, target_bound=1.0, delta=0.1).total < 1e-3


def test_what_has_no_bound_is_refused():
    phi = symmetric_initialisation(8, 3, generator=generator(0))
    with pytest.raises(ValueError, match=r"radii\.U: expected a number, got None; .*complexity"):
        tangent_complexity(phi, Radii(1.0, None, 1.0), inputs=UNIT_BALL)
    with pytest.raises(TypeError, match="inputs: expected InputBounds"):
        tangent_complexity(phi, RHO, inputs=None)
    with pytest.raises(ValueError, match="heads: expected an even number of paired heads, got 7"):
        expected_tangent_complexity(7, RHO, delta=0.1, inputs=UNIT_BALL)
    constants = constants_of()
    for changes, message in (
        ({"samples": 0}, "samples: expected an integer >= 1"),
        ({"delta": 1.0}, "delta: expected a probability"),
        ({"target_bound": -1.0}, "target_bound: expected a finite number >= 0"),
        ({"complexity": math.nan}, "complexity: expected a finite number >= 0"),
    ):
        fields = {"complexity": 1.0, "samples": 5, "target_bound": 1.0, "delta": 0.1} | changes
        with pytest.raises(ValueError, match=message):
            generalisation_bound(constants, **fields)


def test_the_expected_complexity_has_its_formula():
    found = expected_tangent_complexity(
        32, Radii(0.5, 2.0, 3.0), delta=0.1, inputs=InputBounds(1.5, 0.5)
    )
    deviation = 1.5**2 * 0.5 * 3.0 * math.sqrt(4 * math.log(10) / 32)
    assert found == pytest.approx(0.5 + 1.5 * math.hypot(2.0, 1.5 * 0.5 * 3.0) + deviation)
