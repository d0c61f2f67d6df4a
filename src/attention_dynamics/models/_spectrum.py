"""A symmetric positive semidefinite matrix through its eigenvalues: roots, inverses, rank."""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.validation import known_truth


class Spectrum:
    r"""
    .. math:: C = Q \operatorname{diag}(\lambda)\, Q^\top.

    ``matrix`` (\*batch, d, d); every property keeps the batch axes. Eigenvalues below
    :math:`d \epsilon \lambda_{\max}` count as zero.
    """

    def __init__(self, matrix: Float[Tensor, "*batch d d"]) -> None:
        self.matrix = matrix

    @cached_property
    def _pairs(self) -> tuple[Tensor, Tensor]:
        values, vectors = torch.linalg.eigh(self.matrix)
        return values, vectors

    @property
    def values(self) -> Float[Tensor, "*batch d"]:
        """Eigenvalues, ascending."""
        return self._pairs[0]

    @property
    def _floor(self) -> Tensor:
        size = self.values.shape[-1]
        return size * torch.finfo(self.values.dtype).eps * self.values[..., -1:].abs()

    def _of_values(self, values: Tensor) -> Tensor:
        vectors = self._pairs[1]
        return (vectors * values[..., None, :]) @ vectors.mT

    @cached_property
    def root(self) -> Float[Tensor, "*batch d d"]:
        r""":math:`C^{1/2}`, symmetric."""
        # The root of a zero that was rounded to 1e-17 would be 3e-9, and counted by a rank.
        kept = torch.where(self.values > self._floor, self.values, 0.0)
        return self._of_values(kept.sqrt())

    @cached_property
    def inverse_root(self) -> Float[Tensor, "*batch d d"]:
        r""":math:`C^{-1/2}`, symmetric; ask :meth:`require_invertible` first."""
        return self._of_values(self.values.rsqrt())

    @cached_property
    def inverse(self) -> Float[Tensor, "*batch d d"]:
        r""":math:`C^{-1}`; ask :meth:`require_invertible` first."""
        return self._of_values(self.values.reciprocal())

    @cached_property
    def rank(self) -> Tensor:
        r"""The number of eigenvalues that are not zero to rounding, (\*batch,)."""
        return (self.values > self._floor).sum(dim=-1)

    def require_covariance(self, name: str) -> None:
        """Check symmetry and signs up to rounding; raises ValueError."""
        entries = self.matrix.abs().amax(dim=(-2, -1))
        slack = 8 * self.matrix.shape[-1] * torch.finfo(self.matrix.dtype).eps * entries
        skew = (self.matrix - self.matrix.mT).abs().amax(dim=(-2, -1))
        if known_truth((skew <= slack).all()) is False:
            raise ValueError(
                f"{name}: expected a symmetric matrix, got entries that differ from their mirror "
                f"image by {skew.max().item():.3g}; pass 0.5 * (C + C.mT)"
            )
        if known_truth((self.values[..., 0] >= -slack).all()) is False:
            raise ValueError(
                f"{name}: expected eigenvalues >= 0, got {self.values.min().item():.3g}; "
                "a covariance is positive semidefinite"
            )

    def require_invertible(self, name: str, remedy: str, *, what: str = "covariance") -> None:
        """Raise ValueError where an eigenvalue is zero to rounding."""
        size, rank = self.values.shape[-1], self.rank.min()
        if known_truth(rank == size) is False:
            raise ValueError(
                f"{name}: the {what} is singular, rank {int(rank)} of {size}, and its inverse is "
                f"asked for; {remedy}"
            )
