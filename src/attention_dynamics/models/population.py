r"""The population problem of softmax attention for regression: a matrix factorisation.

For Gaussian tokens N(0, S) and infinitely many of them the pooled token is :math:`S b`, and with
:math:`y = M_\star x + \epsilon` the loss of :math:`f(x) = A\,\mu(B^\top x)` becomes

.. math:: L(A, B) = \tfrac12 \bigl\|(A S B^\top - M_\star)\, \Sigma^{1/2}\bigr\|_F^2
    + \tfrac12 m \sigma_\epsilon^2
    = \tfrac12 \|U V^\top - N_\star\|_F^2 + \tfrac12 m \sigma_\epsilon^2

in the whitened factors :math:`U = A S^{1/2}`, :math:`V = \Sigma^{1/2} B S^{1/2}` and target
:math:`N_\star = M_\star \Sigma^{1/2}`. Every function accepts leading batch axes on the factors and
on the problem. Source: arXiv 2603.01514 for the limit, the chapters on regression for the rest.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._regression_inputs import Factors
from attention_dynamics.models.regression_problem import RegressionProblem
from attention_dynamics.validation import require_floating, require_integer, require_matrix

__all__ = [
    "RegressionProblem",
    "excess_risk",
    "finite_context_correction",
    "finite_context_threshold",
    "population_loss",
    "population_loss_and_gradients",
]


def population_loss(factors: Factors, problem: RegressionProblem) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: L(A, B) = \tfrac12 \bigl\|(A S B^\top - M_\star)\, \Sigma^{1/2}\bigr\|_F^2
        + \tfrac12 m \sigma_\epsilon^2.

    Returns (\*batch,). Raises ValueError for shapes that do not fit or entries that are not finite,
    TypeError for dtypes.
    """
    return excess_risk(factors, problem) + problem.noise_loss


def excess_risk(factors: Factors, problem: RegressionProblem) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: \tfrac12 \|E\|_F^2, \qquad E = U V^\top - N_\star
        = (A S B^\top - M_\star)\, \Sigma^{1/2}.

    Returns (\*batch,): the population loss without the noise, which would hide its last digits.
    Arguments and errors are those of :func:`population_loss`.
    """
    _require_factors(factors, problem)
    return 0.5 * _error(factors, problem).square().sum(dim=(-2, -1))


def population_loss_and_gradients(
    factors: Factors, problem: RegressionProblem, *, validate: bool = True
) -> tuple[Float[Tensor, "*batch"], Factors]:
    r"""
    .. math:: \nabla_A L = (A S B^\top - M_\star)\, \Sigma B S, \qquad
        \nabla_B L = \Sigma\, (A S B^\top - M_\star)^\top A S.

    Returns the loss (\*batch,) and the gradients in the shape of the factors. ``validate=False``
    skips the checks in inner loops. Arguments and errors are those of :func:`population_loss`.
    """
    if validate:
        _require_factors(factors, problem)
    values = factors.A @ problem.token_covariance
    error = (values @ factors.B.mT - problem.target) @ problem.query_root
    weighted = error @ problem.query_root
    gradients = Factors(weighted @ (factors.B @ problem.token_covariance), weighted.mT @ values)
    return 0.5 * error.square().sum(dim=(-2, -1)) + problem.noise_loss, gradients


def finite_context_threshold(
    factors: Factors, problem: RegressionProblem
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: \tfrac12 - \|V\|_{\mathrm{op}}^2, \qquad V = \Sigma^{1/2} B S^{1/2}.

    Returns (\*batch,). Where it is positive, and queries are Gaussian, the first correction for a
    finite context is of order 1/T; where it is not, that correction is infinite. Arguments and
    errors are those of :func:`population_loss`.
    """
    _require_factors(factors, problem)
    _, V = problem.whiten(factors)
    return 0.5 - torch.linalg.matrix_norm(V, ord=2).square()


def finite_context_correction(
    factors: Factors, problem: RegressionProblem, length: int, *, centred: bool = False
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: L_T - L \approx \frac{D}{T} \Bigl[\tfrac12 \|U\|_F^2
        + \tfrac12 \operatorname{tr}(X G X^\top) - \operatorname{tr}(E\, G X^\top)\Bigr],

    .. math:: G = (I - 2 V V^\top)^{-1}, \quad D = \det(G)^{1/2}, \quad X = U V^\top,
        \quad E = X - N_\star,

    the leading term of the loss with fresh contexts of T tokens N(0, S) and queries
    :math:`N(0, \Sigma)`, in whitened factors. ``centred`` contexts, whose mean is taken off, have
    :math:`\|U\|_F^2 / (2T)` less. Returns (\*batch,), infinite where
    :func:`finite_context_threshold` is not positive. Raises ValueError for a length below 1;
    other arguments and errors are those of :func:`population_loss`.
    """
    require_integer("length", length, minimum=1)
    _require_factors(factors, problem)
    U, V = problem.whiten(factors)
    # With V = P diag(v) W', both traces live in the columns of X P and E P.
    P, v, W = torch.linalg.svd(V, full_matrices=False)
    squares = v.square()
    below = squares[..., 0] < 0.5
    tilt = 1 / (1 - 2 * torch.where(below[..., None], squares, 0.0))
    fitted = (U @ W.mT) * v[..., None, :]
    missing = fitted - problem.whitened_target @ P
    traces = (tilt * ((0.5 * fitted - missing) * fitted).sum(dim=-2)).sum(dim=-1)
    half_square = 0.5 * U.square().sum(dim=(-2, -1))
    value = tilt.prod(dim=-1).sqrt() * (half_square + traces)
    if centred:
        value = value - half_square
    return torch.where(below, value, torch.inf) / length


def _error(factors: Factors, problem: RegressionProblem) -> Tensor:
    product = factors.A @ problem.token_covariance @ factors.B.mT
    return (product - problem.target) @ problem.query_root


def _require_factors(factors: Factors, problem: RegressionProblem) -> None:
    factors.require_valid()
    sizes = {"m": problem.outputs, "d": problem.dimension, "k": problem.context_dimension}
    require_matrix("factors.A", factors.A, ("m", "k"), sizes)
    require_matrix("factors.B", factors.B, ("d", "k"), sizes)
    require_floating("factors.A", factors.A, problem.target.dtype)
