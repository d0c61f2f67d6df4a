"""The limit kernel: closed forms against quadrature, and errors that can be trusted."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import attention
from attention_dynamics.models.activations import ERF, ERF_PLAIN, TANH, Activation
from attention_dynamics.models.parameters import independent_initialisation
from attention_dynamics.theory import _linear_split
from attention_dynamics.theory._linear_split import mean_slope
from attention_dynamics.theory.erf_kernel import erf_kernel
from attention_dynamics.theory.kernels import empirical_kernel
from attention_dynamics.theory.limit_kernel import limit_kernel

d, T, n = 3, 5, 6


def tokens_of(samples=n, seed=0, law="iid", dtype=torch.float64):
    g = generator(seed, "tokens")
    return unit_ball_tokens(samples, T, d, generator=g, law=law, dtype=dtype)


def query_of(kind, norm=1.3):
    if kind == "last":
        return "last"
    return query_vector(d, generator=generator(0, "query"), norm=norm, dtype=torch.float64)


def moments_of(tokens, w):
    alpha = torch.softmax(tokens @ w, dim=-1)
    a = (alpha[..., None] * tokens).sum(dim=1)
    M = torch.einsum("nt,ntd,nte->nde", alpha, tokens, tokens) - a[:, :, None] * a[:, None]
    return a, M


def estimate(method="sobol", activation="erf", query="fixed", seed=0, other=None, **options):
    options = {"points": 256, "randomisations": 8} | options
    return limit_kernel(
        tokens_of(), other, query=query_of(query), activation=activation, method=method,
        generator=generator(seed, method), **options,
    )  # fmt: skip


def rms(x):
    return float(x.square().mean().sqrt())


def test_the_closed_form_over_U_is_the_gaussian_integral():
    # Gauss-Hermite quadrature in the plane of a and a', where all of sigma lives, for one pair;
    # the third direction enters U' M M' U alone and is a Gaussian moment.
    X, w = tokens_of(2), torch.tensor([0.5, -1.0, 0.3]).double()
    a, M = moments_of(1.0 * X, w)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    z = torch.from_numpy(np.stack(np.meshgrid(nodes, nodes, nodes), axis=-1).reshape(-1, 3))
    weight = torch.from_numpy(
        np.einsum("i,j,k->jik", weights, weights, weights).reshape(-1) / (2 * math.pi) ** 1.5
    )
    s = z @ a.mT
    value, slope = ERF.value_and_first(s)
    r = torch.einsum("nde,ze->znd", M, z)
    found = erf_kernel(a, M)
    for i in range(2):
        for j in range(2):
            pair = slope[:, i] * slope[:, j]
            expected = (
                weight @ (value[:, i] * value[:, j]),
                weight @ pair * (a[i] @ a[j]),
                weight @ (pair * (r[:, i] * r[:, j]).sum(dim=-1)),
            )
            for block, number in zip(found, expected, strict=True):
                assert float(block[i, j]) == pytest.approx(float(number), rel=1e-10)


def test_the_closed_form_of_two_sides_is_a_block_of_the_square():
    a, M = moments_of(tokens_of(), torch.ones(d).double())
    square = erf_kernel(a, M)
    block = erf_kernel(a[:2], M[:2], a[2:], M[2:])
    for found, expected in zip(block, square, strict=True):
        assert torch.allclose(found, expected[:2, 2:], rtol=1e-12, atol=1e-16)
        assert torch.allclose(expected, expected.mT, rtol=1e-12, atol=1e-16)
        assert float(torch.linalg.eigvalsh(expected).min()) > -1e-14
    # a = 0: sigma is odd, and U' M M' U has mean tr M M'
    blind = erf_kernel(0 * a, M)
    assert float(blind.c.abs().max()) == 0.0
    trace = torch.einsum("jde,kde->jk", M, M)
    assert torch.allclose(blind.W, 2 / math.pi * trace, rtol=1e-12)
    with pytest.raises(ValueError, match="other_pooled, other_covariance: expected both or"):
        erf_kernel(a, M, a)
    with pytest.raises(ValueError, match=r"covariance: expected shape \(n, d, d\) with n = 6"):
        erf_kernel(a, M[:2])


@pytest.mark.parametrize("sigma", [TANH, ERF, ERF_PLAIN], ids=lambda sigma: sigma.name)
@pytest.mark.parametrize("largest", [1.0, 9.0])
def test_the_mean_slope_is_the_gaussian_integral(sigma, largest):
    beta = mean_slope(sigma, largest, torch.float64)
    for v in np.linspace(0, largest, 5):

        def integrand(z, v=v):
            slope = float(sigma.first(torch.tensor(math.sqrt(v) * z, dtype=torch.float64)))
            return slope * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

        expected, _ = integrate.quad(integrand, -12, 12, epsabs=1e-10, limit=200)
        assert float(beta(torch.tensor([v], dtype=torch.float64))) == pytest.approx(
            expected, abs=1e-10
        )


@pytest.mark.parametrize("norm", [10.0, 1000.0])
def test_the_mean_slope_is_exact_for_long_tokens_or_refused(norm):
    # An error of beta is a bias that the standard error does not see.
    for v in (norm**2, norm**2 / 2, norm**2 / 100):
        beta = mean_slope(TANH, norm**2, torch.float64)
        expected, _ = integrate.quad(
            lambda s, v=v: math.exp(-s * s / (2 * v)) / math.cosh(s) ** 2, -30, 30, epsabs=1e-13
        )
        expected /= math.sqrt(2 * math.pi * v)
        assert float(beta(torch.tensor(v).double())) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    step = Activation("step", torch.sign, lambda x: (x.abs() < 0.01) * 100.0, torch.zeros_like,
                      (1.0, 100.0, 0.0))  # fmt: skip
    with pytest.raises(ValueError, match="mean slope of 'step' is not resolved for tokens of norm"):
        mean_slope(step, norm**2, torch.float64)


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("activation", ["erf", "tanh", "erf_plain"])
def test_the_methods_agree_within_their_errors(query, activation):
    methods = ["sobol", "monte carlo", *(["closed form"] if activation == "erf" else [])]
    other = tokens_of(4, seed=1)
    for Y in (None, other):
        found = [
            estimate(
                method, activation, query, other=Y,
                points={"sobol": 1024, "monte carlo": 8192, "closed form": 32}[method],
                randomisations=16, scale=0.8,
            )
            for method in methods
        ]  # fmt: skip
        for one in found[1:]:
            pairs = [*zip(one[:3], found[0][:3], one.block_errors, found[0].block_errors,
                          strict=True)]  # fmt: skip
            pairs.append((one.total, found[0].total, one.standard_error, found[0].standard_error))
            for left, right, left_error, right_error in pairs:
                # Entries share their heads, so the worst case is one t variable, of at least 15
                # degrees of freedom: beyond 2.5 in 2.5 % of the cases. The seeds are fixed.
                distance = (left - right) / (left_error.square() + right_error.square()).sqrt()
                assert rms(distance) < 2.5


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_wide_networks_reach_it(query):
    limit = estimate("auto", "tanh", query, points=4096)
    errors = []
    for m in (1000, 16000):
        gaps = [
            empirical_kernel(
                independent_initialisation(
                    m, d, generator=generator(k, "wide", m), dtype=torch.float64
                ),
                tokens_of(), query=query_of(query),
            ).total - limit.total
            for k in range(12)
        ]  # fmt: skip
        errors.append(rms(torch.stack(gaps)))
    assert rms(limit.standard_error) < 0.2 * errors[1]
    assert 3.0 < errors[0] / errors[1] < 5.5  # 4 = sqrt(16): the limit itself is no further off


@pytest.mark.parametrize("method", ["sobol", "monte carlo", "closed form"])
def test_the_standard_error_covers(method):
    reference = estimate("sobol", seed=99, points=8192, randomisations=16).total
    scores = []
    for seed in range(25):
        found = estimate(method, seed=seed, points=8 if method == "closed form" else 32)
        scores.append((found.total - reference) / found.standard_error)
    scores = torch.stack(scores)
    # Student's t with 7 degrees of freedom: mean square 7/5, and 95 % within 2.365. Entries of one
    # seed share their heads; if they were one number, 25 seeds would leave the mean square, whose
    # variance is (147/15 - 49/25)/25, and the share, of variance .05 * .95/25, within two standard
    # deviations above and 1.4 below, and one for the share: errors that are wrong by half show.
    assert 0.64 < float(scores.square().mean()) < 2.52
    assert float((scores.abs() < 2.365).double().mean()) > 0.906


@pytest.mark.parametrize("activation", ["erf", "tanh"])
def test_sobol_points_beat_independent_heads(activation):
    # A point of either is one head, and a Sobol point costs 1.4 times as much: a factor of 7 in
    # variance at equal cost is one of 10 at equal numbers.
    reference = estimate("sobol", activation, seed=99, points=8192, randomisations=16).total
    variance = {
        method: np.mean([
            rms(estimate(method, activation, seed=k, points=512).total - reference) ** 2
            for k in range(6)
        ])
        for method in ("sobol", "monte carlo")
    }  # fmt: skip
    assert variance["monte carlo"] > 10 * variance["sobol"]


def test_only_the_span_of_the_queries_is_sampled(monkeypatch):
    drawn = []
    engine = torch.quasirandom.SobolEngine

    class Counting(engine):
        def __init__(self, dimension, **options):
            drawn.append(dimension)
            super().__init__(dimension, **options)

    monkeypatch.setattr(torch.quasirandom, "SobolEngine", Counting)
    estimate(points=8, randomisations=2)
    estimate(points=8, randomisations=2, query="last")
    estimate("closed form", points=8, randomisations=2)
    assert drawn == [2 * d] * 2 + [d * d + d] * 2 + [d] * 2


def test_it_is_symmetric_repeatable_and_in_the_dtype_of_the_tokens():
    for method in ("sobol", "monte carlo", "closed form"):
        first, again, other = (estimate(method, seed=s, points=16) for s in (0, 0, 1))
        for K in (*first[:4], *first.block_errors):
            assert torch.equal(K, K.mT)
        assert torch.equal(first.c, again.c)
        assert not torch.equal(first.c, other.c)
        assert float(first.standard_error.min()) > 0
    narrow = limit_kernel(
        tokens_of(dtype=torch.float32), query=query_of("fixed").float(), generator=generator(0)
    )
    wide = limit_kernel(tokens_of(), query=query_of("fixed"), generator=generator(0))
    assert narrow.total.dtype == torch.float32
    assert torch.allclose(narrow.total.double(), wide.total, rtol=1e-5, atol=1e-6)


def test_where_attention_has_no_say_nothing_of_W_is_left_and_c_is_the_arcsine():
    X, q = tokens_of(), query_of("fixed")
    # over U in closed form nothing is left to chance
    for method, points, atol in (("sobol", 2048, 1e-4), ("closed form", 4, 1e-14)):
        options = {"generator": generator(0), "activation": "erf", "method": method}
        one = limit_kernel(X[:, :1], query=q, points=points, **options)
        assert float(one.W.abs().max()) == 0.0
        x = X[:, 0]
        norms = 1 + x.square().sum(dim=-1)
        arcsine = 2 / math.pi * torch.asin(x @ x.mT / (norms[:, None] * norms).sqrt())
        assert torch.allclose(one.c, arcsine, rtol=0, atol=atol)
        uniform = limit_kernel(X, query=0 * q, points=points, **options)
        assert float(uniform.W.abs().max()) == 0.0
        a = X.mean(dim=1)
        expected = erf_kernel(a, torch.zeros(n, d, d).double())
        assert torch.allclose(uniform.c, expected.c, rtol=0, atol=atol)
        assert torch.allclose(uniform.U, expected.U, rtol=0, atol=atol)


def test_masked_samples_are_the_shortened_ones():
    X = tokens_of()
    mask = (torch.arange(T) < 3).expand(n, T)
    for query in ("fixed", "last"):
        options = {"query": query_of(query), "points": 16}
        short = limit_kernel(X[:, :3], generator=generator(0), **options)
        masked = limit_kernel(X, mask=mask, generator=generator(0), **options)
        assert torch.allclose(masked.total, short.total, rtol=1e-10)


def test_an_activation_of_ones_own_is_split_too():
    sine = Activation("sin", torch.sin, torch.cos, lambda x: -torch.sin(x), (1.0, 1.0, 1.0))
    found = limit_kernel(
        tokens_of()[:, :1], query=query_of("fixed"), activation=sine, generator=generator(0),
        points=4096,
    )  # fmt: skip
    S = tokens_of()[:, 0] @ tokens_of()[:, 0].mT
    expected = torch.exp(-0.5 * (S.diagonal()[:, None] + S.diagonal())) * torch.sinh(S)
    distance = (found.c - expected) / found.block_errors.c
    assert rms(distance) < 2.5
    assert rms(found.block_errors.c) < 1e-3 * rms(expected)


def test_moments_by_the_head_features_are_those_of_the_weights():
    w = torch.tensor([0.5, -1.0, 0.3]).double()
    a, M = moments_of(tokens_of(), w)
    eye = torch.eye(d).double()
    W = (w[:, None] * eye[0]).expand(d, d, d)
    _, pooled, r = attention.head_features(tokens_of(), W, eye, eye[0])
    assert torch.allclose(pooled[:, 0], a, rtol=1e-12)
    assert torch.allclose(r, M, rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"method": "exact"}, ValueError, "method: expected one of"),
        ({"method": "closed form", "activation": "tanh"}, ValueError, "closed form over U is that"),
        ({"points": 0}, ValueError, "points: expected an integer >= 1, got 0"),
        ({"randomisations": 1}, ValueError, "randomisations: .* >= 2, got 1; an error needs two"),
        ({"generator": 3}, TypeError, "generator: expected a torch.Generator"),
        ({"memory_limit": 1000}, ValueError, "tokens: 12 arrays of 6 x 6 numbers .* allowed"),
        ({"activation": "relu"}, ValueError, "activation: expected one of"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, message):
    options = {"query": "last", "activation": "erf", "generator": generator(0)} | change
    with pytest.raises(error, match=message):
        limit_kernel(tokens_of(), **options)


def test_the_mean_slope_is_fitted_once_whatever_the_randomisations(monkeypatch):
    fits = []

    def counted(*arguments):
        fits.append(arguments)
        return mean_slope(*arguments)

    monkeypatch.setattr(_linear_split, "mean_slope", counted)
    for other, sides in ((None, 1), (tokens_of(seed=1), 2)):
        fits.clear()
        limit_kernel(
            tokens_of(), other, query=query_of("fixed"), generator=generator(0, "fits"),
            points=16, randomisations=5,
        )  # fmt: skip
        assert len(fits) == sides
