r"""The teacher: a large fixed sample of heads that stands in for the expectation of the target."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models.parameters import independent_initialisation
from attention_dynamics.theory.transport import (
    MultiAnchorTransport,
    contributions,
    require_sequences,
)
from attention_dynamics.validation import require_integer

_HEADS, _BLOCK = 1024, 2**18  # heads, and samples x heads, whose contributions are held at once


class TeacherValues(NamedTuple):
    r"""Targets (n,) and their Monte-Carlo standard errors (n,)."""

    values: Float[Tensor, " n"]
    standard_error: Float[Tensor, " n"]


class Teacher:
    r"""
    .. math:: \tilde f(X; v) = \mathbb E[z(X)] \approx \frac1N \sum_{i=1}^N z_i(X), \qquad
        z = v_c\, \sigma(s) + c\, \sigma'(s)
        \bigl(\langle v_u, a \rangle + \langle v_w, (M U) q^\top \rangle\bigr)

    over N = ``heads`` independent heads (8192 by default), drawn once from ``generator``: the
    teacher is a fixed function of the tokens. It is itself a sample, so its
    :meth:`standard_error` belongs to every error measured against it. The transport of the heads is
    computed once; whatever the number of anchors, the values are then one tangent map, a sum over
    heads of slopes, in chunks of heads and samples.

    Raises ValueError if ``heads`` < 2 or the generator is not on the CPU. Source: arXiv 2601.16514,
    the multi-anchor teacher of its experiments.
    """

    def __init__(
        self,
        transport: MultiAnchorTransport,
        *,
        generator: torch.Generator,
        heads: int = 8192,
        engine: str = "auto",
    ) -> None:
        require_integer("heads", heads, minimum=2, remedy="a standard error needs two heads")
        self.transport, self.engine = transport, engine
        self.parameters = independent_initialisation(
            heads,
            transport.anchors.shape[-1],
            generator=generator,
            dtype=transport.anchors.dtype,
            device=transport.anchors.device,
        )
        self._direction = transport(self.parameters, engine=engine)

    @property
    def heads(self) -> int:
        """Number of heads N."""
        return self.parameters.heads

    def __call__(
        self, tokens: Float[Tensor, "n T d"], mask: Bool[Tensor, "n T"] | None = None
    ) -> Float[Tensor, " n"]:
        r""":math:`\frac1N \sum_i z_i(X_j)`, (n,).

        Raises ValueError or TypeError for tokens that are not finite or do not fit the anchors.
        """
        return self.evaluate(tokens, mask).values

    def standard_error(
        self, tokens: Float[Tensor, "n T d"], mask: Bool[Tensor, "n T"] | None = None
    ) -> Float[Tensor, " n"]:
        r""":math:`\sqrt{\widehat{\mathrm{Var}}(z(X_j))/N}`, (n,): the error of N heads for E.

        Raises ValueError or TypeError for tokens that are not finite or do not fit the anchors.
        """
        return self.evaluate(tokens, mask).standard_error

    def evaluate(
        self, tokens: Float[Tensor, "n T d"], mask: Bool[Tensor, "n T"] | None = None
    ) -> TeacherValues:
        r"""Targets and standard errors in one pass; sums over heads are in float64.

        Raises ValueError or TypeError for tokens that are not finite or do not fit the anchors.
        """
        require_sequences(tokens, self.transport, mask)
        inputs = _pass.prepare(
            tokens, self.transport.query, mask, dimension=self.parameters.dimension
        )
        heads = min(self.heads, _HEADS)
        chunk, samples = max(1, _BLOCK // heads), tokens.shape[0]
        total = torch.zeros(samples, dtype=torch.float64, device=tokens.device)
        squares = torch.zeros_like(total)
        for first in range(0, self.heads, heads):
            some, v = (
                parameters.map(lambda block: block[first : first + heads])  # noqa: B023
                for parameters in (self.parameters, self._direction)
            )
            for start in range(0, samples, chunk):
                rows = slice(start, start + chunk)
                z = contributions(inputs.rows(rows), self.transport, some, v, self.engine)
                total[rows] += z.sum(dim=-1, dtype=torch.float64)
                squares[rows] += z.square().sum(dim=-1, dtype=torch.float64)
        mean = total / self.heads
        variance = (squares / self.heads - mean**2).clamp_min(0) * self.heads / (self.heads - 1)
        dtype = self.parameters.dtype
        return TeacherValues(mean.to(dtype), (variance / self.heads).sqrt().to(dtype))
