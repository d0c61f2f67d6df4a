"""Bounds of the whole network, and the theorem made of them, under ten thousand attacks each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_dynamics.data.streams import generator
from attention_dynamics.data.tokens import query_vector, unit_ball_tokens
from attention_dynamics.models import attention, shallow
from attention_dynamics.models.activations import TANH
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory import (
    UNIT_BALL,
    BoundCalculator,
    Setting,
    Start,
    TransportNorms,
    fast_form,
    network_constants,
    paper_form,
    random_multi_anchor,
)
from attention_dynamics.training import DescentConfig, Radii, projected_gradient_descent
from attention_dynamics.verification import projected_ascent

RHO = 3.0
ROUNDING = 1 + 1e-12
DOUBLE = {"dtype": torch.float64}
SHAPES = ((1, 2, 2), (1, 3, 8), (2, 2, 4), (2, 16, 2), (3, 7, 8), (5, 4, 8), (8, 16, 4), (3, 64, 2))


def heads(x: Tensor, U: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = attention.attention_weights(torch.einsum("ntd,nmd->nmt", x, w))
    mu = attention.pooled_token(weights, x)
    return (U * mu).sum(-1), mu, attention.covariance_product(weights, x, U)


def squared_gradient(x: Tensor, c: Tensor, U: Tensor, w: Tensor) -> Tensor:
    s, mu, r = heads(x, U, w)
    slopes = (c * TANH.first(s)) ** 2 * (mu.square().sum(-1) + r.square().sum(-1))
    return (TANH.value(s) ** 2 + slopes).mean(-1)


def output(x: Tensor, c: Tensor, U: Tensor, w: Tensor) -> Tensor:
    return (c * TANH.value(heads(x, U, w)[0])).sum(-1) / c.shape[-1] ** 0.5


BOUNDED = {"gradient_squared": squared_gradient, "output": output}


def ball(point: Tensor, centre: Tensor, radius: float) -> Tensor:
    gap = point - centre
    norm = gap.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return centre + gap * (radius / norm).clamp_max(1.0)


def ascend(name, phi, q, count, T, steps):
    """Best values and points of an ascent over tokens in the ball and heads in theirs."""
    m, d = phi.U.shape
    x = unit_ball_tokens(count, T, d, generator=generator(0, name, m, T, d), **DOUBLE)
    centre = [b.expand(count, *b.shape) for b in (phi.c[:, None], phi.U, phi.W @ q)]
    scale = (T**0.5, 0.3, 0.3, 0.3)

    def natural(blocks):
        return tuple(b * s for b, s in zip(blocks, scale, strict=True))

    def project(*blocks):
        x, *moved = natural(blocks)
        inside = [ball(p, p0, RHO / m**0.5) for p, p0 in zip(moved, centre, strict=True)]
        return tuple(b / s for b, s in zip((ball(x, 0 * x, 1.0), *inside), scale, strict=True))

    def value(*blocks):
        x, c, U, w = natural(blocks)
        return BOUNDED[name](x, c[..., 0], U, w)

    starts = tuple(b / s for b, s in zip((x, *centre), scale, strict=True))
    found = projected_ascent(
        value, starts, project, steps=steps, step_size=1.0, final_step_size=1e-2
    )
    return found.values, natural(found.points), value(*starts)


@pytest.mark.parametrize("name", BOUNDED)
def test_ten_thousand_attacked_networks_do_not_pass_the_bound(name):
    count, climbed = 0, []
    for d, T, m in SHAPES:
        q = query_vector(d, generator=generator(0, "q", d), **DOUBLE)
        phi = symmetric_initialisation(m, d, generator=generator(0, "phi", m, d), **DOUBLE)
        limit = getattr(network_constants(phi, Radii(RHO, RHO, RHO), inputs=UNIT_BALL), name)
        values, _, first = ascend(name, phi, q, 1250, T, 8)
        assert values.max() <= limit * ROUNDING
        count += len(values)
        climbed.append(float((values - first).min()))
    assert count == 10_000
    assert min(climbed) > 0.0  # from each of its starts the adversary gains something


def test_aligned_heads_reach_the_gradient_bound_up_to_the_activation():
    d, m, R = 3, 8, 2.0
    q = query_vector(d, generator=generator(0, "q", d), **DOUBLE)
    phi = symmetric_initialisation(m, d, generator=generator(0, "phi", m, d), **DOUBLE)
    aligned = Parameters(phi.c, R * q.expand(m, d), 0 * phi.W)
    constants = network_constants(aligned, Radii(RHO, RHO, RHO), inputs=UNIT_BALL)
    values, *_ = ascend("gradient_squared", aligned, q, 12, 4, 120)
    # For tanh the sup over tokens and the set is G^2 - s_0^2, see the chapter on the theorem.
    exact = constants.gradient_squared - 1.0
    assert 0.998 * exact <= values.max() <= exact * ROUNDING


@pytest.mark.parametrize("name", BOUNDED)
def test_attacked_quantities_are_those_of_the_network(name):
    d, T, m = 3, 5, 6
    q = query_vector(d, generator=generator(0, "q", d), **DOUBLE)
    phi = symmetric_initialisation(m, d, generator=generator(0, "phi", m, d), **DOUBLE)
    values, (x, c, U, w), _ = ascend(name, phi, q, 3, T, 5)
    for j in range(3):
        W = phi.W + torch.einsum("md,e->mde", w[j] - phi.W @ q, q)  # q is a unit vector
        moved = Parameters(c[j, :, 0], U[j], W)
        if name == "output":
            own = shallow.forward(moved, x[j][None], query=q)[0]
        else:
            own = sum(
                b.square().sum() for b in shallow.per_sample_gradients(moved, x[j][None], query=q)
            )
        torch.testing.assert_close(own, values[j], rtol=1e-10, atol=1e-12)


def test_ten_thousand_instances_of_the_theorem():
    # Both forms hold at every step of every run, whatever the targets are.
    count, steps, draw = 0, 100, np.random.default_rng(0)
    for seed in range(36):
        kind = ("tangent", "noise", "far")[seed // 12]
        d, m, n = int(draw.integers(1, 5)), 2 * int(draw.integers(1, 9)), 4
        T, size = int(draw.choice((1, 2, 16, 256))), float(10 ** draw.uniform(-2, 0.5))
        activation, share = str(draw.choice(("tanh", "erf"))), float(draw.uniform(0.02, 0.95))
        stream = generator(seed, "theorem", kind)
        query = "last" if seed % 2 else query_vector(d, generator=stream, **DOUBLE)
        common = {"query": query, "activation": activation} | DOUBLE
        tokens = unit_ball_tokens(n, T, d, generator=stream, law="sphere", **DOUBLE)
        norms = TransportNorms(size, size, size)
        v = random_multi_anchor(2, T, d, generator=stream, norms=norms, **common)
        model = ShallowTransformer.symmetric(m, d, seed=seed, **common)
        phi_0 = model.snapshot()
        options = {"query": query, "activation": activation}
        y = shallow.jvp(phi_0, tokens, v(phi_0).scaled(m**-0.5), **options)
        if kind == "noise":
            y = size * torch.randn(n, generator=stream, **DOUBLE)
        if kind == "far":
            y = torch.full((n,), 50.0 * size, **DOUBLE)
        setting = Setting(
            heads=m, samples=n, length=T, dimension=d, steps=steps, inputs=UNIT_BALL,
            radii=Radii(size, size, size), transport_norms=norms, activation=activation,
        )  # fmt: skip
        start = Start.measure(phi_0, v, tokens, y)
        given = BoundCalculator(mode="posterior").ingredients(setting, start)
        eta = share / given.gradient_squared
        config = DescentConfig(steps, step_size=eta, radii=setting.radii)
        run = projected_gradient_descent(model, tokens, y, config)
        reached = float(shallow.loss(run.averaged, tokens, y, **options))
        losses = run.history["loss"].to_numpy()[:steps]
        averages = losses.cumsum() / np.arange(1, steps + 1)
        for form in (fast_form, paper_form):
            bounds = [form(given, eta, k + 1) for k in range(steps)]
            assert (averages <= np.array([b.average for b in bounds]) * ROUNDING).all()
            assert (np.minimum.accumulate(losses) <= [b.average for b in bounds]).all()
            assert reached <= bounds[-1].total
        count += 3 * steps
    assert count >= 10_000
