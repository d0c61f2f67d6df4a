r"""Back-propagation through time of the independent recurrent units, in closed form.

.. math:: f(X) = m^{-1/2} \sum_i c_i\, h_{i,T}, \qquad h_{i,t} = \sigma(z_{i,t}), \quad
    z_{i,t} = w_i \cdot x_t + u_i\, h_{i,t-1}, \quad h_{i,0} = 0.

The chain rule passes from :math:`z_t` to :math:`z_{t-1}` through the number
:math:`\partial z_t / \partial z_{t-1} = u\,\sigma'(z_{t-1})`, one for each unit. Hence, with
:math:`g_j = \partial L / \partial f(X_j)`, the derivatives :math:`\delta_t = \partial L / \partial
z_t` of each sample and unit are

.. math:: \delta_T = g\, m^{-1/2} c\, \sigma'(z_T), \qquad
    \delta_{t-1} = \delta_t\, u\, \sigma'(z_{t-1}),

and the parameters, which enter each :math:`z_t` linearly, collect them:

.. math:: \partial_w L = \sum_{j,t} \delta_t\, x_t^\top, \qquad
    \partial_u L = \sum_{j,t} \delta_t\, h_{t-1}, \qquad
    \partial_c L = m^{-1/2} \sum_j g_j\, h_T.

Nothing is clipped: where :math:`|u|\sigma' > 1` over many steps :math:`\delta` leaves the range of
the dtype, the gradient is infinite or NaN, as that of automatic differentiation is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._network import require_per_sample
from attention_dynamics.models._pass import require_tokens
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.engines import recurrence as engines
from attention_dynamics.models.places import Places
from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_integer,
    require_shape,
    working_dtype,
)


class RecurrentParameters(NamedTuple):
    r"""
    .. math:: (w_i, u_i, c_i)_{i=1}^m, \qquad
        w_i \in \mathbb{R}^d,\; u_i \in \mathbb{R},\; c_i \in \mathbb{R}.

    Shapes: ``w`` (m, d), ``u`` (m,), ``c`` (m,). The same tuple holds gradients.
    """

    w: Float[Tensor, "m d"]
    u: Float[Tensor, " m"]
    c: Float[Tensor, " m"]

    @property
    def units(self) -> int:
        """Number of units m."""
        return self.w.shape[0]

    @property
    def dimension(self) -> int:
        """Token dimension d."""
        return self.w.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.w.dtype

    def map(self, function: Callable[[Tensor], Tensor]) -> RecurrentParameters:
        r""":math:`(F(w), F(u), F(c))`."""
        return RecurrentParameters(*map(function, self))

    def minus(self, other: RecurrentParameters) -> RecurrentParameters:
        """Return the difference, block by block."""
        return RecurrentParameters(*(a - b for a, b in zip(self, other, strict=True)))

    def scaled(self, factor: float | Tensor) -> RecurrentParameters:
        """Return the multiple, block by block."""
        return self.map(lambda block: block * factor)

    def detach(self) -> RecurrentParameters:
        """The same tensors outside of any autograd graph."""
        return self.map(Tensor.detach)

    def clone(self) -> RecurrentParameters:
        """Copies that share no memory with these."""
        return self.map(torch.clone)

    def require_valid(self) -> None:
        """Check shapes (m, d), (m,), (m,) and one floating dtype.

        Raises ValueError for a shape, TypeError for a dtype.
        """
        require_shape("w", self.w, ("m", "d"))
        require_floating("w", self.w)
        for name, block in (("u", self.u), ("c", self.c)):
            require_shape(name, block, ("m",), {"m": self.units}, remedy="one number a unit")
            require_floating(name, block, self.dtype)


def forward(
    parameters: RecurrentParameters,
    tokens: Float[Tensor, "n T d"],
    *,
    activation: str | Activation = "tanh",
    chunk: int | None = None,
    engine: str = "auto",
    places: Places | None = None,
    validate: bool = True,
) -> Float[Tensor, " n"]:
    r"""
    .. math:: f(X_j) = m^{-1/2} \sum_i c_i\, h_{i,T}.

    Returns (n,), differentiable by autograd and ``torch.func``; outside of them no more than the
    states of one step are held, whatever T. ``chunk`` is a number of samples handled at once,
    ``engine`` and ``places`` as in :func:`loss_and_gradients`. Raises ValueError for shapes that
    do not fit and for NaN or infinite tokens, TypeError for dtypes that do not fit;
    ``validate=False`` skips these checks.
    """
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, chunk, validate)
    run = engines.choose(engine, tokens, sigma, *parameters)
    return run(parameters, tokens, None, sigma, chunk, places)[0]


def loss_and_gradients(
    parameters: RecurrentParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    *,
    activation: str | Activation = "tanh",
    chunk: int | None = None,
    engine: str = "auto",
    places: Places | None = None,
    validate: bool = True,
) -> tuple[Float[Tensor, ""], RecurrentParameters]:
    r"""
    .. math:: L_n = \frac1n \sum_j \bigl(f(X_j) - y_j\bigr)^2, \qquad \nabla L_n \text{ by }
        g_j = \frac2n \bigl(f(X_j) - y_j\bigr).

    Returns the loss, 0-d, and the gradients in the shape of the parameters. ``engine`` is
    ``"auto"`` (the C++ kernel for tanh on a CPU, else the closed form on blocks of ``chunk``
    samples), ``"fused"``, ``"eager"`` or ``"reference"``. ``places`` are those of
    these tokens, for a caller who looked for them once and takes many steps. Errors are those of
    :func:`forward`; ``targets`` (n,) must be finite.
    """
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, chunk, validate)
    require_per_sample("targets", targets, tokens, validate)
    targets = targets.to(tokens.dtype)
    run = engines.choose(engine, tokens, sigma, targets, *parameters)
    values, gradients = run(parameters, tokens, targets, sigma, chunk, places)
    assert gradients is not None
    return (values - targets).square().mean(), RecurrentParameters(*gradients)


def _prepare(
    parameters: RecurrentParameters,
    tokens: Tensor,
    activation: str | Activation,
    chunk: int | None,
    validate: bool,
) -> tuple[Activation, Tensor, RecurrentParameters]:
    """Check, and bring half precision to float32."""
    if validate:
        parameters.require_valid()
        require_tokens(tokens, parameters.dimension)
        require_floating("w", parameters.w, tokens.dtype)
        require_finite("tokens", tokens)
        if chunk is not None:
            require_integer("chunk", chunk, minimum=1, remedy="pass None for the default")
    dtype = working_dtype(tokens.dtype)
    parameters = parameters.map(lambda block: block.to(dtype))
    return get_activation(activation), tokens.to(dtype), parameters
