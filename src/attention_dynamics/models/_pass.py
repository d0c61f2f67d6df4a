"""Inputs in their working form, and the steps of one pass over the tokens.

Blocks of samples have the tokens as rows, (b, T, m), so that projecting tokens on heads is one
matrix product (bT, d) x (d, m). Nothing is written in place, hence the functions run under
``torch.func``. Arguments are taken as they are: the public modules check them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_integer,
    require_mask,
    require_shape,
    working_dtype,
)

Query = Tensor | Literal["last"]
"""A fixed query (d,), one query a sample (n, d), or ``"last"``, the last valid token."""

# A handful of float32 arrays of this many elements stay in the cache of a CPU core and below the
# size from which the allocator gives memory back to the system; smaller blocks pay more for
# dispatch. An accelerator prefers few large kernels.
_CPU_BLOCK = 2**17
_ACCELERATOR_BLOCK = 2**25


class Inputs(NamedTuple):
    """Checked tokens (n, T, d), query (d,) or (n, d) and mask (n, T) or None, in one dtype."""

    tokens: Tensor
    query: Tensor
    mask: Tensor | None

    def rows(self, block: slice) -> Inputs:
        """The samples of one block."""
        query = self.query if self.query.ndim == 1 else self.query[block]
        return Inputs(self.tokens[block], query, None if self.mask is None else self.mask[block])


class HeadFeatures(NamedTuple):
    r"""
    .. math:: s = U \cdot a, \qquad a = \sum_t \alpha_t x_t, \qquad
        r = M U = \sum_t \alpha_t (s_t - s)\, x_t, \quad s_t = U \cdot x_t.

    Shapes: ``s`` (n, m), ``a`` (n, m, d), ``r`` (n, m, d). Value, gradients, tangent map, kernel
    and linearisation of the model are read off these three.
    """

    s: Float[Tensor, "n m"]
    a: Float[Tensor, "n m d"]
    r: Float[Tensor, "n m d"]


def require_tokens(tokens: Tensor, dimension: int | None = None) -> None:
    """Check the shape and dtype of tokens, and recognise the (n, d, T) layout."""
    columns = isinstance(tokens, Tensor) and tokens.ndim == 3 and tokens.shape[1] == dimension
    require_shape(
        "tokens",
        tokens,
        ("n", "T", "d"),
        None if dimension is None else {"d": dimension},
        remedy=(
            "this looks like (n, d, T): convert it with from_column_layout"
            if columns
            else "the last axis holds the coordinates and must match U and W; if your array is "
            "(n, d, T), convert it with from_column_layout"
        ),
    )
    if 0 in tokens.shape:
        raise ValueError(
            f"tokens: expected at least one sample, token and coordinate, "
            f"got shape {tuple(tokens.shape)}; drop the empty batch before the call"
        )
    require_floating("tokens", tokens)


def prepare(
    tokens: Tensor, query: Query, mask: Tensor | None, *, dimension: int, validate: bool = True
) -> Inputs:
    """Bring the inputs to their working form: padding zeroed, "last" resolved, half to float32.

    Padding is zeroed because 0 weight times a NaN left in it would be NaN. ``validate=False`` skips
    every check, for callers that made them already.
    """
    if validate:
        require_tokens(tokens, dimension)
        if mask is not None:
            require_mask(mask, tokens.shape[0], tokens.shape[1])
    if mask is not None:
        tokens = tokens.masked_fill(~mask[..., None], 0)
    if validate:
        require_finite("tokens", tokens)
    tokens = tokens.to(working_dtype(tokens.dtype))
    return Inputs(tokens, query_vectors(tokens, query, mask, validate=validate), mask)


def query_vectors(
    tokens: Tensor, query: Query, mask: Tensor | None, *, validate: bool = True
) -> Tensor:
    """The query in the dtype of the tokens: (d,) if fixed, (n, d) if it depends on the sample."""
    if isinstance(query, str):
        if query != "last":
            raise ValueError(f"query: expected a tensor of shape (d,) or 'last', got {query!r}")
        if mask is None:
            return tokens[:, -1]
        positions = torch.arange(mask.shape[-1], device=mask.device)
        last = torch.where(mask, positions, -1).amax(dim=-1).clamp_min(0)
        index = last[:, None, None].expand(-1, 1, tokens.shape[-1])
        return tokens.gather(1, index).squeeze(1)
    if validate:
        samples, _, dimension = tokens.shape
        symbols = ("n", "d") if isinstance(query, Tensor) and query.ndim == 2 else ("d",)
        require_shape("query", query, symbols, {"n": samples, "d": dimension})
        require_floating("query", query, tokens.dtype)
        require_finite("query", query)
    return query.to(tokens.dtype)


def require_chunk(chunk: int | None) -> None:
    """Check a number of samples to handle at once."""
    if chunk is not None:
        require_integer("chunk", chunk, minimum=1, remedy="pass None for the default")


def blocks(inputs: Inputs, heads: int, chunk: int | None) -> Iterator[slice]:
    """Slices of samples: of about 2^17 elements b T m (2^25 off the CPU), or ``chunk`` samples.

    A query per sample costs arrays of b m d elements, which count where d > T.
    """
    samples, length, dimension = inputs.tokens.shape
    if chunk is None:
        elements = block_elements(inputs.tokens.device)
        width = length if inputs.query.ndim == 1 else max(length, dimension)
        chunk = max(1, elements // (width * heads))
    for start in range(0, samples, chunk):
        yield slice(start, start + chunk)


def block_elements(device: torch.device) -> int:
    """Elements of an array of one block of samples."""
    return _CPU_BLOCK if device.type == "cpu" else _ACCELERATOR_BLOCK


def head_queries(W: Tensor, query: Tensor, scale: float) -> Tensor:
    """Return scale W q: (m, d) for a fixed query (d,), (b, m, d) for queries (b, d)."""
    heads, dimension, _ = W.shape
    flat = W.reshape(heads * dimension, dimension)
    if query.ndim == 1:
        return (flat @ (scale * query)).reshape(heads, dimension)
    return ((scale * query) @ flat.mT).reshape(-1, heads, dimension)


def project(tokens: Tensor, directions: Tensor) -> Tensor:
    """Inner products x_t . p_i, (b, T, m), for directions (m, d) or (b, m, d)."""
    return tokens @ directions.mT
