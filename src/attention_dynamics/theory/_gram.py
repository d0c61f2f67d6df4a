r"""Gram matrices :math:`F F'^\top`: half of one where it is symmetric; a look at the memory.

A symmetric Gram matrix is computed above its diagonal only and mirrored, hence symmetric to the
last bit. The triangle is split in two triangles and one square, again and again: squares are what
matrix products are fast at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

# The triangle is halved down to blocks of this many rows; what such a block computes below its
# diagonal is thrown away, and much smaller blocks slow the products down.
_CPU_LEAF = 128
_ACCELERATOR_LEAF = 1024


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in all bits of float32: TF32 and bf16 passes are off inside."""
    before = torch.get_float32_matmul_precision()
    if before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if before != "highest":
            torch.set_float32_matmul_precision(before)


def add_gram(
    K: Float[Tensor, "n k"], F: Float[Tensor, "n p"], other: Float[Tensor, "k p"] | None = None
) -> None:
    r""":math:`K \mathrel{+}= F F'^\top`, in place; without ``other`` from the diagonal up.

    Whoever adds without ``other`` calls :func:`mirror` at the end.
    """
    if other is not None:
        K.addmm_(F, other.mT)
        return
    leaf = _CPU_LEAF if K.device.type == "cpu" else _ACCELERATOR_LEAF
    _add_triangle(K, F, leaf)


def _add_triangle(K: Tensor, F: Tensor, leaf: int) -> None:
    n = K.shape[0]
    if n <= leaf:
        K.addmm_(F, F.mT)
        return
    half = n // 2 if n < 2 * leaf else (n // 2 + leaf - 1) // leaf * leaf
    K[:half, half:].addmm_(F[:half], F[half:].mT)
    _add_triangle(K[:half, :half], F[:half], leaf)
    _add_triangle(K[half:, half:], F[half:], leaf)


def mirror(K: Float[Tensor, "n n"]) -> None:
    """Copy what is above the diagonal below it, in place and block by block."""
    leaf = _ACCELERATOR_LEAF
    for start in range(0, K.shape[0], leaf):
        rows = slice(start, start + leaf)
        K[start + leaf :, rows] = K[rows, start + leaf :].mT
        square = K[rows, rows]
        upper = square.triu()
        square.copy_(upper + upper.triu(1).mT)


def require_memory(
    name: str, matrices: int, shape: tuple[int, int], like: Tensor, limit: int | None
) -> None:
    """Check that ``matrices`` arrays of this shape fit: refuse before hours of work, not after.

    ``limit`` in bytes replaces the memory that is free now. Raises ValueError.
    """
    needed = matrices * shape[0] * shape[1] * like.element_size()
    available = free_memory(like.device) if limit is None else limit
    if available is not None and needed > available:
        count = f"{matrices} arrays" if matrices > 1 else "one array"
        raise ValueError(
            f"{name}: {count} of {shape[0]} x {shape[1]} numbers in {like.dtype} take "
            f"{_size(needed)}, and {_size(available)} are "
            f"{'free' if limit is None else 'allowed by memory_limit'}; take fewer samples, the "
            "matrix-free kernel_vector_product, a smaller dtype, or set memory_limit (bytes)"
        )


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had without swapping, or None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _size(count: int) -> str:
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
