"""The empirical tangent kernel: against Jacobians, its symmetries, and how it is computed."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.theory import _tangents
from attention_dynamics.theory.kernels import (
    TangentKernel,
    empirical_kernel,
    empirical_kernel_total,
    kernel_vector_product,
    spectrum,
)
from tests.model_instances import instances

d, T = 4, 5


def tokens_of(samples, seed=0, dtype=torch.float64):
    return unit_ball_tokens(samples, T, d, generator=generator(seed, "tokens"), dtype=dtype)


def query_of(kind, dtype=torch.float64):
    if kind == "last":
        return "last"
    return query_vector(d, generator=generator(0, "query"), norm=1.7, dtype=dtype)


def heads_of(heads=10, draw=independent_initialisation, dtype=torch.float64):
    return draw(heads, d, generator=generator(0, "heads"), dtype=dtype)


def jacobian(parameters, tokens, **options):
    """Rows of the Jacobian by automatic differentiation of the value, block by block."""

    def value(c, U, W, X, mask):
        keep = None if options.get("mask") is None else mask[None]
        return shallow.forward(
            Parameters(c, U, W), X[None], **(options | {"mask": keep}), engine="reference"
        )[0]

    mask = options.get("mask")
    mask = torch.ones(tokens.shape[:2], dtype=torch.bool) if mask is None else mask
    rows = torch.func.vmap(
        torch.func.jacrev(value, argnums=(0, 1, 2)), in_dims=(None, None, None, 0, 0)
    )(*parameters, tokens, mask)
    return [block.flatten(1) for block in rows]


def close(found, expected, tolerance=1e-12):
    return float((found - expected).norm()) <= tolerance * max(1e-300, float(expected.norm()))


@settings(max_examples=40, deadline=None)
@given(instance=instances())
def test_it_is_the_contraction_of_jacobians(instance):
    options = instance.options
    J = shallow.per_sample_gradients(instance.parameters, instance.tokens, **options)
    kernel = empirical_kernel(instance.parameters, instance.tokens, **options)
    for found, rows in zip(kernel, J, strict=True):
        expected = rows.flatten(1) @ rows.flatten(1).mT
        assert torch.allclose(found, expected, rtol=1e-11, atol=1e-13)
        assert torch.equal(found, found.mT)
    total = empirical_kernel_total(instance.parameters, instance.tokens, **options)
    assert torch.allclose(total, kernel.total, rtol=1e-11, atol=1e-13)
    assert torch.equal(total, total.mT)


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("activation", ["tanh", "erf"])
@pytest.mark.parametrize("engine", ["reference", "eager", "auto"])
def test_it_is_the_contraction_of_automatic_jacobians(query, activation, engine):
    parameters, X, Y = heads_of(), tokens_of(7), tokens_of(5, seed=1)
    parameters = parameters._replace(c=parameters.c * torch.linspace(0.5, 2, 10).double())
    options = {"query": query_of(query), "activation": activation, "scale": 0.7}
    J, J_other = jacobian(parameters, X, **options), jacobian(parameters, Y, **options)
    square = empirical_kernel(parameters, X, engine=engine, **options)
    across = empirical_kernel(parameters, X, Y, engine=engine, **options)
    for block in range(3):
        assert close(square[block], J[block] @ J[block].mT)
        assert close(across[block], J[block] @ J_other[block].mT)
    assert close(empirical_kernel_total(parameters, X, Y, engine=engine, **options), across.total)


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_masked_samples_are_the_shortened_ones(query):
    parameters, X = heads_of(), tokens_of(6)
    mask = (torch.arange(T) < 3).expand(6, T)
    short = empirical_kernel(parameters, X[:, :3], query=query_of(query))
    assert close(empirical_kernel(parameters, X, query=query_of(query), mask=mask).W, short.W)
    across = empirical_kernel(parameters, X[:, :3], X, query=query_of(query), other_mask=mask)
    assert close(across.total, short.total)


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_square_is_symmetric_bit_by_bit_and_made_of_its_rectangles(query, dtype):
    # 700 samples take several levels of the split into triangles
    parameters, X = heads_of(dtype=dtype), tokens_of(700, dtype=dtype)
    options = {"query": query_of(query, dtype)}
    kernel = empirical_kernel(parameters, X, **options)
    total = empirical_kernel_total(parameters, X, **options)
    tolerance = 1e-13 if dtype == torch.float64 else 1e-6
    for K in (*kernel, total):
        assert torch.equal(K, K.mT)
    assert close(total, kernel.total, tolerance)
    parts = [slice(0, 300), slice(300, 310), slice(310, 700)]
    for left in parts:
        for right in parts:
            block = empirical_kernel(parameters, X[left], X[right], **options)
            for found, whole in zip(block, kernel, strict=True):
                assert close(found, whole[left, right], tolerance)


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_blocks_of_heads_change_nothing(query, monkeypatch):
    parameters, X, options = heads_of(50), tokens_of(20), {"query": query_of(query)}
    whole = empirical_kernel(parameters, X, **options)
    vectors = torch.randn(20, 2, generator=generator(0), dtype=torch.float64)
    product = kernel_vector_product(parameters, X, vectors, **options)
    monkeypatch.setattr(_tangents, "_CPU_ELEMENTS", 7 * 20 * (1 + 2 * d))  # 7 heads at once
    assert [b.stop for b in _tangents.head_blocks(20, 50, d, X.device)] == [*range(7, 50, 7), 50]
    for found, expected in zip(empirical_kernel(parameters, X, **options), whole, strict=True):
        assert close(found, expected, 1e-14)
    assert close(empirical_kernel_total(parameters, X, **options), whole.total, 1e-14)
    assert close(kernel_vector_product(parameters, X, vectors, **options), product, 1e-14)


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_it_is_positive_semidefinite_of_the_rank_of_its_features(query):
    parameters, X = heads_of(2), tokens_of(40)
    found = spectrum(empirical_kernel(parameters, X, query=query_of(query)))
    assert float(found.eigenvalues.min()) > -1e-14 * float(found.eigenvalues[0])
    # c, U and w = W q have (1 + 2d) coordinates a head; with a query a sample W has all d^2.
    assert found.rank == min(40, 2 * (1 + 2 * d if query == "fixed" else 1 + d + d * d))
    assert (found.eigenvalues.diff() <= 0).all()


@pytest.mark.parametrize("query", ["fixed", "last"])
@pytest.mark.parametrize("rows", [(), (3,)])
def test_the_product_needs_no_matrix(query, rows):
    parameters, X, Y = heads_of(), tokens_of(9), tokens_of(6, seed=1)
    options = {"query": query_of(query), "scale": 0.7}
    g = generator(0, "v")
    v, w = (torch.randn(k, *rows, generator=g, dtype=torch.float64) for k in (9, 6))
    square = empirical_kernel(parameters, X, **options).total
    found = kernel_vector_product(parameters, X, v, **options)
    assert found.shape == v.shape
    assert close(found, square @ v)
    across = empirical_kernel(parameters, X, Y, **options).total
    assert close(kernel_vector_product(parameters, X, w, Y, **options), across @ w)
    if not rows:
        pulled = shallow.vjp(parameters, X, v, **options)
        assert close(found, shallow.jvp(parameters, X, pulled, **options))


@pytest.mark.parametrize("query", ["fixed", "last"])
def test_twin_heads_are_computed_once_and_count_twice(query):
    paired = heads_of(12, symmetric_initialisation)
    weighted = _tangents.WeightedHeads.of(paired)
    assert weighted.U.shape == (6, d)
    options = {"query": query_of(query)}
    half = empirical_kernel(paired, tokens_of(8), **options)
    # another order of the heads is the same network, and hides the twins
    order = torch.randperm(12, generator=generator(0))
    shuffled = paired.map(lambda block: block[order])
    assert _tangents.WeightedHeads.of(shuffled).U.shape == (12, d)
    for found, expected in zip(
        half, empirical_kernel(shuffled, tokens_of(8), **options), strict=True
    ):
        assert close(found, expected, 1e-14)
    # coefficients of a pair may differ; a twin that moved may not be left out
    uneven = paired._replace(c=torch.linspace(-1, 2, 12).double())
    J = jacobian(uneven, tokens_of(8), **options)
    assert close(empirical_kernel(uneven, tokens_of(8), **options).U, J[1] @ J[1].mT)
    moved = paired._replace(U=paired.U + torch.eye(12, d).double())
    J = jacobian(moved, tokens_of(8), **options)
    assert close(empirical_kernel(moved, tokens_of(8), **options).W, J[2] @ J[2].mT)


def test_the_part_of_W_vanishes_where_attention_has_no_say():
    parameters, X, q = heads_of(), tokens_of(6), query_of("fixed")
    assert float(empirical_kernel(parameters, X, query=q).W.diagonal().min()) > 1e-6
    assert float(empirical_kernel(parameters, X[:, :1], query=q).W.abs().max()) == 0.0
    equal = X[:, :1].expand(6, T, d)
    assert float(empirical_kernel(parameters, equal, query=q).W.abs().max()) < 1e-30
    assert float(empirical_kernel(parameters, X, query=0 * q).W.abs().max()) == 0.0
    assert float(empirical_kernel(parameters, X, query=q, scale=0.0).W.abs().max()) == 0.0


def test_the_two_sides_may_have_queries_of_their_own():
    parameters, X, Y = heads_of(), tokens_of(6), tokens_of(4, seed=1)
    q, p = query_of("fixed"), torch.linspace(-1, 1, d).double()
    J, J_other = jacobian(parameters, X, query=q), jacobian(parameters, Y, query=p)
    found = empirical_kernel(parameters, X, Y, query=q, other_query=p)
    total = empirical_kernel_total(parameters, X, Y, query=q, other_query=p)
    assert close(found.W, J[2] @ J_other[2].mT)
    assert close(total, found.total)
    with pytest.raises(ValueError, match="other_query: expected a query of the kind of query"):
        empirical_kernel(parameters, X, Y, query=q, other_query="last")


def test_float32_is_close_to_float64():
    parameters, X, q = heads_of(64), tokens_of(200), query_of("fixed")
    wide = empirical_kernel_total(parameters, X, query=q)
    narrow = empirical_kernel_total(parameters.to(dtype=torch.float32), X.float(), query=q.float())
    assert narrow.dtype == torch.float32
    assert float((narrow.double() - wide).abs().max()) < 32 * 2**-23 * float(wide.abs().max())


PEAK = """
import resource, torch
from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import unit_ball_tokens
from attention_dynamics.models.parameters import {draw}
from attention_dynamics.theory.kernels import empirical_kernel_total, kernel_vector_product
torch.set_num_threads(1)
X = unit_ball_tokens(1024, 16, 8, generator=generator(0))
parameters = {draw}(512, 8, generator=generator(1))
q = torch.full((8,), 0.3)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
empirical_kernel_total(parameters, X[:32], query=q)
before = peak()
kernel_vector_product(parameters, X, torch.ones(1024), query=q)
between = peak()
empirical_kernel_total(parameters, X, query=q)
print(between - before, peak() - before)
"""


@pytest.mark.parametrize("draw", ["symmetric_initialisation", "independent_initialisation"])
def test_its_memory_is_that_of_the_result_and_a_few_blocks(draw):
    # The Jacobian alone would be 1024 x 512 x 73 numbers, 153 MB, and features a, r 34 MB.
    run = subprocess.run(
        [sys.executable, "-c", PEAK.format(draw=draw)], capture_output=True, text=True, check=True
    )
    product, matrix = map(float, run.stdout.split())
    assert product < 40
    assert matrix < 45  # of which the matrix is 4


def test_a_kernel_that_does_not_fit_is_refused_before_it_is_computed():
    parameters, X, q = heads_of(), tokens_of(1000), query_of("fixed")
    message = (
        r"tokens: 3 arrays of 1000 x 1000 numbers in torch\.float64 take 22\.9 MiB, and 9\.54 MiB "
        r"are allowed by memory_limit; take fewer samples, .* kernel_vector_product"
    )
    with pytest.raises(ValueError, match=message):
        empirical_kernel(parameters, X, query=q, memory_limit=10**7)
    empirical_kernel_total(parameters, X, query=q, memory_limit=10**7)  # one array is 8 MB
    with pytest.raises(ValueError, match="one array of 1000 x 1000"):
        empirical_kernel_total(parameters, X, query=q, memory_limit=7 * 10**6)
    huge = X[:1].expand(10**6, T, d)
    with pytest.raises(ValueError, match=r"take 7\d{3} GiB, and .* are free; take fewer samples"):
        empirical_kernel_total(parameters, huge, query=q)


def test_the_spectrum_counts_what_is_above_rounding():
    rows = torch.randn(30, 6, generator=generator(0), dtype=torch.float64)
    values = torch.linalg.eigvalsh(rows @ rows.mT).flip(0)
    for dtype in (torch.float32, torch.float64):
        found = spectrum((rows @ rows.mT).to(dtype))
        assert found.rank == 6
        assert found.eigenvalues.dtype == torch.float64
        assert torch.allclose(found.eigenvalues[:6], values[:6], rtol=1e-5)
    assert spectrum(torch.eye(5)).effective_rank == pytest.approx(5.0)
    assert spectrum(torch.ones(5, 5)).effective_rank == pytest.approx(1.0)
    assert spectrum(torch.zeros(3, 3))[1:] == (0, 0.0)
    parts = TangentKernel(torch.eye(2), torch.eye(2), torch.zeros(2, 2))
    assert spectrum(parts).eigenvalues.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p, X: spectrum(torch.zeros(2, 3)), ValueError, r"kernel: expected shape \(n, n\)"),
        (lambda p, X: spectrum(torch.ones(2, 2).triu()), ValueError, "expected a symmetric matrix"),
        (lambda p, X: empirical_kernel(p, X.float(), query="last"), TypeError, "float64 where"),
        (
            lambda p, X: empirical_kernel(p, X, X[..., :2], query="last"),
            ValueError,
            "tokens: expected",
        ),
        (
            lambda p, X: empirical_kernel(p, X, other_mask=X[..., 0] > 0, query="last"),
            ValueError,
            "other_mask, other_query: expected None without other",
        ),
        (
            lambda p, X: kernel_vector_product(p, X, torch.zeros(4).double(), query="last"),
            ValueError,
            r"v: expected shape \(k,\) with k = 6, got \(4,\)",
        ),
        (
            lambda p, X: kernel_vector_product(p, X, torch.zeros(6), query="last"),
            TypeError,
            "v: has dtype",
        ),
        (lambda p, X: empirical_kernel(p, X, query="last", engine="fast"), ValueError, "engine: "),
    ],
)
def test_what_does_not_fit_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(heads_of(), tokens_of(6))
