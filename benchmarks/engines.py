r"""Which engine of the library serves a side of a comparison."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from attention_dynamics.models.engines import selection
from benchmarks.timing import Side


class Unusable(RuntimeError):
    """The engine of a row can't be used on this machine; the message says why."""


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Let ``name`` serve every call inside, "auto" included."""
    before = os.environ.get(selection.ENVIRONMENT)
    os.environ[selection.ENVIRONMENT] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[selection.ENVIRONMENT]
        else:
            os.environ[selection.ENVIRONMENT] = before


def require_engine(name: str) -> None:
    """Raise Unusable where the library would quietly take another engine."""
    reason = selection.available()[name]
    if reason:
        raise Unusable(f"engine {name}: {reason}")


def served_by(name: str, side: Side) -> Side:
    """The side, with every call inside served by the engine of that name."""

    @wraps(side)
    def inside() -> Any:
        with engine(name):
            return side()

    return inside
