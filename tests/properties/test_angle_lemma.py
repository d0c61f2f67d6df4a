r"""The angle lemma against drawn shapes, laws and scales, and against an ascent over everything."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.theory.conditioning import (
    angle_bound,
    attention_spectrum,
    softmax_rank_bound,
    worst_attention,
)
from attention_dynamics.verification import projected_ascent

double = {"dtype": torch.float64}
ALLOWED = 1 - 1e-10


def ratio(tokens: Tensor, value: Tensor, A: Tensor) -> Tensor:
    """Smallest singular value over its bound, where rounding does not decide."""
    spectrum = attention_spectrum(tokens + A @ tokens @ value)
    bound = angle_bound(tokens, value)
    certain = bound > 1e-5 * spectrum.largest
    return torch.where(certain, spectrum.smallest / bound, torch.ones_like(bound))


def attentions(law: str, count: int, M: int, stream: torch.Generator) -> Tensor:
    A = torch.randn(count, M, M, generator=stream, **double)
    if law == "softmax":
        return torch.softmax(3 * A, dim=-1)
    if law == "permutation":
        return torch.eye(M, **double)[torch.argsort(A, dim=-1)[..., 0]]  # 0-1 rows
    return A


@settings(max_examples=60, deadline=None)
@given(
    M=st.integers(1, 5),
    room=st.integers(0, 8),
    law=st.sampled_from(("gaussian", "softmax", "permutation", "worst")),
    orthonormal=st.booleans(),
    log_scale=st.floats(-3, 3),
    seed=st.integers(0, 2**20),
)
def test_no_attention_matrix_gets_below_the_angle_bound(M, room, law, orthonormal, log_scale, seed):
    count, d = 200, 2 * M + room
    stream = generator(seed, "angle lemma")
    tokens = torch.randn(count, M, d, generator=stream, **double)
    if orthonormal:
        tokens = torch.linalg.qr(tokens.mT)[0].mT
    value = 10**log_scale * torch.randn(count, d, d, generator=stream, **double)
    A = worst_attention(tokens, value) if law == "worst" else attentions(law, count, M, stream)
    found = ratio(tokens, value, A)
    assert (found >= ALLOWED).all()
    if law == "worst" and orthonormal:
        assert (found <= 1 + 1e-8).all()


@pytest.mark.parametrize(("M", "d"), [(2, 4), (3, 7), (4, 12)])
def test_an_ascent_over_tokens_values_and_attention_comes_close_and_no_further(M, d):
    stream = generator(M, "angle lemma", "ascent")
    blocks = ((24, M, d), (24, d, d), (24, M, M))
    starts = tuple(torch.randn(*shape, generator=stream, **double) for shape in blocks)

    def objective(tokens: Tensor, value: Tensor, A: Tensor) -> Tensor:
        output = attention_spectrum(tokens + A @ tokens @ value)
        return angle_bound(tokens, value) / output.smallest

    def project(tokens: Tensor, value: Tensor, A: Tensor) -> tuple[Tensor, ...]:
        # Sizes matter to rounding only: the lemma knows no scale.
        return tuple(
            block / torch.linalg.matrix_norm(block)[..., None, None] * block.shape[-1] ** 0.5
            for block in (tokens, value, A)
        )

    found = projected_ascent(objective, starts, project, steps=200, step_size=0.3)
    assert found.values.max() <= 1 / ALLOWED
    assert found.values.max() > 0.9


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(2, 12),
    d_k=st.integers(1, 3),
    log_s=st.floats(-3, 1),
    degree=st.integers(0, 2),
    seed=st.integers(0, 2**20),
)
def test_no_softmax_matrix_passes_the_rank_bound(T, d_k, log_s, degree, seed):
    s, stream = 10**log_s, generator(seed, "rank bound")
    queries, keys = (torch.randn(100, T, d_k, generator=stream, **double) for _ in range(2))
    queries[::2] = queries[::2].sign()  # half of them at corners
    logits = queries @ keys.mT
    logits = s * logits / logits.abs().amax(dim=(-1, -2), keepdim=True)
    bound = softmax_rank_bound(degree, s, d_k)
    if bound.rank < T:
        values = torch.linalg.svdvals(torch.softmax(logits, dim=-1))[:, bound.rank]
        assert (values <= bound.remainder * (1 + 1e-9) + 1e-15).all()
