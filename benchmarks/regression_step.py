r"""Loss and gradients of attention for regression, against autograd through torch's attention.

Both peers are what a researcher would write: ``scaled_dot_product_attention`` with scale 1, the
samples as queries of one shared context or as one query of a context each, and the same formula
with a plain softmax. Ours is the closed form. The limit carries out the operations of the closed
form from registers, in single precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attention_dynamics.data import generator
from attention_dynamics.data.regression import RegressionSample, regression_problem, sample
from attention_dynamics.models import regression
from attention_dynamics.models.regression import Factors
from benchmarks.machine import Work, spend
from benchmarks.table import Case, Point, Row, Settings, agreement, timed_row
from benchmarks.timing import Side, race

GROUP = "regression_step"
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


class Shape(NamedTuple):
    """Samples n, tokens T, dimensions m = d = k, whether the context is shared, and the dtype."""

    n: int
    T: int
    k: int
    shared: bool = True
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        contexts = "shared" if self.shared else "own"
        return f"n={self.n} T={self.T} k={self.k} {contexts} {str(self.dtype).split('.')[1]}"

    def work(self) -> Work:
        r""":math:`8k \cdot nT` operations and :math:`nT` exponentials: the closed form.

        Logits, slopes along the tokens, and the two sums over tokens take 2k each.
        """
        return Work(8 * self.k * self.n * self.T, self.n * self.T)


SHAPES = (
    Shape(384, 768, 8),  # the experiments on the softmax objective
    Shape(512, 1024, 8),
    Shape(512, 1024, 8, dtype=torch.float32),
    Shape(2048, 4096, 32),
    Shape(2048, 4096, 32, dtype=torch.float32),
    Shape(512, 256, 8, shared=False),
    Shape(512, 256, 8, shared=False, dtype=torch.float32),
)
QUICK = (Shape(12, 16, 3), Shape(12, 16, 3, shared=False), Shape(12, 16, 3, dtype=torch.float32))


def cases(settings: Settings) -> list[Case]:
    """Shared contexts and contexts of each sample's own, in both precisions."""
    return [
        Case(str(shape), _case(shape, settings)) for shape in (QUICK if settings.quick else SHAPES)
    ]


def _case(shape: Shape, settings: Settings) -> Callable[[], list[Row | Point]]:
    return lambda: measure(shape, settings)


def measure(shape: Shape, settings: Settings) -> list[Row | Point]:
    """Fused attention, plain softmax, ours and the limit in one race, for one shape."""
    factors, data = task(shape)
    sides: dict[str, Side] = {
        "fused attention": lambda: through_autograd(fused_attention, factors, data),
        "plain softmax": lambda: through_autograd(plain_softmax, factors, data),
    }
    tolerance = TOLERANCES[shape.dtype]
    differences = {
        name: agreement(side(), closed_form(factors, data), tolerance)
        for name, side in sides.items()
    }
    times = race(
        {
            **sides,
            "ours": lambda: closed_form(factors, data),
            "limit": lambda: spend(shape.work()),
        },
        settings.pace,
    )
    shown = {"group": GROUP, "sizes": str(shape), "malloc": settings.malloc}
    rows: list[Row | Point] = [
        timed_row(
            times, name, "ours", what="loss and gradients of attention for regression",
            difference=differences[name], tolerance=tolerance, **shown,
        )
        for name in sides
    ]  # fmt: skip
    rows.append(
        timed_row(
            times, "ours", "limit", what="regression step, over the limit", sense="at most",
            note="the limit is that of float32", **shown,
        )
    )  # fmt: skip
    return rows


def task(shape: Shape) -> tuple[Factors, RegressionSample]:
    """Factors of small logits, and a sample of a problem of condition number 10."""
    problem = regression_problem(
        shape.k, shape.k, condition=10.0, noise=0.3,
        generator=generator(0, "benchmarks", "regression"), dtype=shape.dtype,
    )  # fmt: skip
    data = sample(
        problem, shape.n, shape.T, shared=shape.shared,
        generator=generator(0, "benchmarks", "regression", "sample"),
    )  # fmt: skip
    stream = generator(0, "benchmarks", "regression", "factors")
    A, B = torch.randn((2, shape.k, shape.k), generator=stream, dtype=torch.float64)
    return Factors(A, 0.2 * B).to(dtype=shape.dtype), data


def closed_form(factors: Factors, data: RegressionSample) -> tuple[Tensor, ...]:
    """Loss and both gradients by the library."""
    loss, gradients = regression.loss_and_gradients(factors, *data, validate=False)
    return loss, *gradients


def through_autograd(
    pool: Callable[[Tensor, Tensor], Tensor], factors: Factors, data: RegressionSample
) -> tuple[Tensor, ...]:
    """Loss and both gradients by autograd, with ``pool`` for the attention."""
    A, B = (block.detach().requires_grad_() for block in factors)
    outputs = pool(data.queries @ B, data.contexts) @ A.mT
    loss = (outputs - data.targets).square().sum() / (2 * data.queries.shape[0])
    return loss.detach(), *torch.autograd.grad(loss, (A, B))


def fused_attention(b: Tensor, contexts: Tensor) -> Tensor:
    """Pooled tokens (n, k): one head of n queries, or a batch of n with one query each."""
    if contexts.ndim == 2:
        keys = contexts[None, None]
        return scaled_dot_product_attention(b[None, None], keys, keys, scale=1.0)[0, 0]
    keys = contexts[:, None]
    return scaled_dot_product_attention(b[:, None, None], keys, keys, scale=1.0)[:, 0, 0]


def plain_softmax(b: Tensor, contexts: Tensor) -> Tensor:
    """Pooled tokens (n, k) from the formula."""
    queries = b if contexts.ndim == 2 else b[:, None]
    pooled = torch.softmax(queries @ contexts.mT, dim=-1) @ contexts
    return pooled.reshape(b.shape)
