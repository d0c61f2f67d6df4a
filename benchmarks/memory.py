r"""Peak memory of a training step, and of inference, against the number of tokens T.

A fixed query, n = 32 sequences, m = 64 heads, d = 8. Ours needs the tokens and little else; the
plain module and torch's fused attention, with autograd, keep arrays that grow with T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_dynamics.models import shallow
from attention_dynamics.models.parameters import Parameters
from benchmarks import plain
from benchmarks.instances import instance
from benchmarks.peers import FusedAttention
from benchmarks.probe import peak_megabytes
from benchmarks.table import Case, Point, Row, Settings, agreement

GROUP = "memory"
SAMPLES, HEADS, DIMENSION = 32, 64, 8
SIDES = ("ours", "plain", "fused attention")


def cases(settings: Settings) -> list[Case]:
    """Training against T, in one case, since its row compares the ends of the curve."""
    return [Case("training step", lambda: measure(settings))]


def measure(settings: Settings) -> list[Row | Point]:
    """Peaks of the three sides over T, and what the ends of ours say about its growth."""
    lengths = (2**6, 2**8) if settings.quick else (2**8, 2**10, 2**12, 2**14, 2**16)
    results = [compute(side, lengths[0])() for side in SIDES]
    difference = max(agreement(results[1], result, 1e-4) for result in results)
    rows: list[Row | Point] = []
    peaks: dict[tuple[str, int], float] = {}
    for side in SIDES:
        for T in lengths:
            peaks[side, T] = peak_megabytes(compute, side, T)
            rows.append(Point(GROUP, "peak of a training step", side, "T", T, peaks[side, T], "MB"))
    longest = lengths[-1]
    sizes = f"T={longest} m={HEADS} n={SAMPLES} d={DIMENSION} q=fixed"
    tokens = SAMPLES * longest * DIMENSION * 4 / 2**20
    rows.append(
        Row(
            GROUP, "peak of a training step beyond its tokens", sizes,
            "the tokens themselves", "ours", ratio=peaks["ours", longest],
            target=settings.target(16.0), sense="at most", unit="MB", baseline_mb=tokens,
            ours_mb=peaks["ours", longest], difference=difference, tolerance=1e-4,
            note=f"{peaks['ours', lengths[0]]:.1f} MB at T={lengths[0]}: flat is read as 16 MB "
            "at most, a quarter of the tokens",
        )
    )  # fmt: skip
    for side in SIDES[1:]:
        rows.append(
            Row(
                GROUP, f"peak of a training step, {side} over ours",
                sizes, side, "ours",
                ratio=peaks[side, longest] / max(peaks["ours", longest], 1.0),
                baseline_mb=peaks[side, longest], ours_mb=peaks["ours", longest],
                difference=difference, tolerance=1e-4,
                note="ours counted as 1 MB at least; the tokens are not counted",
            )
        )  # fmt: skip
    return rows


def compute(side: str, T: int) -> Callable[[], tuple[Tensor, ...]]:
    """Loss and gradients of one side at T tokens, warmed up on two sequences of eight tokens."""
    small, full = (
        instance(DIMENSION, length, HEADS, n, query="fixed", paired=False)
        for length, n in ((8, 2), (T, SAMPLES))
    )
    assert isinstance(full.query, Tensor)
    run = {"ours": _ours, "plain": _plain, "fused attention": _fused_attention}[side]
    run(small.initial, small.data.tokens, small.data.targets, full.query)
    tokens, targets = full.data.tokens.clone(), full.data.targets.clone()
    return lambda: run(full.initial, tokens, targets, full.query)  # type: ignore[arg-type]


def _ours(
    initial: Parameters, tokens: Tensor, targets: Tensor, query: Tensor
) -> tuple[Tensor, ...]:
    loss, gradients = shallow.loss_and_gradients(
        initial, tokens, targets, query=query, validate=False
    )
    return loss, *gradients


def _plain(
    initial: Parameters, tokens: Tensor, targets: Tensor, query: Tensor
) -> tuple[Tensor, ...]:
    return _by_autograd(plain.PlainTransformer(initial, query), tokens, targets)


def _fused_attention(
    initial: Parameters, tokens: Tensor, targets: Tensor, query: Tensor
) -> tuple[Tensor, ...]:
    return _by_autograd(FusedAttention(initial, query), tokens, targets)


def _by_autograd(model: torch.nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    loss = ((model(tokens) - targets) ** 2).mean()
    loss.backward()
    return loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)
