"""Boundary checks shared by the library: each error names the argument, its value, the remedy.

The checks run once, where a caller enters the library; inner loops never repeat them. A check of
*values* (finite, non-empty) is passed over where a tensor has no single value to look at, that is
inside ``torch.func.vmap``, ``torch.compile`` or on the ``meta`` device.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

HALF_PRECISION = (torch.float16, torch.bfloat16)


def known_truth(flag: Tensor) -> bool | None:
    """The truth of a 0-d tensor, or None where it cannot be known (vmap, compile, meta)."""
    if torch.compiler.is_compiling():
        return None
    try:
        return bool(flag)
    except RuntimeError:  # vmap and the meta device both refuse to give one value
        return None


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype computed in: float32 for float16 and bfloat16, the dtype itself otherwise."""
    return torch.float32 if dtype in HALF_PRECISION else dtype


def describe_shape(shape: Sequence[int]) -> str:
    """Return ``(5000, 8, 16)`` for any sequence of sizes, ``torch.Size`` included."""
    return "(" + ", ".join(str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"


def require_shape(
    name: str,
    value: Tensor,
    symbols: Sequence[str],
    sizes: dict[str, int] | None = None,
    *,
    remedy: str = "",
) -> None:
    """Check that ``value`` has one axis per symbol, with the sizes that are already known.

    ``symbols`` are the axes as the documentation writes them, ``("n", "T", "d")``; ``sizes`` fixes
    some of them, ``{"d": 8}``. Raises TypeError when ``value`` is no tensor, ValueError when the
    shape is another one.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name}: expected a torch.Tensor of shape {_symbolic(symbols)}, "
            f"got {type(value).__name__}; convert it with torch.as_tensor"
        )
    known = sizes or {}
    fits = value.ndim == len(symbols) and all(
        known.get(symbol, size) == size for symbol, size in zip(symbols, value.shape, strict=True)
    )
    if not fits:
        raise ValueError(_expected(name, value, symbols, sizes, remedy))


def require_matrix(
    name: str,
    value: Tensor,
    symbols: Sequence[str],
    sizes: dict[str, int] | None = None,
    *,
    remedy: str = "",
) -> None:
    """Check the last axes of ``value`` as :func:`require_shape` does; any axes may lead them."""
    ndim = value.ndim if isinstance(value, Tensor) else 0
    leading = [f"*{axis}" for axis in range(ndim - len(symbols))]
    try:
        require_shape(name, value, [*leading, *symbols], sizes, remedy=remedy)
    except ValueError:
        raise ValueError(_expected(name, value, ["*batch", *symbols], sizes, remedy)) from None


def require_floating(name: str, value: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check that ``value`` is real floating point and, if given, computed in the same ``dtype``."""
    if not value.dtype.is_floating_point:
        raise TypeError(
            f"{name}: expected a floating-point tensor, got {value.dtype}; "
            f"convert it with {name}.to(torch.float32)"
        )
    if dtype is not None and working_dtype(value.dtype) != working_dtype(dtype):
        raise TypeError(
            f"{name}: has dtype {value.dtype} where the rest of the computation is in {dtype}; "
            f"convert it with {name}.to({dtype})"
        )


def require_finite(name: str, value: Tensor, *, remedy: str = "") -> None:
    """Check that ``value`` holds no NaN and no infinity; the error gives the first such index."""
    if not value.numel():
        return
    # One pass and no array of this size: NaN is passed on, and only finite numbers give 0 times 0.
    smallest, largest = torch.aminmax(value.detach())
    if known_truth(smallest * 0 == largest * 0) is False:
        index = tuple((~torch.isfinite(value)).nonzero()[0].tolist())
        raise ValueError(
            f"{name}: expected finite values, got {value[index].item()} at index {index}; "
            + (remedy or "remove or impute these entries before the call")
        )


def require_mask(mask: Tensor, samples: int, length: int) -> None:
    """Check a padding mask: boolean, shape (n, T), True = keep, at least one True in each row.

    Raises TypeError for a mask that is not boolean (an additive mask of large negative numbers has
    a sign and a size to get wrong), ValueError for another shape or a sample without any key.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            f"mask: expected a boolean tensor with True = keep, got {kind}; "
            "for an additive mask pass mask == 0, for a 0/1 mask pass mask.bool()"
        )
    require_shape("mask", mask, ("n", "T"), {"n": samples, "T": length})
    kept = mask.any(dim=-1)
    if known_truth(kept.all()) is False:
        index = int((~kept).nonzero()[0].item())
        raise ValueError(
            f"mask: no key is left for sample {index} (all {length} entries are False); "
            "keep at least one token of every sample or drop the sample"
        )


def require_integer(name: str, value: int, *, minimum: int, remedy: str = "") -> None:
    """Check that ``value`` is an integer, of Python or NumPy, of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(
            f"{name}: expected an integer >= {minimum}, got {value!r}"
            + (f"; {remedy}" if remedy else "")
        )


def require_number(name: str, value: object, *, positive: bool = False, remedy: str = "") -> None:
    """Check that ``value`` is one finite number >= 0, or > 0 if ``positive``.

    Raises TypeError for what is no number, such as text or None, ValueError outside of the range.
    """
    expected = f"{name}: expected a finite number {'> 0' if positive else '>= 0'}, got "
    advice = f"; {remedy}" if remedy else ""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, str):
        raise TypeError(f"{expected}{value!r}, a {type(value).__name__}{advice}")
    if not 0.0 <= number < math.inf or (positive and number == 0.0):
        raise ValueError(f"{expected}{value}{advice}")


def require_one_of(name: str, value: object, known: Iterable[object], *, remedy: str = "") -> None:
    """Check that ``value`` is one of the ``known`` values, which the error lists."""
    options = list(known)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ValueError(
            f"{name}: expected one of {listed}, got {value!r}" + (f"; {remedy}" if remedy else "")
        )


def require_cpu_generator(generator: torch.Generator) -> None:
    """Check for a CPU generator: only then do all devices see the same numbers."""
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator: expected a torch.Generator, got {type(generator).__name__}; "
            "make one with torch.Generator().manual_seed(seed)"
        )
    if generator.device.type != "cpu":
        raise ValueError(
            f"generator: expected a generator on the CPU, got one on {generator.device}; numbers "
            "are sampled on the CPU and then moved, so that every device sees the same ones: "
            "use torch.Generator() and pass device= for the result"
        )


def _expected(
    name: str, value: Tensor, symbols: Sequence[str], sizes: dict[str, int] | None, remedy: str
) -> str:
    where = ", ".join(f"{s} = {size}" for s, size in (sizes or {}).items() if s in symbols)
    return (
        f"{name}: expected shape {_symbolic(symbols)}"
        + (f" with {where}" if where else "")
        + f", got {describe_shape(value.shape)}"
        + (f"; {remedy}" if remedy else "")
    )


def _symbolic(symbols: Sequence[str]) -> str:
    return "(" + ", ".join(symbols) + ("," if len(symbols) == 1 else "") + ")"
