r"""The projection set: per-head balls around the initialisation, one radius a block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attention_dynamics.models.parameters import BlockNorms, Parameters
from attention_dynamics.validation import require_number


@dataclass(frozen=True)
class Radii:
    r""":math:`(\rho_c, \rho_u, \rho_w)`: radii of the projection set, before :math:`1/\sqrt m`.

    ``None`` leaves a block free; 0 freezes it at the centre.

    Raises ValueError if a radius is negative, NaN or infinite, TypeError if it is no number.
    """

    c: float | None
    U: float | None
    W: float | None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        r""":math:`0 \le \rho < \infty`, or None, block by block; ValueError names the block."""
        for block in ("c", "U", "W"):
            radius = getattr(self, block)
            if radius is not None:
                require_number(
                    f"radii.{block}",
                    radius,
                    remedy="0 freezes the block at its centre, None leaves it free",
                )


def require_radii(radii: Radii) -> Radii:
    """Check for :class:`Radii`: a bare number or tuple would leave open which block is meant."""
    if not isinstance(radii, Radii):
        raise TypeError(
            f"radii: expected Radii(c, U, W), got {radii!r}; name the blocks, for example "
            "Radii(c=3.0, U=3.0, W=3.0)"
        )
    return radii


def bounded_radii(radii: Radii, *, remedy: str) -> tuple[float, float, float]:
    r""":math:`(\rho_c, \rho_u, \rho_w)`, none of them None; ValueError names the free block."""
    require_radii(radii)
    for block in ("c", "U", "W"):
        if getattr(radii, block) is None:
            raise ValueError(f"radii.{block}: expected a number, got None; {remedy}")
    assert radii.c is not None
    assert radii.U is not None
    assert radii.W is not None
    return radii.c, radii.U, radii.W


class ActiveHeads(NamedTuple):
    r"""Number of heads on the boundary of their ball, block by block (0 to m)."""

    c: int
    U: int
    W: int


@dataclass(frozen=True)
class ProjectionSet:
    r"""
    .. math:: \Omega_\rho = \{\phi : |c_i - c_{i}^0| \le \rho_c/\sqrt m,\;
        \|U_i - U_i^0\|_2 \le \rho_u/\sqrt m,\; \|W_i - W_i^0\|_F \le \rho_w/\sqrt m,\; i = 1..m\}

    with centre :math:`\phi^0` (``centre``) and ``radii`` :math:`\rho`. A block with radius None is
    free and one with radius 0 stays exactly at the centre; the other blocks are projected all the
    same. Source: arXiv 2601.16514, projected gradient descent.

    Raises ValueError or TypeError if the centre is not a valid set of parameters.
    """

    centre: Parameters
    radii: Radii

    def __post_init__(self) -> None:
        self.centre.require_valid("centre")
        require_radii(self.radii)

    def limits(self) -> tuple[float | None, float | None, float | None]:
        r""":math:`\rho/\sqrt m` for the blocks c, U, W; None where the block is free."""
        root = math.sqrt(self.centre.heads)
        c, U, W = (
            None if radius is None else radius / root
            for radius in (self.radii.c, self.radii.U, self.radii.W)
        )
        return c, U, W

    def project(self, parameters: Parameters) -> Parameters:
        r"""
        .. math:: (\Pi\phi)_i = \phi_i^0 + \min\Bigl(1,
            \frac{\rho/\sqrt m}{\|\phi_i - \phi_i^0\|}\Bigr) (\phi_i - \phi_i^0)

        in each block and head: the nearest point of the set. A head inside its ball comes back
        bit for bit; the arguments are not changed.

        Raises ValueError or TypeError for NaN, infinity, or a shape or dtype unlike the centre's.
        """
        self._require_same_shape(parameters)
        return self.project_with_norms(parameters)[0]

    def project_with_norms(self, parameters: Parameters) -> tuple[Parameters, BlockNorms]:
        r""":math:`\Pi\phi` and :math:`\|\phi_i - \phi_i^0\|` before the projection, unchecked.

        For inner loops: the norms give the distances and the number of active heads for free.
        """
        moved, norms = zip(
            *(
                project_block(block, centre, limit)
                for block, centre, limit in zip(parameters, self.centre, self.limits(), strict=True)
            ),
            strict=True,
        )
        return Parameters(*moved), BlockNorms(*norms)

    def active(self, parameters: Parameters, *, rtol: float = 1e-5) -> ActiveHeads:
        r""":math:`\#\{i : \|\phi_i - \phi_i^0\| \ge (1 - \text{rtol})\, \rho/\sqrt m\}` a block.

        A free block counts 0, a frozen one m, since a ball of radius 0 is all boundary.

        Raises ValueError or TypeError for NaN, infinity, or a shape or dtype unlike the centre's.
        """
        self._require_same_shape(parameters)
        counts = (
            0 if limit is None else int((norms >= (1.0 - rtol) * limit).sum())
            for norms, limit in zip(self._distances(parameters), self.limits(), strict=True)
        )
        return ActiveHeads(*counts)

    def contains(self, parameters: Parameters, atol: float = 0.0) -> bool:
        r""":math:`\|\phi_i - \phi_i^0\| \le \rho/\sqrt m + \text{atol}` for every head and block.

        A projected point may miss by the rounding of :math:`\phi_i^0 + \delta`: allow a few units
        in the last place of the parameters.

        Raises ValueError or TypeError for NaN, infinity, or a shape or dtype unlike the centre's.
        """
        self._require_same_shape(parameters)
        return all(
            limit is None or bool((norms <= limit + atol).all())
            for norms, limit in zip(self._distances(parameters), self.limits(), strict=True)
        )

    def _distances(self, parameters: Parameters) -> BlockNorms:
        return parameters.minus(self.centre).block_norms()

    def _require_same_shape(self, parameters: Parameters) -> None:
        parameters.require_valid()
        if parameters.W.shape != self.centre.W.shape or parameters.dtype != self.centre.dtype:
            raise ValueError(
                f"parameters: expected W of shape {tuple(self.centre.W.shape)} and dtype "
                f"{self.centre.dtype}, as in the centre, got {tuple(parameters.W.shape)} and "
                f"{parameters.dtype}; project around the initialisation of the same model"
            )


def project_block(block: Tensor, centre: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    r"""The nearest point with every row within ``limit`` of that of ``centre``, unchecked.

    A row is the part of one head: a number, a vector or a matrix. Returns the block, rows inside
    bit for bit, and the distances before the projection, (m,); a limit of None moves nothing.
    """
    moved = block - centre
    norms = moved.abs() if moved.ndim == 1 else torch.linalg.vector_norm(moved.flatten(1), dim=1)
    if limit is None:
        return block, norms
    outside = norms > limit
    if outside.device.type == "cpu" and not outside.any():  # elsewhere looking costs a wait
        return block.clone(), norms
    # Heads inside keep their value: centre + (block - centre) would round.
    shape = (-1,) + (1,) * (block.ndim - 1)
    factor = torch.where(outside, limit / norms, torch.ones_like(norms)).reshape(shape)
    return torch.where(outside.reshape(shape), centre + moved * factor, block), norms
