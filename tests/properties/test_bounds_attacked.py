"""The bounds of one head under attack: never passed, and reached where they are called sharp.

Every adversary moves tokens in the ball, the logit vector w = W q and the directions of the bound,
so it only sees weights that a real head can produce.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import Law, unit_ball_tokens
from attention_dynamics.models import attention, indrnn, shallow
from attention_dynamics.models.activations import ERF, ERF_PLAIN, TANH, Activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory import bounds, constants
from attention_dynamics.verification import projected_ascent

ROUNDING = 1 + 1e-12
SHARP = 0.999
LENGTHS = (2, 16, 256, 4096)
Points = tuple[Tensor, ...]


class Bounded(NamedTuple):
    """A quantity of (tokens, w, directions), its bound and the first step of the ascent."""

    value: Callable[..., Tensor]
    bound: float
    directions: int
    step: float


def attend(x: Tensor, w: Tensor) -> Tensor:
    identity = torch.eye(x.shape[-1], dtype=x.dtype)[None]
    return attention.attention_weights(attention.logits(x, identity, w))


def covariance(x: Tensor, w: Tensor) -> Tensor:
    return attention.softmax_covariance(attend(x, w), x)[:, 0]


def cumulant(x: Tensor, w: Tensor, u: Tensor, p: Tensor) -> Tensor:
    return attention.third_cumulant(attend(x, w), x, u[:, None], p[:, None])[:, 0]


def head_gradient(R: float, sigma: Activation, query: float = 1.0) -> Callable[..., Tensor]:
    def value(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        alpha, U = attend(x, w), R * u[:, None]
        mu = attention.pooled_token(alpha, x)
        r = query * attention.covariance_product(alpha, x, U)
        slope = sigma.first((U * mu).sum(-1))[:, 0]
        return slope * torch.cat([mu, r], dim=-1)[:, 0].norm(dim=-1)

    return value


def head_curvature(R: float, sigma: Activation, query: float = 1.0) -> Callable[..., Tensor]:
    def value(x: Tensor, w: Tensor, u: Tensor, vz: Tensor) -> Tensor:
        alpha, U = attend(x, w), R * u[:, None]
        V, Z = vz[:, None].chunk(2, dim=-1)
        p = query * Z
        mu = attention.pooled_token(alpha, x)
        r, r_p = (attention.covariance_product(alpha, x, k) for k in (U, p))
        s, first = (U * mu).sum(-1), (V * mu + r * p).sum(-1)
        second = 2 * (V * r_p).sum(-1) + attention.third_cumulant(alpha, x, U, p)
        return (sigma.second(s) * first**2 + sigma.first(s) * second).abs()[:, 0]

    return value


def trace(x: Tensor, w: Tensor) -> Tensor:
    return covariance(x, w).diagonal(dim1=1, dim2=2).sum(-1)


def frobenius(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(covariance(x, w))


def spectral(x: Tensor, w: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(covariance(x, w), 2)


def gradient_bound(R: float, sigma: Activation) -> Bounded:
    limit = float(constants.head_lipschitz(R, sigma.bounds[1]))
    return Bounded(head_gradient(R, sigma), limit, 1, 1.0)


def curvature_bound(R: float, sigma: Activation) -> Bounded:
    return Bounded(head_curvature(R, sigma), float(constants.head_smoothness(R, sigma)), 2, 1.0)


COVARIANCE = float(constants.covariance_trace_bound())
NORMS = {
    "trace": Bounded(trace, COVARIANCE, 0, 4.0),
    "Frobenius norm": Bounded(frobenius, COVARIANCE, 0, 4.0),
    "spectral norm": Bounded(spectral, COVARIANCE, 0, 4.0),
}
SHARP_BOUNDS = NORMS | {
    "third cumulant": Bounded(cumulant, constants.third_cumulant_bound(), 2, 4.0),
    "gradient, tanh, R=2": gradient_bound(2.0, TANH),
    "gradient, erf, R=1.5": gradient_bound(1.5, ERF),
    "gradient, erf_plain, R=0.5": gradient_bound(0.5, ERF_PLAIN),
}
ALL_BOUNDS = SHARP_BOUNDS | {
    "curvature, tanh, R=2": curvature_bound(2.0, TANH),
    "curvature, erf, R=1": curvature_bound(1.0, ERF),
    "curvature, erf_plain, R=4": curvature_bound(4.0, ERF_PLAIN),
}


def ball(v: Tensor, radius: float) -> Tensor:
    return v * (radius / v.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)


def draw(bounded: Bounded, count: int, T: int, d: int, *names: str, law: Law = "iid") -> Points:
    stream = generator(0, "attack", T, d, *names)
    x = unit_ball_tokens(count, T, d, generator=stream, law=law, dtype=torch.float64)
    w = torch.randn(count, d, generator=stream, dtype=torch.float64)
    sizes = [d, 2 * d if bounded.value.__qualname__.startswith("head_curvature") else d]
    u = [
        torch.randn(count, size, generator=stream, dtype=torch.float64)
        for size in sizes[: bounded.directions]
    ]
    return (x, w, *(v / v.norm(dim=-1, keepdim=True) for v in u))


def ascend(
    bounded: Bounded, points: Points, *, steps: int, radius: float = 1.0
) -> tuple[Tensor, Points]:
    """The best values and where they are; tokens move in the root-mean-square norm."""
    scale = (points[0].shape[1] ** 0.5, *[0.1] * (len(points) - 1))

    def unscaled(blocks: Points) -> Points:
        return tuple(block * s for block, s in zip(blocks, scale, strict=True))

    found = projected_ascent(
        lambda *blocks: bounded.value(*unscaled(blocks)),
        tuple(block / s for block, s in zip(points, scale, strict=True)),
        lambda x, w, *u: (ball(x, radius / scale[0]), w, *(ball(v, 10.0) for v in u)),
        steps=steps,
        step_size=bounded.step,
        final_step_size=1e-2 if bounded.step > 1 else 1e-3,
    )
    return found.values, unscaled(found.points)


@pytest.mark.parametrize("name", ALL_BOUNDS)
def test_ten_thousand_attacked_instances_do_not_pass_the_bound(name):
    bounded = ALL_BOUNDS[name]
    count = 0
    for d, T, law in (
        (1, 2, "iid"), (1, 3, "sphere"), (2, 2, "sphere"), (2, 5, "sequence_means"),
        (3, 7, "iid"), (5, 4, "sphere"), (8, 16, "iid"), (8, 3, "sequence_means"),
    ):  # fmt: skip
        values, _ = ascend(bounded, draw(bounded, 1250, T, d, name, law=law), steps=8)
        assert values.max() <= bounded.bound * ROUNDING
        count += len(values)
    assert count == 10_000


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("name", SHARP_BOUNDS)
def test_ascent_from_random_tokens_reaches_every_sharp_bound_at_every_length(name, T):
    bounded = SHARP_BOUNDS[name]
    starts = draw(bounded, 5 if T == 4096 else 12, T, 3)
    values, _ = ascend(bounded, starts, steps=220)
    assert SHARP * bounded.bound <= values.max() <= bounded.bound * ROUNDING


@pytest.mark.parametrize("d", [1, 2, 6])
@pytest.mark.parametrize("name", SHARP_BOUNDS)
def test_sharp_bounds_are_sharp_in_every_dimension(name, d):
    bounded = SHARP_BOUNDS[name]
    values, _ = ascend(bounded, draw(bounded, 48, 5, d), steps=250)
    assert SHARP * bounded.bound <= values.max() <= bounded.bound * ROUNDING


def test_random_draws_never_come_near_the_third_cumulant_bound_on_long_sequences():
    bounded = SHARP_BOUNDS["third cumulant"]
    x, w, u, p = draw(bounded, 64, 4096, 8)
    assert cumulant(x, w, u, p).abs().max() < 0.05 * bounded.bound


@pytest.mark.parametrize(("R", "reached"), [(0.5, 0.6), (1.0, 0.66), (2.0, 0.7), (4.0, 0.8)])
def test_curvature_is_bounded_and_its_slack_is_known(R, reached):
    bounded = curvature_bound(R, TANH)
    values, _ = ascend(bounded, draw(bounded, 48, 8, 3), steps=300)
    assert reached * bounded.bound <= values.max() <= 0.95 * bounded.bound


def test_attacked_quantities_are_those_of_the_model():
    R, d = 2.0, 3
    x, w, u, vz = draw(curvature_bound(R, TANH), 6, 5, d)
    q = torch.tensor([0.6, 0.0, 0.8], dtype=torch.float64)
    for j in range(len(x)):
        head = Parameters(
            torch.ones(1, dtype=torch.float64), R * u[j][None], torch.outer(w[j], q)[None]
        )
        slopes = shallow.per_sample_gradients(head, x[j][None], query=q)
        size = (slopes.U.square().sum() + slopes.W.square().sum()).sqrt()
        torch.testing.assert_close(
            size, head_gradient(R, TANH)(x[j][None], w[j][None], u[j][None])[0]
        )
        V, p = vz[j].chunk(2)
        second = shallow.head_second_derivative(
            head, x[j][None], V[None], torch.outer(p, q)[None], query=q
        )
        expected = head_curvature(R, TANH)(*(block[j][None] for block in (x, w, u, vz)))
        torch.testing.assert_close(second[0].abs(), expected)


def test_bounds_rescaled_to_a_larger_ball_are_reached_and_not_passed():
    b, b_q, R = 2.5, 0.7, 2.0
    scaled = {"token_bound": b, "query_bound": b_q}
    for bounded, at_least in (
        (Bounded(trace, float(constants.covariance_trace_bound(token_bound=b)), 0, 6.0), SHARP),
        (Bounded(cumulant, constants.third_cumulant_bound(token_bound=b), 2, 6.0), SHARP),
        (
            Bounded(
                head_gradient(R, TANH, b_q), float(constants.head_lipschitz(R, **scaled)), 1, 1.0
            ),
            SHARP,
        ),
        (
            Bounded(
                head_curvature(R, TANH, b_q),
                float(constants.head_smoothness(R, "tanh", **scaled)),
                2,
                1.0,
            ),
            0.7,
        ),
    ):
        x, *rest = draw(bounded, 64, 4, 2)
        values, _ = ascend(bounded, (b * x, *rest), steps=250, radius=b)
        assert at_least * bounded.bound <= values.max() <= bounded.bound * ROUNDING


def test_norms_of_the_covariance_are_ordered_below_the_refined_bound():
    for T, law in ((1, "iid"), (2, "sphere"), (9, "sequence_means"), (64, "iid")):
        x, w = draw(NORMS["trace"], 500, T, 4, law=law)
        mu = attention.pooled_token(attend(x, 3 * w), x)[:, 0].norm(dim=-1).numpy()
        steps = [f(x, 3 * w) for f in (spectral, frobenius, trace)]
        steps.append(torch.as_tensor(constants.covariance_trace_bound(mu.clip(0, 1))))
        for smaller, larger in itertools.pairwise(steps):
            assert (smaller <= larger + 1e-14).all()


@pytest.mark.parametrize("pooled", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("T", [2, 5, 4096])
def test_antipodal_tokens_attain_the_refined_bound_at_every_pooled_norm(T, pooled):
    e = torch.tensor([0.6, -0.8], dtype=torch.float64)
    first = T // 3 + 1
    x = torch.cat([e.repeat(first, 1), -e.repeat(T - first, 1)])[None]
    share = (1 + pooled) / 2
    w = 0.5 * math.log(share * (T - first) / ((1 - share) * first)) * e[None]
    for norm in (trace, frobenius, spectral):
        torch.testing.assert_close(
            norm(x, w)[0].item(),
            float(constants.covariance_trace_bound(pooled)),
            rtol=1e-12,
            atol=0,
        )


@pytest.mark.parametrize("u", [1.5, -1.5, 1.0, 0.5])
@pytest.mark.parametrize("sigma", [TANH, ERF])
def test_recurrent_bound_is_attained_and_never_passed(u, sigma):
    T, d, count = 12, 3, 24
    stream = generator(3, "recurrent", str(u), sigma.name)
    x = unit_ball_tokens(count, T, d, generator=stream, law="sphere", dtype=torch.float64)
    w = torch.randn(count, d, generator=stream, dtype=torch.float64)
    limit = bounds.indrnn_gradient_bounds(u, T, *sigma.bounds[:2])

    def gradient_norm(x: Tensor, w: Tensor) -> Tensor:
        state, slope = x.new_zeros(len(x)), torch.zeros_like(w)
        for token in x.unbind(1):
            z = (w * token).sum(-1) + u * state
            state, slope = sigma.value(z), sigma.first(z)[:, None] * (token + u * slope)
        return slope.norm(dim=-1)

    found = projected_ascent(gradient_norm, (x, w), lambda x, w: (ball(x, 1.0), w), steps=150)
    assert found.values.mean() > 1.2 * gradient_norm(x, w).mean()
    assert found.values.max() <= limit.w * ROUNDING
    for tokens, weights in zip(*found.points, strict=True):
        _, in_u = indrnn.final_state_gradients(weights, u, tokens[None], sigma)
        assert in_u.abs() <= limit.u * ROUNDING

    for length in (1, 2, 7, 64):
        signs = math.copysign(1.0, u) ** torch.arange(length - 1, -1, -1, dtype=torch.float64)
        e, orthogonal = torch.eye(d, dtype=torch.float64)[:2]
        in_w, _ = indrnn.final_state_gradients(orthogonal, u, (signs[:, None] * e)[None], sigma)
        attained = bounds.indrnn_gradient_bounds(u, length, *sigma.bounds[:2]).w
        torch.testing.assert_close(in_w[0], attained * e, rtol=1e-12, atol=0.0)
