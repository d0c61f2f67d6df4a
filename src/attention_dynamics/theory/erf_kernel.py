r"""The limit kernel over U in closed form, for :math:`\sigma(s) = \mathrm{erf}(s/\sqrt2)`.

Given the pooled tokens a, a' and the covariances M, M' of a head, :math:`(s, s') = (U \cdot a,
U \cdot a')` are jointly Gaussian. With :math:`\hat a = a/\sqrt{1 + \|a\|^2}` and
:math:`\rho = \hat a \cdot \hat a'`, which is at most 1/2 for tokens in the unit ball,

.. math:: \mathbb E\,\sigma\sigma' = \tfrac2\pi \arcsin \rho, \qquad
    \mathbb E\,\dot\sigma \dot\sigma'\, a \cdot a' = \tfrac2\pi \frac{\rho}{\sqrt{1 - \rho^2}},

.. math:: \mathbb E\,\dot\sigma\dot\sigma'\, U^\top N U = \frac{2}{\pi}
    \frac{1}{\sqrt{(1 + \|a\|^2)(1 + \|a'\|^2)(1 - \rho^2)}} \Bigl[ \mathrm{tr}\, N -
    \frac{\hat a^\top N \hat a + \hat a'^\top N \hat a'
    - \rho\,(\hat a^\top N \hat a' + \hat a'^\top N \hat a)}{1 - \rho^2} \Bigr], \quad N = M M'.

They are one Gaussian integral: :math:`\dot\sigma\dot\sigma'` is :math:`\tfrac2\pi
e^{-(s^2 + s'^2)/2}`, so U has the covariance :math:`(I + AA^\top)^{-1}`, :math:`A = (a, a')`, under
it, and mass :math:`\det(I + A^\top A)^{-1/2}`. The first formula is the arcsine law of Williams
(1997).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.theory.kernels import TangentKernel
from attention_dynamics.validation import require_floating, require_shape

_BLOCK = 2**21  # elements of the arrays (rows, n', d) held at once


def erf_kernel(
    pooled: Float[Tensor, "n d"],
    covariance: Float[Tensor, "n d d"],
    other_pooled: Float[Tensor, "k d"] | None = None,
    other_covariance: Float[Tensor, "k d d"] | None = None,
) -> TangentKernel:
    r"""
    .. math:: \mathbb E_U\, \sigma \sigma', \qquad
        \mathbb E_U\, \dot\sigma \dot\sigma'\, a \cdot a', \qquad
        \mathbb E_U\, \dot\sigma \dot\sigma'\, U^\top M M' U,
        \qquad U \sim \mathcal N(0, I_d),

    (n, n') each, from a (n, d) and M (n, d, d) of one W; the third is without the factor
    :math:`\gamma^2 \langle q, q' \rangle`. Without the second pair the first is taken twice, and
    the result is symmetric up to rounding. Raises ValueError for shapes, TypeError for dtypes that
    do not fit together.
    """
    a, M = _checked("pooled", pooled, "covariance", covariance, pooled)
    if other_pooled is None and other_covariance is None:
        b, N = a, M
    elif other_pooled is None or other_covariance is None:
        raise ValueError(
            "other_pooled, other_covariance: expected both or neither; they are two moments of the "
            "same attention weights"
        )
    else:
        b, N = _checked("other_pooled", other_pooled, "other_covariance", other_covariance, pooled)
    step = max(1, _BLOCK // b.numel())
    parts = [
        _rows(a[start : start + step], M[start : start + step], b, N)
        for start in range(0, a.shape[0], step)
    ]
    return TangentKernel(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _checked(
    name: str, pooled: Tensor, second: str, covariance: Tensor, like: Tensor
) -> tuple[Tensor, Tensor]:
    require_shape(name, pooled, ("n", "d"), {"d": like.shape[-1]})
    n, d = pooled.shape
    require_shape(second, covariance, ("n", "d", "d"), {"n": n, "d": d})
    require_floating(name, pooled, like.dtype)
    require_floating(second, covariance, like.dtype)
    return pooled, covariance


def _rows(a: Tensor, M: Tensor, b: Tensor, N: Tensor) -> TangentKernel:
    root_a, root_b = ((1 + x.square().sum(dim=-1)).rsqrt() for x in (a, b))
    a, b = a * root_a[:, None], b * root_b[:, None]
    rho = (a @ b.mT).clamp(-1, 1)
    rest = (1 - rho * rho).clamp_min(torch.finfo(a.dtype).tiny)
    Ma, Nb = torch.einsum("jde,je->jd", M, a), torch.einsum("kde,ke->kd", N, b)
    # M_j b_i and N_i a_j for all pairs, (j, i, d): every form in N = M_j N_i is made of these.
    Mb = torch.einsum("jde,ie->jid", M, b)
    Na = torch.einsum("ide,je->jid", N, a)
    own = (Na @ Ma[:, :, None]).squeeze(-1) + torch.einsum("jid,id->ji", Mb, Nb)
    cross = Ma @ Nb.mT + (Mb * Na).sum(dim=-1)
    inner = M.flatten(1) @ N.flatten(1).mT - (own - rho * cross) / rest
    slope = rest.rsqrt()
    factor = 2 / math.pi
    return TangentKernel(
        factor * torch.asin(rho),
        factor * rho * slope,
        factor * root_a[:, None] * root_b * slope * inner,
    )
