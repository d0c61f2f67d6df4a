r"""The shallow Transformer: value, loss, and an ``nn.Module`` for any torch optimiser.

.. math:: f(X; \phi) = m^{-1/2} \sum_{i=1}^m c_i\, \sigma(U_i \cdot a_i),
    \qquad a_i = X\,\mathrm{softmax}(\gamma X^\top W_i q).

Arguments common to all functions: ``parameters`` (c, U, W), ``tokens`` (n, T, d), ``query`` a
tensor (d,) or ``"last"``, ``activation`` a name or an ``Activation``, ``scale`` the logit scale
:math:`\gamma`, ``mask`` (n, T) boolean with True = keep, ``chunk`` the samples handled at once,
``engine`` what computes it: ``"auto"``, the fastest here, or a name listed in ``models.engines``.
All raise ValueError for wrong shapes, NaN or infinite tokens and samples without keys, TypeError
for dtypes that do not fit; ``validate=False`` skips these checks in inner loops. Half precision
is computed, and returned, in float32. Source: arXiv 2601.16514.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from attention_dynamics.models import gradients
from attention_dynamics.models._network import (
    prepare,
    require_per_sample,
)
from attention_dynamics.models._pass import Query
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.engines import selection
from attention_dynamics.models.gradients import (
    head_second_derivative,
    jvp,
    loss_and_gradients,
    per_sample_gradients,
    vjp,
)
from attention_dynamics.models.parameters import Parameters, symmetric_initialisation
from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_integer,
    require_one_of,
    require_shape,
)

__all__ = [
    "ShallowTransformer",
    "forward",
    "from_column_layout",
    "head_second_derivative",
    "jvp",
    "logit_scale",
    "loss",
    "loss_and_gradients",
    "per_sample_gradients",
    "vjp",
]


def forward(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> Float[Tensor, " n"]:
    r"""
    .. math:: f(X_j; \phi) = m^{-1/2} \sum_i c_i\, \sigma(U_i \cdot a_i(X_j)).

    Returns (n,). Differentiable by autograd and by every transform of ``torch.func``, which see the
    formulas of the reference engine: what the closed forms are compared with. Zero, exactly, at
    the symmetric initialisation: the pairs are summed first.
    """
    sigma, inputs, parameters = prepare(
        parameters, tokens, query, activation, mask, validate, chunk
    )
    chosen = selection.choose(engine, inputs, parameters.heads, *parameters)
    return chosen.values(inputs, parameters, sigma, scale, chunk=chunk)


def loss(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, " n"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    chunk: int | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> Float[Tensor, ""]:
    r"""
    .. math:: L_n(\phi) = \frac1n \sum_j \bigl(f(X_j; \phi) - y_j\bigr)^2.

    Returns a 0-d tensor, differentiable by autograd. ``targets`` (n,) must be finite.
    """
    require_per_sample("targets", targets, tokens, validate)
    values = forward(
        parameters, tokens, query=query, activation=activation, scale=scale, mask=mask,
        chunk=chunk, engine=engine, validate=validate,
    )  # fmt: skip
    return (values - targets.to(values.dtype)).square().mean()


def logit_scale(heads: int, exponent: float) -> float:
    r"""
    .. math:: \gamma = m^{\beta}, \qquad \beta \in \{0, -\tfrac12, -1\}.

    :math:`\beta = 0` is the paper's model; below it the kernel part of W vanishes like
    :math:`m^{2\beta}`. The scale 1/m of Wu et al. (2023), Lemma 1, multiplies a product of two
    Gaussian matrices and is :math:`\beta = -\tfrac12` for the collapsed W.
    Raises ValueError for another exponent or m < 1.
    """
    require_integer("heads", heads, minimum=1)
    require_one_of("exponent", exponent, (0, -0.5, -1), remedy="it is the power of m on the logits")
    return float(heads) ** exponent


def from_column_layout(tokens: Float[Tensor, "n d T"]) -> Float[Tensor, "n T d"]:
    r"""
    .. math:: X \in \mathbb{R}^{d \times T} \;\mapsto\; (x_1, \dots, x_T)^\top
        \in \mathbb{R}^{T \times d}.

    Converts an array (n, d, T), tokens as columns like in the paper, to the layout (n, T, d) of
    the library; the result is contiguous. Raises ValueError when there are not three axes.
    """
    require_shape("tokens", tokens, ("n", "d", "T"))
    return tokens.transpose(1, 2).contiguous()


class ShallowTransformer(nn.Module):
    r"""
    .. math:: f(X; \phi) = m^{-1/2} \sum_{i=1}^m c_i\, \sigma(U_i \cdot a_i),
        \qquad a_i = X\,\mathrm{softmax}(m^{\beta} X^\top W_i q),
        \quad \beta = \text{logit\_exponent}.

    ``c`` (m,), ``U`` (m, d), ``W`` (m, d, d) are ``nn.Parameter``; ``query`` is a buffer (d,) or
    ``"last"``. Calling the module on tokens (n, T, d) returns (n,) through plain formulas that
    autograd and ``torch.func`` differentiate; :meth:`loss_and_gradients` is the closed form.
    Raises ValueError for parameters or a query of the wrong shape, an unknown activation or
    exponent. Source: arXiv 2601.16514.
    """

    c: nn.Parameter
    U: nn.Parameter
    W: nn.Parameter
    query: Query

    def __init__(
        self,
        parameters: Parameters,
        *,
        query: Query,
        activation: str | Activation = "tanh",
        logit_exponent: float = 0.0,
    ) -> None:
        super().__init__()
        parameters.require_valid()
        self.c, self.U, self.W = (nn.Parameter(block.detach().clone()) for block in parameters)
        self.activation = get_activation(activation)
        self.logit_exponent = logit_exponent
        self.scale = logit_scale(parameters.heads, logit_exponent)
        if isinstance(query, Tensor):
            require_shape("query", query, ("d",), {"d": parameters.dimension})
            require_floating("query", query, parameters.dtype)
            require_finite("query", query)
            self.register_buffer("query", query.detach().clone())
        else:
            require_one_of("query", query, ("last",), remedy="or pass a tensor of shape (d,)")
            self.query = query

    @classmethod
    def symmetric(
        cls,
        heads: int,
        dimension: int,
        *,
        query: Query,
        generator: torch.Generator | None = None,
        seed: int | None = None,
        activation: str | Activation = "tanh",
        logit_exponent: float = 0.0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ShallowTransformer:
        r"""
        .. math:: f(X; \phi_0) = 0 \quad \text{exactly, at the symmetric initialisation.}

        Takes a CPU ``generator`` or a ``seed``, exactly one of them; a query tensor is moved to
        ``dtype`` and ``device``. Raises ValueError for odd ``heads`` or when neither or both of
        generator and seed are given.
        """
        if (generator is None) == (seed is None):
            raise ValueError(
                f"generator, seed: give exactly one of them, got generator={generator!r} and "
                f"seed={seed!r}; an initialisation without a seed cannot be repeated"
            )
        if generator is None:
            assert seed is not None
            generator = torch.Generator().manual_seed(seed)
        parameters = symmetric_initialisation(
            heads, dimension, generator=generator, dtype=dtype, device=device
        )
        if isinstance(query, Tensor):
            query = query.to(dtype=dtype, device=device)
        return cls(parameters, query=query, activation=activation, logit_exponent=logit_exponent)

    @property
    def heads(self) -> int:
        """Number of heads m."""
        return self.c.shape[0]

    @property
    def dimension(self) -> int:
        """Token dimension d."""
        return self.U.shape[1]

    @property
    def phi(self) -> Parameters:
        r""":math:`\phi = (c, U, W)`, the live parameters, attached to autograd."""
        return Parameters(self.c, self.U, self.W)

    def forward(
        self, tokens: Float[Tensor, "n T d"], mask: Bool[Tensor, "n T"] | None = None
    ) -> Float[Tensor, " n"]:
        r""":math:`f(X_j; \phi)`, (n,), differentiable by autograd; see :func:`forward`."""
        return forward(
            self.phi, tokens, query=self.query, activation=self.activation,
            scale=self.scale, mask=mask,
        )  # fmt: skip

    def loss_and_gradients(
        self,
        tokens: Float[Tensor, "n T d"],
        targets: Float[Tensor, " n"],
        mask: Bool[Tensor, "n T"] | None = None,
        *,
        chunk: int | None = None,
        engine: str = "auto",
        validate: bool = True,
    ) -> tuple[Float[Tensor, ""], Parameters]:
        r"""
        .. math:: L_n = \frac1n \sum_j (f_j - y_j)^2, \qquad \nabla L_n.

        The loss, 0-d, and :class:`Parameters` of gradients, by the closed forms and outside of
        autograd; ``.grad`` of the parameters is left alone.
        """
        return gradients.loss_and_gradients(
            self.snapshot(copy=False), tokens, targets, query=self.query,
            activation=self.activation, scale=self.scale, mask=mask, chunk=chunk,
            engine=engine, validate=validate,
        )  # fmt: skip

    def snapshot(self, *, copy: bool = True) -> Parameters:
        r""":math:`\phi`, detached: copies, or views of the live memory with ``copy=False``."""
        parameters = self.phi.detach()
        return parameters.clone() if copy else parameters

    @torch.no_grad()
    def load(self, parameters: Parameters) -> None:
        r""":math:`\phi \leftarrow` ``parameters``, copied in place: optimisers stay attached.

        Raises ValueError when the shapes are not those of the model.
        """
        for name, own, new in zip("cUW", self.phi, parameters, strict=True):
            if own.shape != new.shape:
                raise ValueError(
                    f"parameters.{name}: expected shape {tuple(own.shape)}, got "
                    f"{tuple(new.shape)}; load parameters of the same heads and dimension"
                )
            own.copy_(new)

    def extra_repr(self) -> str:
        """The sizes, query, activation and logit exponent, for ``print(model)``."""
        query = "last" if isinstance(self.query, str) else "fixed"
        return (
            f"heads={self.heads}, dimension={self.dimension}, query={query}, "
            f"activation={self.activation.name}, logit_exponent={self.logit_exponent}"
        )
