r"""Balls, decay and early stopping beside plain descent, on one problem and one plain run a seed.

The studies ``radius`` and ``decay`` of descent without projection have clean labels; ``noise`` adds
noise to them and tests on clean ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.experiments._teacher_problem import teacher_problem
from attention_dynamics.experiments._without_projection_descent import (
    FREE,
    Path,
    descend,
    equal_radii,
)
from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import Radii

if TYPE_CHECKING:
    from attention_dynamics.experiments.without_projection import Config

NAME = "without_projection"
SHARES = (0.125, 0.1875, 0.25, 0.375, 0.5)  # radii of ``noise`` over the plain distance
DECAYS = (0.01, 0.02, 0.04, 0.08, 0.16)  # its weight decays


class Trained(NamedTuple):
    """What a seed shares: loss, other losses (validation, tests), start, and the plain run."""

    objective: Objective
    held: tuple[Objective, ...]
    start: Parameters
    variance: float
    plain: Path


def radius(config: Config, seed: int, device: str) -> dict[str, float]:
    """A ball whose radius is ``strength`` times the farthest distance of the plain run."""
    shared = _trained(config, seed, device)
    plain, rho = shared.plain, config.strength * shared.plain.distance[-1]
    run = _descend(config, shared, radii=equal_radii(rho))
    held, plain_held = run.held[:, 0], plain.held[:, 0]
    return {
        "radius": rho,
        "plain_distance": plain.distance[-1],
        "distance_over_norm": plain.distance[-1] / config.transport_norm,
        "active_share": run.active[-1] / (3 * config.heads),
        "first_action": run.first_action,
        "first_exit": plain.first_exit(rho),
        "loss": run.loss[-1] / shared.variance,
        "plain_loss": plain.loss[-1] / shared.variance,
        "loss_ratio": run.loss[-1] / plain.loss[-1],
        "held": held[-1] / shared.variance,
        "held_ratio": held[-1] / plain_held[-1],
        "norm": run.norm[-1],
        "norm_ratio": run.norm[-1] / plain.norm[-1],
        "path_ratio": _path_ratio(config, shared),
    }


def decay(config: Config, seed: int, device: str) -> dict[str, float]:
    r"""Weight decay, beside the ball of the same farthest head, the ball of the same
    :math:`\|\phi - \phi_0\|` and the plain run stopped at that norm.
    """
    shared = _trained(config, seed, device)
    run = _descend(config, shared, decay=config.strength)
    farthest, norm, loss = run.farthest[-1].max(), run.norm[-1], run.loss[-1]
    ball = _descend(config, shared, radii=equal_radii(farthest))
    same_norm, mismatch = _ball_of_norm(config, shared, norm, farthest, ball)
    stopped = float(np.interp(norm, np.maximum.accumulate(shared.plain.norm), shared.plain.loss))
    return {
        "farthest": farthest,
        "norm": norm,
        "farthest_share": farthest / shared.plain.distance[-1],
        "loss": loss / shared.variance,
        "held": run.held[-1, 0] / shared.variance,
        "over_ball_farthest": loss / ball.loss[-1],
        "over_ball_norm": loss / same_norm,
        "stopped_over_decay": stopped / loss,
        "norm_mismatch": mismatch,
        "norm_reached": float(norm <= shared.plain.norm.max()),
    }


def _ball_of_norm(
    config: Config, shared: Trained, norm: float, farthest: float, ball: Path
) -> tuple[float, float]:
    r"""The loss of the ball whose run ends at ``norm``, and how far (log) the nearest run is off.

    False position in logarithms, from the ball of radius ``farthest`` down to
    :math:`\|\phi - \phi_0\|/\sqrt3`, below which no run of the ball has that norm; the loss is
    interpolated between the two nearest runs.
    """

    def point(radius: float, run: Path) -> tuple[float, float, float]:
        return math.log(radius), math.log(run.norm[-1] / norm), math.log(run.loss[-1])

    def at(radius: float) -> tuple[float, float, float]:
        return point(radius, _descend(config, shared, radii=equal_radii(radius)))

    low, high = at(norm / math.sqrt(3)), point(farthest, ball)
    points = [low, high]
    for _ in range(3):
        if high[1] - low[1] < 1e-6:
            break
        found = at(math.exp(low[0] - low[1] * (high[0] - low[0]) / (high[1] - low[1])))
        low, high = (found, high) if found[1] < 0 else (low, found)
        points.append(found)
    (_, n0, l0), (_, n1, l1) = sorted(points, key=lambda some: abs(some[1]))[:2]
    share = -n0 / (n1 - n0) if abs(n1 - n0) > 1e-9 else 0.0
    return math.exp(l0 + share * (l1 - l0)), abs(n0)


def noise(config: Config, seed: int, device: str) -> dict[str, float]:
    """Noisy labels: ball, decay and stopping time chosen on noisy held-out data, clean tests."""
    shared = _trained(config, seed, device)
    plain, farthest = shared.plain, shared.plain.distance[-1]
    balls = {
        share: _descend(config, shared, radii=equal_radii(share * farthest)).held[-1]
        for share in SHARES
    } | {1.0: plain.held[-1]}
    decays = {
        strength: _descend(config, shared, decay=strength).held[-1] for strength in DECAYS
    } | {0.0: plain.held[-1]}
    ball = min(balls, key=lambda share: balls[share][0])
    spring = min(decays, key=lambda strength: decays[strength][0])
    stop = stopping(plain.held[:, 0], plain.looks, config.patience)
    clean = {
        "plain": plain.held[-1, 1], "start": plain.held[0, 1], "ball": balls[ball][1],
        "smallest": balls[SHARES[0]][1], "decay": decays[spring][1],
        "stopped": plain.held[stop, 1],
    }  # fmt: skip
    radii = {f"test_ball_{share:g}": found[1] / shared.variance for share, found in balls.items()}
    springs = {
        f"test_decay_{strength:g}": found[1] / shared.variance for strength, found in decays.items()
    }
    times = {
        f"test_at_{k}": found / shared.variance
        for k, found in zip(plain.looks, plain.held[:, 1], strict=True)
    }
    return {
        **{f"test_{name}": value / shared.variance for name, value in clean.items()},
        "chosen_share": ball,
        "chosen_decay": spring,
        "chosen_step": float(plain.looks[stop]),
        "plain_over_ball": clean["plain"] / clean["ball"],
        "smallest_over_ball": clean["smallest"] / clean["ball"],
        "plain_over_stopped": clean["plain"] / clean["stopped"],
        "plain_over_decay": clean["plain"] / clean["decay"],
        "ball_over_stopped": clean["ball"] / clean["stopped"],
        "stopped_over_decay_noisy": clean["stopped"] / clean["decay"],
        **radii, **springs, **times,
    }  # fmt: skip


def hindsight(config: Config, seed: int, device: str = "cpu") -> tuple[float, float]:
    r"""The smallest clean test losses of the tangent model, over all times and over all decays.

    .. math:: f_t = K_\star\,K^{-1}\bigl(1 - e^{-2Kt/n}\bigr)\,y, \qquad
        f_\lambda = K_\star\bigl(K + \tfrac{n\lambda}2 I\bigr)^{-1} y,

    the gradient flow of a stopped run and the minimum of :math:`L_n + \frac\lambda2
    \|\phi - \phi_0\|^2`, with the tangent kernel K of the training samples at the start and
    :math:`K_\star` between tests and training samples. Over 200 times up to :math:`\eta\tau` and
    decays :math:`\lambda = 1/t`, divided by the variance of the targets.

    Raises ValueError unless ``tests`` is positive.
    """
    if config.tests < 1:
        raise ValueError(f"tests: expected at least 1 clean sample, got {config.tests}")
    shared = _trained(config, seed, device)
    start, seen, clean = shared.start.to(dtype=torch.float64), shared.objective, shared.held[1]

    def slopes(data: Objective) -> Tensor:
        tokens, query = (part.double() for part in data.inputs[:2])
        blocks = shallow.per_sample_gradients(start, tokens, query=query)
        return torch.cat([block.flatten(1) for block in blocks], dim=1)

    J = slopes(seen)
    values, vectors = torch.linalg.eigh(J @ J.mT)
    values, n = values.clamp_min(1e-12), len(J)
    across = slopes(clean) @ J.mT @ vectors
    along, wanted = vectors.mT @ seen.targets.double(), clean.targets.double()

    def loss(share: Tensor) -> float:
        return float((across @ (share * along) - wanted).square().mean())

    longest = config.step_size * config.steps
    times = np.geomspace(longest / 1000, longest, 200).tolist()
    flow = min(loss(-torch.expm1(-2 * values * t / n) / values) for t in times)
    ridge = min(loss(1 / (values + n / (2 * t))) for t in times)
    return flow / shared.variance, ridge / shared.variance


def stopping(losses: np.ndarray, looks: np.ndarray, patience: int) -> int:
    r"""The index of the best look when none within ``patience`` steps after it was better.

    The minimum is compared before it is updated, so the best look is always one that was made.
    """
    best = 0
    for index, loss in enumerate(losses):
        if looks[index] - looks[best] > patience:
            break
        if loss < losses[best]:
            best = index
    return best


@lru_cache(maxsize=24)
def _shared(config: Config, seed: int, device: str) -> Trained:
    problem = teacher_problem(
        NAME, seed, samples=config.samples + config.tests,
        validation_fraction=(round(config.validation_fraction * config.samples) + config.tests)
        / (config.samples + config.tests),
        length=config.length, dimension=config.dimension, token_law=config.token_law,
        query="fixed", activation="tanh", anchors=config.anchors,
        teacher_heads=config.teacher_heads,
        norms=TransportNorms(*(config.transport_norm,) * 3), device=device,
    )  # fmt: skip
    spread = float(problem.targets.std(correction=0))
    stream = generator(seed, NAME, "noise")

    def noisy(values: Tensor) -> Tensor:
        drawn = torch.randn(len(values), generator=stream).to(values)
        return values + config.noise * spread * drawn

    start = symmetric_initialisation(
        config.heads, config.dimension, generator=generator(seed, NAME, "student", config.heads),
        device=device,
    )  # fmt: skip
    model = ShallowTransformer(start, query=problem.query)
    targets = noisy(problem.targets)
    kept = len(problem.held_targets) - config.tests
    parts = [(problem.held_tokens[:kept], noisy(problem.held_targets[:kept]))]
    if config.tests:
        parts.append((problem.held_tokens[kept:], problem.held_targets[kept:]))
    objective = Objective.of(model, problem.tokens, targets)
    held = tuple(Objective.of(model, X, y) for X, y in parts)
    plain = descend(objective, start, config.step_size, config.steps, held=held, look=_look(config))
    return Trained(objective, held, start, spread**2, plain)


def _trained(config: Config, seed: int, device: str) -> Trained:
    """The problem and the plain run of a seed, whatever the strength."""
    return _shared(replace(config, strength=0.0, study="radius"), seed, device)


def _descend(config: Config, shared: Trained, *, radii: Radii = FREE, decay: float = 0.0) -> Path:
    return descend(
        shared.objective, shared.start, config.step_size, config.steps, radii=radii, decay=decay,
        held=shared.held, look=config.steps,
    )  # fmt: skip


def _look(config: Config) -> int:
    return max(1, config.steps // 40)


def _path_ratio(config: Config, shared: Trained) -> float:
    r"""Farthest head of the plain run over what :math:`2\eta\sum_k\sqrt{L_k}` allows, at most 1."""
    run = shared.plain
    path = config.step_size * np.sqrt(run.loss[:-1]).sum()
    c, U, _ = run.farthest.max(axis=0)
    root = math.sqrt(config.heads)
    longest = float(shared.start.block_norms().U.max())
    C, R = 1 + c / root, longest + U / root
    speeds = np.array([1.0, C, C * R])
    return float((run.farthest.max(axis=0) / (2 * speeds * path)).max())
