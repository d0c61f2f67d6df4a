r"""The recurrent contrast: independent recurrent units, whose gradients sum over all T steps.

.. math:: h_{i,t} = \sigma(w_i \cdot x_t + u_i\, h_{i,t-1}), \quad h_{i,0} = 0, \qquad
    f(X) = m^{-1/2} \sum_i c_i\, h_{i,T}.

The closed back-propagation of one unit shows the sum of products that grows like
:math:`(s_1 |u|)^T`; :mod:`~attention_dynamics.models.recurrence` runs it for all units and samples.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_dynamics.models import recurrence
from attention_dynamics.models._pass import require_tokens
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.recurrence import RecurrentParameters
from attention_dynamics.validation import (
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_shape,
)


def forward(
    w: Float[Tensor, "m d"],
    u: Float[Tensor, " m"],
    c: Float[Tensor, " m"],
    tokens: Float[Tensor, "n T d"],
    activation: str | Activation = "tanh",
) -> Float[Tensor, " n"]:
    r"""
    .. math:: f(X_j) = m^{-1/2} \sum_i c_i\, h_{i,T}, \qquad
        h_{i,t} = \sigma(w_i \cdot x_t + u_i\, h_{i,t-1}), \quad h_{i,0} = 0.

    Returns (n,), differentiable by autograd and ``torch.func``; outside of them one state is held
    at a time. Raises ValueError for shapes that do not fit and for NaN or infinite tokens.
    """
    return recurrence.forward(RecurrentParameters(w, u, c), tokens, activation=activation)


def final_state_gradients(
    w: Float[Tensor, " d"],
    u: float | Float[Tensor, ""],
    tokens: Float[Tensor, "n T d"],
    activation: str | Activation = "tanh",
) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
    r"""
    .. math:: \partial_w h_T = \sum_t \delta_t\, x_t, \qquad
        \partial_u h_T = \sum_t \delta_t\, h_{t-1}, \qquad
        \delta_t = \sigma'(z_t) \prod_{k=t+1}^{T} u\, \sigma'(z_k), \quad
        z_t = w \cdot x_t + u\, h_{t-1}.

    One unit, n sequences: returns (n, d) and (n,). Bounded by
    :math:`s_1 \frac{(s_1|u|)^T - 1}{s_1|u| - 1} \max_t \|x_t\|` and
    :math:`s_0 s_1 \frac{(s_1|u|)^{T-1} - 1}{s_1|u| - 1}`: exponential in T for
    :math:`s_1 |u| > 1`. Raises ValueError for shapes that do not fit, NaN or infinite tokens.
    """
    require_tokens(tokens)
    require_shape("w", w, ("d",), {"d": tokens.shape[-1]})
    require_floating("w", w, tokens.dtype)
    require_finite("tokens", tokens)
    sigma = get_activation(activation)
    u = torch.as_tensor(u, dtype=tokens.dtype, device=tokens.device)
    require_shape("u", u, ())
    state = tokens.new_zeros(tokens.shape[0])
    previous, slopes = [], []
    for drive in (tokens @ w).unbind(dim=1):
        z = drive + u * state
        previous.append(state)
        slopes.append(sigma.first(z))
        state = sigma.value(z)
    deltas = [slopes[-1]]
    for slope in reversed(slopes[:-1]):
        deltas.append(deltas[-1] * u * slope)
    delta = torch.stack(deltas[::-1], dim=1)
    in_w = (delta[:, None, :] @ tokens).squeeze(1)
    return in_w, (delta * torch.stack(previous, dim=1)).sum(dim=1)


class IndRNN(nn.Module):
    r"""
    .. math:: f(X) = m^{-1/2} \sum_i c_i\, h_{i,T}, \qquad
        h_{i,t} = \sigma(w_i \cdot x_t + u_i\, h_{i,t-1}).

    Parameters ``w`` (m, d) standard Gaussian, ``c`` (m,) Rademacher, and ``u`` (m,) as
    ``recurrent_init`` says, which has no default because results depend on it: ``"normal"`` for
    :math:`u_i \sim \mathcal{N}(0, 1)`, a number r >= 0 for :math:`u_i = \pm r` with equal
    probability. Drawn on the CPU in float64, then cast and moved. Raises ValueError for another
    ``recurrent_init``, ``units`` or ``dimension`` below 1, a generator that is not on the CPU.
    """

    def __init__(
        self,
        units: int,
        dimension: int,
        *,
        recurrent_init: str | float,
        generator: torch.Generator,
        activation: str | Activation = "tanh",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        require_integer("units", units, minimum=1)
        require_integer("dimension", dimension, minimum=1)
        require_cpu_generator(generator)
        self.activation = get_activation(activation)
        self.recurrent_init = recurrent_init
        w = _normal((units, dimension), generator)
        c = _signs(units, generator)
        if recurrent_init == "normal":
            u = _normal((units,), generator)
        elif isinstance(recurrent_init, int | float) and 0 <= recurrent_init < math.inf:
            u = recurrent_init * _signs(units, generator)
        else:
            raise ValueError(
                f"recurrent_init: expected 'normal' for N(0, 1) or a finite number r >= 0 for "
                f"+-r with equal probability, got {recurrent_init!r}"
            )
        self.w, self.u, self.c = (
            nn.Parameter(block.to(device=device, dtype=dtype)) for block in (w, u, c)
        )

    @property
    def phi(self) -> RecurrentParameters:
        r""":math:`(w, u, c)`, the live parameters, attached to autograd."""
        return RecurrentParameters(self.w, self.u, self.c)

    def forward(self, tokens: Float[Tensor, "n T d"]) -> Float[Tensor, " n"]:
        r""":math:`f(X_j)`, (n,); see :func:`forward`."""
        return recurrence.forward(self.phi, tokens, activation=self.activation)

    def loss_and_gradients(
        self,
        tokens: Float[Tensor, "n T d"],
        targets: Float[Tensor, " n"],
        *,
        chunk: int | None = None,
        engine: str = "auto",
        validate: bool = True,
    ) -> tuple[Float[Tensor, ""], RecurrentParameters]:
        r"""
        .. math:: L_n = \frac1n \sum_j (f_j - y_j)^2, \qquad \nabla L_n.

        The loss, 0-d, and ``RecurrentParameters`` of gradients, by closed back-propagation
        and outside of autograd; ``.grad`` of the parameters is left alone.
        """
        return recurrence.loss_and_gradients(
            self.snapshot(copy=False), tokens, targets, activation=self.activation, chunk=chunk,
            engine=engine, validate=validate,
        )  # fmt: skip

    def snapshot(self, *, copy: bool = True) -> RecurrentParameters:
        r""":math:`(w, u, c)`, detached: copies, or views of the live memory with ``copy=False``."""
        parameters = self.phi.detach()
        return parameters.clone() if copy else parameters

    @torch.no_grad()
    def load(self, parameters: RecurrentParameters) -> None:
        r""":math:`(w, u, c) \leftarrow` ``parameters``, copied in place: optimisers stay attached.

        Raises ValueError when the shapes are not those of the model.
        """
        pairs = list(zip(parameters._fields, self.phi, parameters, strict=True))
        for name, own, new in pairs:
            if own.shape != new.shape:
                raise ValueError(
                    f"parameters.{name}: expected shape {tuple(own.shape)}, got "
                    f"{tuple(new.shape)}; load parameters of the same units and dimension"
                )
        for _, own, new in pairs:
            own.copy_(new)

    def extra_repr(self) -> str:
        """The sizes, activation and recurrent initialisation, for ``print(model)``."""
        units, dimension = self.w.shape
        return (
            f"units={units}, dimension={dimension}, activation={self.activation.name}, "
            f"recurrent_init={self.recurrent_init!r}"
        )


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _signs(count: int, generator: torch.Generator) -> Tensor:
    draws = torch.randint(0, 2, (count,), generator=generator, device="cpu")
    return 2.0 * draws.to(torch.float64) - 1.0
