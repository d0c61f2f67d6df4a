r"""One regression problem for sequences of every length: nested samples, and one teacher."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.models.attention import Query
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import MultiAnchorTransport, TransportNorms
from attention_dynamics.validation import require_integer, require_one_of

NestedLaw = Literal["sequence_means", "iid"]
QueryKind = Literal["fixed", "last"]
LAWS: tuple[NestedLaw, ...] = ("sequence_means", "iid")
_FIRST = 4  # tokens of the first block; every further one doubles the length


class NestedProblem(NamedTuple):
    """Samples of one length, and what all lengths of a seed share."""

    tokens: Float[Tensor, "n T d"]
    targets: Float[Tensor, " n"]
    query: Query


def nested_tokens(
    count: int, length: int, dimension: int, *, law: NestedLaw, seed: int, name: str, role: str
) -> Float[Tensor, "n T d"]:
    r""":math:`z_{j,t}`, or :math:`(b_j + z_{j,t})/2`: the last T tokens of an endless sequence.

    The law of :func:`~attention_dynamics.data.tokens.unit_ball_tokens`, in float64 on the CPU. For
    the same ``seed``, ``name`` and ``role`` a shorter sequence is the end of a longer one, and the
    two laws share z. Raises ValueError for a size below 1 or another law.
    """
    require_integer("length", length, minimum=1)
    require_one_of("law", law, LAWS)

    def drawn(size: int, *block: str | int) -> Tensor:
        stream = generator(seed, name, role, *block)
        return unit_ball_tokens(count, size, dimension, generator=stream, dtype=torch.float64)

    blocks, have = [], 0
    while have < length:
        size = max(_FIRST, have)
        blocks.append(drawn(size, have))
        have += size
    z = torch.cat(blocks[::-1], dim=1)[:, -length:]
    return z if law == "iid" else 0.5 * (drawn(1, "means") + z)


def nested_problem(
    name: str,
    seed: int,
    *,
    samples: int,
    length: int,
    dimension: int,
    token_law: NestedLaw,
    query: QueryKind,
    activation: str,
    anchors: int,
    anchor_length: int,
    teacher_heads: int,
    norms: TransportNorms,
    device: str,
) -> NestedProblem:
    r"""The problem of one seed at one length, in float32; the streams carry ``name``.

    The anchors of the teacher have ``anchor_length`` tokens at every T, so that the target is one
    function of sequences of any length. ``query`` is ``"fixed"``, one unit vector, or ``"last"``,
    the last token. Raises ValueError for another one, another law or a size below 1.
    """
    require_one_of("query", query, ("fixed", "last"))

    def tokens(role: str, count: int, size: int) -> Tensor:
        return nested_tokens(
            count, size, dimension, law=token_law, seed=seed, name=name, role=role
        ).to(device=device, dtype=torch.float32)  # fmt: skip

    asked: Query = "last"
    if query == "fixed":
        asked = query_vector(dimension, generator=generator(seed, name, "query")).to(device)
    normal = torch.randn(
        anchors, generator=generator(seed, name, "coefficients"), dtype=torch.float64
    )
    coefficients = (normal / normal.abs().sum()).to(device=device, dtype=torch.float32)
    transport = MultiAnchorTransport(
        tokens("anchors", anchors, anchor_length), coefficients, norms, asked, activation
    )
    teacher = Teacher(transport, generator=generator(seed, name, "teacher"), heads=teacher_heads)
    X = tokens("samples", samples, length)
    return NestedProblem(X, teacher(X), asked)
