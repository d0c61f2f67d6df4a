"""Training on sampled contexts: the parts of the experiment ``regression_context`` that descend."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attention_dynamics.data import generator
from attention_dynamics.data.regression import RegressionSample, sample
from attention_dynamics.models import regression
from attention_dynamics.models.population import RegressionProblem, finite_context_correction
from attention_dynamics.models.regression import Factors
from attention_dynamics.theory.gaussian_context import context_excess
from attention_dynamics.training.structure_aware import (
    Descent,
    Scheme,
    descend,
    spectral_initialisation,
)

if TYPE_CHECKING:
    from attention_dynamics.experiments.regression_context import Config

NAME = "regression_context"


def _trained(
    config: Config, seed: int, problem: RegressionProblem, *, shared: bool, centred: bool
) -> tuple[Descent, RegressionSample, RegressionProblem]:
    """Scaled descent from a spectral start on a subset; the data and their own least squares."""
    stream = generator(seed, NAME, config.part, str(config.condition), config.length, "sample")
    data = sample(
        problem, config.samples, config.length, shared=shared, centred=centred, generator=stream
    )
    known = RegressionProblem.from_samples(*data)
    few = data.first(config.subset)
    start = RegressionProblem.from_samples(few.queries, data.contexts if shared else few.contexts,
                                           few.targets)  # fmt: skip
    scheme = Scheme("scaled", config.step_size, damping=config.damping, rho=config.norm)
    factors = spectral_initialisation(start, config.norm)
    # on a shared context the linear part of the layer is that of this context's covariance
    S = known.token_covariance if shared else problem.token_covariance
    truth = RegressionProblem(problem.target, problem.query_covariance, S, problem.noise)
    result = descend(factors, known, scheme, config.steps, sample=data, truth=truth, check=False)
    return result, data, known


def floor(config: Config, seed: int, problem: RegressionProblem) -> dict[str, float]:
    result, data, known = _trained(config, seed, problem, shared=True, centred=True)
    least_risk = _linear_risk(known.target, problem)
    start = RegressionProblem.from_samples(data.queries[: config.subset], data.contexts,
                                           data.targets[: config.subset])  # fmt: skip
    queries = _fresh(config, seed, problem)
    layer = _layer_risk(result.factors, problem, queries, data.contexts)
    # the context's own covariance is what training fits
    own = replace(problem, token_covariance=known.token_covariance)
    predicted = _distortion(result.factors, own, config.length)
    linear, cross = _linear_part(result.factors, own, queries, data.contexts)
    true = spectral_initialisation(own, config.norm)  # A S_hat B' = M, untrained
    untrained = _layer_risk(true, problem, queries, data.contexts)
    return {
        "risk": float(result.risk[-1]) / least_risk,
        "risk_at_start": _linear_risk(start.target, problem) / least_risk,
        "layer_risk": layer / least_risk,
        "distortion": (layer - float(result.risk[-1])) / predicted,
        "distortion_linear": linear / predicted,
        "distortion_cross": cross / predicted,
        "distortion_untrained": untrained / _distortion(true, own, config.length),
        "least_squares": least_risk,
        "rejected": float(result.rejected),
    }


def drift(config: Config, seed: int, problem: RegressionProblem) -> dict[str, float]:
    result, _, known = _trained(config, seed, problem, shared=True, centred=True)
    tenth = max(1, config.steps // 10)
    least_risk, least = _linear_risk(known.target, problem), float(known.noise_loss)
    return {
        "risk_after_drift": float(result.risk[-1]) / least_risk,
        "risk_before_drift": float(result.risk[tenth]) / least_risk,
        "loss_fall": float(result.loss[tenth] - result.loss[-1]) / least,
        "loss_after_drift": float(result.loss[-1]) / least,
    }


def prompts(config: Config, seed: int, problem: RegressionProblem) -> dict[str, float]:
    result, _, known = _trained(config, seed, problem, shared=False, centred=False)
    queries = _fresh(config, seed, problem)
    stream = generator(seed, NAME, "prompts", config.length, "fresh contexts")
    risk = 0.0
    for rows in queries.split(max(1, 1_000_000 // config.length)):
        tokens = normal((len(rows), config.length, config.dimension), stream, problem)
        tokens = tokens @ problem.token_root
        risk += len(rows) * _layer_risk(result.factors, problem, rows, tokens)
    factors = result.factors
    limit = queries @ factors.B @ problem.token_covariance @ factors.A.mT
    predicted = 0.5 * (limit - queries @ problem.target.mT).square().sum(dim=-1).mean()
    noise = context_excess(factors, problem, queries, config.length).mean()
    least_risk = _linear_risk(known.target, problem)
    return {
        "prompt_loss": risk / len(queries) / float(predicted + noise),
        "prompt_noise": float(noise) / least_risk,
        "prompt_risk": risk / len(queries) / least_risk,
        "rejected": float(result.rejected),
    }


def _fresh(config: Config, seed: int, problem: RegressionProblem) -> Tensor:
    stream = generator(seed, NAME, config.part, str(config.condition), "fresh")
    return normal((config.fresh, config.dimension), stream, problem) @ problem.query_root


def normal(shape: tuple[int, ...], stream: torch.Generator, problem: RegressionProblem) -> Tensor:
    like = problem.target
    return torch.randn(shape, generator=stream, dtype=like.dtype).to(like.device)


def _linear_risk(target: Tensor, problem: RegressionProblem) -> float:
    r""":math:`\tfrac12\lVert(M - M_\star)\Sigma^{1/2}\rVert_F^2`."""
    return 0.5 * float(((target - problem.target) @ problem.query_root).square().sum())


def _distortion(factors: Factors, own: RegressionProblem, length: int) -> float:
    """The centred correction of order 1/T without its part that is linear in the logits."""
    U, V = own.whiten(factors)
    squares = U.square().sum() * V.square().sum() + (U @ V.mT).square().sum()
    correction = finite_context_correction(factors, own, length, centred=True)
    return float(correction - squares / (2 * length))


def _linear_part(
    factors: Factors, own: RegressionProblem, queries: Tensor, contexts: Tensor
) -> tuple[float, float]:
    r"""
    .. math:: \tfrac12\,\overline{\lVert Lx\rVert^2}, \qquad
        \overline{\langle (A\hat SB^\top - M_\star)x,\ r(x)\rangle}, \qquad
        r(x) = f(x) - A\hat SB^\top x,

    means over the queries, with L the linear map that fits r best.
    """
    output = queries @ factors.B @ own.token_covariance @ factors.A.mT
    rest = regression.forward(factors, queries, contexts, validate=False) - output
    fitted = queries @ torch.linalg.solve(queries.mT @ queries, queries.mT @ rest)
    error = output - queries @ own.target.mT
    linear = 0.5 * fitted.square().sum(dim=-1).mean()
    return float(linear), float((error * rest).sum(dim=-1).mean())


def _layer_risk(
    factors: Factors, problem: RegressionProblem, queries: Tensor, contexts: Tensor
) -> float:
    r"""The mean of :math:`\tfrac12\lVert f(x) - M_\star x\rVert^2`: no noise in it."""
    output = regression.forward(factors, queries, contexts, validate=False)
    return 0.5 * float((output - queries @ problem.target.mT).square().sum(dim=-1).mean())
