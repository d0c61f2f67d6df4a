r"""Structure-aware descent: gradient steps on (A, B) that know the loss is a factorisation.

In the whitened factors :math:`U = AS^{1/2}`, :math:`V = \Sigma^{1/2}BS^{1/2}` the population loss
is :math:`\tfrac12\|UV^\top - N\|_F^2` plus a constant. A ``Scheme`` says which of five things
a step does about it: a preconditioner, a damping of that preconditioner, a balancing regulariser
or a balancing retraction, and a renormalisation that keeps :math:`\|V\|_{\mathrm{op}}` in place.

The idea is that of arXiv 2603.01514, of which this is a reconstruction from the abstract: the
formulas are derived in the chapters on regression and are not the authors' algorithm.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_dynamics.data.regression import RegressionSample
from attention_dynamics.models import regression
from attention_dynamics.models.population import RegressionProblem, population_loss_and_gradients
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.gauge import (
    balance,
    random_initialisation,
    spectral_initialisation,
    spectral_norm,
)
from attention_dynamics.training.preconditioning import (
    GROWTH_LIMIT,
    Scheme,
    chosen,
    finite,
    move,
    require_invertible,
)
from attention_dynamics.validation import require_integer

__all__ = [
    "Descent",
    "Rule",
    "Scheme",
    "balance",
    "descend",
    "random_initialisation",
    "spectral_initialisation",
    "step",
]


class Rule(Protocol):
    """An optimiser in place of a scheme, such as ``regression_baselines.Adam``."""

    def advance(self, factors: Factors, gradients: Factors) -> Factors:
        """The factors after one more step; what it remembers belongs to one run."""
        ...


def step(
    factors: Factors, gradients: Factors, problem: RegressionProblem, scheme: Scheme
) -> Factors:
    r"""
    .. math:: (A, B) \mapsto (A, B) - \eta\,(\text{preconditioned gradient}),
        \text{ then balance, then } \|V\|_{\mathrm{op}} = \rho_V

    as the ``Scheme`` says. ``gradients`` are those of any loss at ``factors``; ``problem``
    gives the covariances, the true ones or ``RegressionProblem.from_samples``. Shapes: leading
    batch axes as in the problem.

    Raises ValueError for shapes that do not fit, NaN or infinite entries, and for more columns k
    than min(m, d) under the undamped scaled preconditioner; ArithmeticError for a step that is
    not finite or takes :math:`\|V\|_{\mathrm{op}}` beyond ten times ``rho``.
    """
    factors.require_valid()
    gradients.require_valid("gradients")
    require_invertible(factors, scheme)
    moved, accepted = move(factors, gradients, problem, scheme)
    if not bool(accepted.all()):
        raise ArithmeticError(
            f"step: {int((~accepted).sum())} of {accepted.numel()} steps are not finite or take "
            f"the norm of V beyond {GROWTH_LIMIT:g} rho; take a smaller step_size, more damping "
            "or spectral_initialisation"
        )
    return moved


@dataclass(frozen=True)
class Descent:
    r"""A run: the last factors, and what was recorded at each iterate.

    The records have shape (steps + 1, \*batch). ``loss`` is the loss descended on; ``risk`` is
    :math:`\tfrac12\|(ASB^\top - M_\star)\Sigma^{1/2}\|_F^2` of the true problem, and ``excess`` the
    same divided by its value at zero; ``distance`` is :math:`\|UV^\top - N\|_F/\|N\|_F` from the
    target of the problem that preconditions, least squares when it comes from samples;
    ``norm`` is :math:`\|V\|_{\mathrm{op}}`; ``effective`` the mean effective sample size over the
    queries, infinite in the population. ``rejected`` (\*batch) marks runs that stopped at a step
    that was refused; their records stay constant from there on.
    """

    factors: Factors
    loss: Float[Tensor, "steps ..."]
    risk: Float[Tensor, "steps ..."]
    excess: Float[Tensor, "steps ..."]
    distance: Float[Tensor, "steps ..."]
    norm: Float[Tensor, "steps ..."]
    effective: Float[Tensor, "steps ..."]
    rejected: Bool[Tensor, "*batch"]

    def steps_to(self, level: float) -> Int[Tensor, "*batch"]:
        """The first step whose ``excess`` is at most ``level``; -1 where there is none."""
        return first_step(self.excess, level)


def first_step(
    values: Float[Tensor, "steps ..."], level: float | Float[Tensor, "*batch"]
) -> Int[Tensor, "*batch"]:
    """The first index along the first axis with ``values <= level``; -1 where there is none."""
    below = values <= level
    first = below.to(torch.int8).argmax(dim=0)
    return torch.where(below.any(dim=0), first, -1)


def descend(
    factors: Factors,
    problem: RegressionProblem,
    scheme: Scheme | Rule,
    steps: int,
    *,
    sample: RegressionSample | None = None,
    truth: RegressionProblem | None = None,
    tolerance: float | None = None,
    check: bool = True,
) -> Descent:
    r"""Take ``steps`` steps from ``factors`` on the population loss, or on that of a sample.

    ``scheme`` is a ``Scheme``, or a rule of ``regression_baselines`` such as Adam, whose steps
    are refused only when they are not finite. ``problem`` preconditions; without a ``sample`` it is
    also the loss. ``truth`` is the problem whose risk is recorded, ``problem`` itself if absent.
    With a ``tolerance`` the run ends when the excess of every instance is at most that, or its
    steps were refused.

    ``check`` refuses what is known to fail: under the undamped scaled preconditioner with
    m = d = k, a start for which :math:`N^{-1}X_0` has eigenvalues on the negative real axis, where
    they stay for ever. It warns when k is below the rank of the target, since the rate is then set
    by the gap behind the k-th singular value, and when the effective sample size at the start is
    below 10 k.

    Raises ValueError for such a start and for the reasons of :func:`step`.
    """
    require_integer("steps", steps, minimum=0)
    factors.require_valid()
    if isinstance(scheme, Scheme):
        require_invertible(factors, scheme)
    if check and isinstance(scheme, Scheme):
        _require_reachable(factors, problem, scheme)
    truth = problem if truth is None else truth
    target, goal = problem.whitened_target, truth.whitened_target
    scale = goal.square().sum(dim=(-2, -1)) / 2
    shape = torch.broadcast_shapes(factors.batch_shape, target.shape[:-2])
    alive = torch.ones(shape, dtype=torch.bool, device=target.device)
    records: list[tuple[Tensor, ...]] = []
    for number in range(steps + 1):
        loss, gradients = _loss_and_gradients(factors, problem, sample)
        U, V = truth.whiten(factors)
        risk = (U @ V.mT - goal).square().sum(dim=(-2, -1)) / 2
        if truth is not problem:
            U, V = problem.whiten(factors)
        distance = torch.linalg.matrix_norm(U @ V.mT - target) / torch.linalg.matrix_norm(target)
        norm, effective = spectral_norm(V)[..., 0, 0], _effective(factors, problem, sample)
        if number == 0 and check:
            _warn_short_context(effective, factors)
        records.append((loss, risk, distance, norm, effective))
        done = ~alive if tolerance is None else (risk / scale <= tolerance) | ~alive
        if number == steps or bool(done.all()):
            break
        if isinstance(scheme, Scheme):
            moved, accepted = move(factors, gradients, problem, scheme)
        else:
            moved = scheme.advance(factors, gradients)
            accepted = finite(moved)
        alive = alive & accepted
        factors = chosen(alive, moved, factors)
    loss, risk, distance, norm, effective = (
        torch.stack([value.expand(shape) for value in column])
        for column in zip(*records, strict=True)
    )
    return Descent(factors, loss, risk, risk / scale, distance, norm, effective, ~alive)


def _loss_and_gradients(
    factors: Factors, problem: RegressionProblem, sample: RegressionSample | None
) -> tuple[Tensor, Factors]:
    if sample is None:
        return population_loss_and_gradients(factors, problem)
    return regression.loss_and_gradients(
        factors, sample.queries, sample.contexts, sample.targets, validate=False
    )


def _effective(
    factors: Factors, problem: RegressionProblem, sample: RegressionSample | None
) -> Tensor:
    if sample is None:
        return factors.A.new_full((), math.inf)
    length = sample.contexts.shape[-2]
    sizes = regression.effective_sample_size(
        factors, sample.queries, problem.token_covariance, length
    )
    return sizes.mean(dim=-1)


def _require_reachable(factors: Factors, problem: RegressionProblem, scheme: Scheme) -> None:
    if scheme.preconditioner != "scaled":
        return
    m, d, k = problem.outputs, problem.dimension, factors.A.shape[-1]
    if k < problem.rank:
        values = problem.singular_values
        rate = float(torch.as_tensor(scheme.step_size).min())
        gap = float((values[..., k] / values[..., k - 1]).max())
        warnings.warn(
            f"factors: k = {k} columns reach the best approximation of rank {k} of a target of "
            f"rank {problem.rank}; the error falls by about 1 - step_size (1 - {gap:.3g}) = "
            f"{1 - rate * (1 - gap):.3g} a step, as sigma_(k+1) / sigma_k allows",
            UserWarning,
            stacklevel=3,
        )
    elif scheme.damping == 0 and m == d == k:
        U, V = problem.whiten(factors)
        eigenvalues = torch.linalg.eigvals(torch.linalg.solve(problem.whitened_target, U @ V.mT))
        trapped = (eigenvalues.imag == 0) & (eigenvalues.real <= 0)
        if bool(trapped.any()):
            raise ValueError(
                f"factors: N^-1 X has {int(trapped.sum())} eigenvalues on the negative real axis, "
                "where undamped scaled steps leave them for ever (part 3 of the theorem, the "
                "obstruction of the sign map); take a damping such as 0.1, or "
                "spectral_initialisation with more samples"
            )


def _warn_short_context(effective: Tensor, factors: Factors) -> None:
    smallest, k = float(effective.min()), factors.A.shape[-1]
    if smallest < 10 * k:
        warnings.warn(
            f"factors: the effective sample size {smallest:.3g} at the start is below 10 k = "
            f"{10 * k}: the pooled token is mostly noise; take a smaller rho or longer contexts",
            UserWarning,
            stacklevel=3,
        )
