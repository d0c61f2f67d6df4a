r"""Ascent of a head's linearisation error, with the gradient read off the features at the point.

With :math:`(\tilde s, \tilde a, \tilde r)` the features of the displaced head
:math:`(U + \delta_U,\; \gamma W q + p)` and :math:`(s, a, r)` those of the head itself,

.. math:: e = (c + \delta_c)\,\sigma(\tilde s) - (c + \delta_c)\,\sigma(s)
        - c\,\dot\sigma(s)\,(\delta_U \cdot a + p \cdot r), \\
    \partial_{\delta_c} e = \sigma(\tilde s) - \sigma(s), \qquad
    \partial_{\delta_U} e = (c + \delta_c)\,\dot\sigma(\tilde s)\,\tilde a - c\,\dot\sigma(s)\,a,
    \qquad \partial_p e = (c + \delta_c)\,\dot\sigma(\tilde s)\,\tilde r - c\,\dot\sigma(s)\,r.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.activations import Activation
from attention_dynamics.models.parameters import Parameters


class Displacements(NamedTuple):
    r""":math:`(\delta_c, \delta_U, p)` of many heads, k displacements each; also gradients."""

    c: Float[Tensor, "*k m"]
    U: Float[Tensor, "*k m d"]
    p: Float[Tensor, "*k m d"]

    def norms(self) -> Displacements:
        """Norms a head: absolute values of c, and (.., m, 1) for the vectors."""
        U, p = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (self.U, self.p))
        return Displacements(self.c.abs(), U, p)


class HeadAscent:
    r"""All heads at one sample, displaced k times each; ``limits`` are the radii of the balls."""

    def __init__(
        self,
        initial: Parameters,
        row: Float[Tensor, "T d"],
        query: Float[Tensor, " d"],
        sigma: Activation,
        limits: tuple[float, float, float],
    ) -> None:
        self.initial, self.row, self.query, self.sigma = initial, row, query, sigma
        self.length = float(torch.linalg.vector_norm(query))
        self.limits = Displacements(
            *(row.new_tensor(limit) for limit in (*limits[:2], limits[2] * self.length))
        )
        self.logit = initial.W @ query
        self.s, self.a, self.r = self._features(initial.U, self.logit)
        self.value, slope = sigma.value_and_first(self.s)
        self.in_U, self.in_p = ((initial.c * slope)[:, None] * x for x in (self.a, self.r))

    def error(self, point: Displacements) -> tuple[Float[Tensor, "k m"], Displacements]:
        """Return e of every displacement and its gradient."""
        c = self.initial.c + point.c
        s, a, r = self._features(self.initial.U + point.U, self.logit + point.p)
        value, slope = self.sigma.value_and_first(s)
        gain, weight = value - self.value, (c * slope)[..., None]
        linear = (point.U * self.in_U + point.p * self.in_p).sum(dim=-1)
        gradient = Displacements(gain, weight * a - self.in_U, weight * r - self.in_p)
        return c * gain - linear, gradient

    def climb(
        self, signs: Float[Tensor, "k 1"], start: Displacements, steps: int
    ) -> tuple[Float[Tensor, "k m"], Displacements]:
        """Climb sign * e from k starts a head, to the farthest points along the gradient, and on.

        Returns the largest value that each start has seen, and where.
        """
        # Near the centre the gradient is that of the second-order term: an aligned start.
        _, gradient = self.error(Displacements(*(1e-2 * block for block in start)))
        point = self._farthest(signs, gradient, start)
        value, gradient = self.error(point)
        best, best_value = point, signs * value
        for _ in range(steps):
            point = self._farthest(signs, gradient, point)
            value, gradient = self.error(point)
            value = signs * value
            better = value > best_value
            best_value = torch.where(better, value, best_value)
            best = Displacements(
                torch.where(better, point.c, best.c),
                torch.where(better[..., None], point.U, best.U),
                torch.where(better[..., None], point.p, best.p),
            )
        return best_value, best

    def displaced(self, best: Displacements) -> Parameters:
        r"""The heads at one displacement each, :math:`\delta_W = p q^\top / \|q\|^2`."""
        q = self.query / self.length**2 if self.length > 0 else self.query
        return self.initial.plus(Parameters(best.c, best.U, best.p[:, :, None] * q))

    def _features(self, U: Tensor, logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.softmax(logit @ self.row.mT, dim=-1)
        projections = U @ self.row.mT
        s = (weights * projections).sum(dim=-1)
        r = (weights * (projections - s[..., None])) @ self.row
        return s, weights @ self.row, r

    def _farthest(
        self, signs: Tensor, gradient: Displacements, fallback: Displacements
    ) -> Displacements:
        """Farthest points of the balls along the gradient; the fallback where it vanishes."""
        c, U, p = (
            torch.where(norms > 0, limit * sign * block / norms, other)
            for block, norms, other, limit, sign in zip(
                gradient, gradient.norms(), fallback, self.limits,
                (signs, signs[..., None], signs[..., None]), strict=True,
            )
        )  # fmt: skip
        return Displacements(c, U, p)
