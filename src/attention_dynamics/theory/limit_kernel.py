r"""The limit kernel :math:`K_\infty = \lim_m K`: an expectation over one head, with its error.

.. math:: K_c = \mathbb E\,\sigma\sigma', \qquad
    K_u = \mathbb E\,\dot\sigma\dot\sigma'\, a \cdot a', \qquad
    K_w = \gamma^2 \langle q, q' \rangle\, \mathbb E\,\dot\sigma\dot\sigma'\, U^\top M M' U,

over :math:`U \sim \mathcal N(0, I_d)` and W with independent standard entries; :math:`c_i^2 = 1`.
Only W q enters: a fixed query needs the d Gaussians :math:`w = Wq/\|q\|`, queries that span r
dimensions need d r. Heads are scrambled Sobol points, and the error is read off independent
scramblings. Sources: arXiv 2601.16514 (the kernel); Owen, *Scrambled net variance for integrals of
smooth functions* (1997).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models.activations import ERF, Activation
from attention_dynamics.models.attention import Query
from attention_dynamics.models.engines.selection import choose
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory._gram import add_gram, full_precision, mirror, require_memory
from attention_dynamics.theory._linear_split import SplitBuffer
from attention_dynamics.theory._tangents import KernelPair, WeightedHeads, head_blocks
from attention_dynamics.theory.erf_kernel import erf_kernel
from attention_dynamics.theory.kernels import TangentKernel
from attention_dynamics.validation import (
    require_cpu_generator,
    require_integer,
    require_one_of,
)

Method = Literal["auto", "sobol", "closed form", "monte carlo"]


class LimitKernel(NamedTuple):
    r"""
    :math:`K_c, K_u, K_w`, the standard error of their sum, and those of the three (n, n') each.

    The errors have ``randomisations`` - 1 degrees of freedom.
    """

    c: Float[Tensor, "n k"]
    U: Float[Tensor, "n k"]
    W: Float[Tensor, "n k"]
    standard_error: Float[Tensor, "n k"]
    block_errors: TangentKernel

    @property
    def total(self) -> Float[Tensor, "n k"]:
        r""":math:`K_c + K_u + K_w`."""
        return self.c + self.U + self.W


def limit_kernel(
    tokens: Float[Tensor, "n T d"],
    other: Float[Tensor, "k T d"] | None = None,
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    other_mask: Bool[Tensor, "k T"] | None = None,
    other_query: Query | None = None,
    generator: torch.Generator,
    points: int = 1024,
    randomisations: int = 8,
    method: Method = "auto",
    engine: str = "auto",
    memory_limit: int | None = None,
) -> LimitKernel:
    r"""
    .. math:: \bar K = \frac1R \sum_{k=1}^R K^{(k)}, \qquad
        \mathrm{se}^2 = \frac{1}{R(R-1)} \sum_k \bigl(K^{(k)} - \bar K\bigr)^2,

    with R = ``randomisations`` unbiased and independent estimates :math:`K^{(k)}` of ``points``
    points each, best a power of 2. ``method`` is one of

    - ``"sobol"``: points in (w, U), and the part of the activation that is linear in U in closed
      form: for any activation. This is what ``"auto"`` does;
    - ``"closed form"``: points in w only, everything in U in closed form
      (:func:`~attention_dynamics.theory.erf_kernel.erf_kernel`): for ``erf`` only. A point costs
      some forty of the other's, and has less error;
    - ``"monte carlo"``: independent heads, the mean over as many empirical kernels.

    ``generator`` is a CPU generator: it seeds the scramblings. Against themselves, tokens give
    matrices symmetric to the last bit. Sums over the randomisations are in float64, the result is
    in the dtype of the tokens.

    Raises ValueError for an unknown method, one that does not fit the activation, fewer than 2
    randomisations, more dimensions than Sobol points have, what ``empirical_kernel`` refuses
    or matrices larger than the free memory (``memory_limit`` bytes replace it).
    """
    require_one_of("method", method, get_args(Method))
    require_integer("points", points, minimum=1)
    require_integer("randomisations", randomisations, minimum=2, remedy="an error needs two")
    require_cpu_generator(generator)
    _pass.require_tokens(tokens)
    blank = tokens.new_zeros(1, tokens.shape[-1])
    pair = KernelPair(
        Parameters(blank[:, 0], blank, blank[..., None] * blank[:, None]),
        tokens, other, query, other_query, activation, scale, mask, other_mask, engine,
    )  # fmt: skip
    estimate = _ESTIMATES[method]
    if method == "closed form" and pair.sigma is not ERF:
        raise ValueError(
            f"method: expected 'sobol' or 'monte carlo' for {pair.sigma.name!r}; the closed form "
            "over U is that of 'erf', erf(x / sqrt 2)"
        )
    like = pair.left.tokens
    require_memory("tokens", 20 if like.dtype == torch.float32 else 12, pair.shape, like,
                   memory_limit)  # fmt: skip
    mean = torch.zeros((4, *pair.shape), dtype=torch.float64, device=like.device)
    squares = torch.zeros_like(mean)
    draw = _Draws(pair, generator, points, sobol=method != "monte carlo")
    with torch.no_grad(), full_precision():
        for k in range(randomisations):
            blocks = estimate(pair, draw)
            for index, block in enumerate((*blocks, blocks.total)):
                step = block.double() - mean[index]
                mean[index] += step / (k + 1)
                squares[index] += step * (block - mean[index])
    errors = (squares / (randomisations * (randomisations - 1))).sqrt().to(like.dtype)
    c, U, W, _ = mean.to(like.dtype)
    return LimitKernel(c, U, W, errors[3], TangentKernel(*errors[:3]))


class _Draws:
    """Heads (U, W), or W alone, at Gaussian points: a new scrambling, or new numbers, a call."""

    def __init__(
        self, pair: KernelPair, generator: torch.Generator, points: int, *, sobol: bool
    ) -> None:
        self.generator, self.points, self.sobol = generator, points, sobol
        self.like = pair.left.tokens
        self.basis = _span(pair)
        self.buffers: list[SplitBuffer] = []

    def __call__(self, *, with_U: bool = True) -> WeightedHeads:
        d, r = self.basis.shape
        normal = self._normal(d * r + d * with_U).to(dtype=self.like.dtype, device=self.like.device)
        W = normal[:, : d * r].reshape(-1, d, r) @ self.basis.mT
        weight = normal.new_full((self.points,), 1 / self.points)
        return WeightedHeads(normal[:, d * r :], W, weight, weight)

    def _normal(self, dimensions: int) -> Tensor:
        if not self.sobol:
            shape = (self.points, dimensions)
            return torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        if dimensions > torch.quasirandom.SobolEngine.MAXDIM:
            raise ValueError(
                f"method: expected at most {torch.quasirandom.SobolEngine.MAXDIM} dimensions for "
                f"Sobol points, got {dimensions}; use method='monte carlo'"
            )
        seed = int(torch.randint(2**62, (), generator=self.generator, device="cpu"))
        sequence = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=seed)
        # Points are multiples of 2^-30 in [0, 1): the middle of their cells has finite quantiles.
        uniform = sequence.draw(self.points, dtype=torch.float64) + 2.0**-31
        return torch.special.ndtri(uniform)


def _span(pair: KernelPair) -> Float[Tensor, "d r"]:
    """An orthonormal basis of the span of the queries of both sides."""
    queries = torch.cat([side.query.reshape(-1, side.query.shape[-1]).double()
                         for side in (pair.left, pair.right)])  # fmt: skip
    _, sizes, directions = torch.linalg.svd(queries[:1] if pair.fixed else queries)
    rank = max(1, int((sizes > 1e-9 * sizes[0]).sum()))
    return directions[:rank].mT.to(pair.left.tokens.dtype)


def _by_features(pair: KernelPair, draw: _Draws) -> TangentKernel:
    r"""Sobol points in (w, U), the linear part in closed form."""
    heads = draw()
    kernel = TangentKernel(*(pair.left.tokens.new_zeros(pair.shape) for _ in range(3)))
    linear = torch.zeros_like(kernel.c)
    sides = (pair.left,) if pair.symmetric else (pair.left, pair.right)
    width = 3 * pair.left.tokens.shape[-1] // 2 + 1  # of a head's features, in units of head_blocks
    blocks = list(head_blocks(max(pair.shape), draw.points, width, linear.device))
    if not draw.buffers:  # their mean slope is the same for all randomisations
        draw.buffers = [
            SplitBuffer(side, pair.sigma, pair.scale, pair.engine, blocks[0].stop) for side in sides
        ]
    for block in blocks:
        some = heads.select(block)
        filled = [buffer.fill(some) for buffer in draw.buffers]
        first, second = filled[0], filled[-1]
        add_gram(linear, first[0], None if pair.symmetric else second[0])
        for K, F, G in zip(kernel, first[1], second[1], strict=False):
            add_gram(K, F, None if pair.symmetric else G)
    pair.weight_by_queries(kernel.W)
    kernel.c.add_(linear)
    kernel.U.add_(linear)
    return _mirrored(kernel, pair)


def _by_heads(pair: KernelPair, draw: _Draws) -> TangentKernel:
    """The empirical kernel of independent heads."""
    pair.heads = draw()
    kernel = TangentKernel(*(pair.left.tokens.new_zeros(pair.shape) for _ in range(3)))
    for first, second in pair.features():
        for K, F, G in zip(kernel, first, second or first, strict=False):
            add_gram(K, F, None if second is None else G)
    pair.weight_by_queries(kernel.W)
    return _mirrored(kernel, pair)


def _by_closed_form(pair: KernelPair, draw: _Draws) -> TangentKernel:
    """Sobol points in w, everything in U in closed form."""
    heads = draw(with_U=False)
    kernel = TangentKernel(*(pair.left.tokens.new_zeros(pair.shape) for _ in range(3)))
    sides = (pair.left,) if pair.symmetric else (pair.left, pair.right)
    for moments in zip(*(_moments(side, heads.W, pair) for side in sides), strict=True):
        a, M = moments[0]
        part = erf_kernel(a, M) if pair.symmetric else erf_kernel(a, M, *moments[1])
        for K, term in zip(kernel, part, strict=True):
            K.add_(term, alpha=1 / draw.points)
    pair.weight_by_queries(kernel.W)
    length = pair.scale**2
    if pair.fixed:
        length *= float(pair.left.query.double().square().sum())
    kernel.W.mul_(length)
    return _mirrored(kernel, pair)


def _moments(inputs: _pass.Inputs, W: Tensor, pair: KernelPair) -> Iterator[tuple[Tensor, Tensor]]:
    """The pooled tokens (n, d) and covariances (n, d, d) of each W: M is r at U = e_1, ..., e_d."""
    samples, _, d = inputs.tokens.shape
    step = max(1, 2**21 // (samples * d * d))
    for start in range(0, W.shape[0], step):
        some = W[start : start + step].repeat_interleave(d, dim=0)
        U = torch.eye(d, dtype=W.dtype, device=W.device).repeat(some.shape[0] // d, 1)
        _, a, r = choose(pair.engine, inputs, len(U), U, some).features(inputs, U, some, pair.scale)
        a, M = a.unflatten(1, (-1, d)), r.unflatten(1, (-1, d))
        for k in range(a.shape[1]):
            yield a[:, k, 0], M[:, k]


def _mirrored(kernel: TangentKernel, pair: KernelPair) -> TangentKernel:
    if pair.symmetric:
        for K in kernel:
            mirror(K)
    return kernel


_ESTIMATES: dict[str, Callable[[KernelPair, _Draws], TangentKernel]] = {
    "auto": _by_features,
    "sobol": _by_features,
    "closed form": _by_closed_form,
    "monte carlo": _by_heads,
}
