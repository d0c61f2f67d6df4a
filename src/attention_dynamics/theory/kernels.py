r"""The empirical tangent kernel :math:`K(X, X') = \langle \nabla f(X), \nabla f(X') \rangle`.

With the features :math:`(s, a, r)` of each head, the query q and the logit scale :math:`\gamma`,

.. math:: K_c = \frac1m \sum_i \sigma\, \sigma', \qquad
    K_u = \frac1m \sum_i c_i^2\, \dot\sigma\, \dot\sigma' \langle a_i, a_i' \rangle, \qquad
    K_w = \frac{\gamma^2 \langle q, q' \rangle}m
        \sum_i c_i^2\, \dot\sigma\, \dot\sigma' \langle r_i, r_i' \rangle,

where a prime on :math:`\sigma, \dot\sigma, a, r, q` stands for :math:`X'`. No Jacobian, which would
be n times the parameters, is ever formed: heads are taken in blocks. :math:`K_w` is zero for T = 1,
for equal tokens and for q = 0. Sources: arXiv 2601.16514; the closed form follows from the
gradients of the chapter on them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models.activations import Activation
from attention_dynamics.models.attention import Query
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory._gram import add_gram, full_precision, mirror, require_memory
from attention_dynamics.theory._tangents import KernelPair
from attention_dynamics.validation import require_finite, require_floating, require_shape


class TangentKernel(NamedTuple):
    r""":math:`K = K_c + K_u + K_w`, one matrix (n, n') a block of the parameters."""

    c: Float[Tensor, "n k"]
    U: Float[Tensor, "n k"]
    W: Float[Tensor, "n k"]

    @property
    def total(self) -> Float[Tensor, "n k"]:
        r""":math:`K_c + K_u + K_w`."""
        return self.c + self.U + self.W


def empirical_kernel(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    other: Float[Tensor, "k T d"] | None = None,
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    other_mask: Bool[Tensor, "k T"] | None = None,
    other_query: Query | None = None,
    engine: str = "auto",
    memory_limit: int | None = None,
) -> TangentKernel:
    r"""
    .. math:: K_c, \; K_u, \; K_w, \quad K_{jl} = \langle \partial f(X_j), \partial f(X'_l) \rangle.

    ``tokens`` (n, T, d) against ``other`` (n', T', d), or against themselves: then only the upper
    triangle is computed, and the matrices are symmetric to the last bit. ``other_query`` is
    ``query`` unless given. Beyond the result the memory is a few dozen MB, whatever n and m are. At
    the symmetric initialisation half of the heads are computed, with the same result.

    Float32 products use all bits (no TF32). Raises ValueError for wrong shapes, NaN or infinity, or
    a kernel larger than the free memory (``memory_limit`` bytes replace it); TypeError for dtypes
    that do not fit.
    """
    pair = KernelPair(
        parameters, tokens, other, query, other_query, activation, scale, mask, other_mask, engine
    )
    shape = pair.shape
    require_memory("tokens", 3, shape, pair.left.tokens, memory_limit)
    c, U, W = (pair.left.tokens.new_zeros(shape) for _ in range(3))
    with torch.no_grad(), full_precision():
        for first, second in pair.features():
            add_gram(c, first.c, None if second is None else second.c)
            add_gram(U, first.U, None if second is None else second.U)
            add_gram(W, first.W, None if second is None else second.W)
        pair.weight_by_queries(W)
        if other is None:
            for block in (c, U, W):
                mirror(block)
    return TangentKernel(c, U, W)


def empirical_kernel_total(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    other: Float[Tensor, "k T d"] | None = None,
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    other_mask: Bool[Tensor, "k T"] | None = None,
    other_query: Query | None = None,
    engine: str = "auto",
    memory_limit: int | None = None,
) -> Float[Tensor, "n k"]:
    r""":math:`K = K_c + K_u + K_w = F F'^\top`, (n, n'), when the parts are not asked for.

    With a fixed query the three parts are one product, and K is the only large array; arguments
    and errors are those of :func:`empirical_kernel`.
    """
    pair = KernelPair(
        parameters, tokens, other, query, other_query, activation, scale, mask, other_mask, engine
    )
    shape, fixed = pair.shape, pair.fixed
    require_memory("tokens", 1 if fixed else 2, shape, pair.left.tokens, memory_limit)
    K = pair.left.tokens.new_zeros(shape)
    in_W = K if fixed else torch.zeros_like(K)
    with torch.no_grad(), full_precision():
        for first, second in pair.features():
            if fixed:
                add_gram(K, first.all, None if second is None else second.all)
                continue
            kept = first.all.shape[1] - first.W.shape[1]
            add_gram(K, first.all[:, :kept], None if second is None else second.all[:, :kept])
            add_gram(in_W, first.W, None if second is None else second.W)
        if not fixed:
            pair.weight_by_queries(in_W)
            K += in_W
        if other is None:
            mirror(K)
    return K


def kernel_vector_product(
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    v: Float[Tensor, " k"] | Float[Tensor, "k p"],
    other: Float[Tensor, "k T d"] | None = None,
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    other_mask: Bool[Tensor, "k T"] | None = None,
    other_query: Query | None = None,
    engine: str = "auto",
) -> Float[Tensor, " n"] | Float[Tensor, "n p"]:
    r"""
    .. math:: K(X, X')\, v = \nabla f(X) \Bigl( \sum_l v_l\, \nabla f(X'_l) \Bigr)
        = \sum_i F_i F_i'^\top v,

    a tangent map after a gradient, head by head, without the n n' numbers of K: the memory grows
    like n + n'. ``v`` is one vector (n',) or several, (n', p); the result is (n,) or (n, p). The
    tokens are passed over once. Raises the errors of :func:`empirical_kernel`, and ValueError when
    ``v`` does not fit.
    """
    pair = KernelPair(
        parameters, tokens, other, query, other_query, activation, scale, mask, other_mask, engine
    )
    n, k = pair.shape
    symbols = ("k", "p") if isinstance(v, Tensor) and v.ndim == 2 else ("k",)
    require_shape("v", v, symbols, {"k": k}, remedy="one number a sample that K(X, X') sums over")
    require_floating("v", v, pair.left.tokens.dtype)
    require_finite("v", v)
    dtype = pair.left.tokens.dtype
    columns = v.to(dtype).reshape(k, -1)
    out = columns.new_zeros((n, columns.shape[1]))
    with torch.no_grad(), full_precision():
        # With a query a sample, <q, q'> F F'^T v is q . F (F' q')^T v, one coordinate at a time.
        weights = [] if pair.fixed else [*zip(pair.left.query.mT, pair.right.query.mT, strict=True)]
        for first, second in pair.features():
            second = first if second is None else second
            if pair.fixed:
                out.addmm_(first.all, second.all.mT @ columns)
                continue
            kept = first.all.shape[1] - first.W.shape[1]
            out.addmm_(first.all[:, :kept], second.all[:, :kept].mT @ columns)
            for left, right in weights:
                out += left[:, None] * (first.W @ (second.W.mT @ (right[:, None] * columns)))
    return out.reshape(n, *v.shape[1:])


class Spectrum(NamedTuple):
    r"""
    Eigenvalues :math:`\lambda_1 \ge \dots \ge \lambda_n` in float64; ``rank`` counts those above
    the rounding of the kernel's own dtype, and ``effective_rank`` is
    :math:`(\sum \lambda)^2 / \sum \lambda^2`.
    """

    eigenvalues: Float[Tensor, " n"]
    rank: int
    effective_rank: float


def spectrum(kernel: TangentKernel | Float[Tensor, "n n"]) -> Spectrum:
    r"""
    .. math:: K = V \Lambda V^\top, \qquad \mathrm{rank} = \#\{k : \lambda_k > n\,\varepsilon\,
        \lambda_1\}, \quad \varepsilon \text{ of the dtype that } K \text{ was computed in.}

    The decomposition runs in float64 on the CPU. Raises ValueError for a matrix that is not square,
    finite and symmetric.
    """
    K = kernel.total if isinstance(kernel, TangentKernel) else kernel
    require_shape("kernel", K, ("n", "n"), None if not isinstance(K, Tensor) else {"n": len(K)})
    require_floating("kernel", K)
    require_finite("kernel", K)
    epsilon = torch.finfo(K.dtype).eps
    K = K.detach().to(device="cpu", dtype=torch.float64)
    gap, size = float((K - K.mT).abs().max()), float(K.abs().max())
    if gap > 64 * epsilon * size:
        raise ValueError(
            f"kernel: expected a symmetric matrix, got entries that differ by {gap:.3g} from their "
            "mirror image; a rectangular block K(X, X') has no spectrum"
        )
    values = torch.linalg.eigvalsh(K).flip(0)
    rank = int((values > len(K) * epsilon * values[0]).sum())
    squares = float(values.square().sum())
    return Spectrum(values, rank, float(values.sum()) ** 2 / squares if squares > 0 else 0.0)
