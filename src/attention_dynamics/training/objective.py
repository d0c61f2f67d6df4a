r"""The training loss with its data, checked once and then evaluated without checks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import shallow
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.attention import Query
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.shallow import ShallowTransformer
from attention_dynamics.validation import (
    HALF_PRECISION,
    require_finite,
    require_floating,
    require_mask,
    require_shape,
)


@dataclass(frozen=True)
class Objective:
    r""":math:`L_n(\phi) = \frac1n \sum_j (f(X_j; \phi) - y_j)^2` on fixed data, unchecked.

    Build it with :meth:`of`, which checks the data once.
    """

    tokens: Float[Tensor, "n T d"]
    targets: Float[Tensor, " n"]
    mask: Bool[Tensor, "n T"] | None
    query: Query
    activation: Activation
    scale: float
    engine: str = "auto"

    @classmethod
    def of(
        cls,
        model: ShallowTransformer,
        tokens: Float[Tensor, "n T d"],
        targets: Float[Tensor, " n"],
        mask: Bool[Tensor, "n T"] | None = None,
        *,
        name: str = "",
        engine: str = "auto",
    ) -> Objective:
        r""":math:`L_n` of ``model`` on (tokens, targets); ``name`` marks the data in messages,
        ``engine`` is that of the losses and gradients.

        Raises ValueError for wrong shapes, an empty batch, NaN or infinity, TypeError for a model
        in half precision, a dtype that is not the model's or a mask that is not boolean.
        """
        if model.U.dtype in HALF_PRECISION:
            raise TypeError(
                f"model: expected float32 or float64 parameters, got {model.U.dtype}; steps are "
                "smaller than half precision resolves: convert it with model.float()"
            )
        prefix = f"{name} " if name else ""
        require_shape(f"{prefix}tokens", tokens, ("n", "T", "d"), {"d": model.dimension})
        require_floating(f"{prefix}tokens", tokens, model.U.dtype)
        samples, length, _ = tokens.shape
        if samples * length == 0:
            raise ValueError(
                f"{prefix}tokens: expected at least one sample and token, got shape "
                f"{tuple(tokens.shape)}"
            )
        if mask is not None:
            require_mask(mask, samples, length)
            tokens = tokens.masked_fill(~mask[..., None], 0)
        require_finite(f"{prefix}tokens", tokens)
        require_shape(
            f"{prefix}targets", targets, ("n",), {"n": samples}, remedy="one number a sample"
        )
        require_floating(f"{prefix}targets", targets, model.U.dtype)
        require_finite(f"{prefix}targets", targets)
        return cls(tokens, targets, mask, model.query, model.activation, model.scale, engine)

    def loss(self, parameters: Parameters) -> Float[Tensor, ""]:
        r""":math:`L_n(\phi)`, 0-d."""
        return shallow.loss(
            parameters, self.tokens, self.targets, query=self.query, activation=self.activation,
            scale=self.scale, mask=self.mask, engine=self.engine, validate=False,
        )  # fmt: skip

    def loss_and_gradients(self, parameters: Parameters) -> tuple[Float[Tensor, ""], Parameters]:
        r""":math:`L_n(\phi)` and :math:`\nabla L_n(\phi)` by the closed form."""
        return shallow.loss_and_gradients(
            parameters, self.tokens, self.targets, query=self.query, activation=self.activation,
            scale=self.scale, mask=self.mask, engine=self.engine, validate=False,
        )  # fmt: skip

    def rows(self, index: Tensor) -> Objective:
        r""":math:`L` on the samples ``index`` (b,), repeated as often as they occur in it."""
        return Objective(
            self.tokens[index],
            self.targets[index],
            None if self.mask is None else self.mask[index],
            self.query,
            self.activation,
            self.scale,
            self.engine,
        )
