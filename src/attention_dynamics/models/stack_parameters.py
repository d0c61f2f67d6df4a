r"""Parameters of a stack of layers of the shallow Transformer, and their three starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_integer,
    require_one_of,
    require_shape,
)

Start = Literal["paired", "mixed", "unpaired"]
STARTS: tuple[Start, ...] = ("paired", "mixed", "unpaired")


class TokenLayer(NamedTuple):
    r"""
    .. math:: \theta = (C_i, U_i, W_i)_{i=1}^m, \qquad
        C_i, U_i \in \mathbb{R}^d,\; W_i \in \mathbb{R}^{d \times d}.

    Shapes: ``C`` (m, d), ``U`` (m, d), ``W`` (m, d, d). The same tuple holds gradients.
    """

    C: Float[Tensor, "m d"]
    U: Float[Tensor, "m d"]
    W: Float[Tensor, "m d d"]


class StackParameters(NamedTuple):
    r"""
    .. math:: \phi = (\theta^{(1)}, \dots, \theta^{(L-1)},\; (c, U, W)).

    ``inner`` holds the L - 1 layers from tokens to tokens, ``readout`` the last one, which is
    :class:`~attention_dynamics.models.parameters.Parameters`. The same tuple holds gradients. Every
    method returns a new tuple.
    """

    inner: tuple[TokenLayer, ...]
    readout: Parameters

    @property
    def depth(self) -> int:
        """Number of layers L, the read-out among them."""
        return len(self.inner) + 1

    @property
    def heads(self) -> int:
        """Number of heads m of each layer."""
        return self.readout.heads

    @property
    def dimension(self) -> int:
        """Token dimension d."""
        return self.readout.dimension

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.readout.dtype

    def map(self, function: Callable[[Tensor], Tensor]) -> StackParameters:
        r""":math:`F(\phi)`, block by block."""
        inner = tuple(TokenLayer(*map(function, layer)) for layer in self.inner)
        return StackParameters(inner, self.readout.map(function))

    def zip(
        self, other: StackParameters, function: Callable[[Tensor, Tensor], Tensor]
    ) -> StackParameters:
        r""":math:`F(\phi, \phi')`, block by block."""
        pairs = zip(self.inner, other.inner, strict=True)
        inner = tuple(TokenLayer(*map(function, one, two)) for one, two in pairs)
        return StackParameters(inner, self.readout.zip(other.readout, function))

    def layers(self) -> tuple[TokenLayer | Parameters, ...]:
        """The L layers in order, the read-out last; each has three blocks with m rows."""
        return (*self.inner, self.readout)

    def layer_norms(self) -> Float[Tensor, " L"]:
        r""":math:`\|\theta^{(l)}\|` for each layer, over its three blocks, in float64."""
        squares = [
            torch.stack([block.double().square().sum() for block in layer]).sum()
            for layer in self.layers()
        ]
        return torch.stack(squares).sqrt()

    def require_valid(self) -> None:
        """Check shapes, one floating dtype, and that all is finite.

        Raises ValueError for a shape or a number that is not finite, TypeError for a dtype.
        """
        self.readout.require_valid("readout")
        sizes = {"m": self.heads, "d": self.dimension}
        for place, layer in enumerate(self.inner):
            for name, block in zip("CUW", layer, strict=True):
                label = f"inner[{place}].{name}"
                require_shape(label, block, ("m", "d", "d")[: 3 if name == "W" else 2], sizes)
                require_floating(label, block, self.dtype)
                require_finite(label, block, remedy="training diverged or the start was wrong")


def stack_initialisation(
    depth: int,
    heads: int,
    dimension: int,
    *,
    generator: torch.Generator,
    start: Start = "paired",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> StackParameters:
    r"""
    .. math:: U_i, W_i \sim \mathcal{N}(0, I), \quad c_i = \pm 1, \quad
        C_i \in \{\pm d^{-1/2}\}^d \text{ uniform.}

    ``start`` is ``"paired"``: in every layer head :math:`i + m/2` is head i with the opposite
    coefficient, so that layers are the identity and f = 0; ``"mixed"``: only the read-out is
    paired, f = 0 still; ``"unpaired"``: no layer is. The read-out is drawn first, then the layers
    from the first on, so that stacks of one generator share what they have in common. Drawn in
    float64 on the CPU. Raises ValueError for an odd number of heads where they are paired, a depth
    below 1, or another start.
    """
    require_integer("depth", depth, minimum=1, remedy="the read-out is a layer")
    require_one_of("start", start, STARTS)
    draw = independent_initialisation if start == "unpaired" else symmetric_initialisation
    readout = draw(heads, dimension, generator=generator, dtype=dtype, device=device)
    inner = []
    for _ in range(depth - 1):
        paired = start == "paired"
        draw = symmetric_initialisation if paired else independent_initialisation
        _, U, W = draw(heads, dimension, generator=generator, dtype=torch.float64)
        count = heads // 2 if paired else heads
        signs = torch.randint(0, 2, (count, dimension), generator=generator, device="cpu")
        C = (2.0 * signs.double() - 1.0) * dimension**-0.5
        layer = TokenLayer(torch.cat((C, -C)) if paired else C, U, W)
        inner.append(TokenLayer(*(block.to(device=device, dtype=dtype) for block in layer)))
    return StackParameters(tuple(inner), readout)
