"""Tokens: the unit ball is respected, laws are what they say, errors name value and remedy."""

import math

import pytest
import torch

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import (
    check_token_norms,
    query_vector,
    rescale_tokens,
    unit_ball_tokens,
)

LAWS = ("iid", "sphere", "sequence_means")


def tokens_of(law, samples=400, length=6, dimension=5, dtype=torch.float64):
    return unit_ball_tokens(
        samples, length, dimension, generator=generator(0, law, length), law=law, dtype=dtype
    )


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_are_in_the_unit_ball(law, dtype):
    tokens = tokens_of(law, dtype=dtype)
    assert tokens.shape == (400, 6, 5)
    assert tokens.dtype == dtype
    assert check_token_norms(tokens) == 1.0


@pytest.mark.parametrize("law", LAWS)
def test_one_seed_gives_the_same_tokens_in_every_dtype(law):
    assert torch.equal(tokens_of(law).float(), tokens_of(law, dtype=torch.float32))


def test_iid_tokens_are_uniform_in_the_ball():
    radius = torch.linalg.vector_norm(tokens_of("iid", samples=4000), dim=-1).flatten()
    for r in (0.5, 0.8, 0.95):  # P(|X| <= r) = r^d
        p = r**5
        share = float((radius <= r).double().mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / radius.numel())


def test_sphere_tokens_are_on_the_sphere():
    radius = torch.linalg.vector_norm(tokens_of("sphere"), dim=-1)
    assert torch.allclose(radius, torch.ones_like(radius), rtol=0, atol=1e-14)


def pooled_variance(law, length, samples=2000, dimension=4):
    tokens = unit_ball_tokens(
        samples, length, dimension, generator=generator(1, law, length), law=law,
        dtype=torch.float64,
    )  # fmt: skip
    return float(tokens.mean(dim=1).var(dim=0).mean())


def test_sequence_means_keep_their_variance_as_the_length_grows():
    short, long = (pooled_variance("sequence_means", T, samples=1000) for T in (4, 1024))
    assert short == pytest.approx((1 + 1 / 4) / (4 * 6), rel=0.1)
    assert long == pytest.approx((1 + 1 / 1024) / (4 * 6), rel=0.1)
    assert long > 0.6 * short


def test_independent_tokens_lose_it():
    short, long = (pooled_variance("iid", T, samples=500) for T in (4, 1024))
    assert long < short / 200


@pytest.mark.parametrize("norm", [0.0, 1.0, 2.5])
def test_query_has_the_norm_asked_for(norm):
    query = query_vector(7, generator=generator(0, "q"), norm=norm, dtype=torch.float64)
    assert float(torch.linalg.vector_norm(query)) == pytest.approx(norm, abs=1e-14)


def test_a_longer_token_needs_its_bound():
    tokens = tokens_of("iid")
    tokens[3, 2] *= 2 / torch.linalg.vector_norm(tokens[3, 2])
    with pytest.raises(ValueError, match=r"norms <= 1, got 2; pass token_bound=2.002 .*rescale"):
        check_token_norms(tokens)
    with pytest.raises(ValueError, match=r"norms <= 1.5, got 2; raise token_bound"):
        check_token_norms(tokens, 1.5)
    assert check_token_norms(tokens, 2.0) == 2.0
    rescaled = rescale_tokens(tokens, 2.0)
    assert torch.equal(rescaled, tokens / 2)
    assert check_token_norms(rescaled) == 1.0


def test_rounding_of_unit_tokens_is_no_violation():
    tokens = tokens_of("sphere", samples=2000, dtype=torch.float32)
    assert float(torch.linalg.vector_norm(tokens.double(), dim=-1).max()) > 1.0
    assert check_token_norms(tokens) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tokens_that_are_not_finite_are_located(bad):
    tokens = tokens_of("iid")
    tokens[5, 1, 2] = bad
    with pytest.raises(ValueError, match=r"tokens: .*finite.*\(5, 1, 2\)"):
        check_token_norms(tokens)
    with pytest.raises(ValueError, match="finite"):
        rescale_tokens(tokens, 2.0)


def test_masked_tokens_are_not_looked_at():
    tokens = tokens_of("iid")
    tokens[5, 1] = math.nan
    tokens[6, 1] = 9.0
    mask = torch.ones(400, 6, dtype=torch.bool)
    mask[5:7, 1] = False
    assert check_token_norms(tokens, mask=mask) == 1.0
    halves = rescale_tokens(tokens, 2.0, mask=mask)
    assert torch.equal(halves[mask], tokens[mask] / 2)


def test_no_tokens_are_no_proof_of_a_bound():
    with pytest.raises(ValueError, match=r"tokens: expected at least one .* got shape \(0, 6, "):
        check_token_norms(tokens_of("iid")[:0])


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_must_be_positive(bound):
    with pytest.raises(ValueError, match="token_bound: expected a finite number > 0"):
        check_token_norms(tokens_of("iid"), bound)


@pytest.mark.parametrize("argument", ["samples", "length", "dimension"])
def test_sizes_must_be_positive(argument):
    sizes = {"samples": 2, "length": 2, "dimension": 2} | {argument: 0}
    with pytest.raises(ValueError, match=f"{argument}: expected an integer >= 1, got 0"):
        unit_ball_tokens(**sizes, generator=generator(0))


def test_an_unknown_law_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"law: .*'iid', 'sphere', 'sequence_means', got 'gauss'"):
        unit_ball_tokens(2, 2, 2, generator=generator(0), law="gauss")


@pytest.mark.parametrize("norm", [-1.0, math.nan, math.inf])
def test_a_query_norm_must_be_finite(norm):
    with pytest.raises(ValueError, match="norm: expected a finite number >= 0"):
        query_vector(3, generator=generator(0), norm=norm)
