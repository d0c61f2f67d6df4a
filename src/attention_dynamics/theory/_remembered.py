r"""The scalar constants of the theory, each computed once a process.

A table of bounds, or the search for a width, asks for the same constants over and over. They are
pure functions of numbers. T is an argument of none of them, so that nothing is kept, or looked up,
by the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import ParamSpec, TypeVar, cast

from attention_dynamics.theory import a_priori, approximation

P = ParamSpec("P")
R = TypeVar("R")


def _remembered(function: Callable[P, R]) -> Callable[P, R]:
    """The function with a memory of its last 4096 results; 64 and 64.0 are told apart."""
    return cast(Callable[P, R], lru_cache(maxsize=4096, typed=True)(function))


a_priori_constants = _remembered(a_priori.a_priori_constants)
approximation_bound = _remembered(approximation.approximation_bound)
bernstein_approximation_bound = _remembered(approximation.bernstein_approximation_bound)
head_second_moment = _remembered(approximation.head_second_moment)
target_bound = _remembered(approximation.target_bound)
