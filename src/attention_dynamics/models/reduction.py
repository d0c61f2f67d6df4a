r"""A fixed query sees W only through :math:`w_i = W_i q`: training in :math:`\mathbb R^d`, exactly.

.. math:: \nabla_{W_i} L = (\nabla_{w_i} L)\, q^\top \quad\Longrightarrow\quad
    W_i = W_i^0 + \frac{(w_i - w_i^0)\, q^\top}{\|q\|^2} \text{ at every step.}

A step :math:`\eta` on W is a step :math:`\eta \|q\|^2` on w, and the ball
:math:`\|W_i - W_i^0\|_F \le \rho_w/\sqrt m` is the ball
:math:`\|w_i - w_i^0\| \le \rho_w \|q\| / \sqrt m`: projected gradient descent on (c, U, w) with
this step and this radius gives the same iterates. The step of w alone changes, those of c and U
do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.parameters import Parameters
from attention_dynamics.validation import require_finite, require_floating, require_shape


class Reduced(NamedTuple):
    r"""
    .. math:: (c_i, U_i, w_i)_{i=1}^m, \qquad w_i = W_i q, \qquad
        \eta_w = \eta \|q\|^2, \quad \rho'_w = \rho_w \|q\|.

    Shapes: ``c`` (m,), ``U`` (m, d), ``w`` (m, d); ``step_factor`` is :math:`\|q\|^2`,
    ``radius_factor`` is :math:`\|q\|`, both 0-d.
    """

    c: Float[Tensor, " m"]
    U: Float[Tensor, "m d"]
    w: Float[Tensor, "m d"]
    step_factor: Float[Tensor, ""]
    radius_factor: Float[Tensor, ""]


def reduce(parameters: Parameters, query: Float[Tensor, " d"]) -> Reduced:
    r""":math:`(c, U, w)` with :math:`w_i = W_i q`, and the factors of the step and the radius of w.

    Raises ValueError for a query that is not one finite vector (d,) other than 0: with q = 0 the
    logits vanish and W does not matter; TypeError for another dtype.
    """
    _require_query(parameters, query)
    norm = torch.linalg.vector_norm(query)
    return Reduced(parameters.c, parameters.U, parameters.W @ query, norm.square(), norm)


def lift(
    c: Float[Tensor, " m"],
    U: Float[Tensor, "m d"],
    w: Float[Tensor, "m d"],
    *,
    initial: Parameters,
    query: Float[Tensor, " d"],
) -> Parameters:
    r"""
    .. math:: W_i = W_i^0 + \frac{(w_i - W_i^0 q)\, q^\top}{\|q\|^2}.

    The parameters that descent from ``initial`` reaches when it reaches (c, U, w): of all W with
    :math:`W_i q = w_i` the nearest to the start. Raises like :func:`reduce`, and ValueError for a
    w of another shape.
    """
    _require_query(initial, query)
    require_shape("w", w, ("m", "d"), {"m": initial.heads, "d": initial.dimension})
    change = w - initial.W @ query
    return Parameters(c, U, initial.W + change[:, :, None] * (query / query.square().sum()))


def _require_query(parameters: Parameters, query: Tensor) -> None:
    require_shape("query", query, ("d",), {"d": parameters.dimension})
    require_floating("query", query, parameters.dtype)
    require_finite("query", query)
    if not query.any():
        raise ValueError(
            "query: expected a vector other than 0, got zeros; the logits vanish and W plays no "
            "part, so there is nothing to reduce"
        )
