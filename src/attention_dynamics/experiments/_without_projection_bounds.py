r"""What bounds say without a projection: certificates, stochastic gradients, a sleeping ball.

The studies ``certificate``, ``batch`` and ``covered`` of descent without projection, all of them
small and in float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments import certificates
from attention_dynamics.experiments._without_projection_descent import (
    FREE,
    decayed_certificate,
    descend,
    equal_radii,
    prefix_certificates,
)
from attention_dynamics.models import shallow
from attention_dynamics.models.attention import Query
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.theory.bounds import InputBounds
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.setting import Setting, Start
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import TransportNorms, random_multi_anchor
from attention_dynamics.training.objective import Objective
from attention_dynamics.training.projection import ProjectionSet, Radii

if TYPE_CHECKING:
    from attention_dynamics.experiments.without_projection import Config

NAME = "without_projection"
HORIZON = 1000  # steps that the study ``covered`` watches at most


def certificate(config: Config, seed: int, device: str) -> dict[str, float]:
    """Certificates of one instance without projection: plain, stopped, stochastic, decayed."""
    found: dict[str, float] = {}
    for query in ("fixed", "last"):
        kind = certificates.Config(
            query, "tanh", config.case,  # type: ignore[arg-type]
            heads=config.heads, samples=config.samples, length=config.length,
            dimension=config.dimension, teacher_heads=config.teacher_heads, steps=config.steps,
        )  # fmt: skip
        instance = certificates.draw(kind, seed, device)
        initial = instance.model.snapshot()
        # Without a ball the comparison point need not be projected; draw() has radii above nu.
        free = instance._replace(radii=FREE)
        plain = certificates.trajectory(free, kind, seed)
        prefixes = prefix_certificates(plain)
        batches = replace(kind, descent="ProjSGD")
        stochastic = certificates.trajectory(free, batches, seed)
        moved = math.sqrt(initial.heads) * max(
            float(norms.max()) for norms in plain.final.minus(initial).block_norms()
        )
        small = equal_radii(0.25 * moved)
        inside = ProjectionSet(initial, small).project(instance.comparison)
        ball = certificates.trajectory(
            instance._replace(radii=small, comparison=inside), kind, seed
        )
        spring = decayed_certificate(
            instance.model, instance.tokens, instance.targets, instance.comparison,
            step_size=instance.step_size, steps=instance.steps,
            decay=0.1 / instance.step_size,
        )  # fmt: skip
        runs = {"plain": plain, "stochastic": stochastic, "ball": ball}
        for name, run in runs.items():
            bound = run.certificate()
            found[f"{name}_loss_{query}"] = run.average_loss
            found[f"{name}_bound_{query}"] = bound.average
            found[f"{name}_ratio_{query}"] = bound.average / run.average_loss
            found[f"{name}_epsilon_{query}"] = run.epsilon
        found[f"stopped_ratio_{query}"] = min(some.bound / some.loss for some in prefixes)
        found[f"decay_loss_{query}"], found[f"decay_bound_{query}"] = spring[:2]
        found[f"decay_epsilon_{query}"] = spring.epsilon
        found[f"decay_ratio_{query}"] = spring.bound / spring.loss
    return found


def batch(config: Config, seed: int, device: str) -> dict[str, float]:
    """``draws`` runs of ProjSGD on one instance, with batches of one size."""
    size = round(config.strength)
    kind = certificates.Config(
        "fixed", "tanh", "noisy", "ProjSGD", "each", drawn=False, heads=config.heads,
        samples=config.samples, length=config.length, dimension=config.dimension,
        anchors=config.anchors, teacher_heads=config.teacher_heads,
        transport_norm=config.transport_norm, steps=config.steps, step_scale=config.step_scale,
        batch_size=size,
    )  # fmt: skip
    instance = certificates.draw(kind, seed, device)
    runs = [
        certificates.trajectory(instance, kind, 1000 * seed + draw) for draw in range(config.draws)
    ]
    ends = torch.stack([_residuals(instance, run.final) for run in runs])
    rows = []
    for run, end in zip(runs, ends, strict=True):
        history, length = run.history, run.step_size * run.steps
        noise_sum = 2 * run.step_size * float(history["noise"].sum())
        squares = run.step_size**2 * float(history["step_squared"].sum())
        budget = (run.progress + noise_sum + squares) / length
        losses = [*history["loss"], float(end.square().mean())]
        same_samples = losses[max(1, run.steps // size)]
        rows.append([run.average_loss, run.epsilon**2, budget, losses[-1], same_samples])
    average, epsilon, budget, last, same_samples = np.mean(rows, axis=0)
    bound = ((math.sqrt(epsilon) + math.sqrt(max(0.0, epsilon + budget))) / 2) ** 2
    stream = generator(seed, NAME, "batch", size)
    return {
        "average_loss": average,
        "expected_bound": bound,
        "expected_ratio": bound / average,
        "final_loss": last,
        "same_samples_loss": same_samples,
        "output_variance": float(ends.var(dim=0, correction=1).mean()),
        "noise": gradient_noise(_slopes(instance), size, 20 * config.draws, stream),
    }


def gradient_noise(slopes: Tensor, size: int, draws: int, stream: torch.Generator) -> float:
    r""":math:`\mathbb E\|g - \nabla L\|^2` over batches with replacement, from so many draws.

    ``slopes`` (n, P) are the gradients of the n squared residuals.
    """
    index = torch.randint(len(slopes), (draws, size), generator=stream)
    return float((slopes[index].mean(dim=1) - slopes.mean(dim=0)).square().sum(dim=1).mean())


def covered(config: Config, seed: int, device: str) -> dict[str, float]:
    """How long the projection cannot act, at initialisation, and when it first does."""
    start, setting, evidence, X, y, query = _instance(config, seed, device)
    found = BoundCalculator(mode="posterior").no_projection(setting, evidence)
    objective = Objective.of(ShallowTransformer(start, query=query), X, y)
    watched = min(HORIZON, max(50, 20 * found.steps))
    run = descend(objective, start, setting.eta, watched, radii=setting.radii)
    acted = run.first_action <= watched
    return {
        "covered": min(found.steps, watched),
        "slept": run.first_action - 1,
        "acted": float(acted),
        "limit": found.limit,
        "radius": min(setting.radii.c or 0.0, setting.radii.U or 0.0, setting.radii.W or 0.0),
    }


def _instance(
    config: Config, seed: int, device: str
) -> tuple[Parameters, Setting, Start, Tensor, Tensor, Query]:
    r"""A problem, radii and a comparison point: the transported one, or the start itself.

    For the start any radii will do; ``aligned`` is the worst case of the lemma on the speed of a
    head: heads of one length, antipodal tokens of equal weight, one sample, a tiny ball.
    """
    stream = generator(seed, NAME, "covered", config.case)
    exact: dict[str, Any] = {"generator": stream, "dtype": torch.float64, "device": device}

    def uniform(low: float, high: float) -> float:
        share = float(torch.rand((), generator=stream, dtype=torch.float64))
        return low * (high / low) ** share

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=stream))

    if config.case == "aligned":
        d, m, path = 2, 2 * whole(1, 32), uniform(2e-4, 2e-3)
        size, b_q = uniform(1.0, 2.0), 1.0
        e = torch.eye(2, dtype=torch.float64, device=device)
        c = torch.ones(m // 2, dtype=torch.float64, device=device)
        start = Parameters(
            torch.cat((c, -c)), size * e[:1].repeat(m, 1), torch.zeros(m, 2, 2).to(e)
        )
        q, X, y = e[1], torch.stack((e[0], -e[0]))[None], torch.ones(1).to(e)
        C = 1 + 2 * path / math.sqrt(m)
        reach = size + 2 * C * path / math.sqrt(m)
        radii = Radii(2 * path, 2 * C * path, 2 * C * path * reach)
        eta, evidence = path / whole(40, 200), Start(start, 1.0, 0.0, TransportNorms(0, 0, 0), 1.0)
        nu = TransportNorms(0, 0, 0)
    elif config.case in ("transported", "start"):
        d, n, T = whole(1, 3), whole(1, 8), whole(2, 4)
        b_q, size = uniform(0.1, 1.0), uniform(0.05, 0.3)
        m = 2 ** whole(8, 11) if config.case == "transported" else 2 ** whole(1, 8)
        q = b_q * query_vector(d, **exact)
        v = random_multi_anchor(
            whole(1, 2), T, d, norms=TransportNorms(size, size, size), query=q,
            law="sequence_means", **exact,
        )  # fmt: skip
        X = unit_ball_tokens(n, T, d, law="sequence_means", **exact)
        start = symmetric_initialisation(m, d, **exact)
        if config.case == "transported":
            y = Teacher(v, generator=stream, heads=1024)(X)
            evidence = Start.measure(start, v, X, y)
            assert evidence.norms is not None
            nu = evidence.norms
            scale = uniform(1.0, 8.0)
            radii = Radii(scale * nu.c, scale * nu.U, scale * nu.W)
        else:
            y = torch.randn(n, **exact).sign()
            nu = TransportNorms(0, 0, 0)
            radii = equal_radii(uniform(1e-3, 0.5))
            evidence = Start(start, 1.0, 0.0, nu, 1.0)
        eta = uniform(1e-3, 0.1) / (2.0 + d)
    else:
        raise ValueError(f"case: expected 'transported', 'start' or 'aligned', got {config.case!r}")
    setting = Setting(m, len(X), X.shape[1], d, 1, radii, nu, InputBounds(1.0, b_q), step_size=eta)
    return start, setting, evidence, X, y, q


def _residuals(instance: certificates.Instance, phi: Parameters) -> Tensor:
    model = instance.model
    options: dict[str, Any] = {"query": model.query, "activation": model.activation}
    return shallow.forward(phi, instance.tokens, **options) - instance.targets


def _slopes(instance: certificates.Instance) -> Tensor:
    model, start = instance.model, instance.model.snapshot()
    per_sample = shallow.per_sample_gradients(
        start, instance.tokens, query=model.query, activation=model.activation
    )
    slopes = torch.cat([block.flatten(1) for block in per_sample], dim=1)
    return 2 * _residuals(instance, start)[:, None] * slopes
