r"""The multi-anchor teacher: 8192 heads, 16 anchors, on the paper's 5000 sequences.

The baseline computes what the definition says, block by block and anchor by anchor: features of
the samples with the d x d covariance of every head, inner products with those of each anchor. Ours
collapses the anchors into one direction for each head. The baseline takes minutes for all samples,
so both are timed on as many as one block of it, and ours also on all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.theory.teacher import Teacher
from attention_dynamics.theory.transport import (
    MultiAnchorTransport,
    TransportNorms,
    random_multi_anchor,
)
from benchmarks.probe import peak_megabytes
from benchmarks.table import Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import race

GROUP = "teacher"
ANCHORS, NORM = 16, 3.0
TOLERANCE = 1e-3


def cases(settings: Settings) -> list[Case]:
    """One case: time on a block, time on all, and the peaks."""
    return [Case("multi-anchor teacher", lambda: measure(settings))]


def measure(settings: Settings) -> list[Row | Point]:
    """Ours against the definition on one block; ours on all samples; the peak of both."""
    heads, block, total = (64, 4, 16) if settings.quick else (8192, 32, 5000)
    sizes = f"m={heads} anchors={ANCHORS} T=16 d=8"
    baseline, ours = plain_teacher(heads, block), our_teacher(heads, block)
    difference = agreement(baseline(), ours(), TOLERANCE)
    pace = replace(settings.pace, least=3)
    times = race({"definition": baseline, "ours": ours}, pace)
    whole = race({"ours": our_teacher(heads, total)}, pace)
    linear = whole.median("ours") / times.median("ours") * block / total
    rows: list[Row | Point] = [
        timed_row(
            times, "definition", "ours", group=GROUP, what="teacher", malloc=settings.malloc,
            sizes=f"{sizes} n={block} of {total}", target=settings.target(40.0),
            difference=difference, tolerance=TOLERANCE,
            note=f"ours on all {total}: {whole.median('ours'):.3g} s CPU, "
            f"{linear:.2f} of {total}/{block} times this",
        )
    ]  # fmt: skip
    if not settings.quick:
        peak = peak_megabytes(our_teacher, heads, total)
        other = peak_megabytes(plain_teacher, heads, block)
        rows.append(
            Row(
                GROUP, "teacher, peak memory", f"{sizes} n={total}", "definition", "ours",
                ratio=peak, target=settings.target(50.0), sense="at most", unit="MB",
                baseline_mb=other, ours_mb=peak, malloc=settings.malloc,
                note=f"of the definition: that of one block of {block} samples",
            )
        )  # fmt: skip
    return rows


def _problem(samples: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, query, anchors and their coefficients."""
    transport = _transport()
    tokens = unit_ball_tokens(samples, 16, 8, generator=generator(0, "benchmarks", "teacher"))
    assert isinstance(transport.query, Tensor)
    return tokens, transport.query, transport.anchors, transport.coefficients


def _transport() -> MultiAnchorTransport:
    query = query_vector(8, generator=generator(0, "benchmarks", "teacher query"))
    return random_multi_anchor(
        ANCHORS, 16, 8, generator=generator(0, "benchmarks", "anchors"),
        norms=TransportNorms(NORM, NORM, NORM), query=query,
    )  # fmt: skip


def our_teacher(heads: int, samples: int) -> Callable[[], Tensor]:
    """Values and nothing else; the teacher, with its direction, is made before."""
    tokens = _problem(samples)[0]
    teacher = Teacher(_transport(), generator=generator(0, "benchmarks", "heads"), heads=heads)
    teacher(tokens[:2])
    return lambda: teacher(tokens)


def plain_teacher(heads: int, samples: int) -> Callable[[], Tensor]:
    """The definition of the teacher for the same heads."""
    tokens, query, anchors, beta = _problem(samples)
    drawn = Teacher(
        _transport(), generator=generator(0, "benchmarks", "heads"), heads=heads
    ).parameters
    return lambda: by_definition(tokens, query, anchors, beta, *drawn)


def by_definition(
    tokens: Tensor, query: Tensor, anchors: Tensor, beta: Tensor, c: Tensor, U: Tensor, W: Tensor
) -> Tensor:
    r""":math:`\frac1m \sum_i z_i(X)` with every M formed, one anchor after the other."""

    def features(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = torch.einsum("ntd,md->nmt", X, W @ query)
        weights = torch.softmax(logits, dim=-1)
        a = torch.einsum("nmt,ntd->nmd", weights, X)
        moments = torch.einsum("nmt,ntd,nte->nmde", weights, X, X)
        M = moments - a[..., :, None] * a[..., None, :]
        return torch.einsum("nmd,md->nm", a, U), a, torch.einsum("nmde,me->nmd", M, U)

    s, a, r = features(tokens)
    value, slope = torch.tanh(s), 1 - torch.tanh(s) ** 2
    total = torch.zeros(tokens.shape[0], dtype=tokens.dtype)
    for anchor, weight in zip(anchors, beta, strict=True):
        s_r, a_r, r_r = (feature[0] for feature in features(anchor[None]))
        slope_r = 1 - torch.tanh(s_r) ** 2
        # The matrix sigma'(s_r) M_r U q^T of each head, cut off at the norm.
        v_w = (slope_r[:, None] * r_r)[:, :, None] * query
        size = torch.linalg.vector_norm(v_w, dim=(1, 2))
        v_w = v_w * torch.clamp(NORM / size.clamp_min(1e-30), max=1.0)[:, None, None]
        along_c = NORM * torch.tanh(s_r) * value
        along_u = NORM * slope_r * slope * torch.einsum("nmd,md->nm", a, a_r)
        along_w = slope * torch.einsum("nmd,mde,e->nm", r, v_w, query)
        total += weight * (along_c + c**2 * (along_u + along_w)).mean(dim=1)
    return total
