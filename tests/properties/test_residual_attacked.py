"""The constants of the residual layer under ascent: no point or direction of a ball passes them."""

import math

import pytest
import torch

from attention_dynamics.data import generator
from attention_dynamics.models import residual
from attention_dynamics.models.residual import ResidualConfig, ResidualParameters
from attention_dynamics.theory.certificates import ball_constants
from attention_dynamics.verification import projected_ascent

STARTS, STEPS = 4, 20


def softmax_second(p, u):
    v = u - (p * u).sum(-1, keepdim=True)
    return p * (v * v - (p * v * v).sum(-1, keepdim=True))


@pytest.mark.parametrize("T", [2, 3, 8])
def test_the_two_softmax_derivatives_are_at_most_a_half_and_one(T):
    stream = generator(0, "softmax derivatives", T)
    starts = tuple(torch.randn(64, T, generator=stream, dtype=torch.float64) for _ in "lu")

    def project(logits, u):
        return logits, u / u.norm(dim=-1, keepdim=True)

    def first(logits, u):
        p = logits.softmax(-1)
        return (p * (u - (p * u).sum(-1, keepdim=True))).norm(dim=-1)

    def second(logits, u):
        return softmax_second(logits.softmax(-1), u).norm(dim=-1)

    reached = projected_ascent(first, starts, project, steps=200).values.max()
    assert 0.49 < reached <= 0.5 + 1e-12
    reached = projected_ascent(second, starts, project, steps=200).values.max()
    assert 0.25 < reached <= 1.0


def quantities(point, direction, X, config):
    """Norms of Z and of the derivatives of Z, H and F along a direction, by nested autograd."""

    def outputs(t):
        moved = ResidualParameters(*(a + t * b for a, b in zip(point, direction, strict=True)))
        passed = residual.layers(moved, X, config, validate=False)
        return passed.Z, passed.H, passed.F

    zero = torch.zeros((), dtype=X.dtype)
    one = torch.ones_like(zero)

    def first(t):
        return torch.func.jvp(outputs, (t,), (one,))[1]

    (Z, _, _), (dZ, dH, dF) = torch.func.jvp(outputs, (zero,), (one,))
    second = torch.func.jvp(first, (zero,), (one,))[1]
    return Z, (dZ, dH, dF), second


def norms(block):
    return block.flatten(-3).norm(dim=-1)


@pytest.mark.parametrize(("attend", "feed"), [(True, True), (False, False)])
def test_no_point_of_the_ball_and_no_direction_passes_a_constant(attend, feed):
    config = ResidualConfig(
        dimension=4, key_dimension=2, hidden=4, attention_residual=attend,
        feedforward_residual=feed, slope=0.3, softness=3.0,
    )  # fmt: skip
    stream = generator(0, "ball constants")
    X = torch.randn(2, 3, 4, generator=stream, dtype=torch.float64)
    centre = residual.init_parameters(config, stream)
    rho = 0.7
    limit = ball_constants(centre, X, config, rho=rho, error=1.0)
    fields = {
        "output": lambda Z, d, dd: torch.linalg.matrix_norm(Z.flatten(-3, -2), ord=2),
        "zeta": lambda Z, d, dd: norms(d[0]),
        "zeta_2": lambda Z, d, dd: norms(dd[0]),
        "e": lambda Z, d, dd: norms(d[1]),
        "e_2": lambda Z, d, dd: norms(dd[1]),
        "beta": lambda Z, d, dd: norms(d[2]),
        "lam": lambda Z, d, dd: norms(dd[2]),
    }

    def drawn():
        return tuple(
            torch.randn(STARTS, *block.shape, generator=stream, dtype=torch.float64)
            for block in centre
        )

    def project(*blocks):
        shift, direction = (ResidualParameters(*blocks[i : i + 5]) for i in (0, 5))
        inside = rho / shift.norm().clamp_min(rho)
        unit = 1 / direction.norm()
        return tuple(
            factor[:, None, None] * block
            for factor, part in ((inside, shift), (unit, direction))
            for block in part
        )

    def ratios(*blocks):
        point = centre.plus(ResidualParameters(*blocks[:5]))
        found = quantities(point, ResidualParameters(*blocks[5:]), X, config)
        return {name: read(*found) / getattr(limit, name) for name, read in fields.items()}

    def objective(*blocks):  # one ascent for all of them: the sum of the logarithms
        return sum(ratio.log() for ratio in ratios(*blocks).values())

    found = projected_ascent(objective, (*drawn(), *drawn()), project, steps=STEPS)
    reached = {name: float(ratio.max()) for name, ratio in ratios(*found.points).items()}
    assert max(reached.values()) <= 1, reached
    assert min(reached.values()) > 1e-4, reached  # crude: each is one line of triangle inequality


def test_the_hessian_of_the_loss_is_below_the_smoothness_on_the_ball():
    config = ResidualConfig(dimension=3, key_dimension=2, hidden=3, softness=3.0)
    stream = generator(1, "smoothness")
    X, Y = torch.randn(2, 1, 3, 3, generator=stream, dtype=torch.float64)
    centre = residual.init_parameters(config, stream)
    error = float(torch.linalg.vector_norm(residual.forward(centre, X, config) - Y))
    sizes = [block.numel() for block in centre]

    def loss(flat):
        blocks = [
            part.reshape(block.shape) for part, block in zip(flat.split(sizes), centre, strict=True)
        ]
        return residual.loss(ResidualParameters(*blocks), X, Y, config, validate=False)

    start = torch.cat([block.flatten() for block in centre])
    for rho in (0.0, 0.5, 2.0):
        S = ball_constants(centre, X, config, rho=rho, error=error).S
        for _ in range(4):
            step = torch.randn(start.shape, generator=stream, dtype=torch.float64)
            hessian = torch.func.hessian(loss)(start + rho * step / step.norm())
            assert torch.linalg.matrix_norm(hessian, ord=2) <= S
    assert math.isfinite(S)
