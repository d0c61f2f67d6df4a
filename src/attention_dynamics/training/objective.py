r"""The training loss with its data, checked once and then evaluated without checks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models._pass import Inputs, prepare
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines import placed, selection
from attention_dynamics.models.engines.base import Engine, plainly
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.places import Places, find_places
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

    Build it with :meth:`of`, which checks the data once and lays them out as an engine reads them:
    contiguous, padding zeroed, the query "last" replaced by the last valid tokens. The engine is
    chosen there too, so parameters have to be plain tensors: autograd is served by ``models``.
    ``places`` are the tokens split into numbers and places, for the fused kernel, where that pays.
    """

    inputs: Inputs
    targets: Float[Tensor, " n"]
    activation: Activation
    scale: float
    engine: Engine
    places: Places | None = None

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
        # Half precision that fits the model's dtype is computed in it; derivatives are not taken.
        tokens, targets = tokens.detach(), targets.detach().to(model.U.dtype)
        inputs = prepare(tokens, model.query, mask, dimension=model.dimension, validate=False)
        tokens, query, mask = inputs
        inputs = Inputs(
            tokens.contiguous(), query.contiguous(), None if mask is None else mask.contiguous()
        )
        chosen = selection.choose(engine, inputs, model.heads, targets)
        places = None
        if chosen.name == "fused" and mask is None and model.activation.value is torch.tanh:
            places = find_places(inputs.tokens, inputs.query)
            if places is not None and (
                not places.serve(model.heads) or placed.unavailable(tokens.dtype)
            ):
                places = None
        return cls(inputs, targets.contiguous(), model.activation, model.scale, chosen, places)

    @property
    def tokens(self) -> Float[Tensor, "n T d"]:
        """The tokens, padding zeroed."""
        return self.inputs.tokens

    @property
    def mask(self) -> Bool[Tensor, "n T"] | None:
        """The mask, True = keep, or None."""
        return self.inputs.mask

    @plainly
    def loss(self, parameters: Parameters) -> Float[Tensor, ""]:
        r""":math:`L_n(\phi)`, 0-d."""
        if self.places is not None:
            values = placed.values(self.places, parameters, self.scale)
        else:
            values = self.engine.values(self.inputs, parameters, self.activation, self.scale)
        return (values - self.targets).square().mean()

    @plainly
    def loss_and_gradients(self, parameters: Parameters) -> tuple[Float[Tensor, ""], Parameters]:
        r""":math:`L_n(\phi)` and :math:`\nabla L_n(\phi)` by the closed form."""
        if self.places is not None:
            values, gradients = placed.step(self.places, parameters, self.scale, self.targets)
        else:
            values, gradients = self.engine.step(
                self.inputs, parameters, self.activation, self.scale, self.targets
            )
        return (values - self.targets).square().mean(), gradients

    def rows(self, index: Tensor | slice) -> Objective:
        r""":math:`L` on the samples ``index`` (b,), repeated as often as they occur in it.

        A slice copies nothing.
        """

        def taken(data: Tensor) -> Tensor:
            return data[index] if isinstance(index, slice) else data.index_select(0, index)

        tokens, query, mask = self.inputs
        inputs = Inputs(
            taken(tokens),
            query if query.ndim == 1 else taken(query),
            None if mask is None else taken(mask),
        )
        places = None if self.places is None else self.places.rows(index)
        return replace(self, inputs=inputs, targets=taken(self.targets), places=places)
