r"""Transport maps: targets in the RKHS of the tangent kernel, and the multi-anchor teacher.

A transport map v sends a head :math:`(c, U, W)` to a direction
:math:`(v_c, v_u, v_w)`; the target is :math:`\tilde f(X; v)`, the expectation of the head's tangent
along it. Sup-norm bounds of v are the norm :math:`\nu` of the target. Tokens and anchors may have
any norm here: what is computed is exact. The bounds of it ask for
:func:`~attention_dynamics.theory.bounds.input_bounds`. Source: arXiv 2601.16514.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.data.tokens import Law, unit_ball_tokens
from attention_dynamics.models import _pass
from attention_dynamics.models._pass import require_tokens
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.attention import Query, head_features, resolve_query
from attention_dynamics.models.engines.selection import choose
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_integer,
    require_mask,
    require_number,
    require_shape,
)

_BLOCK = 2**18  # samples x heads whose contributions are held at once


@dataclass(frozen=True)
class TransportNorms:
    r""":math:`(\nu_c, \nu_u, \nu_w)`, the sizes of a transport map, block by block.

    Raises ValueError if one is negative or not finite, TypeError if it is no number.
    """

    c: float
    U: float
    W: float

    def __post_init__(self) -> None:
        for block in ("c", "U", "W"):
            require_number(
                f"norms.{block}", getattr(self, block), remedy="0 switches the block off"
            )

    @property
    def norm(self) -> float:
        r""":math:`\|\nu\| = \sqrt{\nu_c^2 + \nu_u^2 + \nu_w^2}`."""
        return math.sqrt(self.c**2 + self.U**2 + self.W**2)


@dataclass(frozen=True, eq=False)
class MultiAnchorTransport:
    r"""
    .. math:: v_c = \nu_c \sum_r \beta_r\, \sigma(s_r), \qquad
        v_u = \nu_u\, c \sum_r \beta_r\, \sigma'(s_r)\, a_r, \qquad
        v_w = c \sum_r \beta_r\, \mathrm{clip}_{\nu_w}\bigl(\sigma'(s_r)\, M_r U q_r^\top\bigr),

    where :math:`s_r = U \cdot a_r`, :math:`a_r` and :math:`M_r` are those of the anchor
    :math:`X_r`, :math:`\sum_r |\beta_r| = 1` and
    :math:`\mathrm{clip}_\nu(A) = A \min(1, \nu/\|A\|_F)`. The whole matrix W enters, through
    :math:`Wq`; taking its diagonal gives another map. With a logit ``scale`` other than 1,
    :math:`q_r` stands for scale times the query, here and in :func:`head_contributions`.

    ``anchors`` (R, T, d), ``coefficients`` (R,), ``query`` (d,) or ``"last"`` (the last token of
    each anchor). Raises ValueError for wrong shapes, NaN or infinity, another word for the query, a
    negative scale, or coefficients whose absolute values do not sum to 1; TypeError for dtypes that
    differ or norms that are no :class:`TransportNorms`.
    """

    anchors: Float[Tensor, "R T d"]
    coefficients: Float[Tensor, " R"]
    norms: TransportNorms
    query: Query
    activation: str | Activation = "tanh"
    scale: float = 1.0

    def __post_init__(self) -> None:
        require_shape("anchors", self.anchors, ("R", "T", "d"))
        require_finite("anchors", self.anchors)
        require_shape("coefficients", self.coefficients, ("R",), {"R": self.anchors.shape[0]})
        require_floating("coefficients", self.coefficients, self.anchors.dtype)
        require_finite("coefficients", self.coefficients)
        total = float(self.coefficients.abs().sum(dtype=torch.float64))
        if abs(total - 1.0) > 1e-5:
            raise ValueError(
                f"coefficients: expected absolute values that sum to 1, got {total:.6g}; "
                "divide them by that sum and put the size of the target into norms"
            )
        if isinstance(self.query, Tensor):
            require_shape("query", self.query, ("d",), {"d": self.anchors.shape[-1]})
        resolve_query(self.anchors, self.query)  # for its checks of the word, dtype and values
        if not isinstance(self.norms, TransportNorms):
            raise TypeError(
                f"norms: expected TransportNorms(c, U, W), got {self.norms!r}; name the blocks"
            )
        require_number("scale", self.scale)
        get_activation(self.activation)

    def __call__(self, parameters: Parameters, *, engine: str = "auto") -> Parameters:
        r""":math:`(c, U, W) \mapsto (v_c, v_u, v_w)`, shapes (m,), (m, d), (m, d, d).

        The anchors are collapsed here, once: whatever their number, the target is then one tangent.

        Raises ValueError or TypeError for parameters whose shape or dtype does not fit the anchors.
        """
        parameters.require_valid()
        sigma, beta = get_activation(self.activation), self.coefficients
        features = head_features(
            self.anchors, parameters.W, parameters.U, self.query, scale=self.scale, engine=engine
        )
        slope = sigma.first(features.s)
        queries = self.scale * resolve_query(self.anchors, self.query)
        sizes = (
            slope.abs()
            * torch.linalg.vector_norm(features.r, dim=-1)
            * torch.linalg.vector_norm(queries, dim=-1)[:, None]
        )
        clip = torch.where(sizes > self.norms.W, self.norms.W / sizes, torch.ones_like(sizes))
        weights = beta[:, None] * slope * parameters.c
        return Parameters(
            self.norms.c * (beta @ sigma.value(features.s)),
            self.norms.U * torch.einsum("rm,rmd->md", weights, features.a),
            torch.einsum("rmd,re->mde", (weights * clip)[..., None] * features.r, queries),
        )

    def sup_norm_bounds(self, coefficient: float = 1.0) -> TransportNorms:
        r"""
        .. math:: |v_c| \le \nu_c s_0, \qquad
            \|v_u\| \le \nu_u s_1 |c| \max_{r,t} \|x_{r,t}\|, \qquad \|v_w\|_F \le \nu_w |c|

        for every head with :math:`|c| \le` ``coefficient``. With tokens in the unit ball,
        :math:`s_0 = s_1 = 1` and :math:`|c| = 1` these are the norms :math:`\nu` themselves;
        :math:`s_1 > 1`, as for ``erf_plain``, exceeds :math:`\nu_u`.
        """
        s0, s1, _ = get_activation(self.activation).bounds
        longest = float(torch.linalg.vector_norm(self.anchors, dim=-1).max())
        return TransportNorms(
            self.norms.c * s0,
            self.norms.U * s1 * coefficient * longest,
            self.norms.W * coefficient,
        )


def random_multi_anchor(
    anchors_count: int,
    length: int,
    dimension: int,
    *,
    generator: torch.Generator,
    norms: TransportNorms,
    query: Query,
    activation: str | Activation = "tanh",
    law: Law = "iid",
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> MultiAnchorTransport:
    r""":math:`\beta_r = g_r / \sum_k |g_k|`, g standard Gaussian, at R random anchors.

    The anchors are drawn by :func:`attention_dynamics.data.tokens.unit_ball_tokens` with ``law``;
    a query tensor is moved to ``dtype`` and ``device``. Raises ValueError for a size below 1, an
    unknown law or activation, or a generator that is not on the CPU.
    """
    require_integer("anchors_count", anchors_count, minimum=1)
    anchors = unit_ball_tokens(
        anchors_count, length, dimension, generator=generator, law=law, dtype=dtype, device=device
    )
    normal = torch.randn(anchors_count, generator=generator, dtype=torch.float64, device="cpu")
    coefficients = (normal / normal.abs().sum()).to(dtype=dtype, device=device)
    if isinstance(query, Tensor):
        query = query.to(dtype=dtype, device=device)
    return MultiAnchorTransport(anchors, coefficients, norms, query, activation, scale)


def head_contributions(
    tokens: Float[Tensor, "n T d"],
    transport: MultiAnchorTransport,
    parameters: Parameters,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
    direction: Parameters | None = None,
    engine: str = "auto",
) -> Float[Tensor, "n m"]:
    r"""
    .. math:: z_i(X) = v_c\, \sigma(s) + c\, \sigma'(s)
        \bigl(\langle v_u, a \rangle + \langle v_w, (M U) q^\top \rangle\bigr),

    one number a sample and head, evaluated with the query, activation and scale of the transport.
    ``direction`` is v at these heads if it was computed already. The bracket is the slope of s
    along v, so no anchor, and neither a nor M U, is formed: the memory is n m.

    Raises ValueError or TypeError for tokens that are not finite or do not fit the parameters.
    """
    require_sequences(tokens, transport, mask)
    parameters.require_valid()
    require_floating("parameters", parameters.U, tokens.dtype)
    inputs = _pass.prepare(tokens, transport.query, mask, dimension=parameters.dimension)
    v = transport(parameters, engine=engine) if direction is None else direction
    return contributions(inputs, transport, parameters, v, engine)


def contributions(
    inputs: _pass.Inputs,
    transport: MultiAnchorTransport,
    parameters: Parameters,
    v: Parameters,
    engine: str,
) -> Float[Tensor, "n m"]:
    """What :func:`head_contributions` returns, for inputs that were checked and parts of heads."""
    c, U, W = parameters
    chosen = choose(engine, inputs, U.shape[0], *parameters, *v)
    s, slope = chosen.slopes(inputs, U, W, v.U, v.W, transport.scale)
    value, first = get_activation(transport.activation).value_and_first(s)
    return v.c * value + c * first * slope


def transported_function(
    tokens: Float[Tensor, "n T d"],
    transport: MultiAnchorTransport,
    parameters: Parameters,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
    engine: str = "auto",
) -> Float[Tensor, " n"]:
    r""":math:`\frac1m \sum_i z_i(X) = \langle \nabla f(X; \phi_0),\; v/\sqrt m \rangle`.

    The average over the heads of ``parameters`` (:math:`\phi_0`) of :func:`head_contributions`:
    what a network of m heads makes of the target in its tangent space. With paired heads the two of
    a pair contribute the same, so only m/2 of them are independent. Samples are handled in chunks.

    Raises ValueError or TypeError for tokens that are not finite or do not fit the parameters.
    """
    require_sequences(tokens, transport, mask)
    direction = transport(parameters, engine=engine)
    chunk = max(1, _BLOCK // parameters.heads)
    parts = []
    for start in range(0, tokens.shape[0], chunk):
        rows = slice(start, start + chunk)
        kept = None if mask is None else mask[rows]
        z = head_contributions(
            tokens[rows], transport, parameters, mask=kept, direction=direction, engine=engine
        )
        parts.append(z.mean(dim=-1))
    return torch.cat(parts)


def require_sequences(
    tokens: Float[Tensor, "n T d"],
    transport: MultiAnchorTransport,
    mask: Bool[Tensor, "n T"] | None,
) -> None:
    """Check tokens and mask against the anchors, once, before they are cut into chunks."""
    require_tokens(tokens, transport.anchors.shape[-1])
    require_floating("tokens", tokens, transport.anchors.dtype)
    if mask is not None:
        require_mask(mask, tokens.shape[0], tokens.shape[1])


class ApproximationError(NamedTuple):
    r""":math:`\max_j |e_j|` and :math:`\sqrt{\tfrac1n \sum_j e_j^2}`."""

    sup: float
    rms: float


def approximation_error(
    teacher_values: Float[Tensor, " n"],
    transport: MultiAnchorTransport,
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    mask: Bool[Tensor, "n T"] | None = None,
    engine: str = "auto",
) -> ApproximationError:
    r""":math:`e_j = \frac1m \sum_i z_i(X_j) - \tilde f(X_j; v)`: its maximum and root mean square.

    ``teacher_values`` (n,) stand for :math:`\tilde f`; their own Monte-Carlo error
    (:meth:`attention_dynamics.theory.teacher.Teacher.standard_error`) is part of the result.

    Raises ValueError or TypeError for values that are not finite or do not fit the tokens.
    """
    require_sequences(tokens, transport, mask)
    require_shape("teacher_values", teacher_values, ("n",), {"n": tokens.shape[0]})
    require_finite("teacher_values", teacher_values)
    values = transported_function(tokens, transport, parameters, mask=mask, engine=engine)
    error = (values - teacher_values).double()
    return ApproximationError(float(error.abs().max()), float(error.square().mean().sqrt()))
