"""One-query attention: weights, moments of the tokens, features, and the errors at the boundary."""

import pytest
import torch
from hypothesis import given
from model_instances import Instance, head_by_formula, instances

from attention_dynamics.models import attention

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def weights_of(instance):
    """Logits and weights of an instance, by the public functions."""
    values = attention.logits(
        instance.tokens,
        instance.parameters.W,
        instance.query,
        mask=instance.mask,
        scale=instance.scale,
    )
    return attention.attention_weights(values, instance.mask)


@given(instances())
def test_weights_pooled_token_and_covariance_are_the_formulas(instance):
    weights = weights_of(instance)
    pooled = attention.pooled_token(weights, instance.tokens)
    covariance = attention.softmax_covariance(weights, instance.tokens)
    for j in range(instance.samples):
        X, q = instance.sequence(j)
        kept = slice(None) if instance.mask is None else instance.mask[j]
        for i in range(instance.heads):
            alpha, a, M = head_by_formula(
                X, instance.parameters.U[i], instance.parameters.W[i], q, instance.scale
            )
            torch.testing.assert_close(weights[j, i, kept], alpha, **TIGHT)
            torch.testing.assert_close(pooled[j, i], a, **TIGHT)
            torch.testing.assert_close(covariance[j, i], M, **TIGHT)


@given(instances())
def test_the_covariance_product_is_the_product_with_M(instance):
    weights = weights_of(instance)
    M = attention.softmax_covariance(weights, instance.tokens)
    shared = instance.tangent.U
    actual = attention.covariance_product(weights, instance.tokens, shared)
    torch.testing.assert_close(actual, torch.einsum("nmde,me->nmd", M, shared), **TIGHT)
    own = shared * torch.linspace(1, 2, instance.samples, dtype=M.dtype)[:, None, None]
    actual = attention.covariance_product(weights, instance.tokens, own)
    torch.testing.assert_close(actual, torch.einsum("nmde,nme->nmd", M, own), **TIGHT)


@given(instances())
def test_the_third_cumulant_is_its_centred_sum(instance):
    weights = weights_of(instance)
    u, p = instance.parameters.U, instance.tangent.U
    actual = attention.third_cumulant(weights, instance.tokens, u, p)
    for j in range(instance.samples):
        for i in range(instance.heads):
            alpha, X = weights[j, i], instance.tokens[j]
            mu = sum(alpha[t] * X[t] for t in range(instance.length))
            expected = sum(
                alpha[t] * (u[i] @ (X[t] - mu)) * (p[i] @ (X[t] - mu)) ** 2
                for t in range(instance.length)
            )
            torch.testing.assert_close(actual[j, i], expected, **TIGHT)
    own = p.expand(instance.samples, -1, -1)
    torch.testing.assert_close(
        attention.third_cumulant(weights, instance.tokens, u, own), actual, **TIGHT
    )


@given(instances())
def test_the_covariance_is_the_derivative_of_the_pooled_token(instance):
    # d a / d l along x_t . p is M p, and d (u^T M p) is kappa_3(u, p, p).
    W, p = instance.parameters.W, instance.tangent.U

    def shifted(epsilon):
        values = attention.logits(
            instance.tokens, W, instance.query, mask=instance.mask, scale=instance.scale
        )
        along = torch.einsum("ntd,md->nmt", instance.tokens, p)
        return attention.attention_weights(values + epsilon * along, instance.mask)

    zero = torch.zeros((), dtype=torch.float64)
    one = torch.ones_like(zero)
    weights = shifted(zero)
    _, moved = torch.func.jvp(
        lambda e: attention.pooled_token(shifted(e), instance.tokens), (zero,), (one,)
    )
    product = attention.covariance_product(weights, instance.tokens, p)
    torch.testing.assert_close(moved, product, **TIGHT)
    u = instance.parameters.U
    _, moved = torch.func.jvp(
        lambda e: (u * attention.covariance_product(shifted(e), instance.tokens, p)).sum(-1),
        (zero,),
        (one,),
    )
    torch.testing.assert_close(
        moved, attention.third_cumulant(weights, instance.tokens, u, p), **TIGHT
    )


@given(instances())
def test_head_features_are_the_separate_functions(instance):
    weights = weights_of(instance)
    U = instance.parameters.U
    s, a, r = attention.head_features(
        instance.tokens,
        instance.parameters.W,
        U,
        instance.query,
        mask=instance.mask,
        scale=instance.scale,
        chunk=2,
    )
    torch.testing.assert_close(a, attention.pooled_token(weights, instance.tokens), **TIGHT)
    torch.testing.assert_close(s, (U * a).sum(-1), **TIGHT)
    torch.testing.assert_close(
        r, attention.covariance_product(weights, instance.tokens, U), **TIGHT
    )


def test_the_centred_covariance_stays_psd_far_from_the_origin():
    g = torch.Generator().manual_seed(0)
    tokens = 1e6 + torch.randn((4, 6, 3), generator=g, dtype=torch.float64)
    weights = torch.softmax(torch.randn((4, 5, 6), generator=g, dtype=torch.float64), -1)
    eigenvalues = torch.linalg.eigvalsh(attention.softmax_covariance(weights, tokens))
    assert eigenvalues.min() > -1e-12
    # The other form, sum alpha x x^T - mu mu^T, has lost six digits here.
    mu = weights @ tokens
    raw = torch.einsum("nmt,ntd,nte->nmde", weights, tokens, tokens)
    raw = raw - mu[..., :, None] * mu[..., None, :]
    assert (raw - attention.softmax_covariance(weights, tokens)).abs().max() > 1e-5


def test_resolve_query():
    tokens = torch.arange(24.0).reshape(2, 4, 3)
    assert torch.equal(attention.resolve_query(tokens, "last"), tokens[:, 3])
    mask = torch.tensor([[True, True, False, False], [False, True, True, False]])
    expected = torch.stack((tokens[0, 1], tokens[1, 2]))
    assert torch.equal(attention.resolve_query(tokens, "last", mask), expected)
    fixed = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(attention.resolve_query(tokens, fixed), torch.stack((fixed, fixed)))
    own = torch.randn(2, 3)
    assert torch.equal(attention.resolve_query(tokens, own), own)


def test_one_query_per_sample_is_accepted():
    last = Instance(samples=4, query_kind="last")
    W, U = last.parameters.W, last.parameters.U
    expected = attention.head_features(last.tokens, W, U, "last")
    actual = attention.head_features(last.tokens, W, U, last.tokens[:, -1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float16, 1e4),
        (torch.float16, 6.5e4),
        (torch.bfloat16, 1e30),
        (torch.float32, 1e30),
        (torch.float32, 3e38),
        (torch.float64, 1e308),
    ],
)
def test_weights_of_huge_logits_are_finite(dtype, size):
    logits = torch.tensor([[[0.0, size, -size, size]]]).double().to(dtype)
    if dtype == torch.float64:
        logits = torch.tensor([[[0.0, size, -size, size]]], dtype=dtype)
    weights = attention.attention_weights(logits)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(weights, torch.tensor([[[0.0, 0.5, 0.0, 0.5]]], dtype=weights.dtype))


def test_weights_of_masked_huge_logits_ignore_the_masked_maximum():
    logits = torch.tensor([[[1e30, 1.0, 1.0]]])
    mask = torch.tensor([[False, True, True]])
    weights = attention.attention_weights(logits, mask)
    assert torch.equal(weights, torch.tensor([[[0.0, 0.5, 0.5]]]))


def test_half_precision_tokens_do_not_overflow_in_the_logits():
    # x . W q = 300 * 300 = 9e4 is infinite in float16.
    tokens = torch.tensor([[[300.0], [-300.0]]], dtype=torch.float16)
    W = torch.tensor([[[300.0]]], dtype=torch.float16)
    query = torch.ones(1, dtype=torch.float16)
    values = attention.logits(tokens, W, query)
    assert values.dtype == torch.float32
    assert values.flatten().tolist() == [9e4, -9e4]
    features = attention.head_features(tokens, W, torch.ones((1, 1), dtype=torch.float16), query)
    assert features.s.dtype == torch.float32
    assert features.a.flatten().tolist() == [300.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_no_number_is_located(bad):
    logits = torch.zeros(3, 2, 4)
    logits[2, 1, 0] = bad
    with pytest.raises(ValueError, match=rf"logits: .* sample 2, head 1 is {bad}"):
        attention.attention_weights(logits)


def test_bad_shapes_name_the_argument():
    tokens, weights = torch.zeros(2, 4, 3), torch.full((2, 5, 4), 0.25)
    with pytest.raises(ValueError, match=r"weights: .* n = 2, T = 4, got \(2, 4, 5\)"):
        attention.pooled_token(weights.mT, tokens)
    with pytest.raises(ValueError, match=r"direction: .* m = 5, d = 3, got \(5, 4\)"):
        attention.covariance_product(weights, tokens, torch.zeros(5, 4))
    with pytest.raises(ValueError, match=r"direction: .* n = 2, m = 5, d = 3, got \(3, 5, 3\)"):
        attention.covariance_product(weights, tokens, torch.zeros(3, 5, 3))
    with pytest.raises(ValueError, match=r"p: expected shape \(m, d\)"):
        attention.third_cumulant(weights, tokens, torch.zeros(5, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"W: .* d = 3, got \(5, 3, 4\)"):
        attention.logits(tokens, torch.zeros(5, 3, 4), "last")
    with pytest.raises(ValueError, match=r"logits: expected shape \(n, m, T\), got \(2, 4\)"):
        attention.attention_weights(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"chunk: expected an integer >= 1, got 0"):
        attention.head_features(tokens, torch.zeros(5, 3, 3), torch.zeros(5, 3), "last", chunk=0)
    with pytest.raises(TypeError, match=r"W: has dtype torch.float64"):
        attention.logits(tokens, torch.zeros(5, 3, 3, dtype=torch.float64), "last")
    with pytest.raises(ValueError, match=r"tokens: .* got nan at index \(0, 0, 0\)"):
        attention.pooled_token(weights, torch.full((2, 4, 3), torch.nan))


def test_a_non_square_W_is_refused():
    with pytest.raises(ValueError, match=r"W: expected shape \(m, d, d\)"):
        attention.logits(torch.zeros(2, 4, 3), torch.zeros(5, 4, 3), "last")
