r"""The inputs of the benchmarks: tokens, parameters and targets of the paper's sizes, by seed."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.models.parameters import (
    Parameters,
    independent_initialisation,
    symmetric_initialisation,
)
from benchmarks.plain import Data

HELD_OUT = 0.2  # of all samples, as in the paper: 4000 train and 1000 are held out of 5000


class Instance(NamedTuple):
    """A training problem: data, query ("last" or a vector), symmetric initial parameters."""

    data: Data
    query: Tensor | Literal["last"]
    initial: Parameters


def instance(
    d: int, T: int, m: int, n: int, *, query: str = "last", paired: bool = True
) -> Instance:
    """``n`` training samples and a quarter as many held out, in the unit ball, random targets.

    ``paired`` heads are the symmetric initialisation, where f is 0; without, heads are independent.
    """
    held = round(n * HELD_OUT / (1 - HELD_OUT))
    total = n + max(1, held)
    tokens = unit_ball_tokens(total, T, d, generator=generator(0, "benchmarks", "tokens"))
    targets = torch.randn(total, generator=generator(0, "benchmarks", "targets"))
    fixed = query_vector(d, generator=generator(0, "benchmarks", "query"))
    draw = symmetric_initialisation if paired else independent_initialisation
    initial = draw(m, d, generator=generator(0, "benchmarks", "student"))
    data = Data(tokens[:n], targets[:n], tokens[n:], targets[n:])
    return Instance(data, "last" if query == "last" else fixed, initial)
