r"""The two errors of the tangent model under attack, ten thousand small networks each.

The ascent moves the tokens, which all heads of a network share, and every head inside its own
ball. Only :math:`p = Zq` of a displacement Z matters, and :math:`w = Wq` of W.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from attention_dynamics.data import generator, unit_ball_tokens
from attention_dynamics.models.activations import ERF, ERF_PLAIN, TANH, Activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory import UNIT_BALL, TransportNorms, constants, network_constants
from attention_dynamics.training import Radii
from attention_dynamics.verification import projected_ascent

d, NETWORKS = 3, 280
CASES = list(
    itertools.product((TANH, ERF, ERF_PLAIN), (0.3, 1.0, 3.0), ((2, 4), (16, 2)), (1.0, 0.3))
)
Head = tuple[Tensor, Tensor, Tensor]


def attend(x: Tensor, w: Tensor, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    alpha, values = torch.softmax(w @ x.mT, dim=-1), U @ x.mT
    s = (alpha * values).sum(-1)
    return s, alpha @ x, (alpha * (values - s[..., None])) @ x


def tangent_error(x: Tensor, head: Head, step: Head, sigma: Activation) -> Tensor:
    (c, U, w), (dc, V, p) = head, step
    s, mu, r = attend(x, w, U)
    gain = sigma.value(attend(x, w + p, U + V)[0]) - sigma.value(s)
    linear = sigma.first(s) * ((V * mu).sum(-1) + (p * r).sum(-1))
    return ((c + dc) * gain - c * linear).sum(-1) / c.shape[1] ** 0.5


def ball(v: Tensor) -> Tensor:
    return v / v.norm(dim=-1, keepdim=True).clamp_min(1.0)


def step_of(blocks: tuple[Tensor, ...], radius: float) -> Head:
    dc, V, p = (radius * block / block.shape[1] ** 0.5 for block in blocks)
    return dc[..., 0], V, p


def problem(count: int, T: int, m: int, points: int, *case: str) -> tuple[Head, tuple[Tensor, ...]]:
    stream = generator(0, "linearisation attacked", T, m, points, *case)
    double = {"dtype": torch.float64}
    U, w = (torch.randn(count, m // 2, d, generator=stream, **double) for _ in range(2))
    c = torch.ones(count, m // 2, **double)
    x = unit_ball_tokens(count, T, d, generator=stream, law="sphere", **double)
    blocks = [torch.randn(count, m, k, generator=stream, **double) for k in (1, d, d) * points]
    head = (torch.cat((c, -c), 1), torch.cat((U, U), 1), torch.cat((w, w), 1))
    return head, (x / T**0.5, *(ball(9 * block) / m**0.5 for block in blocks))


def climb(value, starts: tuple[Tensor, ...], T: int, m: int) -> np.ndarray:
    sizes = (T**0.5, *[m**0.5] * (len(starts) - 1))

    def natural(blocks):
        return tuple(block * size for block, size in zip(blocks, sizes, strict=True))

    def project(*blocks):
        moved = map(ball, natural(blocks))
        return tuple(block / size for block, size in zip(moved, sizes, strict=True))

    found = projected_ascent(
        lambda *blocks: value(*natural(blocks)), starts, project,
        steps=20, step_size=0.7, final_step_size=3e-2,
    )  # fmt: skip
    return found.values.numpy()


def limits(head: Head, rho: float, nu: float, sigma: Activation) -> tuple[np.ndarray, np.ndarray]:
    """E_lin / sqrt m and E_rem / sqrt m of every network."""
    m, s1 = head[1].shape[1], sigma.bounds[1]
    R = head[1].norm(dim=-1).numpy() + rho / m**0.5

    def P(r):
        return s1 * constants.block_slope(R, r, r)

    def Q(r):
        return constants.block_curvature(R, r, r, sigma)

    both = rho + nu
    E_lin = rho * P(rho) + Q(rho) / 2
    E_rem = both * P(both) + (1 + rho / m**0.5) * Q(both) / 2
    return E_lin.mean(axis=1) / m**0.5, E_rem.mean(axis=1) / m**0.5


@pytest.mark.parametrize("sigma", [TANH, ERF, ERF_PLAIN], ids=lambda sigma: sigma.name)
def test_ten_thousand_networks_stay_below_both_bounds(sigma):
    tightest, attacked = {"error": 0.0, "remainder": 0.0}, 0
    for chosen, rho, (T, m), share in CASES:
        if chosen is not sigma:
            continue
        nu = share * rho

        def remainder(x, *z, head, rho=rho, nu=nu):
            here, there = step_of(z[:3], rho), step_of(z[3:], nu)
            at_k = tuple(block + moved for block, moved in zip(head, here, strict=True))
            way = tuple(to - at for to, at in zip(there, here, strict=True))
            return tangent_error(x, at_k, way, sigma)

        case = (sigma.name, str(rho), str(share))
        head, starts = problem(NETWORKS, T, m, 1, *case)
        error = climb(
            lambda x, *z, head=head, rho=rho: tangent_error(x, head, step_of(z, rho), sigma),
            starts, T, m,
        )  # fmt: skip
        ratio = error / limits(head, rho, nu, sigma)[0]
        head, starts = problem(NETWORKS, T, m, 2, *case)
        gap = climb(lambda x, *z, head=head: remainder(x, *z, head=head), starts, T, m)
        ratio_2 = gap / limits(head, rho, nu, sigma)[1]
        attacked += len(error)
        tightest["error"] = max(tightest["error"], float(ratio.max()))
        tightest["remainder"] = max(tightest["remainder"], float(ratio_2.max()))
    assert attacked >= 10_000 / 3
    assert 0.5 < tightest["error"] <= 1
    assert 0.25 < tightest["remainder"] <= 1


def test_the_limits_are_those_of_the_library():
    head, _ = problem(3, 4, 4, 1)
    E_lin, E_rem = limits(head, 2.0, 1.0, ERF)
    for k in range(3):
        phi = Parameters(head[0][k], head[1][k], torch.zeros(4, d, d, dtype=torch.float64))
        found = network_constants(
            phi, Radii(2.0, 2.0, 2.0), inputs=UNIT_BALL,
            transport_norms=TransportNorms(1.0, 1.0, 1.0), activation=ERF,
        )  # fmt: skip
        assert found.linearisation_error == pytest.approx(E_lin[k], rel=1e-12)
        assert found.remainder_error == pytest.approx(E_rem[k], rel=1e-12)
