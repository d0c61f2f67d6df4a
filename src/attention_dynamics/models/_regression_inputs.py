"""Factors of softmax attention for regression, and the arguments of one pass over the samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.validation import (
    describe_shape,
    require_finite,
    require_floating,
    require_matrix,
    working_dtype,
)


class Factors(NamedTuple):
    r"""
    .. math:: A \in \mathbb{R}^{m \times k}, \qquad B \in \mathbb{R}^{d \times k}.

    Shapes: ``A`` (\*batch, m, k), ``B`` (\*batch, d, k). The same tuple holds gradients.
    """

    A: Float[Tensor, "*batch m k"]
    B: Float[Tensor, "*batch d k"]

    def map(self, function: Callable[[Tensor], Tensor]) -> Factors:
        r""":math:`(F(A), F(B))`."""
        return Factors(function(self.A), function(self.B))

    def zip(self, other: Factors, function: Callable[[Tensor, Tensor], Tensor]) -> Factors:
        r""":math:`(F(A, A'), F(B, B'))`."""
        return Factors(function(self.A, other.A), function(self.B, other.B))

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Factors:
        """The same numbers on another device or in another dtype."""
        return self.map(lambda block: block.to(device=device, dtype=dtype))

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading axes of both factors, broadcast."""
        return tuple(torch.broadcast_shapes(self.A.shape[:-2], self.B.shape[:-2]))

    def require_valid(self, name: str = "factors") -> None:
        r"""Check shapes (\*batch, m, k) and (\*batch, d, k), one floating dtype, finite entries.

        Raises ValueError for a shape or a NaN or infinite entry, TypeError for a dtype.
        """
        require_matrix(f"{name}.A", self.A, ("m", "k"))
        require_matrix(f"{name}.B", self.B, ("d", "k"), {"k": self.A.shape[-1]})
        require_floating(f"{name}.A", self.A)
        require_floating(f"{name}.B", self.B, self.A.dtype)
        for field, block in zip(self._fields, self, strict=True):
            require_finite(
                f"{name}.{field}", block, remedy="training diverged or the start was not finite"
            )


class Inputs(NamedTuple):
    """Checked arguments in one dtype; ``targets`` is None where there are none."""

    factors: Factors
    queries: Tensor
    contexts: Tensor
    targets: Tensor | None
    shared: bool
    chunk: int
    validate: bool

    @staticmethod
    def prepare(
        factors: Factors,
        queries: Tensor,
        contexts: Tensor,
        targets: Tensor | None,
        chunk: int | None,
        validate: bool,
    ) -> Inputs:
        _pass.require_chunk(chunk)
        if validate:
            require_arguments(factors, queries, contexts, targets)
        dtype = working_dtype(queries.dtype)
        factors = factors.to(dtype=dtype)
        shared = contexts.ndim == queries.ndim
        if chunk is None:
            batch = math.prod(torch.broadcast_shapes(factors.batch_shape, queries.shape[:-2]))
            chunk = max(1, _pass.block_elements(queries.device) // (batch * contexts.shape[-2]))
        return Inputs(
            factors,
            queries.to(dtype),
            contexts.to(dtype),
            None if targets is None else targets.to(dtype),
            shared,
            chunk,
            validate,
        )

    def blocks(self) -> Iterator[slice]:
        """Slices of samples."""
        for start in range(0, self.queries.shape[-2], self.chunk):
            yield slice(start, start + self.chunk)

    def tokens(self, rows: slice, batch: torch.Size) -> Tensor:
        """The contexts of a block as sequences: (b, T, k) if shared, else (b n, T, k)."""
        block = self.contexts if self.shared else self.contexts[..., rows, :, :]
        own = block.shape[len(block.shape) - (2 if self.shared else 3) :]
        return block.expand(*batch, *own).reshape(-1, *block.shape[-2:])


def as_heads(vectors: Tensor, shared: bool) -> Tensor:
    """Vectors (*batch, n, k) as one a head of a sequence: (b, n, k) shared, else (b n, 1, k)."""
    samples, dimension = vectors.shape[-2:]
    return vectors.reshape(-1, samples if shared else 1, dimension)


def require_arguments(
    factors: Factors | None, queries: Tensor, contexts: Tensor, targets: Tensor | None
) -> None:
    """Check shapes, dtypes and entries; ``factors`` fix the sizes d, k and m where they are given.

    Raises ValueError or TypeError.
    """
    require_matrix("queries", queries, ("n", "d"))
    sizes = {"n": queries.shape[-2]}
    if factors is not None:
        factors.require_valid()
        sizes |= {"m": factors.A.shape[-2], "d": factors.B.shape[-2], "k": factors.A.shape[-1]}
    require_matrix("queries", queries, ("n", "d"), sizes)
    own = isinstance(contexts, Tensor) and contexts.ndim == queries.ndim + 1
    require_matrix(
        "contexts",
        contexts,
        ("n", "T", "k") if own else ("T", "k"),
        sizes,
        remedy="a shared context has as many axes as the queries, contexts of one sample each have "
        "one axis more",
    )
    if isinstance(contexts, Tensor) and contexts.ndim not in (queries.ndim, queries.ndim + 1):
        raise ValueError(
            f"contexts: expected {queries.ndim} axes (shared by the samples) or "
            f"{queries.ndim + 1} (one context a sample), as the queries have {queries.ndim}, "
            f"got shape {describe_shape(contexts.shape)}"
        )
    dtype = queries.dtype if factors is None else factors.A.dtype
    named = {"queries": queries, "contexts": contexts}
    if targets is not None:
        require_matrix("targets", targets, ("n", "m"), sizes)
        named["targets"] = targets
    for name, value in named.items():
        require_floating(name, value, dtype)
        require_finite(name, value)
        if 0 in value.shape:
            raise ValueError(
                f"{name}: expected at least one entry along every axis, "
                f"got shape {describe_shape(value.shape)}"
            )
