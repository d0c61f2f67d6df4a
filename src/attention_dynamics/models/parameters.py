r"""Parameters :math:`\phi = (c, U, W)` of the shallow Transformer and their initialisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.validation import (
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_shape,
)


class Parameters(NamedTuple):
    r"""
    .. math:: \phi = (c_i, U_i, W_i)_{i=1}^m, \qquad
        c_i \in \mathbb{R},\; U_i \in \mathbb{R}^d,\; W_i \in \mathbb{R}^{d \times d}.

    Shapes: ``c`` (m,), ``U`` (m, d), ``W`` (m, d, d). The same tuple holds gradients, tangents and
    transports, which have the shape of the parameters. Every method returns a new tuple.
    """

    c: Float[Tensor, "*n m"]
    U: Float[Tensor, "*n m d"]
    W: Float[Tensor, "*n m d d"]

    @property
    def heads(self) -> int:
        """Number of heads m."""
        return self.c.shape[-1]

    @property
    def dimension(self) -> int:
        """Token dimension d."""
        return self.U.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.U.dtype

    def map(self, function: Callable[[Tensor], Tensor]) -> Parameters:
        r""":math:`(F(c), F(U), F(W))`."""
        return Parameters(function(self.c), function(self.U), function(self.W))

    def zip(self, other: Parameters, function: Callable[[Tensor, Tensor], Tensor]) -> Parameters:
        r""":math:`(F(c, c'), F(U, U'), F(W, W'))`."""
        return Parameters(
            function(self.c, other.c), function(self.U, other.U), function(self.W, other.W)
        )

    def plus(self, other: Parameters) -> Parameters:
        r""":math:`\phi + \phi'`."""
        return self.zip(other, torch.add)

    def minus(self, other: Parameters) -> Parameters:
        r""":math:`\phi - \phi'`."""
        return self.zip(other, torch.sub)

    def scaled(self, factor: float | Tensor) -> Parameters:
        r""":math:`\gamma \phi`."""
        return self.map(lambda block: block * factor)

    def inner(self, other: Parameters) -> Float[Tensor, ""]:
        r""":math:`\langle \phi, \phi' \rangle`, summed over the three blocks."""
        products = self.zip(other, torch.mul)
        return products.c.sum() + products.U.sum() + products.W.sum()

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Parameters:
        """The same numbers on another device or in another dtype."""
        return self.map(lambda block: block.to(device=device, dtype=dtype))

    def detach(self) -> Parameters:
        """The same tensors outside of any autograd graph."""
        return self.map(Tensor.detach)

    def clone(self) -> Parameters:
        """Copies that share no memory with these."""
        return self.map(torch.clone)

    def is_symmetric(self) -> bool:
        r"""Whether :math:`U_{i+m/2} = U_i,\; W_{i+m/2} = W_i,\; c_{i+m/2} = -c_i`, bit by bit.

        True at the symmetric initialisation, in general false after one step.
        """
        if self.heads % 2:
            return False
        (c, d), (U, V), (W, Z) = (block.chunk(2, dim=0) for block in self)
        return torch.equal(c, -d) and torch.equal(U, V) and torch.equal(W, Z)

    def half(self) -> Parameters:
        r"""
        .. math:: K(\phi) = K(\phi_{\text{half}}), \qquad
            \phi_{\text{half}} = (c_i, U_i, W_i)_{i=1}^{m/2}.

        Paired heads are one function with coefficients of opposite sign, and kernels are even in
        c: the tangent kernel, and with :meth:`folded` every tangent map, is that of half the
        heads. Raises ValueError when the heads are not paired.
        """
        if not self.is_symmetric():
            raise ValueError(
                "parameters: expected paired heads, U and W equal and c opposite in the two "
                "halves, as symmetric_initialisation makes them; after a step of training the "
                "pairs differ, and all heads are needed"
            )
        return self.map(lambda block: block[: self.heads // 2])

    def folded(self) -> Parameters:
        r"""
        .. math:: \tilde v_c = \tfrac{1}{\sqrt2} (v_{c,i} + v_{c,i+m/2}), \quad
            \tilde v_U = \tfrac{1}{\sqrt2} (v_{U,i} - v_{U,i+m/2}), \quad
            \tilde v_W = \tfrac{1}{\sqrt2} (v_{W,i} - v_{W,i+m/2}),

        the tangent on half the heads with
        :math:`\langle \nabla f(\phi), v \rangle
        = \langle \nabla f(\phi_{\text{half}}), \tilde v \rangle` at paired heads.
        """
        (c, d), (U, V), (W, Z) = (block.chunk(2, dim=0) for block in self)
        return Parameters(c + d, U - V, W - Z).scaled(0.5**0.5)

    def block_norms(self) -> BlockNorms:
        r""":math:`(|c_i|,\; \|U_i\|_2,\; \|W_i\|_F)` for each head, three tensors (m,)."""
        return BlockNorms(
            self.c.abs(),
            torch.linalg.vector_norm(self.U, dim=-1),
            torch.linalg.vector_norm(self.W, dim=(-2, -1)),
        )

    def require_valid(self, name: str = "parameters") -> None:
        """Check shapes (m,), (m, d), (m, d, d), one floating dtype, and that all is finite.

        Raises ValueError for a shape or a NaN or infinite entry, TypeError for a dtype.
        """
        require_shape(f"{name}.U", self.U, ("m", "d"))
        require_floating(f"{name}.U", self.U)
        heads, dimension = self.U.shape
        require_shape(f"{name}.c", self.c, ("m",), {"m": heads}, remedy="one coefficient a head")
        require_shape(f"{name}.W", self.W, ("m", "d", "d"), {"m": heads, "d": dimension})
        require_floating(f"{name}.c", self.c, self.U.dtype)
        require_floating(f"{name}.W", self.W, self.U.dtype)
        for field, block in zip(self._fields, self, strict=True):
            require_finite(
                f"{name}.{field}", block, remedy="training diverged or the start was not finite"
            )


class BlockNorms(NamedTuple):
    r""":math:`(|c_i|, \|U_i\|_2, \|W_i\|_F)`, one number a head: each (m,)."""

    c: Float[Tensor, "*n m"]
    U: Float[Tensor, "*n m"]
    W: Float[Tensor, "*n m"]


def symmetric_initialisation(
    heads: int,
    dimension: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Parameters:
    r"""
    .. math:: W_{i+m/2} = W_i, \quad U_{i+m/2} = U_i, \quad c_{i+m/2} = -c_i, \qquad
        W_i, U_i \sim \mathcal{N}(0, I), \; c_i \sim \mathrm{Rademacher},

    so that :math:`f(X; \phi_0) = 0` exactly. Returns c (m,), U (m, d), W (m, d, d).

    The numbers are drawn in float64 on the CPU, then cast and moved: one seed gives the same heads
    on every device and, up to rounding, in every dtype. Raises ValueError when ``heads`` is odd or
    below 2, or when the generator is not on the CPU. Source: arXiv 2601.16514, the symmetric
    initialisation.
    """
    require_integer("heads", heads, minimum=2, remedy="symmetric initialisation pairs the heads")
    if heads % 2:
        raise ValueError(
            f"heads: symmetric initialisation pairs head i with head i + m/2, so m must be even, "
            f"got m = {heads}; take m = {heads - 1} or m = {heads + 1}, or "
            "independent_initialisation for unpaired heads"
        )
    half = _draw(heads // 2, dimension, generator)
    paired = Parameters(
        torch.cat((half.c, -half.c)), torch.cat((half.U, half.U)), torch.cat((half.W, half.W))
    )
    return paired.to(device=device, dtype=dtype)


def independent_initialisation(
    heads: int,
    dimension: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Parameters:
    r"""
    .. math:: W_i, U_i \sim \mathcal{N}(0, I), \quad c_i \sim \mathrm{Rademacher},
        \quad i = 1..m \text{ independent.}

    Returns c (m,), U (m, d), W (m, d, d). Without pairing :math:`f(X; \phi_0)` is of order one and
    not zero: this is the ablation, and the sample of heads behind a teacher. Drawn on the CPU in
    float64, then cast and moved. Raises ValueError for ``heads`` or ``dimension`` below 1 or a
    generator that is not on the CPU.
    """
    require_integer("heads", heads, minimum=1)
    return _draw(heads, dimension, generator).to(device=device, dtype=dtype)


def _draw(heads: int, dimension: int, generator: torch.Generator) -> Parameters:
    require_integer("dimension", dimension, minimum=1)
    require_cpu_generator(generator)
    W = torch.randn(
        (heads, dimension, dimension), generator=generator, dtype=torch.float64, device="cpu"
    )
    U = torch.randn((heads, dimension), generator=generator, dtype=torch.float64, device="cpu")
    signs = torch.randint(0, 2, (heads,), generator=generator, device="cpu")
    return Parameters(2.0 * signs.to(torch.float64) - 1.0, U, W)
