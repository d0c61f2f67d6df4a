r"""Windows of one series: a split in time that shares nothing, and a split that leaks.

A window that starts at a reads :math:`x_a, \dots, x_{a+T-1}` and has the target :math:`x_{a+T}`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from attention_dynamics.validation import (
    require_cpu_generator,
    require_integer,
    require_one_of,
)

Split = Literal["time", "random"]


class Windows(NamedTuple):
    r"""Where the windows of a split start: ``training`` (n,) and ``validation`` (v,), integers.

    A window that starts at a reads :math:`x_a, \dots, x_{a+T-1}` and has the target
    :math:`x_{a+T}`.
    """

    training: Int[Tensor, " n"]
    validation: Int[Tensor, " v"]


def split_windows(
    windows: int,
    length: int,
    *,
    split: Split,
    validation_fraction: float = 0.2,
    gap: int | None = None,
    generator: torch.Generator | None = None,
) -> Windows:
    r"""Starts of ``windows`` windows of ``length`` T, the last share of them for validation.

    - ``"time"``: training starts at 0, 1, ..., n - 1, validation at n + ``gap`` and later. With
      ``gap`` >= T, its default, no value of the series is in a training window, or is a training
      target, and is also in a validation window or a validation target. A smaller gap is refused.
    - ``"random"``: windows that start at 0, 1, ... are dealt out at random, as in the published
      experiment. Neighbours share all values but one, so validation targets lie inside of training
      windows (:func:`targets_seen`). ``gap`` has no meaning and must be None; the ``generator``
      deals.

    The series must hold ``windows`` + ``gap`` + T values. Raises ValueError for sizes below 1, a
    fraction that leaves one side empty, an unknown split, a gap that lets values be shared.
    """
    require_integer("windows", windows, minimum=2, remedy="one to train and one to validate")
    require_integer("length", length, minimum=1)
    require_one_of("split", split, get_args(Split))
    held = round(validation_fraction * windows) if 0 < validation_fraction < 1 else 0
    if not 0 < held < windows:
        raise ValueError(
            f"validation_fraction: expected a fraction that leaves both sides at least one of the "
            f"{windows} windows, got {validation_fraction}"
        )
    kept = windows - held
    if split == "time":
        gap = length if gap is None else gap
        require_integer(
            "gap", gap, minimum=length,
            remedy=f"windows of {length} tokens and a target share values across a smaller one",
        )  # fmt: skip
        return Windows(_range(0, kept), _range(kept + gap, windows + gap))
    if gap is not None:
        raise ValueError(f"gap: expected None for split='random', got {gap}; it has none")
    if generator is None:
        raise ValueError("generator: expected one for split='random', got None; it deals")
    require_cpu_generator(generator)
    dealt = torch.randperm(windows, generator=generator, device="cpu")
    return Windows(dealt[held:].sort().values, dealt[:held].sort().values)


def targets_seen(windows: Windows, length: int) -> float:
    r"""The share of validation targets that are tokens or targets of a training window.

    Windows start at ``windows`` and hold ``length`` T tokens. Raises ValueError for a length below
    1 or no validation window.
    """
    require_integer("length", length, minimum=1)
    if not windows.validation.numel():
        raise ValueError("windows: expected at least one validation window, got none")
    targets = windows.validation + length
    seen = (windows.training[:, None] + _range(0, length + 1)).unique()
    return float(torch.isin(targets, seen).double().mean())


def _range(start: int, stop: int) -> Int[Tensor, " k"]:
    return torch.arange(start, stop, device="cpu")
