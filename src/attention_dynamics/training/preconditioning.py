r"""One preconditioned step on the factors: what a scheme says, and how it is computed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attention_dynamics.models.population import RegressionProblem
from attention_dynamics.models.regression import Factors
from attention_dynamics.training.gauge import retract, spectral_norm
from attention_dynamics.validation import require_number, require_one_of

GROWTH_LIMIT = 10.0
r"""A step that takes :math:`\|V\|_{\mathrm{op}}` beyond this multiple of ``rho``, or of its value
before where that is larger, is refused."""


@dataclass(frozen=True)
class Scheme:
    r"""What one step does with the gradients :math:`G_U, G_V` of the whitened factors.

    With :math:`\tau^2 = \|U\|_{\mathrm{op}}/\|V\|_{\mathrm{op}}` and
    :math:`P = U^\top U`, :math:`Q = V^\top V`:

    - ``"none"``: plain gradient descent in A and B;
    - ``"whiten"``: :math:`\Delta U = -\eta\,G_U`, :math:`\Delta V = -\eta\,G_V`, that is
      :math:`-\eta\,G_AS^{-1}` and :math:`-\eta\,\Sigma^{-1}G_BS^{-1}`;
    - ``"scaled"``: :math:`\Delta U = -\eta\,G_U(Q + \lambda\tau^{-2})^{-1}`,
      :math:`\Delta V = -\eta\,G_V(P + \lambda\tau^2)^{-1}` with
      :math:`\lambda = c\,\|G_UQ^{-1/2}\|_F` and c the ``damping``: the damping is measured at the
      scale where both factors have the same norm, so the step does not depend on the scale.

    Damping below :math:`\eta/4` leaves a trap: the pair :math:`u = -v` of a direction other than
    the leading one has a cycle that attracts its neighbours. In a hundred trial runs from the
    spectral start at condition numbers of 1000 and more, about four ended there with c = 0.1 and
    :math:`\eta` = 0.5, none with c = 0.125 or more.

    ``step_size`` is :math:`\eta`, a number or one a batch entry.
    ``regulariser`` is the weight w of :math:`\tfrac w8\|U^\top U - V^\top V\|_F^2`, whose gradient
    is added. ``balance`` replaces the factors by the balanced ones of the same product after the
    step. ``rho`` is :math:`\rho_V`: the step is taken, and the regulariser measured, at the scale
    where both factors have the same norm, and the result is rescaled to
    :math:`\|V\|_{\mathrm{op}} = \rho_V`.

    Exact balance is meant for a start near the solution: from balanced factors the sign of
    :math:`\det UV^\top` does not change, since a pair of singular directions with
    :math:`u = \pm v` whose product has to change sign runs into the saddle at zero.

    Raises ValueError or TypeError for a field out of its range, and for damping without the scaled
    preconditioner. Warns when ``rho`` is at or past the threshold :math:`1/\sqrt2` of the
    finite-context expansion, and when the regulariser meets the scaled preconditioner, which it
    makes stiff again.
    """

    preconditioner: Literal["none", "whiten", "scaled"]
    step_size: float | Tensor
    damping: float = 0.0
    regulariser: float = 0.0
    rho: float | None = None
    balance: bool = False

    def __post_init__(self) -> None:
        require_one_of("preconditioner", self.preconditioner, ("none", "whiten", "scaled"))
        for rate in torch.as_tensor(self.step_size).aminmax():
            require_number("step_size", float(rate), positive=True)
        require_number("damping", self.damping)
        require_number("regulariser", self.regulariser)
        if self.damping and self.preconditioner != "scaled":
            raise ValueError(
                f"damping: expected 0 with preconditioner {self.preconditioner!r}, got "
                f"{self.damping}; only the scaled preconditioner inverts something that needs it"
            )
        if self.rho is not None:
            require_number("rho", self.rho, positive=True, remedy="None does not renormalise")
            if self.rho >= math.sqrt(0.5):
                warnings.warn(
                    f"rho = {self.rho:g} is at or past 1/sqrt(2): the loss at a finite context is "
                    "no longer its limit plus a term in 1/T; take rho = 0.2 for centred contexts "
                    "and 0.5 for others",
                    UserWarning,
                    stacklevel=3,
                )
        if self.regulariser and self.preconditioner == "scaled":
            warnings.warn(
                "regulariser: its gauge directions have curvature up to regulariser times cond(N) "
                "under the scaled preconditioner, and the step size has to shrink with it; "
                "balance=True balances without a step size",
                UserWarning,
                stacklevel=3,
            )


def move(
    factors: Factors, gradients: Factors, problem: RegressionProblem, scheme: Scheme
) -> tuple[Factors, Tensor]:
    r"""The factors after a step, and (\*batch) whether that step is to be taken."""
    U, V = problem.whiten(factors)
    ratio = spectral_norm(U) / spectral_norm(V)
    weight = ratio if scheme.rho is not None else torch.ones_like(ratio)
    eta = torch.as_tensor(scheme.step_size, dtype=U.dtype, device=U.device)[..., None, None]
    if scheme.preconditioner == "none":
        G_A, G_B = gradients
        if scheme.regulariser:
            slope_A, slope_B = problem.whiten(Factors(*_imbalance(U, V, weight, scheme)))
            G_A, G_B = G_A + slope_A, G_B + slope_B
        moved = Factors(factors.A - eta * weight * G_A, factors.B - eta / weight * G_B)
    else:
        # Gradients transform inversely: G_U = G_A S^-1/2 and G_V = Sigma^-1/2 G_B S^-1/2.
        G_U, G_V = problem.unwhiten(*gradients)
        if scheme.regulariser:
            slope_U, slope_V = _imbalance(U, V, weight, scheme)
            G_U, G_V = G_U + slope_U, G_V + slope_V
        if scheme.preconditioner == "whiten":
            G_U, G_V = G_U * weight, G_V / weight
        else:
            G_U, G_V = _scaled(U, V, G_U, G_V, ratio, scheme.damping)
        moved = problem.unwhiten(U - eta * G_U, V - eta * G_V)
    accepted = finite(moved)
    return _in_gauge(chosen(accepted, moved, factors), accepted, spectral_norm(V), problem, scheme)


def finite(factors: Factors) -> Tensor:
    r"""Whether all entries are finite, (\*batch)."""
    A, B = (torch.isfinite(block).all(dim=-1).all(dim=-1) for block in factors)
    return A & B


def chosen(flags: Tensor, new: Factors, old: Factors) -> Factors:
    r"""``new`` where the flag (\*batch) is set, ``old`` elsewhere."""
    kept = flags[..., None, None]
    return new.zip(old, lambda a, b: torch.where(kept, a, b))


def _in_gauge(
    moved: Factors, accepted: Tensor, before: Tensor, problem: RegressionProblem, scheme: Scheme
) -> tuple[Factors, Tensor]:
    """The factors balanced and renormalised; a step that grew too far is no longer accepted."""
    if scheme.rho is None and not scheme.balance:
        return moved, accepted
    U, V = problem.whiten(moved)
    norm = spectral_norm(V)
    if scheme.rho is not None:
        limit = GROWTH_LIMIT * before.clamp_min(scheme.rho)
        accepted = accepted & (norm <= limit)[..., 0, 0]
    if scheme.balance:
        U, V = retract(U, V)
        moved, norm = problem.unwhiten(U, V), spectral_norm(V)
    if scheme.rho is not None:
        moved = Factors(moved.A * (norm / scheme.rho), moved.B * (scheme.rho / norm))
    return moved, accepted


def _imbalance(U: Tensor, V: Tensor, weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    r"""The gradients of :math:`\tfrac w8\|U^\top U/\tau^2 - \tau^2V^\top V\|_F^2`."""
    gap = 0.5 * scheme.regulariser * (U.mT @ U / weight - V.mT @ V * weight)
    return U @ gap / weight, -V @ gap * weight


def _scaled(
    U: Tensor, V: Tensor, G_U: Tensor, G_V: Tensor, ratio: Tensor, damping: float
) -> tuple[Tensor, Tensor]:
    r""":math:`G_U(Q + \lambda\tau^{-2})^{-1}` and :math:`G_V(P + \lambda\tau^2)^{-1}`.

    From the singular vectors of V and U: the condition numbers of Q and P are the squares of theirs
    """
    (s, right), (r, left) = _right_singular(V), _right_singular(U)
    smallest = torch.finfo(s.dtype).eps * s.amax(dim=-1, keepdim=True)
    rotated = G_U @ right
    reached = torch.where(s > smallest, 1 / s.clamp_min(smallest), 0)[..., None, :]
    strength = damping * torch.linalg.matrix_norm(rotated * reached)[..., None, None]
    tiny = torch.finfo(s.dtype).tiny
    q = (s.square()[..., None, :] + strength / ratio).clamp_min(tiny)
    p = (r.square()[..., None, :] + strength * ratio).clamp_min(tiny)
    return (rotated / q) @ right.mT, (G_V @ left / p) @ left.mT


def _right_singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    r"""All k right singular vectors (\*batch, k, k) as columns, and the k values, zeros too."""
    rows, columns = matrix.shape[-2:]
    _, values, vectors = torch.linalg.svd(matrix, full_matrices=rows < columns)
    return torch.nn.functional.pad(values, (0, max(0, columns - rows))), vectors.mT


def require_invertible(factors: Factors, scheme: Scheme) -> None:
    m, k = factors.A.shape[-2:]
    d = factors.B.shape[-2]
    if scheme.preconditioner == "scaled" and scheme.damping == 0 and k > min(m, d):
        raise ValueError(
            f"damping: the scaled preconditioner inverts matrices of size k = {k} and rank at most "
            f"min(m, d) = {min(m, d)}; take a damping such as 0.1, or preconditioner='whiten'"
        )
