r"""Tokens, query and targets of one seed, as the experiments on system 1 share them.

The targets are the values of a multi-anchor teacher: a member of the class of the theorem.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from torch import Tensor

from attention_dynamics.data import Law, generator, query_vector, unit_ball_tokens
from attention_dynamics.models.attention import Query
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import (
    MultiAnchorTransport,
    TransportNorms,
    random_multi_anchor,
)


class TeacherProblem(NamedTuple):
    """Training and held-out samples, and the transport map that made their targets."""

    tokens: Tensor
    targets: Tensor
    standard_error: Tensor
    held_tokens: Tensor
    held_targets: Tensor
    query: Query
    transport: MultiAnchorTransport


@lru_cache(maxsize=32)
def teacher_problem(
    name: str,
    seed: int,
    *,
    samples: int,
    validation_fraction: float,
    length: int,
    dimension: int,
    token_law: Law,
    query: Literal["fixed", "last"],
    activation: str,
    anchors: int,
    teacher_heads: int,
    norms: TransportNorms,
    device: str,
) -> TeacherProblem:
    r"""The problem of one seed; the streams carry ``name``, so that experiments share no numbers.

    ``query`` is ``"fixed"``, one unit vector, or ``"last"``, the last token. Raises ValueError
    for another one, and if fewer than two samples are left for training.
    """
    asked: Query = "last"
    if query == "fixed":
        asked = query_vector(dimension, generator=generator(seed, name, "query")).to(device)
    elif query != "last":
        raise ValueError(f"query must be 'fixed' or 'last', got {query!r}")
    kept = samples - round(validation_fraction * samples)
    if kept < 2:
        raise ValueError(
            f"samples={samples} and validation_fraction={validation_fraction} leave "
            f"{kept} for training; at least 2 are needed for a variance"
        )
    transport = random_multi_anchor(
        anchors, length, dimension, generator=generator(seed, name, "anchors"), norms=norms,
        query=asked, activation=activation, law=token_law, device=device,
    )  # fmt: skip
    teacher = Teacher(transport, generator=generator(seed, name, "teacher"), heads=teacher_heads)
    tokens = unit_ball_tokens(
        samples, length, dimension,
        generator=generator(seed, name, "tokens"), law=token_law, device=device,
    )  # fmt: skip
    targets, errors = teacher.evaluate(tokens)
    return TeacherProblem(
        tokens[:kept], targets[:kept], errors[:kept], tokens[kept:], targets[kept:],
        asked, transport,
    )  # fmt: skip
