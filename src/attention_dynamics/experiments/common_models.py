r"""The models of the common task behind one interface: gradient, tangent kernel, one step.

A model says its outputs' error E, the gradient of its own loss :math:`L = \frac w2\|E\|^2`, and
the tangent kernel :math:`K = JJ^\top` of its outputs, so that descent with a frozen tangent is
:math:`E_{k+1} = (I - \eta wK)E_k` for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from attention_dynamics.data import generator, unit_ball_tokens
from attention_dynamics.models import regression, residual, shallow, wu_encoder
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors
from attention_dynamics.models.residual import ResidualConfig, ResidualParameters
from attention_dynamics.theory.tangent_spectrum import tangent_kernel
from attention_dynamics.training.projection import ProjectionSet, Radii
from attention_dynamics.training.structure_aware import (
    Scheme,
    random_initialisation,
    step,
)

RADIUS = 3.0
r"""The projection radii of the shallow Transformer, all three."""
AWARE_STEP = 0.3
AWARE = Scheme("scaled", AWARE_STEP, damping=0.1, rho=0.5)
_FAMILY = {"aware": "regression", "vanilla": "residual"}  # the same draws


class Sizes(Protocol):
    """What is read of a configuration."""

    @property
    def model(self) -> str: ...
    @property
    def dimension(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def fraction(self) -> float: ...


class Tangents(NamedTuple):
    r"""Falls of :math:`\log L` that frozen tangents predict: from half of the run to its end by the
    tangent there, over the whole run by that of the start; and :math:`\log_{10}` of the condition
    number of the kernel at the start, at most 16.
    """

    half: float
    whole: float
    condition: float


class Recorded(NamedTuple):
    """Losses up to the last step, or to the first below 1e-20 of the first one."""

    losses: Tensor
    tangents: Tangents | None


@dataclass(frozen=True)
class Problem:
    """One model on the task: a start and four functions of a point."""

    start: Any
    weight: float
    loss_and_gradients: Callable[[Any], tuple[Tensor, Any]]
    error: Callable[[Any], Tensor]
    kernel: Callable[[Any], Tensor]
    move: Callable[[Any, Any, float], Any]
    natural: float | None = None


def task(config: Sizes, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    r"""Tokens (n, T, d) on the unit sphere, and an orthogonal :math:`M_\star` (d, d), in float64.

    Every model of a seed gets the same.
    """
    n, T, d = config.samples, config.length, config.dimension
    stream = generator(seed, "common task", "tokens", n, T, d)
    tokens = unit_ball_tokens(n, T, d, generator=stream, law="sphere", dtype=torch.float64)
    drawn = torch.randn(
        d, d, generator=generator(seed, "common task", "target", d), dtype=torch.float64
    )
    return tokens.to(device), torch.linalg.qr(drawn)[0].to(device)


FLOOR = 1e-20
"""The relative loss at which a run ends, since rounding is near."""


def descend(config: Sizes, seed: int, device: str = "cpu") -> Recorded:
    """Descend the model of the configuration, and predict it from its tangents."""
    problem = build(config, seed, device)
    if problem.natural is not None:
        return Recorded(_run(problem, problem.natural, config.steps)[0], None)
    whole = torch.linalg.eigh(problem.kernel(problem.start))
    smallest, largest = float(whole[0][0]), float(whole[0][-1])
    scale = config.fraction / largest
    losses, _ = _run(problem, scale / problem.weight, config.steps)
    end = len(losses) - 1
    _, half = _run(problem, scale / problem.weight, end // 2)
    at_half = torch.linalg.eigh(problem.kernel(half))
    tangents = Tangents(
        frozen_fall(at_half[0], at_half[1], problem.error(half), scale, end - end // 2),
        frozen_fall(whole[0], whole[1], problem.error(problem.start), scale, end),
        math.log10(largest / max(smallest, 1e-16 * largest)),
    )
    return Recorded(losses, tangents)


def reaches(config: Sizes, seed: int, threshold: float, device: str = "cpu") -> bool:
    """Whether descent brings the relative loss down to the threshold within its steps."""
    problem = build(config, seed, device)
    largest = float(torch.linalg.eigvalsh(problem.kernel(problem.start))[-1])
    if largest <= 0:  # every neuron is dead
        return False
    eta = config.fraction / (largest * problem.weight)
    losses, _ = _run(problem, eta, config.steps, threshold)
    return bool(losses[-1] <= threshold * losses[0])


def _run(problem: Problem, eta: float, steps: int, floor: float = FLOOR) -> tuple[Tensor, Any]:
    """The losses and the last point of at most ``steps`` steps; iterates are not kept."""
    point, losses = problem.start, []
    for number in range(steps + 1):
        loss, gradients = problem.loss_and_gradients(point)
        losses.append(loss)
        if number == steps or float(loss) <= floor * float(losses[0]):
            break
        point = problem.move(point, gradients, eta)
    return torch.stack(losses), point


def frozen_fall(
    eigenvalues: Tensor, vectors: Tensor, error: Tensor, scale: float, steps: int
) -> float:
    r""":math:`\log\|E_0\|^2 - \log\|(I - sK)^kE_0\|^2`, s the ``scale`` and k the ``steps``."""
    squares = (vectors.mT @ error).square()
    left = (1 - scale * eigenvalues).square() ** steps @ squares
    return float(squares.sum().log() - left.log())


def build(config: Sizes, seed: int, device: str = "cpu") -> Problem:
    """The problem of one model. Raises ValueError for an unknown one."""
    tokens, target = task(config, seed, device)
    wanted = tokens @ target.mT
    family = _FAMILY.get(config.model, config.model)
    stream = generator(seed, "common task", "start", family, config.width)
    if config.model == "shallow":
        return _shallow(config, tokens, wanted[:, -1, 0], stream, device)
    if config.model == "encoder":
        return _encoder(config, tokens, wanted[:, -1, 0], stream, device)
    if config.model in ("regression", "aware"):
        return _regression(config, tokens, target, wanted[:, -1], stream)
    if config.model in ("residual", "vanilla"):
        return _residual(config, tokens, wanted, stream, device)
    raise ValueError(
        "model must be 'shallow', 'encoder', 'regression', 'aware', 'residual' or 'vanilla'; "
        f"got {config.model!r}"
    )


def _shallow(
    config: Sizes, tokens: Tensor, targets: Tensor, stream: torch.Generator, device: str
) -> Problem:
    start = symmetric_initialisation(
        config.width, config.dimension, generator=stream, dtype=tokens.dtype, device=device
    )
    ball = ProjectionSet(start, Radii(RADIUS, RADIUS, RADIUS))

    def loss_and_gradients(point: Parameters) -> tuple[Tensor, Parameters]:
        return shallow.loss_and_gradients(point, tokens, targets, query="last", validate=False)

    def kernel(point: Parameters) -> Tensor:
        rows = shallow.per_sample_gradients(point, tokens, query="last", validate=False)
        jacobian = torch.cat([block.flatten(1) for block in rows], dim=1)
        return jacobian @ jacobian.mT

    def move(point: Parameters, gradients: Parameters, eta: float) -> Parameters:
        moved = (a - eta * b for a, b in zip(point, gradients, strict=True))
        return ball.project(Parameters(*moved))

    return Problem(
        start,
        2 / len(tokens),
        loss_and_gradients,
        lambda point: shallow.forward(point, tokens, query="last", validate=False) - targets,
        kernel,
        move,
    )


def _encoder(
    config: Sizes, tokens: Tensor, targets: Tensor, stream: torch.Generator, device: str
) -> Problem:
    start = wu_encoder.initial_parameters(
        config.width, config.dimension, generator=stream, dtype=tokens.dtype, device=device
    )
    return Problem(
        start,
        2 / len(tokens),
        lambda point: wu_encoder.loss_and_gradients(point, tokens, targets, logit_exponent=0.5),
        lambda point: wu_encoder.forward(point, tokens, logit_exponent=0.5) - targets,
        lambda point: wu_encoder.tangent_kernel(point, tokens, logit_exponent=0.5).total(),
        lambda point, gradients, eta: point.moved(gradients, -eta),
    )


def _regression(
    config: Sizes, tokens: Tensor, target: Tensor, targets: Tensor, stream: torch.Generator
) -> Problem:
    queries, d = tokens[:, -1], config.dimension
    covariance = torch.eye(d, dtype=tokens.dtype, device=tokens.device) / d
    population = RegressionProblem(target, covariance, covariance)
    start = random_initialisation(population, AWARE.rho, generator=stream)

    def error(point: Factors) -> Tensor:
        fitted = regression.forward(point, queries, tokens, validate=False)
        return (fitted - targets).flatten()

    def move(point: Factors, gradients: Factors, eta: float) -> Factors:
        if config.model == "aware":
            return step(point, gradients, population, AWARE)
        return point.zip(gradients, lambda a, b: a - eta * b)

    return Problem(
        start,
        1 / len(tokens),
        lambda point: regression.loss_and_gradients(
            point, queries, tokens, targets, validate=False
        ),
        error,
        lambda point: regression_kernel(point, queries, tokens),
        move,
        AWARE_STEP if config.model == "aware" else None,
    )


def regression_kernel(factors: Factors, queries: Tensor, contexts: Tensor) -> Tensor:
    r"""
    .. math:: K[(i,o),(j,p)] = \delta_{op}\langle\mu_i,\mu_j\rangle + \langle x_i,x_j\rangle
        \langle M_iA^\top e_o, M_jA^\top e_p\rangle,

    for contexts (n, T, k) of their own; rows and columns in the order of the flattened outputs.
    """
    b = queries @ factors.B
    weights = torch.softmax((contexts @ b[..., None]).squeeze(-1), dim=-1)
    pooled = (weights[:, None, :] @ contexts).squeeze(1)
    centred = contexts - pooled[:, None, :]
    reach = (weights[..., None] * centred).mT @ (centred @ factors.A.mT)  # M_i A^T
    rows = reach.mT.flatten(0, 1)
    outputs = factors.A.shape[0]
    through = (rows @ rows.mT).unflatten(0, (-1, outputs)).unflatten(2, (-1, outputs))
    through = through * (queries @ queries.mT)[:, None, :, None]
    eye = torch.eye(outputs, dtype=rows.dtype, device=rows.device)
    direct = (pooled @ pooled.mT)[:, None, :, None] * eye[:, None, :]
    return (through + direct).flatten(2).flatten(0, 1)


def _residual(
    config: Sizes, tokens: Tensor, targets: Tensor, stream: torch.Generator, device: str
) -> Problem:
    layer = ResidualConfig(
        dimension=config.dimension,
        key_dimension=min(8, config.dimension),
        hidden=config.width,
        attention_residual=config.model == "residual",
    )
    start = residual.init_parameters(layer, stream, device=device)

    def error(point: ResidualParameters) -> Tensor:
        return (residual.forward(point, tokens, layer, validate=False) - targets).flatten()

    return Problem(
        start,
        1.0,
        lambda point: residual.loss_and_gradients(point, tokens, targets, layer, validate=False),
        error,
        lambda point: tangent_kernel(point, tokens, layer, validate=False),
        lambda point, gradients, eta: point.plus(gradients, -eta),
    )
