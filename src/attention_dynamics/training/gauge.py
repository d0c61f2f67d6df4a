r"""The gauge of a factorisation :math:`X = UV^\top`: its scale, its balance, and where to start.

The product is unchanged by :math:`U \to UH,\ V \to VH^{-\top}` with H in GL(k), and so is the
population loss. What the softmax sees is V alone: its norm sets how far attention is from a plain
mean. Factors here are whitened, :math:`U = AS^{1/2}`, :math:`V = \Sigma^{1/2}BS^{1/2}`. All
functions take leading batch axes.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors
from attention_dynamics.validation import (
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_matrix,
    require_number,
)


def spectral_norm(matrix: Float[Tensor, "*batch p q"]) -> Float[Tensor, "*batch 1 1"]:
    r""":math:`\|M\|_{\mathrm{op}}`, with two axes of length one to broadcast against M."""
    return torch.linalg.matrix_norm(matrix, 2)[..., None, None]


def rescale(
    U: Float[Tensor, "*batch m k"], V: Float[Tensor, "*batch d k"], rho: float | None
) -> tuple[Float[Tensor, "*batch m k"], Float[Tensor, "*batch d k"]]:
    r"""
    .. math:: (U/\tau,\ V\tau), \qquad \|V\tau\|_{\mathrm{op}} = \rho_V,

    the renormalisation; ``rho`` None takes the scale at which both factors have the same norm.
    Unchecked; a factor that is zero gives infinite or undefined entries.
    """
    norm = spectral_norm(V)
    scale = (spectral_norm(U) / norm).sqrt() if rho is None else rho / norm
    return U / scale, V * scale


def balance(
    U: Float[Tensor, "*batch m k"], V: Float[Tensor, "*batch d k"], rho: float | None = None
) -> tuple[Float[Tensor, "*batch m k"], Float[Tensor, "*batch d k"]]:
    r"""
    .. math:: (UG,\ VG^{-1}), \quad G = H^{1/2}, \quad
        H = P^{-1/2}\bigl(P^{1/2}QP^{1/2}\bigr)^{1/2}P^{-1/2}, \quad
        P = U^\top U,\ Q = V^\top V,

    the balanced factors of the same product: :math:`GPG = G^{-1}QG^{-1}`, since H, the geometric
    mean of :math:`P^{-1}` and Q, solves :math:`HPH = Q`. Among all H it is the positive definite
    one, so that nothing is rotated. With ``rho`` the result is rescaled to
    :math:`\|V\|_{\mathrm{op}} = \rho_V` afterwards, and is balanced up to that scale.

    Computed from QR and the singular values of the k by k core, without P and Q: their condition
    numbers are the squares of those of U and V. Factors whose product has rank below k are sent to
    balanced factors too, where the formula itself would divide by zero.

    Raises ValueError for shapes that do not fit, NaN, infinity, or ``rho`` that is not positive.
    """
    require_matrix("U", U, ("m", "k"))
    require_matrix("V", V, ("d", "k"), {"k": U.shape[-1]})
    for name, factor in (("U", U), ("V", V)):
        require_floating(name, factor, U.dtype)
        require_finite(name, factor)
    if rho is not None:
        require_number("rho", rho, positive=True, remedy="None leaves the scale as it is")
    moved = retract(U, V)
    return moved if rho is None else rescale(*moved, rho)


def retract(U: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Balanced factors of the same product as in :func:`balance`, unchecked and not rescaled."""
    left, left_core = torch.linalg.qr(U)
    right, right_core = torch.linalg.qr(V)
    W, s, Z = torch.linalg.svd(left_core @ right_core.mT, full_matrices=False)
    root = s.sqrt()[..., None, :]
    floor = torch.finfo(s.dtype).tiny ** 0.5
    # U_b = W s^1/2 = left_core C with C = right_core^T Z^T s^-1/2 = G O: the polar factor O is
    # what U G must be rotated back by.
    C = (right_core.mT @ Z.mT) / root.clamp_min(floor)
    a, _, b = torch.linalg.svd(C, full_matrices=False)
    rotation = (a @ b).mT
    return left @ (W * root) @ rotation, right @ (Z.mT * root) @ rotation


def spectral_initialisation(
    problem: RegressionProblem, rho: float | None = None, rank: int | None = None
) -> Factors:
    r"""
    .. math:: N = L\,\mathrm{diag}(s)\,R^\top, \quad U = L(\gamma s)^{1/2}, \quad
        V = R(s/\gamma)^{1/2}, \quad \gamma = s_1/\rho_V^2,

    so that :math:`UV^\top = N` and :math:`\|V\|_{\mathrm{op}} = \rho_V`; ``rho`` None takes
    :math:`\gamma = 1`. ``problem`` is what is known of the task, for example
    ``RegressionProblem.from_samples`` on a subset: on all samples the product is least squares
    itself, and nothing is left to train. ``rank`` keeps the leading singular values only. Columns
    beyond min(m, d), or beyond ``rank``, are zero.

    Returns factors with the batch axes of the problem. Raises ValueError for a rank below 1 or a
    ``rho`` that is not positive.
    """
    if rho is not None:
        require_number("rho", rho, positive=True, remedy="None balances the two factors")
    L, s, R = torch.linalg.svd(problem.whitened_target, full_matrices=False)
    columns = problem.context_dimension
    kept = min(columns, s.shape[-1])
    if rank is not None:
        require_integer("rank", rank, minimum=1)
        kept = min(kept, rank)
    gamma = 1.0 if rho is None else s[..., :1] / rho**2
    pad = (0, columns - kept)
    U = torch.nn.functional.pad((L * (gamma * s).sqrt()[..., None, :])[..., :kept], pad)
    V = torch.nn.functional.pad((R.mT * (s / gamma).sqrt()[..., None, :])[..., :kept], pad)
    return problem.unwhiten(U, V)


def random_initialisation(
    problem: RegressionProblem, rho: float | None = None, *, generator: torch.Generator
) -> Factors:
    r"""
    .. math:: A_{ij},\ B_{ij} \sim \mathcal N(0, 1), \quad\text{then}\quad
        \|V\|_{\mathrm{op}} = \rho_V, \quad \|U\|_{\mathrm{op}} = \|N\|_{\mathrm{op}}/\rho_V,

    two scalars that make the factors as large as the target; ``rho`` None takes
    :math:`\rho_V = \|N\|_{\mathrm{op}}^{1/2}`. The directions know nothing of the data: they are
    uniform in the coordinates of A and B, not in the whitened ones.

    Numbers are drawn on the CPU, A before B, for the whole batch of the problem. Raises ValueError
    for a ``rho`` that is not positive, TypeError for a generator that is none.
    """
    require_cpu_generator(generator)
    if rho is not None:
        require_number("rho", rho, positive=True, remedy="None balances the two factors")
    target = problem.whitened_target
    k = problem.context_dimension
    shapes = ((*target.shape[:-1], k), (*target.shape[:-2], target.shape[-1], k))
    A, B = (torch.randn(shape, generator=generator, dtype=target.dtype) for shape in shapes)
    U, V = problem.whiten(Factors(A.to(target.device), B.to(target.device)))
    largest = spectral_norm(target)
    radius = largest.sqrt() if rho is None else largest.new_full((), rho)
    U, V = U * (largest / radius / spectral_norm(U)), V * (radius / spectral_norm(V))
    return problem.unwhiten(U, V)
