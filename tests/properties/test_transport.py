"""Transport maps: the formula head by head, the tangent space, the size, the whole W."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.theory.kernels import empirical_kernel
from attention_dynamics.theory.transport import (
    MultiAnchorTransport,
    TransportNorms,
    head_contributions,
    random_multi_anchor,
    transported_function,
)

R, T, d, m, n = 3, 5, 4, 6, 7
NORMS = TransportNorms(1.5, 2.0, 0.1)
QUERIES = ("fixed", "last")
ACTIVATIONS = ("tanh", "erf", "erf_plain")


def transport_of(query="fixed", activation="tanh", norms=NORMS, seed=0, scale=1.0):
    if query == "fixed":
        query = query_vector(d, generator=generator(seed, "query"), dtype=torch.float64)
    return random_multi_anchor(
        R, T, d, generator=generator(seed, "anchors"), norms=norms, query=query,
        activation=activation, scale=scale, dtype=torch.float64,
    )  # fmt: skip


def heads_of(seed=0, paired=True, heads=m):
    draw = symmetric_initialisation if paired else independent_initialisation
    return draw(heads, d, generator=generator(seed, "heads"), dtype=torch.float64)


def tokens_of(seed=0):
    return unit_ball_tokens(n, T, d, generator=generator(seed, "tokens"), dtype=torch.float64)


def one_head(X, q, U, W):
    """Value-side quantities of one head at one sequence, from the matrix M itself."""
    alpha = torch.softmax(X @ W @ q, dim=0)
    a = X.mT @ alpha
    M = X.mT @ torch.diag(alpha) @ X - torch.outer(a, a)
    return U @ a, a, M @ U


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_map_is_the_formula_head_by_head(query, activation, scale):
    transport, parameters = transport_of(query, activation, scale=scale), heads_of(paired=False)
    sigma, v = get_activation(activation), transport(parameters)
    clipped = 0
    for i in range(m):
        c, U, W = (block[i] for block in parameters)
        v_c, v_U, v_W = 0.0, torch.zeros(d).double(), torch.zeros(d, d).double()
        for X, beta in zip(transport.anchors, transport.coefficients, strict=True):
            q = scale * (X[-1] if query == "last" else transport.query)
            s, a, r = one_head(X, q, U, W)
            term = sigma.first(s) * torch.outer(r, q)
            size = float(torch.linalg.matrix_norm(term))
            clipped += size > NORMS.W
            v_c = v_c + NORMS.c * beta * sigma.value(s)
            v_U = v_U + NORMS.U * c * beta * sigma.first(s) * a
            v_W = v_W + c * beta * term * min(1.0, NORMS.W / size)
        for found, expected in zip((v.c[i], v.U[i], v.W[i]), (v_c, v_U, v_W), strict=True):
            assert torch.allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert 0 < clipped < m * R  # both branches of the clip were used


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_the_transported_function_is_a_tangent(query, masked, scale):
    transport, parameters, tokens = transport_of(query, scale=scale), heads_of(), tokens_of()
    mask = torch.arange(T) < torch.arange(n)[:, None] % T + 1 if masked else None
    value = transported_function(tokens, transport, parameters, mask=mask)
    tangent = transport(parameters).scaled(m**-0.5)
    expected = shallow.jvp(
        parameters, tokens, tangent, query=transport.query, scale=scale, mask=mask
    )
    assert torch.allclose(value, expected, rtol=1e-12, atol=1e-15)


def test_chunks_of_samples_change_nothing():
    transport, parameters = transport_of(), heads_of(paired=False, heads=2**14)
    tokens = unit_ball_tokens(100, T, d, generator=generator(0, "long"), dtype=torch.float64)
    assert 100 * parameters.U.numel() > 2**22
    parts = [transported_function(part, transport, parameters) for part in tokens.split(33)]
    whole = transported_function(tokens, transport, parameters)
    assert torch.allclose(whole, torch.cat(parts), rtol=1e-12, atol=1e-16)


def test_it_is_the_derivative_along_the_transport():
    transport, parameters, tokens = transport_of("last"), heads_of(), tokens_of()
    tangent = transport(parameters).scaled(m**-0.5)

    def value(c, U, W):
        return shallow.forward(Parameters(c, U, W), tokens, query="last")

    _, derivative = torch.func.jvp(value, tuple(parameters), tuple(tangent))
    found = transported_function(tokens, transport, parameters)
    assert torch.allclose(found, derivative, rtol=1e-11, atol=1e-15)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    norms=st.builds(TransportNorms, *(st.floats(0.0, 5.0),) * 3),
    query=st.sampled_from(QUERIES),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_the_map_stays_below_its_sup_norm_bounds(seed, norms, query, activation):
    transport = transport_of(query, activation, norms, seed)
    bounds = transport.sup_norm_bounds()
    sizes = transport(heads_of(seed, paired=False, heads=200)).block_norms()
    for block in "cUW":
        assert float(getattr(sizes, block).max()) <= getattr(bounds, block) * (1 + 1e-12)


def test_the_norms_themselves_bound_the_map_for_tanh():
    bounds = transport_of("fixed", "tanh").sup_norm_bounds()
    assert bounds.c == NORMS.c
    assert bounds.U <= NORMS.U
    assert bounds.W == NORMS.W
    assert transport_of("fixed", "erf_plain").sup_norm_bounds().U > NORMS.U


def test_the_sup_norm_bounds_are_reached():
    # One anchor of equal unit tokens: v_c -> nu_c along U, v_U = nu_U at U = 0.
    e = torch.eye(d, dtype=torch.float64)[0]
    one = torch.ones(1, dtype=torch.float64)
    zero = torch.zeros(1, d, d, dtype=torch.float64)
    equal = MultiAnchorTransport(e.expand(1, T, d), one, TransportNorms(2, 3, 0.5), e)
    assert float(equal(Parameters(one, 20 * e[None], zero)).c) == pytest.approx(2.0, rel=1e-12)
    assert float(equal(Parameters(one, 0 * e[None], zero)).U.norm()) == pytest.approx(3.0)
    # Antipodal tokens: M U q^T has norm |U|, cut off at nu_W.
    antipodal = MultiAnchorTransport(torch.stack((e, -e))[None], one, TransportNorms(2, 3, 0.5), e)
    assert float(antipodal(Parameters(one, 2 * e[None], zero)).W.norm()) == pytest.approx(0.5)
    assert float(antipodal(Parameters(one, 0.2 * e[None], zero)).W.norm()) == pytest.approx(0.2)


def test_the_whole_matrix_W_enters():
    # Taking the diagonal of W, as einsum("kdd,bd->bkd") does, gives another function.
    transport, parameters, tokens = (
        transport_of(norms=TransportNorms(1, 1, 1)),
        heads_of(),
        tokens_of(),
    )
    diagonal = parameters._replace(W=torch.diag_embed(parameters.W.diagonal(dim1=-2, dim2=-1)))
    full = transported_function(tokens, transport, parameters)
    other = transported_function(tokens, transport, diagonal)
    assert float((full - other).abs().max()) > 0.05 * float(full.abs().max())
    i = 1
    q = transport.query
    s, _, _ = one_head(transport.anchors[0], q, parameters.U[i], parameters.W[i])
    s_diagonal, _, _ = one_head(transport.anchors[0], q, parameters.U[i], diagonal.W[i])
    one_anchor = MultiAnchorTransport(
        transport.anchors[:1], torch.ones(1, dtype=torch.float64), TransportNorms(1, 0, 0), q
    )
    assert float(one_anchor(parameters).c[i]) == pytest.approx(math.tanh(s), rel=1e-12)
    assert abs(math.tanh(s) - math.tanh(s_diagonal)) > 1e-3


def test_only_W_q_enters():
    transport, parameters, tokens = transport_of(), heads_of(), tokens_of()
    q = transport.query
    off = torch.eye(d, dtype=torch.float64) - torch.outer(q, q)
    moved = parameters._replace(W=parameters.W + 3.0 * off)  # off q = 0
    assert torch.allclose(
        transported_function(tokens, transport, parameters),
        transported_function(tokens, transport, moved),
        rtol=1e-11,
        atol=1e-14,
    )


def test_paired_heads_contribute_the_same_twice():
    transport, tokens = transport_of(), tokens_of()
    z = head_contributions(tokens, transport, heads_of())
    assert torch.allclose(z[:, : m // 2], z[:, m // 2 :], rtol=1e-12, atol=1e-16)
    unpaired = head_contributions(tokens, transport, heads_of(paired=False))
    assert float((unpaired[:, : m // 2] - unpaired[:, m // 2 :]).abs().min(dim=0).values.max()) > 0


def test_equal_tokens_have_no_part_in_W():
    transport = transport_of("last")
    same = tokens_of()[:, :1].expand(n, T, d)
    blind = transport(heads_of())._replace(W=torch.zeros(m, d, d, dtype=torch.float64))
    assert torch.allclose(
        head_contributions(same, transport, heads_of()),
        head_contributions(same, transport, heads_of(), direction=blind),
        rtol=0,
        atol=1e-15,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchors": torch.zeros(R, T)}, "anchors: expected shape"),
        ({"anchors": torch.full((R, T, d), math.nan)}, "anchors: expected finite"),
        ({"coefficients": torch.ones(R + 1)}, r"coefficients: expected shape \(R,\) with R = 3"),
        ({"coefficients": torch.ones(R)}, "coefficients: expected .* sum to 1, got 3; divide"),
        ({"activation": "relu"}, "activation: expected one of"),
        ({"query": "first"}, "query: expected a tensor of shape .* or 'last', got 'first'"),
        # One query an anchor has the shape (n, d) of one query a sample, and is neither.
        ({"query": torch.zeros(R, d)}, r"query: expected shape \(d,\) with d = 4, got \(3, 4\)"),
        ({"query": torch.zeros(d).double()}, "query: has dtype torch.float64"),
        ({"scale": math.nan}, "scale: expected a finite number >= 0, got nan"),
        ({"norms": (1, 1, 1)}, r"norms: expected TransportNorms\(c, U, W\), got \(1, 1, 1\)"),
    ],
)
def test_a_bad_transport_is_refused(change, message):
    fields = {
        "anchors": torch.zeros(R, T, d), "coefficients": torch.tensor([0.5, -0.25, 0.25]),
        "norms": NORMS, "query": "last",
    }  # fmt: skip
    MultiAnchorTransport(**fields)
    with pytest.raises((ValueError, TypeError), match=message):
        MultiAnchorTransport(**(fields | change))


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_transport_norm_is_finite_and_not_negative(value):
    with pytest.raises(ValueError, match=r"norms\.U: expected a finite number >= 0"):
        TransportNorms(1.0, value, 1.0)
    assert TransportNorms(2.0, 3.0, 6.0).norm == 7.0


def rkhs_energy(transport, heads, tokens):
    """y^T K^+ y of the transported values, and the mean square of the map over the heads."""
    K = empirical_kernel(
        heads, tokens, query=transport.query, activation=transport.activation
    ).total
    y = transported_function(tokens, transport, heads)
    size = sum(float(block.square().sum()) for block in transport(heads)) / heads.heads
    return float(y @ torch.linalg.pinv(K, rtol=1e-11, hermitian=True) @ y), size


@given(
    seed=st.integers(0, 10**6), query=st.sampled_from(QUERIES), sigma=st.sampled_from(ACTIVATIONS)
)
@settings(max_examples=60, deadline=None)
def test_the_rkhs_norm_is_at_most_the_size_of_the_map(seed, query, sigma):
    transport, heads = transport_of(query, sigma, seed=seed), heads_of(seed, heads=16)
    tokens = torch.cat((tokens_of(seed), tokens_of(seed)[:2]))  # duplicates: K is singular
    energy, size = rkhs_energy(transport, heads, tokens)
    assert 0 <= energy <= size * (1 + 1e-9)
    assert size <= transport.sup_norm_bounds().norm ** 2 * (1 + 1e-12)


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_combination_of_tangents_has_exactly_the_norm_of_its_map(query, activation):
    transport = transport_of(query, activation, norms=TransportNorms(1.0, 1.0, 1e6))  # no clip
    heads = heads_of(heads=32)
    energy, size = rkhs_energy(transport, heads, transport.anchors)
    assert energy == pytest.approx(size, rel=1e-9)
    beyond, _ = rkhs_energy(transport, heads, torch.cat((transport.anchors, tokens_of())))
    assert beyond == pytest.approx(size, rel=1e-6)  # more samples cannot add to it
    fewer, _ = rkhs_energy(transport, heads, tokens_of())
    assert fewer < 0.999 * size
