r"""Softmax attention with one query a head: :math:`a = X\,\mathrm{softmax}(X^\top W q)`.

Tokens are (n, T, d), heads :math:`i = 1..m`; weights have shape (n, m, T). A mask is boolean,
(n, T), True = keep, and a masked sequence gives what the shortened sequence gives. Logits may be
any finite numbers. Inputs in half precision are computed, and returned, in float32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._pass import HeadFeatures, Query, require_tokens
from attention_dynamics.models.engines import selection
from attention_dynamics.validation import (
    known_truth,
    require_finite,
    require_floating,
    require_mask,
    require_shape,
    working_dtype,
)

__all__ = [
    "HeadFeatures",
    "Query",
    "attention_weights",
    "covariance_product",
    "head_features",
    "logits",
    "pooled_token",
    "resolve_query",
    "softmax_covariance",
    "third_cumulant",
]


def resolve_query(
    tokens: Float[Tensor, "n T d"], query: Query, mask: Bool[Tensor, "n T"] | None = None
) -> Float[Tensor, "n d"]:
    r"""
    :math:`q_j = q`, or :math:`q_j = x_{j,T_j}` for ``query="last"``, with :math:`T_j` the last
    token that the mask keeps.

    Returns (n, d). A tensor (d,) is expanded, a tensor (n, d) taken as it is. Raises ValueError
    for another shape or word, TypeError for a mask that is not boolean.
    """
    require_tokens(tokens)
    inputs = _pass.prepare(tokens, query, mask, dimension=tokens.shape[-1])
    return inputs.query if inputs.query.ndim == 2 else inputs.query.expand(tokens.shape[0], -1)


def logits(
    tokens: Float[Tensor, "n T d"],
    W: Float[Tensor, "m d d"],
    query: Query,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
    scale: float = 1.0,
) -> Float[Tensor, "n m T"]:
    r"""
    .. math:: \ell_t = \gamma\, x_t^\top W_i\, q, \qquad \gamma = \text{scale}.

    Returns (n, m, T). The mask only decides which token is the last one, and the logit of a padded
    token is 0. Raises ValueError for wrong shapes, NaN or infinite tokens.
    """
    require_tokens(tokens)
    dimension = tokens.shape[-1]
    require_shape("W", W, ("m", "d", "d"), {"d": dimension})
    require_floating("W", W, tokens.dtype)
    inputs = _pass.prepare(tokens, query, mask, dimension=dimension)
    queries = _pass.head_queries(W.to(inputs.tokens.dtype), inputs.query, scale)
    return _pass.project(inputs.tokens, queries).mT.contiguous()


def attention_weights(
    logits: Float[Tensor, "n m T"], mask: Bool[Tensor, "n T"] | None = None
) -> Float[Tensor, "n m T"]:
    r"""
    .. math:: \alpha_t = \frac{e^{\ell_t - \max_u \ell_u}}{\sum_v e^{\ell_v - \max_u \ell_u}},
        \quad t \text{ kept by the mask}; \qquad \alpha_t = 0 \text{ elsewhere.}

    Returns (n, m, T), nonnegative with sum 1 over T; float16 and bfloat16 logits are computed and
    returned in float32. Raises TypeError for a mask that is not boolean, ValueError when no key is
    left, when a row of logits is all :math:`-\infty`, or when a kept logit is NaN or
    :math:`+\infty`.
    """
    require_shape("logits", logits, ("n", "m", "T"))
    require_floating("logits", logits)
    logits = logits.to(working_dtype(logits.dtype))
    if mask is not None:
        require_mask(mask, logits.shape[0], logits.shape[2])
        logits = logits.masked_fill(~mask[:, None, :], -torch.inf)
    largest = logits.amax(dim=-1)
    if known_truth(torch.isfinite(largest).all()) is False:
        sample, head = (~torch.isfinite(largest)).nonzero()[0].tolist()
        raise ValueError(
            f"logits: the largest kept logit of sample {sample}, head {head} is "
            f"{largest[sample, head].item()}; a row needs one finite logit and no NaN or +inf: "
            "exclude keys with a boolean mask and check the tokens and W for overflow"
        )
    return torch.softmax(logits, dim=-1)


def pooled_token(
    weights: Float[Tensor, "n m T"], tokens: Float[Tensor, "n T d"]
) -> Float[Tensor, "n m d"]:
    r"""
    .. math:: \mu = a = \sum_t \alpha_t x_t.

    Returns (n, m, d). Raises ValueError when the shapes do not fit together.
    """
    weights, tokens = _weights_and_tokens(weights, tokens)
    return weights @ tokens


def softmax_covariance(
    weights: Float[Tensor, "n m T"], tokens: Float[Tensor, "n T d"]
) -> Float[Tensor, "n m d d"]:
    r"""
    .. math:: M = \sum_t \alpha_t (x_t - \mu)(x_t - \mu)^\top
        = \sum_t \alpha_t x_t x_t^\top - \mu \mu^\top.

    Returns (n, m, d, d). The centred form is used: it is positive semidefinite to rounding also
    where the two terms of the other form cancel. For teaching and tests; products with M are
    cheaper through :func:`covariance_product`. Raises ValueError when the shapes do not fit.
    """
    weights, tokens = _weights_and_tokens(weights, tokens)
    centred = tokens[:, None] - (weights @ tokens)[:, :, None]
    return (weights[..., None] * centred).mT @ centred


def covariance_product(
    weights: Float[Tensor, "n m T"],
    tokens: Float[Tensor, "n T d"],
    direction: Float[Tensor, "m d"] | Float[Tensor, "n m d"],
) -> Float[Tensor, "n m d"]:
    r"""
    .. math:: M u = \sum_t \alpha_t (s_t - s)\, x_t, \qquad
        s_t = u \cdot x_t, \quad s = \sum_t \alpha_t s_t.

    Returns (n, m, d) without forming M: the memory is that of the weights. ``direction`` is one
    vector a head, or one a head and sample. Raises ValueError when the shapes do not fit.
    """
    weights, tokens = _weights_and_tokens(weights, tokens)
    return (weights * _centred(weights, tokens, "direction", direction)) @ tokens


def third_cumulant(
    weights: Float[Tensor, "n m T"],
    tokens: Float[Tensor, "n T d"],
    u: Float[Tensor, "m d"] | Float[Tensor, "n m d"],
    p: Float[Tensor, "m d"] | Float[Tensor, "n m d"],
) -> Float[Tensor, "n m"]:
    r"""
    .. math:: \kappa_3(u, p, p) = \sum_t \alpha_t\,
        \bigl(u \cdot (x_t - \mu)\bigr)\, \bigl(p \cdot (x_t - \mu)\bigr)^2.

    Returns (n, m). It is the derivative of :math:`u^\top M p` along :math:`p` in the logits, and
    bounded by :math:`4/(3\sqrt3)` for unit vectors and tokens. Raises ValueError when the shapes
    do not fit.
    """
    weights, tokens = _weights_and_tokens(weights, tokens)
    along_p = _centred(weights, tokens, "p", p)
    return (weights * _centred(weights, tokens, "u", u) * along_p * along_p).sum(dim=-1)


def head_features(
    tokens: Float[Tensor, "n T d"],
    W: Float[Tensor, "m d d"],
    U: Float[Tensor, "m d"],
    query: Query,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
    scale: float = 1.0,
    chunk: int | None = None,
    engine: str = "auto",
    validate: bool = True,
) -> HeadFeatures:
    r"""
    .. math:: s = U \cdot a, \qquad a = X\alpha, \qquad r = M U, \qquad
        \alpha = \mathrm{softmax}(\gamma X^\top W q).

    One pass over the tokens; a fixed query enters only through :math:`w_i = W_i q`. ``chunk`` is
    the number of samples that an engine in blocks handles at once; ``engine`` is ``"auto"``, which
    takes the fastest here, or a name listed in ``models.engines``. Returns
    :class:`HeadFeatures` with shapes (n, m), (n, m, d), (n, m, d). Raises ValueError for wrong
    shapes, NaN or infinite tokens, a sample without keys; TypeError for a mask that is not
    boolean. ``validate=False`` skips these checks in inner loops.
    """
    _pass.require_chunk(chunk)
    require_shape("U", U, ("m", "d"))
    heads, dimension = U.shape
    require_shape("W", W, ("m", "d", "d"), {"m": heads, "d": dimension})
    inputs = _pass.prepare(tokens, query, mask, dimension=dimension, validate=validate)
    for name, parameter in (("U", U), ("W", W)):
        require_floating(name, parameter, inputs.tokens.dtype)
    U, W = U.to(inputs.tokens.dtype), W.to(inputs.tokens.dtype)
    chosen = selection.choose(engine, inputs, heads, U, W)
    return chosen.features(inputs, U, W, scale, chunk=chunk)


def _centred(weights: Tensor, tokens: Tensor, name: str, direction: Tensor) -> Tensor:
    """Return direction . (x_t - mu), (n, m, T)."""
    samples, heads, _ = weights.shape
    symbols = (
        ("n", "m", "d") if isinstance(direction, Tensor) and direction.ndim == 3 else ("m", "d")
    )
    require_shape(name, direction, symbols, {"n": samples, "m": heads, "d": tokens.shape[-1]})
    require_floating(name, direction, tokens.dtype)
    along = _pass.project(tokens, direction.to(tokens.dtype)).mT
    return along - (weights * along).sum(dim=-1, keepdim=True)


def _weights_and_tokens(weights: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    require_tokens(tokens)
    samples, length, _ = tokens.shape
    require_shape("weights", weights, ("n", "m", "T"), {"n": samples, "T": length})
    require_floating("weights", weights, tokens.dtype)
    require_finite("tokens", tokens)
    dtype = working_dtype(tokens.dtype)
    return weights.to(dtype), tokens.to(dtype)
