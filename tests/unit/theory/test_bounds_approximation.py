"""The approximation error without d and without log m: attained, attacked, and compared."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.attention import head_features
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.theory import (
    UNIT_BALL,
    InputBounds,
    Teacher,
    TransportNorms,
    approximation_bound,
    approximation_error,
    random_multi_anchor,
)
from attention_dynamics.theory.approximation import (
    _exponential_remainder,
    bernstein_approximation_bound,
    head_second_moment,
)

NORMS = TransportNorms(1.0, 2.0, 1.5)


def draws_of_the_largest_head(tokens, query, norms, activation, count=8000, seed=0):
    """The largest |z| that a transport map of these norms can give, at random heads, (count,)."""
    d = tokens.shape[-1]
    g = generator(seed, "heads", d)
    U = torch.randn(count, d, generator=g, dtype=torch.float64)
    W = torch.randn(count, d, d, generator=g, dtype=torch.float64)
    s, a, r = head_features(tokens, W, U, query)
    sigma = get_activation(activation)
    q = torch.linalg.vector_norm(tokens[0, -1] if isinstance(query, str) else query)
    slopes = norms.U * a[0].norm(dim=-1) + norms.W * q * r[0].norm(dim=-1)
    return norms.c * sigma.value(s[0]).abs() + sigma.first(s[0]).abs() * slopes


@pytest.mark.parametrize("activation", ["tanh", "erf", "erf_plain"])
@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("d", [1, 3, 8])
def test_no_transport_map_has_a_larger_second_moment(activation, query, d):
    q = query_vector(d, generator=generator(1, d), dtype=torch.float64)
    largest = 0.0
    e = unit_ball_tokens(1, 1, d, generator=generator(2, d), law="sphere", dtype=torch.float64)
    sequences = [e * torch.tensor([1.0, -1, 1, -1], dtype=torch.float64)[:, None]]
    sequences += [
        unit_ball_tokens(1, 5, d, generator=generator(k, d), law=law, dtype=torch.float64)
        for k, law in enumerate(("iid", "sphere", "sequence_means"))
    ]
    for tokens in sequences:
        z = draws_of_the_largest_head(tokens, q if query == "fixed" else "last", NORMS, activation)
        largest = max(largest, float((z**2).mean() - 4 * (z**2).std() / math.sqrt(len(z))))
    assert largest <= head_second_moment(NORMS, inputs=UNIT_BALL, activation=activation)


def test_the_second_moment_is_attained_in_every_dimension():
    # Antipodal tokens at equal weights: a = 0, M = e e^T, so |MU|^2 = (U.e)^2 has mean 1.
    norms = TransportNorms(0.0, 0.0, 1.5)
    for d in (1, 4, 64):
        e = torch.zeros(d, dtype=torch.float64)
        e[0] = 1.0
        U = torch.randn(200000, d, generator=generator(0, d), dtype=torch.float64)
        alpha = torch.full((1, 1, 2), 0.5, dtype=torch.float64)
        tokens = torch.stack((e, -e))
        assert float((alpha[0, 0] @ tokens).norm()) == 0.0
        M = (alpha[0, 0, :, None] * tokens).T @ tokens
        z = norms.W * (U @ M).norm(dim=-1)
        moment = head_second_moment(norms, inputs=UNIT_BALL)
        assert float((z**2).mean()) == pytest.approx(moment, rel=0.02)


def test_the_second_moment_has_no_dimension_and_is_below_that_of_g():
    for d in (2, 8, 100):
        with_d = approximation_bound(
            NORMS, 64, d, delta=0.1, delta_prime=0.1, inputs=UNIT_BALL
        ).second_moment
        assert head_second_moment(NORMS, inputs=UNIT_BALL) < with_d
    rescaled = head_second_moment(TransportNorms(0, 0, 1.5), inputs=InputBounds(2.0, 0.5))
    assert rescaled == pytest.approx((1.5 * 4 * 0.5) ** 2)


@pytest.mark.parametrize("pairs", [4, 64, 4096])
def test_the_radius_is_the_best_exponential_rate_over_a_grid(pairs):
    # r(t) from its definition alone: h by expm1, E by Simpson's rule, the infimum over a grid.
    delta, n = 0.05, 1000
    g = NORMS.c + max(NORMS.U * a + NORMS.W * (1 - a * a) for a in np.linspace(0, 1, 10001))
    zeta = np.linspace(0, 30, 6001)
    found = bernstein_approximation_bound(
        NORMS, 2 * pairs, delta=delta, inputs=UNIT_BALL, samples=n
    )
    for value, t in ((found.rms, math.log(2 / delta)), (found.sup, math.log(2 * n / delta))):

        def rate(x, t=t):
            u = x * (2 * g + NORMS.W * zeta)
            above = integrate.simpson((np.expm1(u) - u - u**2 / 2) * stats.norm.pdf(zeta), x=zeta)
            below = math.expm1(2 * x * g) - 2 * x * g - (2 * x * g) ** 2 / 2
            return (t / pairs + (x * g) ** 2 / 2 + above + below / 2) / x

        optimum = min(map(rate, np.geomspace(0.02, 1, 200) * math.sqrt(2 * t / pairs) / g))
        assert value == pytest.approx(optimum, rel=1e-3)
        assert value <= optimum * (1 + 1e-9)


def test_gaussian_heads_use_up_a_known_share_of_the_bound():
    # z = nu_w U.e is N(0, nu_w^2), which has the largest second moment: the mean of N heads is
    # beyond nu_w z_(delta/2) / sqrt N with probability delta. sqrt(2 log 20) / 1.645 = 1.488.
    norms, delta = TransportNorms(0.0, 0.0, 1.5), 0.1
    for N, share in ((2**9, 2.3), (2**24, 1.5)):
        exact = 1.5 * stats.norm.isf(delta / 2) / math.sqrt(N)
        found = bernstein_approximation_bound(
            norms, 2 * N, delta=delta, inputs=UNIT_BALL, samples=1
        )
        assert 1.488 * exact < found.sup < share * exact
        assert found.rms == found.sup  # one sample: the maximum is the root mean square


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_the_bound_holds_over_draws_of_the_heads(query):
    d, T = 4, 6
    q = query_vector(d, generator=generator(0, "q"), dtype=torch.float64)
    transport = random_multi_anchor(
        2, T, d, generator=generator(0, "a"), norms=NORMS, dtype=torch.float64,
        query=q if query == "fixed" else "last",
    )  # fmt: skip
    tokens = unit_ball_tokens(32, T, d, generator=generator(0, "t"), dtype=torch.float64)
    values, errors = Teacher(transport, generator=generator(0), heads=4000).evaluate(tokens)
    slack = 5 * float(errors.max())
    for heads in (4, 32):
        bound = bernstein_approximation_bound(
            NORMS, heads, delta=0.05, inputs=UNIT_BALL, samples=32
        )
        for k in range(30):
            phi = symmetric_initialisation(heads, d, generator=generator(k), dtype=torch.float64)
            found = approximation_error(values, transport, phi, tokens)
            assert found.sup <= bound.sup + slack
            assert found.rms <= bound.rms + slack


def test_there_is_no_dimension_and_the_leading_term_is_that_of_the_second_moment():
    def rms(m):
        return bernstein_approximation_bound(NORMS, m, delta=0.05, inputs=UNIT_BALL).rms

    assert "dimension" not in inspect.signature(bernstein_approximation_bound).parameters
    V, t = head_second_moment(NORMS, inputs=UNIT_BALL), math.log(2 / 0.05)
    assert rms(2**40) == pytest.approx(math.sqrt(2 * V * t / 2**39), rel=1e-5)
    assert rms(64) > math.sqrt(2 * V * t / 32)
    excess = [rms(2**k) * 2 ** ((k - 1) / 2) - math.sqrt(2 * V * t) for k in (14, 16, 18)]
    for a, b in itertools.pairwise(excess):
        assert a / b == pytest.approx(2, rel=0.05)  # of order t/N
    widths = [rms(m) for m in (2, 8, 64, 512, 4096, 2**20)]
    assert all(b < a for a, b in itertools.pairwise(widths))
    for d in (1, 8, 200):
        with_d = approximation_bound(NORMS, 64, d, delta=0.05, delta_prime=0.05, inputs=UNIT_BALL)
        assert rms(64) < with_d.rms


def test_n_enters_the_maximum_through_its_logarithm_only():
    def bound(n, m=2**40):
        return bernstein_approximation_bound(NORMS, m, delta=0.05, inputs=UNIT_BALL, samples=n)

    assert bound(100).rms == bound(10**6).rms == bound(None).rms
    assert bound(None).sup is None
    ratio = bound(10**6).sup / bound(100).sup
    assert ratio == pytest.approx(math.sqrt(math.log(4e7) / math.log(4e3)), rel=1e-3)


@given(base=st.floats(1e-6, 5.0), growth=st.floats(0.0, 5.0))
def test_the_remainder_of_the_exponential_is_its_integral(base, growth):
    def h(zeta):
        x = base + growth * max(zeta, 0.0)
        return x**3 / 6 * (1 + x / 4 + x**2 / 20) if x < 1e-4 else math.expm1(x) - x - x**2 / 2

    above, _ = integrate.quad(
        lambda z: h(z) * stats.norm.pdf(z), 0, growth + 12, points=[growth], limit=200
    )
    assert _exponential_remainder(base, growth) == pytest.approx(above + h(0) / 2, rel=1e-6)


# The square of a norm below 1e-154 is 0 in float64, and so is then the bound.
SIZES = st.just(0.0) | st.floats(1e-100, 3.0)


@given(
    nu=st.tuples(SIZES, SIZES, SIZES), pairs=st.integers(1, 10**6),
    delta=st.floats(1e-6, 0.5), share=st.floats(1.01, 10.0),
)  # fmt: skip
def test_the_bound_grows_with_the_target_and_with_certainty(nu, pairs, delta, share):
    def rms(norms, delta):
        return bernstein_approximation_bound(
            TransportNorms(*norms), 2 * pairs, delta=delta, inputs=UNIT_BALL
        ).rms

    base = rms(nu, delta)
    assert math.isfinite(base)
    assert base <= rms(nu, delta / share) * (1 + 1e-6)
    assert base <= rms(tuple(share * x for x in nu), delta) * (1 + 1e-6)
    assert (base == 0) == (max(nu) == 0)


@pytest.mark.parametrize("d", [1, 3, 40])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_size_of_a_head_is_stochastically_below_the_one_of_the_proof(d, mixed):
    # The worst head over samples with a = 0 (antipodal tokens) and, if mixed, a = 1 (equal ones).
    U = torch.randn(20000, d, generator=generator(d), dtype=torch.float64)
    antipodal = NORMS.c + NORMS.W * U[:, 0].abs()
    z = antipodal
    if mixed:
        z = ((antipodal**2 + (NORMS.c + NORMS.U) ** 2) / 2).sqrt()
    g1 = math.sqrt(head_second_moment(NORMS, inputs=UNIT_BALL))
    for level in (0.5, 0.9, 0.99, 0.999):
        limit = g1 + NORMS.W * max(0.0, stats.norm.ppf(level))
        assert float(z.quantile(level)) <= limit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 7}, "heads: expected an even number of paired heads, got 7"),
        ({"delta": 1.0}, r"delta: expected a probability in \(0, 1\), got 1.0"),
        ({"samples": 0}, "samples: expected an integer >= 1, got 0"),
        ({"activation": "relu"}, "activation: expected one of"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, message):
    fields = {"norms": NORMS, "heads": 8, "delta": 0.1, "inputs": UNIT_BALL}
    with pytest.raises(ValueError, match=message):
        bernstein_approximation_bound(**(fields | changes))


def test_unpaired_heads_count_one_each():
    given_ = {"delta": 0.05, "inputs": UNIT_BALL, "samples": 9}
    paired = bernstein_approximation_bound(NORMS, 64, **given_)
    assert bernstein_approximation_bound(NORMS, 32, **given_, paired=False) == paired
    assert math.isfinite(paired.sup)
