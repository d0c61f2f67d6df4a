"""Constants from the law of the initialisation: they cover those of the heads that are drawn."""

import inspect
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.theory import (
    UNIT_BALL,
    InputBounds,
    TransportNorms,
    network_constants,
    value_radius,
)
from attention_dynamics.theory.a_priori import (
    a_priori_constants,
    mean_square_radius,
    mean_square_radius_bound,
)
from attention_dynamics.theory.constants import KAPPA_STAR
from attention_dynamics.training import Radii

RHO, NU = Radii(2.0, 1.5, 2.5), TransportNorms(1.0, 1.5, 0.5)


def heads_of_norm(norm, m, d):
    U = torch.zeros(m, d, dtype=torch.float64)
    U[:, 0] = norm
    signs = torch.ones(m, dtype=torch.float64)
    return Parameters(signs, U, torch.zeros(m, d, d, dtype=torch.float64))


def values(constants):
    return (
        constants.gradient_squared, constants.output, constants.linearisation, constants.remainder,
    )  # fmt: skip


@pytest.mark.parametrize("concentration", ["mean", "largest"])
@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
@pytest.mark.parametrize("inputs", [UNIT_BALL, InputBounds(1.5, 0.6)])
def test_they_cover_with_the_probability_asked_for(concentration, activation, inputs):
    m, d, delta, draws = 8, 3, 0.2, 150
    common = {"inputs": inputs, "transport_norms": NU, "activation": activation}
    bound = values(
        a_priori_constants(m, d, RHO, delta=delta, concentration=concentration, **common)
    )
    covered = 0
    for k in range(draws):
        phi = symmetric_initialisation(m, d, generator=generator(k, "c"), dtype=torch.float64)
        found = values(network_constants(phi, RHO, **common))
        covered += all(x <= y for x, y in zip(found, bound, strict=True))
    assert covered >= draws * (1 - delta) - 3 * math.sqrt(draws * delta * (1 - delta))


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
def test_the_largest_head_everywhere_attains_them(activation):
    m, d, delta = 16, 5, 0.05
    common = {"inputs": InputBounds(1.3, 0.8), "transport_norms": NU, "activation": activation}
    phi = heads_of_norm(value_radius(m, d, delta), m, d)
    bound = a_priori_constants(m, d, RHO, delta=delta, concentration="largest", **common)
    assert values(network_constants(phi, RHO, **common)) == pytest.approx(values(bound), rel=1e-12)


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
def test_equal_heads_of_the_mean_radius_are_just_below_them(activation):
    m, d, delta = 256, 8, 0.05
    common = {"inputs": UNIT_BALL, "transport_norms": NU, "activation": activation}
    phi = heads_of_norm(mean_square_radius(m, d, delta), m, d)
    bound = values(a_priori_constants(m, d, RHO, delta=delta, **common))
    for found, limit in zip(values(network_constants(phi, RHO, **common)), bound, strict=True):
        assert found <= limit <= 1.35 * found


def test_the_mean_radius_covers_with_exactly_the_probability_asked_for():
    m, d, delta, draws = 6, 2, 0.2, 20000
    U = torch.randn(draws, m // 2, d, generator=generator(0, "U"), dtype=torch.float64)
    mean = U.square().sum(-1).mean(-1).sqrt()
    covered = float((mean <= mean_square_radius(m, d, delta)).double().mean())
    assert abs(covered - 0.8) < 4 * math.sqrt(0.16 / draws)


@given(pairs=st.integers(1, 2**50), d=st.integers(1, 300), delta=st.floats(1e-12, 0.9))
def test_the_elementary_mean_radius_is_larger(pairs, d, delta):
    exact = mean_square_radius(2 * pairs, d, delta)
    assert 0 < exact <= mean_square_radius_bound(2 * pairs, d, delta) * (1 + 1e-12)


def test_only_the_largest_head_knows_the_width():
    def at(m, concentration):
        return a_priori_constants(
            m, 8, RHO, delta=0.05, inputs=UNIT_BALL, transport_norms=NU,
            concentration=concentration,
        )  # fmt: skip

    narrow, wide = at(2**20, "mean"), at(2**50, "mean")
    assert values(wide) == pytest.approx(values(narrow), rel=0.02)
    assert all(w < n for w, n in zip(values(wide), values(narrow), strict=True))
    assert mean_square_radius(2**50, 8, 0.05) == pytest.approx(math.sqrt(8), rel=1e-6)
    assert at(2**50, "largest").gradient_squared > 1.5 * at(2**20, "largest").gradient_squared
    for m in (4, 64, 2**20):
        assert at(m, "mean").linearisation < at(m, "largest").linearisation


def test_no_sequence_length_and_no_number_of_samples_is_asked_for():
    names = set(inspect.signature(a_priori_constants).parameters)
    assert not names & {"length", "T", "samples", "n"}


@given(
    pairs=st.integers(1, 10**6), d=st.integers(1, 50), delta=st.floats(1e-6, 0.5),
    share=st.floats(1.0, 4.0), concentration=st.sampled_from(["mean", "largest"]),
)  # fmt: skip
def test_they_grow_with_radii_tokens_and_certainty(pairs, d, delta, share, concentration):
    def at(delta=delta, rho=1.0, b=1.0, b_q=1.0):
        return values(
            a_priori_constants(
                2 * pairs, d, Radii(2 * rho, 1.5 * rho, 2.5 * rho), delta=delta,
                inputs=InputBounds(b, b_q), transport_norms=NU, concentration=concentration,
            )
        )  # fmt: skip

    base = at()
    for other in (at(delta=delta / share), at(rho=share), at(b=share), at(b_q=share)):
        assert all(x <= y * (1 + 1e-12) for x, y in zip(base, other, strict=True))


def test_what_has_no_bound_is_refused():
    common = {"delta": 0.1, "inputs": UNIT_BALL}
    with pytest.raises(ValueError, match=r"radii\.U: expected a number, got None"):
        a_priori_constants(8, 3, Radii(1.0, None, 1.0), **common)
    with pytest.raises(ValueError, match=r"radii\.W: expected at least transport_norms\.W = 0\.5"):
        a_priori_constants(8, 3, Radii(2.0, 2.0, 0.1), transport_norms=NU, **common)
    with pytest.raises(ValueError, match="heads: expected an even number of paired heads, got 9"):
        a_priori_constants(9, 3, RHO, **common)
    with pytest.raises(ValueError, match="concentration: expected one of 'mean', 'largest'"):
        a_priori_constants(8, 3, RHO, concentration="median", **common)
    with pytest.raises(TypeError, match="inputs: expected InputBounds"):
        a_priori_constants(8, 3, RHO, delta=0.1, inputs=(1.0, 1.0))
    assert a_priori_constants(8, 3, RHO, **common).remainder is None


def test_the_curvature_of_the_mean_head_has_its_formula():
    found = a_priori_constants(
        16, 4, Radii(0.5, 2.0, 3.0), delta=0.1, inputs=UNIT_BALL, concentration="mean"
    )
    R = mean_square_radius(16, 4, 0.1) + 2.0 / 4
    slope = math.hypot(2.0, 3.0 * R)
    second = 2 * 2.0 * 3.0 + KAPPA_STAR * R * 9.0
    s2 = 4 / (3 * math.sqrt(3))
    assert found.linearisation == pytest.approx(0.5 * slope + (s2 * slope**2 + second) / 2)
