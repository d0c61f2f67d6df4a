r"""Gaussian regression tasks for softmax attention: problems of a chosen conditioning, samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.validation import (
    require_cpu_generator,
    require_integer,
    require_number,
)


class RegressionSample(NamedTuple):
    r"""Queries :math:`x_i`, contexts :math:`z_t`, targets :math:`y_i = M_\star x_i + \epsilon_i`.

    Shapes: ``queries`` (\*batch, n, d); ``contexts`` (\*batch, T, k) shared by all samples or
    (\*batch, n, T, k) one a sample; ``targets`` (\*batch, n, m).
    """

    queries: Float[Tensor, "*batch n d"]
    contexts: Float[Tensor, "*batch T k"] | Float[Tensor, "*batch n T k"]
    targets: Float[Tensor, "*batch n m"]

    @property
    def shared(self) -> bool:
        """Whether one context serves all samples."""
        return self.contexts.ndim == self.queries.ndim

    def first(self, samples: int) -> RegressionSample:
        """The first samples, such as the subset of a spectral initialisation."""
        contexts = self.contexts if self.shared else self.contexts[..., :samples, :, :]
        return RegressionSample(
            self.queries[..., :samples, :], contexts, self.targets[..., :samples, :]
        )


def regression_problem(
    outputs: int,
    dimension: int,
    context_dimension: int | None = None,
    *,
    condition: float,
    target_condition: float = 2.0,
    noise: float,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> RegressionProblem:
    r"""
    .. math:: \Sigma = Q \operatorname{diag}(\lambda)\, Q^\top, \quad
        \tfrac1d \operatorname{tr} \Sigma = 1, \quad
        \frac{\lambda_{\max}}{\lambda_{\min}} = \text{condition}, \qquad
        M_\star = L \operatorname{diag}(s)\, R^\top.

    Eigenvalues :math:`\lambda` and singular values :math:`s` are evenly spaced on a logarithmic
    scale, s from 1 down to 1 over ``target_condition``; Q, L and R are uniform among orthogonal
    matrices. Tokens have the covariance of the queries, S = :math:`\Sigma`, where
    ``context_dimension`` is None or the dimension (the paper's case), else one of their own with
    the same condition number (1 where k = 1). Drawn on the CPU in float64, then cast and moved.
    Raises ValueError for sizes below 1, condition numbers below 1 (or above 1 in one dimension),
    negative noise, a generator not on the CPU.
    """
    k = dimension if context_dimension is None else context_dimension
    sizes = {"outputs": outputs, "dimension": dimension, "context_dimension": k}
    for name, size in sizes.items():
        require_integer(name, size, minimum=1)
    for name, value in (("condition", condition), ("target_condition", target_condition)):
        require_number(name, value, positive=True)
        if value < 1:
            raise ValueError(f"{name}: expected a condition number >= 1, got {value}")
    if condition > 1 and dimension == 1:
        raise ValueError(
            f"condition: a covariance of dimension 1 has condition number 1, got {condition}; "
            "take dimension >= 2 or condition=1.0"
        )
    require_number("noise", noise, remedy="it is a standard deviation")
    require_cpu_generator(generator)
    query_covariance = _covariance(dimension, condition, generator)
    left, right = (_orthogonal(size, generator) for size in (outputs, dimension))
    rank = min(outputs, dimension)
    target = (left[:, :rank] * _spaced(rank, target_condition)) @ right[:, :rank].mT
    token_covariance = query_covariance if k == dimension else _covariance(k, condition, generator)
    problem = RegressionProblem(target, query_covariance, token_covariance, noise)
    return problem.to(dtype=dtype, device=device)


def sample(
    problem: RegressionProblem,
    samples: int,
    length: int,
    *,
    shared: bool = True,
    centred: bool = True,
    correlation: float = 0.0,
    generator: torch.Generator,
) -> RegressionSample:
    r"""
    .. math:: x_i \sim \mathcal N(0, \Sigma), \qquad z_t \sim \mathcal N(0, S), \qquad
        y_i = M_\star x_i + \epsilon_i, \quad \epsilon_i \sim \mathcal N(0, \sigma_\epsilon^2 I).

    ``shared`` gives all samples one context (T, k); otherwise each has its own, (n, T, k).
    ``centred`` takes the mean of every context off. ``correlation`` :math:`r` makes a context a
    stationary autoregression, :math:`z_{t+1} = r z_t + \sqrt{1 - r^2}\, \xi_t`, whose tokens are
    each N(0, S) still. A batched problem gives a batched sample. Drawn on the CPU in float64, then
    cast and moved to the problem's dtype and device. Raises ValueError for sizes below 1, a
    correlation outside of [0, 1), a generator not on the CPU.
    """
    require_integer("samples", samples, minimum=1)
    require_integer("length", length, minimum=1)
    require_number("correlation", correlation)
    if correlation >= 1:
        raise ValueError(f"correlation: expected a number in [0, 1), got {correlation}")
    require_cpu_generator(generator)
    target, batch = problem.target, problem.batch_shape

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(
            (*batch, *shape), generator=generator, dtype=torch.float64, device="cpu"
        )
        return drawn.to(dtype=target.dtype, device=target.device)

    queries = normal(samples, problem.dimension) @ problem.query_root
    own = () if shared else (samples,)
    noise = torch.as_tensor(problem.noise, dtype=target.dtype, device=target.device)
    errors = noise[..., None, None] * normal(samples, problem.outputs)
    tokens = _autoregression(normal(*own, length, problem.context_dimension), correlation)
    root = problem.token_root
    contexts = tokens @ (root if shared else root[..., None, :, :])
    if centred:
        contexts = contexts - contexts.mean(dim=-2, keepdim=True)
    return RegressionSample(queries, contexts, queries @ target.mT + errors)


def _spaced(size: int, condition: float) -> Tensor:
    """Numbers from 1 down to 1 / condition, evenly spaced on a logarithmic scale."""
    exponents = torch.linspace(0, 1, size, dtype=torch.float64)
    return torch.as_tensor(condition, dtype=torch.float64) ** -exponents


def _orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A uniform orthogonal matrix: the Q of a Gaussian matrix whose R has a positive diagonal."""
    drawn = torch.randn((size, size), generator=generator, dtype=torch.float64, device="cpu")
    Q, R = torch.linalg.qr(drawn)
    return Q * R.diagonal().sign()


def _covariance(size: int, condition: float, generator: torch.Generator) -> Tensor:
    values = _spaced(size, condition)
    Q = _orthogonal(size, generator)
    matrix = (Q * (values / values.mean())) @ Q.mT
    return 0.5 * (matrix + matrix.mT)


def _autoregression(innovations: Tensor, correlation: float) -> Tensor:
    """Standard normal tokens with correlation r^|t - u|, from independent ones, along axis -2."""
    if correlation == 0:
        return innovations
    tokens = [innovations[..., 0, :]]
    fresh = (1 - correlation**2) ** 0.5
    for step in range(1, innovations.shape[-2]):
        tokens.append(correlation * tokens[-1] + fresh * innovations[..., step, :])
    return torch.stack(tokens, dim=-2)
