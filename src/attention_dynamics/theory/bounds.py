r"""Constants of the whole network on the projection set, and the errors they bound.

All are averages over heads of the constants of one head (``theory.constants``) and contain no
sequence length T. Derived here for the system of arXiv 2601.16514, which states the rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.data.tokens import check_token_norms
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.attention import Query, resolve_query
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.constants import block_curvature, block_slope, head_lipschitz
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import require_integer, require_number


class InputBounds(NamedTuple):
    r""":math:`\|x_t\| \le b` and :math:`\gamma\|q\| \le b_q`: the fields are b and :math:`b_q`.

    Every bound of a network asks for them. :func:`input_bounds` checks data and returns them;
    ``UNIT_BALL`` is for a statement about all inputs with b = :math:`b_q` = 1.
    """

    token_bound: float
    query_bound: float


UNIT_BALL = InputBounds(1.0, 1.0)
r""":math:`b = b_q = 1`, the assumption of the theory; nothing is checked."""


def require_inputs(inputs: InputBounds) -> dict[str, float]:
    """The two bounds by name, after checking that they are bounds and not tokens."""
    if not isinstance(inputs, InputBounds):
        raise TypeError(
            f"inputs: expected InputBounds, got {type(inputs).__name__}; make them with "
            "input_bounds(tokens, query), which checks the norms"
        )
    require_number("inputs.token_bound", inputs.token_bound, positive=True)
    require_number("inputs.query_bound", inputs.query_bound)
    return inputs._asdict()


def input_bounds(
    tokens: Float[Tensor, "n T d"],
    query: Query,
    *,
    token_bound: float | None = None,
    query_bound: float | None = None,
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
) -> InputBounds:
    r""":math:`(b, \gamma b_q)` after checking :math:`\|x_t\| \le b` and :math:`\|q\| \le b_q`.

    b and :math:`b_q` are 1 unless given; with ``query="last"`` the query is a token and
    :math:`b_q = b`. ``scale`` is the logit scale :math:`\gamma`. One call a fit is enough: its
    result goes to every bound as ``inputs``.

    Raises ValueError if a token or query is longer than its bound, NaN or infinite, or if
    ``query_bound`` is given for ``query="last"``; TypeError for another dtype of the query.
    """
    require_number("scale", scale)
    b = check_token_norms(tokens, token_bound, mask=mask)
    resolve_query(tokens, query, mask)  # for its checks
    if isinstance(query, str):
        if query_bound is not None:
            raise ValueError(
                f"query_bound: expected None for query='last', got {query_bound}; the query is a "
                f"token, bounded by token_bound = {b:g}"
            )
        return InputBounds(b, scale * b)
    limit = 1.0 if query_bound is None else query_bound
    require_number("query_bound", limit)
    longest = float(torch.linalg.vector_norm(query.detach(), dim=-1, dtype=torch.float64).max())
    if not longest <= limit * (1 + 8 * torch.finfo(query.dtype).eps):
        raise ValueError(
            f"query: expected a norm <= {limit:g}, got {longest:.6g}; pass "
            f"query_bound={longest * (1 + 1e-3):.4g} for the rescaled constants, or shorten it"
        )
    return InputBounds(b, scale * limit)


@dataclass(frozen=True)
class NetworkConstants:
    r"""
    .. math:: \sup_{\Omega_\rho}\|\nabla f\|^2 \le G^2, \quad
        \sup_{\Omega_\rho}|f - f(\phi_0)| \le F, \quad
        \sup_{\Omega_\rho}|f - f_{\mathrm{lin}}| \le E_{\mathrm{lin}}/\sqrt m, \quad
        |f(\phi^\star) - f(\phi) - \langle\nabla f(\phi), \phi^\star - \phi\rangle|
        \le E_{\mathrm{rem}}/\sqrt m

    for every input within the bounds, where :math:`\phi \in \Omega_\rho` and
    :math:`\phi^\star \in \Omega_\nu`. Fields ``gradient_squared``, ``output``, ``linearisation``,
    ``remainder`` (None without transport norms) and ``heads`` (m).
    """

    gradient_squared: float
    output: float
    linearisation: float
    remainder: float | None
    heads: int

    @property
    def linearisation_error(self) -> float:
        r""":math:`E_{\mathrm{lin}}/\sqrt m`."""
        return self.linearisation / math.sqrt(self.heads)

    @property
    def remainder_error(self) -> float | None:
        r""":math:`E_{\mathrm{rem}}/\sqrt m`."""
        return None if self.remainder is None else self.remainder / math.sqrt(self.heads)


def network_constants(
    initial: Parameters,
    radii: Radii,
    *,
    inputs: InputBounds,
    transport_norms: TransportNorms | None = None,
    activation: str | Activation = "tanh",
) -> NetworkConstants:
    r"""
    .. math:: G^2 = s_0^2 + s_1^2\,\overline{C_i^2 \max(b, b^2 b_q R_i)^2}, \qquad
        F = s_0\rho_c + s_1\,\overline{|c_i^0| P_\rho(R_i)}, \\
        E_{\mathrm{lin}} = \rho_c s_1\,\overline{P_\rho(R_i)}
        + \tfrac12\,\overline{|c_i^0| Q_\rho(R_i)}, \qquad
        E_{\mathrm{rem}} = (\rho_c + \nu_c) s_1\,\overline{P_{\rho+\nu}(R_i)}
        + \tfrac12\,\overline{C_i Q_{\rho+\nu}(R_i)},

    bars are averages over the m heads of ``initial`` (:math:`\phi_0`),
    :math:`R_i = \|U_i^0\| + \rho_u/\sqrt m`, :math:`C_i = |c_i^0| + \rho_c/\sqrt m`. P and Q are
    :func:`~attention_dynamics.theory.constants.block_slope` and
    :func:`~attention_dynamics.theory.constants.block_curvature`. ``inputs`` come from
    :func:`input_bounds`, which checks the tokens; ``UNIT_BALL`` speaks of all inputs of norm at
    most 1. See :class:`NetworkConstants`.

    Raises ValueError if a radius is None (a free block has no bound) or below its transport norm,
    TypeError if ``radii`` or ``inputs`` is something else.
    """
    rho = TransportNorms(
        *bounded_radii(
            radii,
            remedy="a block without projection has no bound: pass the radius it stayed within, "
            "for example the largest distance in the history",
        )
    )
    if transport_norms is not None:
        require_radii_above(rho, transport_norms)
    initial.require_valid("initial")
    sigma = get_activation(activation)
    s0, s1, _ = sigma.bounds
    root = math.sqrt(initial.heads)
    norms = initial.detach().to(device="cpu", dtype=torch.float64).block_norms()
    c0, R = norms.c.numpy(), norms.U.numpy() + rho.U / root
    C = c0 + rho.c / root
    b = require_inputs(inputs)
    slope = block_slope(R, rho.U, rho.W, **b)
    curvature = block_curvature(R, rho.U, rho.W, sigma, **b)
    remainder = None
    if transport_norms is not None:
        r_c, r_U, r_W = (
            rho.c + transport_norms.c,
            rho.U + transport_norms.U,
            rho.W + transport_norms.W,
        )
        remainder = r_c * s1 * np.mean(block_slope(R, r_U, r_W, **b)) + 0.5 * np.mean(
            C * block_curvature(R, r_U, r_W, sigma, **b)
        )
    return NetworkConstants(
        gradient_squared=float(s0**2 + np.mean(C**2 * head_lipschitz(R, s1, **b) ** 2)),
        output=float(s0 * rho.c + s1 * np.mean(c0 * slope)),
        linearisation=float(rho.c * s1 * np.mean(slope) + 0.5 * np.mean(c0 * curvature)),
        remainder=None if remainder is None else float(remainder),
        heads=initial.heads,
    )


class IndRNNGradientBounds(NamedTuple):
    r"""Bounds of :math:`\|\partial_w h_T\|` (``w``) and :math:`|\partial_u h_T|` (``u``)."""

    w: float
    u: float


def indrnn_gradient_bounds(
    u: float, T: int, s0: float = 1.0, s1: float = 1.0, *, token_bound: float = 1.0
) -> IndRNNGradientBounds:
    r"""
    .. math:: \|\partial_w h_T\| \le s_1 b\, \frac{(s_1|u|)^T - 1}{s_1|u| - 1}, \qquad
        |\partial_u h_T| \le s_0 s_1\, \frac{(s_1|u|)^{T-1} - 1}{s_1|u| - 1}

    for one unit :math:`h_t = \sigma(w \cdot x_t + u h_{t-1})`, :math:`h_0 = 0`,
    :math:`\|x_t\| \le b`; at :math:`s_1|u| = 1` they are :math:`T s_1 b` and
    :math:`(T-1) s_0 s_1`. Unlike every constant of the Transformer they grow with T, exponentially
    if :math:`s_1|u| > 1`. For tanh the first is attained: w orthogonal to the tokens
    :math:`x_t = \mathrm{sgn}(u)^{T-t} x`. The second is not. Infinite where it overflows.

    Raises ValueError if u is not finite, T < 1, or a bound is negative or not finite.
    """
    if not math.isfinite(u):
        raise ValueError(f"u: expected a finite number, got {u}")
    require_integer("T", T, minimum=1, remedy="it counts recurrent steps")
    for name, value in (("s0", s0), ("s1", s1), ("token_bound", token_bound)):
        require_number(name, value)
    ratio = s1 * abs(float(u))
    return IndRNNGradientBounds(
        s1 * token_bound * _geometric_sum(ratio, T), s0 * s1 * _geometric_sum(ratio, T - 1)
    )


def _geometric_sum(ratio: float, terms: int) -> float:
    """1 + ratio + ... + ratio^(terms - 1), accurate for every ratio near 1."""
    if terms == 0 or ratio == 0.0:
        return float(min(terms, 1))
    if ratio == 1.0:
        return float(terms)
    try:
        return math.expm1(terms * math.log(ratio)) / (ratio - 1.0)
    except OverflowError:
        return math.inf


def require_radii_above(rho: TransportNorms, nu: TransportNorms) -> None:
    r"""Check :math:`\rho \ge \nu` block by block; ValueError names the block."""
    for block in ("c", "U", "W"):
        radius, norm = getattr(rho, block), getattr(nu, block)
        if radius < norm:
            raise ValueError(
                f"radii.{block}: expected at least transport_norms.{block} = {norm:g}, got "
                f"{radius:g}; the bounds need the target inside of the projection set: raise "
                f"radii.{block} or shrink the target"
            )
