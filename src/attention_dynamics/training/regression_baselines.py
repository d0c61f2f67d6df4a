r"""What structure-aware descent is compared with: plain gradient descent, Adam and Muon.

:func:`gradient_descent` runs tens of thousands of plain steps on the population loss, over a batch
of problems and step sizes at once. :class:`Adam` and :class:`Muon` are rules for
``structure_aware.descend``, batched over leading axes, which ``torch.optim.Muon`` is not; the tests
compare both with ``torch.optim``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.gauge import spectral_initialisation, spectral_norm
from attention_dynamics.validation import require_integer, require_number

MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, those of ``torch.optim.Muon``."""

_TOGETHER = 64  # steps between two looks at which runs have ended
_DIVERGED = 1e12


def stable_step_size(problem: RegressionProblem) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: 1/\bar\Lambda, \qquad \bar\Lambda = \|V_\star S V_\star^\top\|_{\mathrm{op}}
        + \|\Sigma\|_{\mathrm{op}}\,\|U_\star S U_\star^\top\|_{\mathrm{op}}
        \ge \lambda_{\max}(\nabla^2 L)

    at the balanced minimum :math:`(U_\star, V_\star)`: plain gradient descent in (A, B) is stable
    there below twice this step size. The Hessian at a minimum is :math:`J^\top J` with
    :math:`JJ^\top E = E\,VSV^\top + USU^\top E\,\Sigma`.
    """
    U, V = problem.whiten(spectral_initialisation(problem))
    root = problem.token_root
    parts = (spectral_norm(V @ root), spectral_norm(problem.query_root), spectral_norm(U @ root))
    right, queries, left = (part[..., 0, 0].square() for part in parts)
    return 1 / (right + queries * left)


class GradientDescent(NamedTuple):
    r"""A run of plain gradient descent.

    ``excess`` (steps + 1, \*batch) is :math:`\|UV^\top - N\|_F^2/\|N\|_F^2` at every step; from the
    step on at which a run reached the tolerance or diverged it stays constant. ``diverged``
    (\*batch) marks runs whose excess grew beyond all bounds.
    """

    excess: Float[Tensor, "steps ..."]
    diverged: Bool[Tensor, "*batch"]


def gradient_descent(
    factors: Factors,
    problem: RegressionProblem,
    step_size: float | Float[Tensor, "*batch"],
    steps: int,
    *,
    tolerance: float = 0.0,
) -> GradientDescent:
    r"""
    .. math:: A \leftarrow A - \eta\,\nabla_A L, \qquad B \leftarrow B - \eta\,\nabla_B L

    on the population loss, ``steps`` times or until the excess is at most ``tolerance``. The same
    steps as ``Scheme("none", step_size)``, taken in the eigenbases of :math:`\Sigma` and S, where
    they are :math:`\Delta U = -\eta\,G_U\Lambda_S`,
    :math:`\Delta V = -\eta\,\Lambda_\Sigma G_V\Lambda_S` with diagonal :math:`\Lambda`: three
    products of small matrices a step. Runs that have ended are left out, 64 steps at a time.

    Factors, problem and step size may carry leading batch axes, which are broadcast. Raises
    ValueError for factors that are not finite, a step size that is not positive, or ``steps < 0``.
    """
    require_integer("steps", steps, minimum=0)
    require_number("tolerance", tolerance)
    factors.require_valid()
    rate = torch.as_tensor(step_size, dtype=factors.A.dtype, device=factors.A.device)
    require_number("step_size", float(rate.min()), positive=True)
    require_number("step_size", float(rate.max()), positive=True)
    shape = torch.broadcast_shapes(factors.batch_shape, problem.batch_shape, rate.shape)

    def flat(matrix: Tensor) -> Tensor:
        return matrix.expand(*shape, *matrix.shape[-2:]).reshape(-1, *matrix.shape[-2:])

    query_values, query_basis = torch.linalg.eigh(problem.query_covariance)
    token_values, token_basis = torch.linalg.eigh(problem.token_covariance)
    U, V = problem.whiten(factors)
    rate = rate[..., None, None]
    state = [
        flat(matrix).clone()
        for matrix in (
            U @ token_basis,
            query_basis.mT @ V @ token_basis,
            problem.whitened_target @ query_basis,
            rate * token_values[..., None, :],
            rate * query_values[..., :, None] * token_values[..., None, :],
        )
    ]
    excess, diverged = _run(state, steps, tolerance)
    return GradientDescent(excess.reshape(-1, *shape), diverged.reshape(shape))


def _run(state: list[Tensor], steps: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Excess (steps taken + 1, runs), and whether a run diverged; the state is used up."""
    scale = state[2].square().sum(dim=(-2, -1))
    excess = scale.new_empty(steps + 1, len(scale))
    diverged = torch.zeros(len(scale), dtype=torch.bool, device=scale.device)
    runs = torch.arange(len(scale), device=scale.device)
    for start in range(0, steps + 1, _TOGETHER):
        stop = min(start + _TOGETHER, steps + 1)
        values = _advance(state, stop - start).square() / scale[runs]
        reached, lost = values <= tolerance, ~(values <= _DIVERGED)
        ended = reached | lost
        over = ended.any(dim=0)
        # The value at the step where a run ended, from there on.
        first = torch.where(over, ended.to(torch.int8).argmax(dim=0), stop - start - 1)
        final = values.gather(0, first[None])
        index = torch.arange(stop - start, device=scale.device)[:, None]
        excess[start:stop, runs] = torch.where(index <= first, values, final)
        excess[stop:, runs[over]] = final[0, over]
        diverged[runs] = lost.any(dim=0) & ~reached.any(dim=0)
        if bool(over.all()):
            return excess[:stop], diverged
        if bool(over.any()):
            runs, state = runs[~over], [matrix[~over] for matrix in state]
    return excess, diverged


def _advance(state: list[Tensor], iterates: int) -> Tensor:
    r"""Evaluate :math:`\|UV^\top - N\|_F` (iterates, runs), taking a step after each, in place."""
    U, V, N, rate_U, rate_V = state
    norms = N.new_empty(iterates, len(N))
    error, slope_U, slope_V = torch.empty_like(N), torch.empty_like(U), torch.empty_like(V)
    for number in range(iterates):
        torch.baddbmm(N, U, V.mT, beta=-1, out=error)
        torch.linalg.vector_norm(error, dim=(-2, -1), out=norms[number])
        torch.bmm(error, V, out=slope_U)
        torch.bmm(error.mT, U, out=slope_V)
        U.addcmul_(slope_U, rate_U, value=-1)
        V.addcmul_(slope_V, rate_V, value=-1)
    return norms


class Adam:
    r"""
    .. math:: m \leftarrow \beta_1m + (1-\beta_1)g, \quad
        v \leftarrow \beta_2v + (1-\beta_2)g^2, \quad
        \theta \leftarrow \theta
        - \eta_k\,\frac{m/(1-\beta_1^k)}{\sqrt{v/(1-\beta_2^k)} + \epsilon}

    entry by entry in A and B, with the ``learning_rate`` constant or, with ``decay_steps``, falling
    linearly to zero over that many steps. A rule for ``structure_aware.descend``; it remembers its
    moments, so a run needs one of its own. Raises ValueError for a number out of its range.
    """

    def __init__(
        self,
        learning_rate: float,
        *,
        decay_steps: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self.rates = _Rates(learning_rate, decay_steps)
        self.betas, self.epsilon = betas, epsilon
        self.number = 0
        self.first: Factors | None = None
        self.second: Factors | None = None

    def advance(self, factors: Factors, gradients: Factors) -> Factors:
        """The factors after one more step."""
        if self.first is None or self.second is None:
            self.first = self.second = gradients.map(torch.zeros_like)
        self.number += 1
        fast, slow = self.betas
        self.first = self.first.zip(gradients, lambda m, g: fast * m + (1 - fast) * g)
        self.second = self.second.zip(gradients, lambda v, g: slow * v + (1 - slow) * g * g)
        correction, root = 1 - fast**self.number, (1 - slow**self.number) ** 0.5
        rate = self.rates.at(self.number) / correction
        moves = self.first.zip(self.second, lambda m, v: m / (v.sqrt() / root + self.epsilon))
        return factors.zip(moves, lambda value, move: value - rate * move)


class Muon:
    r"""
    .. math:: g \mapsto \text{momentum} \mapsto LR^\top \quad(\text{momentum} = LsR^\top),
        \qquad \theta \leftarrow \theta - \eta_k\sqrt{\max(1, p/q)}\;LR^\top

    for each matrix (p, q): a step along the nearest orthogonal matrix to the Nesterov momentum,
    found approximately by five quintic Newton-Schulz iterations. That of ``torch.optim.Muon``
    without weight decay, but batched and in the dtype of the factors, where torch iterates in
    bfloat16. The ``learning_rate`` is constant or, with ``decay_steps``, falls linearly to zero.
    A rule for ``structure_aware.descend``; a run needs one of its own. Raises ValueError for a
    number out of its range.
    """

    def __init__(
        self, learning_rate: float, *, decay_steps: int | None = None, momentum: float = 0.95
    ) -> None:
        self.rates = _Rates(learning_rate, decay_steps)
        self.momentum = momentum
        self.number = 0
        self.buffer: Factors | None = None

    def advance(self, factors: Factors, gradients: Factors) -> Factors:
        """The factors after one more step."""
        if self.buffer is None:
            self.buffer = gradients.map(torch.zeros_like)
        self.number += 1
        rate, beta = self.rates.at(self.number), self.momentum
        self.buffer = self.buffer.zip(gradients, lambda m, g: torch.lerp(m, g, 1 - beta))
        ahead = gradients.zip(self.buffer, lambda g, m: torch.lerp(g, m, beta))

        def moved(value: Tensor, direction: Tensor) -> Tensor:
            rows, columns = value.shape[-2:]
            return value - rate * max(1, rows / columns) ** 0.5 * orthogonalised(direction)

        return factors.zip(ahead, moved)


def orthogonalised(matrix: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch p q"]:
    r"""
    .. math:: X_0 = \frac{M}{\|M\|_F}, \qquad X \leftarrow aX + b\,(XX^\top)X + c\,(XX^\top)^2X

    five times: approximately :math:`LR^\top` for :math:`M = LsR^\top`, singular values in about
    [0.7, 1.2] unless s is tiny against :math:`\|M\|_F`.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    X = matrix.mT if tall else matrix
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(1e-7)
    a, b, c = MUON_COEFFICIENTS
    for _ in range(5):
        gram = X @ X.mT
        X = a * X + (b * gram + c * gram @ gram) @ X
    return X.mT if tall else X


class _Rates:
    """A constant learning rate, or one that falls linearly to zero."""

    def __init__(self, learning_rate: float, decay_steps: int | None) -> None:
        require_number("learning_rate", learning_rate, positive=True)
        if decay_steps is not None:
            require_integer("decay_steps", decay_steps, minimum=1)
        self.learning_rate, self.decay_steps = learning_rate, decay_steps

    def at(self, number: int) -> float:
        """The rate of step ``number``, counted from 1."""
        if self.decay_steps is None:
            return self.learning_rate
        return self.learning_rate * max(0.0, 1 - (number - 1) / self.decay_steps)
