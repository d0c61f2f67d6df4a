r"""Certificates: a step size and a rate that gradient descent on the residual layer must keep.

Two routes to a Polyak-Lojasiewicz inequality :math:`\|\nabla L\|^2 \ge 2\mu L` on a ball of radius
:math:`\rho` around the start, whose path length gradient descent cannot exceed:

- route Z, through :math:`W_1` and the attention output: :math:`d \ge nT`, :math:`m \ge d`,
  :math:`\mu = a^2\sigma_{nT}(Z_0)^2\sigma_d(W_2^0)^2/16`;
- route H, through :math:`W_2` and the hidden layer: :math:`m \ge nT`,
  :math:`\mu = \sigma_{nT}(H_0)^2/4`.

If a certificate holds, then for every step size up to ``eta``

.. math:: L_k \le (1 - \eta\mu(2 - \eta S))^k L_0 \le (1 - \eta\mu)^k L_0, \qquad
    \|\theta_k - \theta_0\| \le \rho \quad \text{for all } k.

Derived here. That the singular values of Z set the rate is the claim of arXiv 2506.05249, whose
proof we have not seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.residual import ResidualConfig, ResidualParameters, layers
from attention_dynamics.models.residual_parameters import require_layer, require_targets
from attention_dynamics.theory.ball_constants import BallConstants, ball_constants
from attention_dynamics.validation import require_number, require_one_of

__all__ = [
    "BallConstants",
    "Certificate",
    "Certified",
    "ball_constants",
    "certificate",
    "pl_constant",
    "scale_to_certify",
]

Route = Literal["Z", "H"]
SINGULAR = 1e-12
"""A smallest singular value below this fraction of the largest one certifies nothing (in float32
the fraction is that of rounding: the larger side times the machine precision)."""


@dataclass(frozen=True)
class Certificate:
    r"""What is certified at one start: ``ok``, and if not, the ``reason``.

    ``mu`` is :math:`\mu_{\mathrm{PL}}`, ``rho`` the radius :math:`\rho_\theta`, ``S`` the
    smoothness :math:`S_\theta` on that ball, ``eta`` = 1/S the largest certified step size.
    ``smallest`` is :math:`\sigma_{nT}(Z_0)` or :math:`\sigma_{nT}(H_0)`, ``readout``
    :math:`\sigma_d(W_2^0)` (route Z; 1 on route H), ``error`` :math:`r_0 = \|E_0\|_F`. Without
    positive singular values ``mu`` and ``eta`` are 0, ``rho`` and ``S`` infinite, ``constants``
    None.
    """

    ok: bool
    reason: str
    route: Route
    mu: float
    rho: float
    S: float
    eta: float
    smallest: float
    readout: float
    error: float
    constants: BallConstants | None

    @property
    def factor(self) -> float:
        r""":math:`1 - \eta\mu`, a bound of :math:`L_{k+1}/L_k` at the step size ``eta``."""
        return 1.0 - self.eta * self.mu

    def loss_bound(self, loss: float, steps: int, step_size: float | None = None) -> float:
        r""":math:`(1 - \eta\mu(2 - \eta S))^k L_0` for a step size up to ``eta`` (default).

        Raises ValueError if nothing is certified, or for a larger step size.
        """
        if not self.ok:
            raise ValueError(f"certificate: expected one that holds, got: {self.reason}")
        eta = self.eta if step_size is None else step_size
        require_number("step_size", eta, positive=True)
        if eta > self.eta:
            raise ValueError(
                f"step_size: expected at most eta = {self.eta:.6g}, got {eta:.6g}; larger steps "
                "are not certified"
            )
        return (1.0 - eta * self.mu * (2.0 - eta * self.S)) ** steps * loss


def certificate(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, "n T d"],
    config: ResidualConfig,
    *,
    route: Route = "Z",
) -> Certificate:
    r"""
    .. math:: \text{Z:}\quad \rho = \frac{8 r_0}{a\,s_z s_w}, \quad
        \rho \le \frac{s_w}2, \quad \zeta(\rho)\,\rho \le \frac{s_z}2; \qquad
        \text{H:}\quad \rho = \frac{4 r_0}{s_h}, \quad e(\rho)\,\rho \le \frac{s_h}2,

    with :math:`s_z = \sigma_{nT}(Z_0)`, :math:`s_w = \sigma_d(W_2^0)`, :math:`s_h =
    \sigma_{nT}(H_0)`, both :math:`\rho = 2 r_0/\sqrt\mu`. Holds: the singular values at most halve
    on the ball, so :math:`\mu` serves all of it, and the path is at most :math:`\rho` long.

    One start, no leading axes. Raises ValueError where the route is closed by the sizes
    (:math:`d \ge nT` and :math:`m \ge d`, or :math:`m \ge nT`) or for shapes that do not fit. A
    smallest singular value that is 0 to rounding (``SINGULAR``) is returned as "uncertifiable",
    not raised.
    """
    rows = _require_route(parameters, tokens, targets, config, route)
    passed = layers(parameters, tokens, config, validate=False)
    error = float(torch.linalg.vector_norm(passed.F - targets))
    matrix = (passed.Z if route == "Z" else passed.H).flatten(-3, -2)
    smallest, singular = _smallest(matrix, rows)
    readout, flat = _smallest(parameters.W2, config.dimension) if route == "Z" else (1.0, False)
    if singular or flat:
        what = route if singular else "W_2"
        return Certificate(
            False, f"uncertifiable: {what} is singular, to rounding", route, 0.0,
            math.inf, math.inf, 0.0, smallest, readout, error, None,
        )  # fmt: skip
    root = config.slope * smallest * readout / 4 if route == "Z" else smallest / 2
    rho = 2 * error / root
    found = ball_constants(parameters, tokens, config, rho=rho, error=error)
    if route == "Z":
        conditions = [
            (rho, readout / 2, "rho <= sigma_d(W_2) / 2"),
            (found.zeta * rho, smallest / 2, "zeta rho <= sigma(Z) / 2"),
        ]
    else:
        conditions = [(found.e * rho, smallest / 2, "e rho <= sigma(H) / 2")]
    broken = [f"{name} fails, {x:.4g} > {y:.4g}" for x, y, name in conditions if not x <= y]
    return Certificate(
        not broken, "; ".join(broken) or "holds", route, root**2, rho, found.S, 1 / found.S,
        smallest, readout, error, found,
    )  # fmt: skip


def pl_constant(
    parameters: ResidualParameters, tokens: Float[Tensor, "n T d"], config: ResidualConfig
) -> float:
    r"""
    .. math:: \tfrac12\|\nabla L\|^2 / L \ge a^2\sigma_{nT}(Z)^2\sigma_d(W_2)^2
        + \sigma_{nT}(H)^2

    at one point; a term whose route the sizes close is 0. The left-hand side is
    :math:`\|\nabla L\|^2/\|E\|^2`. Errors are those of ``models.residual.layers``.
    """
    require_layer(parameters, tokens, config)
    passed = layers(parameters, tokens, config, validate=False)
    rows = tokens.shape[-3] * tokens.shape[-2]
    total = 0.0
    if config.dimension >= rows and config.hidden >= config.dimension:
        s_z, s_w = (float(torch.linalg.svdvals(block)[-1]) for block in (
            passed.Z.flatten(-3, -2), parameters.W2))  # fmt: skip
        total += (config.slope * s_z * s_w) ** 2
    if config.hidden >= rows:
        total += float(torch.linalg.svdvals(passed.H.flatten(-3, -2))[-1]) ** 2
    return total


class Certified(NamedTuple):
    r"""The smallest certified scale, the start scaled by it, and its certificate."""

    scale: float
    parameters: ResidualParameters
    certificate: Certificate


def scale_to_certify(
    parameters: ResidualParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, "n T d"],
    config: ResidualConfig,
    *,
    route: Route = "Z",
    accuracy: float = 1e-3,
    largest: float = 1e15,
) -> Certified:
    r"""
    .. math:: \text{Z:}\quad W_1 = 0,\; W_2 = c\,W_2^0, \qquad
        \text{H:}\quad W_2 = 0,\; W_1 = c\,W_1^0, \qquad c \text{ as small as certified}.

    On both routes the start predicts :math:`F = r_fZ` whatever c is, so that the conditions of
    :func:`certificate` hold from some c on if the singular values are positive: :math:`\rho` falls
    like 1/c. A scale where they begin to hold is bracketed by doubling and bisected to the
    relative ``accuracy``; on route Z it is the smallest.

    Raises ValueError if the start is uncertifiable at every scale up to ``largest`` (a singular Z
    or H, or a zero block to be scaled), and as :func:`certificate` does.
    """
    require_number("accuracy", accuracy, positive=True)
    _require_route(parameters, tokens, targets, config, route)
    zero, scaled = ("W1", "W2") if route == "Z" else ("W2", "W1")
    base = getattr(parameters, scaled)

    def at(scale: float) -> Certified:
        blocks = {zero: torch.zeros_like(getattr(parameters, zero)), scaled: scale * base}
        start = parameters._replace(**blocks)
        return Certified(scale, start, certificate(start, tokens, targets, config, route=route))

    upper = at(1.0)
    while not upper.certificate.ok:
        if upper.scale > largest or upper.certificate.smallest == 0.0:
            raise ValueError(
                f"parameters: expected a start that some scale certifies, got at scale "
                f"{upper.scale:.3g}: {upper.certificate.reason}; a singular Z or H has no rate"
            )
        upper = at(2 * upper.scale)
    if upper.certificate.error == 0.0:  # nothing to learn: every scale is certified
        return upper
    lower = upper.scale / 2 if upper.scale > 1 else 0.0
    while upper.scale - lower > accuracy * upper.scale:
        middle = at(0.5 * (lower + upper.scale))
        if middle.certificate.ok:
            upper = middle
        else:
            lower = middle.scale
    return upper


def _require_route(
    parameters: ResidualParameters,
    tokens: Tensor,
    targets: Tensor,
    config: ResidualConfig,
    route: Route,
) -> int:
    """Check one start and the sizes of its route; return nT."""
    require_one_of("route", route, ("Z", "H"))
    require_layer(parameters, tokens, config)
    require_targets(targets, tokens)
    if tokens.ndim != 3 or parameters.Q.ndim != 2 or targets.ndim != 3:
        raise ValueError(
            f"parameters: expected one start without leading axes, got tokens with {tokens.ndim} "
            f"axes and W_Q with {parameters.Q.ndim}; certify the seeds one by one"
        )
    rows, d, m = tokens.shape[0] * tokens.shape[1], config.dimension, config.hidden
    if route == "Z" and not (d >= rows and m >= d):
        raise ValueError(
            f"route: 'Z' needs d >= nT and m >= d, got d = {d}, nT = {rows}, m = {m}; use fewer "
            "tokens, or route 'H' with m >= nT"
        )
    if route == "H" and not m >= rows:
        raise ValueError(
            f"route: 'H' needs m >= nT, got m = {m}, nT = {rows}; widen the hidden layer"
        )
    return rows


def _smallest(matrix: Tensor, index: int) -> tuple[float, bool]:
    """The singular value number ``index``, and whether it is 0 to ``SINGULAR``."""
    values = torch.linalg.svdvals(matrix)
    smallest = float(values[index - 1])
    rounding = max(SINGULAR, max(matrix.shape) * torch.finfo(matrix.dtype).eps)
    return smallest, not smallest > rounding * float(values[0])
