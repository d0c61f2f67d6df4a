r"""Experiments: one module each, all of one shape, found by name.

A module has ``NAME``, ``SCHEMA``, a frozen ``Config``, ``COLUMNS``, ``PROFILES`` (``smoke``,
``book``, ``paper``), ``run(config, seed, device) -> rows``, ``summarise(frame) -> estimates`` and
``BANDS``, the intervals that theory predicts, fixed before any run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = (
    "tangent_kernel",
    "kernel_length",
    "sample_maximum",
    "linearisation",
    "certificates",
    "width",
    "steps",
    "sample_size",
    "sequence_length",
    "recurrence",
    "memory",
    "without_projection",
    "beyond_kernel",
    "real_sequences",
    "stacks",
    "population_limit",
    "regression_conditioning",
    "regression_ablation",
    "regression_context",
    "residual_conditioning",
    "residual_certificates",
    "residual_training",
    "residual_depth",
    "encoder_scaling",
    "encoder_width",
    "common_task",
)


def names() -> tuple[str, ...]:
    """The experiments there are, in the order of the book."""
    return _NAMES


def get(name: str) -> Any:
    """The experiment of that name. Raises ValueError listing the names there are."""
    if name not in _NAMES:
        raise ValueError(f"experiment must be one of {', '.join(_NAMES)}; got {name!r}")
    return import_module(f"{__name__}.{name}")
