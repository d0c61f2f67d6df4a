"""Blockwise comparison of float64 values, strict about what it is given."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attention_dynamics.verification.record import CheckFailed

LARGEST = 1e300  # stands for infinity in a record, which JSON cannot hold


@dataclass(frozen=True)
class Comparison:
    """``excess = max |a - e| / (atol + rtol |e|)``, where it happened and over how many entries.

    ``relative`` is the largest relative error: of an entry, or, where ``atol`` excuses small
    entries, of a block by its largest entry.
    """

    excess: float
    relative: float
    entries: int
    block: str
    index: tuple[int, ...]
    actual: float
    expected: float


def blocks(value: Any, name: str, dtype: str) -> Iterator[tuple[str, NDArray]]:
    """``value -> (block name, array)``: tensors, arrays, numbers, tuples and mappings of them.

    ``value`` may be a callable without arguments. Raises ``TypeError`` for a floating type other
    than ``dtype``, ``ValueError`` for an empty block and ``CheckFailed`` for a non-finite entry.
    """
    if callable(value) and not hasattr(value, "shape"):
        value = value()
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from blocks(value[key], f"{name}[{key!r}]", dtype)
    elif isinstance(value, list | tuple) and not _is_numbers(value):
        fields = getattr(value, "_fields", None) or range(len(value))
        if not value:
            raise ValueError(f"{name} is empty: there is nothing to compare")
        for key, entry in zip(fields, value, strict=True):
            yield from blocks(entry, f"{name}.{key}", dtype)
    else:
        yield name, _array(value, name, dtype)


def compare(
    actual: Any, expected: Any, *, rtol: float, atol: float, dtype: str, expected_name: str
) -> Comparison:
    r"""Worst entry of :math:`|a - e| / (\mathrm{atol} + \mathrm{rtol}\,|e|)` over all blocks.

    Raises ``ValueError`` when the blocks or their shapes differ.
    """
    left = list(blocks(actual, "actual", dtype))
    right = list(blocks(expected, expected_name, dtype))
    if len(left) != len(right):
        raise ValueError(
            f"actual has {len(left)} blocks and {expected_name} has {len(right)}: pass the same "
            "structure on both sides"
        )
    worst: Comparison | None = None
    entries, relative = 0, 0.0
    for (name, a), (other, e) in zip(left, right, strict=True):
        key = name.removeprefix("actual")
        if "[" in key and key != other.removeprefix(expected_name):
            raise ValueError(f"{name} stands against {other}: use the same keys on both sides")
        if a.shape != e.shape:
            raise ValueError(
                f"{name} has shape {a.shape} and {other} has shape {e.shape}: shapes must be "
                "equal, nothing is broadcast"
            )
        if np.shares_memory(a, e):
            raise ValueError(f"{name} and {other} share their memory: this compares x with x")
        # Converted only now: a converted copy shares no memory with anything.
        a, e = a.astype(np.float64, copy=False), e.astype(np.float64, copy=False)
        entries += a.size
        gap, allowed = np.abs(a - e), atol + rtol * np.abs(e)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(gap == 0, 0.0, np.minimum(gap / allowed, LARGEST))
        index = tuple(int(i) for i in np.unravel_index(np.argmax(ratio), ratio.shape))
        if atol == 0:
            relative = max(relative, float(ratio[index]) * rtol)
        else:
            relative = max(relative, float(gap.max() / (np.abs(e).max() or 1.0)))
        if worst is None or ratio[index] > worst.excess:
            worst = Comparison(
                float(ratio[index]), 0.0, 0, name, index, float(a[index]), float(e[index])
            )
    assert worst is not None
    return replace(worst, relative=relative, entries=entries)


def as_array(value: Any, name: str) -> NDArray[np.float64]:
    """``value -> array`` of finite float64 numbers; raises as :func:`blocks` does."""
    array = _array(value() if callable(value) else value, name, "float64")
    return array.astype(np.float64, copy=False)


def _is_numbers(value: Any) -> bool:
    return len(value) > 0 and all(isinstance(entry, int | float) for entry in value)


def _array(value: Any, name: str, dtype: str) -> NDArray:
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_conj().resolve_neg().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "iub" and array.dtype.name not in ("float64", dtype):
        raise TypeError(
            f"{name} has dtype {array.dtype.name}: checks compare {dtype}. Compute it in "
            f'{dtype}, or pass dtype="{array.dtype.name}" and the tolerance it deserves'
        )
    if array.size == 0:
        raise ValueError(f"{name} is empty (shape {array.shape}): there is nothing to compare")
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise CheckFailed(f"{name}{list(where)} = {array[where]} is not finite")
    return array
