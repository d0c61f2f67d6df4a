r"""Conditioning of the attention output :math:`Z = A X W_V + r_a X`, tokens as rows of X.

Four facts: the singular values of Z (:func:`attention_spectrum`); how many of those of A are not
small (:func:`softmax_rank_bound`); what a residual guarantees for every matrix A whatsoever
(:func:`angle_bound`), and which A it guarantees no more for (:func:`worst_attention`). Rows are the
nT tokens of all sequences; A is then block diagonal. Tokens and value matrices may each carry
leading axes, which broadcast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from scipy.special import gammainc
from torch import Tensor

from attention_dynamics.validation import (
    known_truth,
    require_finite,
    require_floating,
    require_integer,
    require_matrix,
    require_number,
    working_dtype,
)


class AttentionSpectrum(NamedTuple):
    r"""Singular values in falling order, (..., min(nT, d)), and what conditioning needs of them.

    ``smallest`` is the nT-th singular value, 0 if there are more rows than columns; ``condition``
    is ``largest / smallest``, infinite where the rows are dependent. Each (...).
    """

    singular_values: Float[Tensor, "*batch r"]
    largest: Float[Tensor, "*batch"]
    smallest: Float[Tensor, "*batch"]
    condition: Float[Tensor, "*batch"]


class RankBound(NamedTuple):
    r"""At most ``rank`` singular values of the attention matrix are larger than ``remainder``."""

    rank: int
    remainder: float


def attention_spectrum(output: Float[Tensor, "*batch nT d"]) -> AttentionSpectrum:
    r"""
    .. math:: \sigma_1(Z) \ge \dots \ge \sigma_{nT}(Z), \qquad
        \operatorname{cond}(Z) = \frac{\sigma_1(Z)}{\sigma_{nT}(Z)} .

    Rows are tokens: stack the sequences first, (n, T, d) to (nT, d). A matrix that is singular in
    exact arithmetic has, as a rule, a condition number above 1e15 here, not infinity. Raises
    ValueError for another shape or entries that are not finite.
    """
    output = _matrix("output", output)
    values = torch.linalg.svdvals(output)
    rows, columns = output.shape[-2:]
    largest = values[..., 0]
    smallest = values[..., -1] if rows <= columns else torch.zeros_like(largest)
    condition = torch.where(smallest > 0, largest / smallest, torch.inf)
    return AttentionSpectrum(values, largest, smallest, condition)


def principal_sine(
    tokens: Float[Tensor, "*batch nT d"], value: Float[Tensor, "*batch d d"]
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: \sin\vartheta = \min_{p \in \mathcal X,\ \|p\| = 1} \operatorname{dist}(p,
        W_V^\top \mathcal X), \qquad \mathcal X = \operatorname{row}(X),

    the sine of the smallest principal angle between the row space of the tokens and its image under
    :math:`W_V^\top`. Returns (...); exactly 0 where the dimensions leave no room,
    :math:`\operatorname{rank} X + \operatorname{rank} X W_V > d`, and 1 for :math:`W_V = 0`. Raises
    ValueError for shapes that do not fit.
    """
    tokens, value = _pair(tokens, value)
    basis, rank = _row_basis(tokens)
    image, image_rank = _row_basis(basis.mT @ value)
    distant = torch.linalg.svdvals(basis - image @ (image.mT @ basis))
    # Columns beyond the rank are zero, and so are their singular values: take the rank-th one.
    index = (rank - 1).clamp_min(0)[..., None].expand(*distant.shape[:-1], 1)
    sine = distant.gather(-1, index)[..., 0].clamp_max(1.0)
    sine = torch.where(rank == 0, torch.ones_like(sine), sine)
    return torch.where(rank + image_rank > tokens.shape[-1], torch.zeros_like(sine), sine)


def angle_bound(
    tokens: Float[Tensor, "*batch nT d"], value: Float[Tensor, "*batch d d"]
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: \sigma_{nT}(X + A X W_V) \ge \sigma_{nT}(X)\, \sin\vartheta
        \quad\text{for every matrix } A \in \mathbb R^{nT \times nT},

    with :func:`principal_sine`. Returns (...); 0 if nT > d. Raises ValueError for shapes that do
    not fit.
    """
    return attention_spectrum(tokens).smallest * principal_sine(tokens, value)


def worst_attention(
    tokens: Float[Tensor, "*batch nT d"], value: Float[Tensor, "*batch d d"]
) -> Float[Tensor, "*batch nT nT"]:
    r"""
    .. math:: A_\star = -X (X W_V)^+, \qquad X + A_\star X W_V = X \Pi, \qquad
        \sigma_{nT}(X \Pi) = \min_A \sigma_{nT}(X + A X W_V),

    with :math:`\Pi` the projection along :math:`W_V^\top \operatorname{row}(X)`: the matrix for
    which a residual guarantees least. As a rule it is no softmax matrix, nor block diagonal.
    Returns (..., nT, nT).
    """
    tokens, value = _pair(tokens, value)
    return -tokens @ torch.linalg.pinv(tokens @ value)


def condition_bound(
    tokens: Float[Tensor, "*batch nT d"],
    value: Float[Tensor, "*batch d d"],
    attention_norm: float | Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch"]:
    r"""
    .. math:: \operatorname{cond}(X + A X W_V) \le
        \frac{\sigma_1(X) + \|A\|\, \|X W_V\|}{\sigma_{nT}(X)\, \sin\vartheta} .

    ``attention_norm`` bounds the spectral norm of A; :math:`\sqrt T` always does if the rows of
    every block of A are weights of T tokens. Returns (...), infinite where the angle is 0. Raises
    ValueError for shapes that do not fit, or a norm that is negative or not finite.
    """
    tokens, value = _pair(tokens, value)
    if isinstance(attention_norm, Tensor):
        require_finite("attention_norm", attention_norm)
        if known_truth((attention_norm < 0).any()):
            raise ValueError("attention_norm: expected norms >= 0, got a negative one")
    else:
        require_number("attention_norm", attention_norm)
    spectrum = attention_spectrum(tokens)
    below = spectrum.smallest * principal_sine(tokens, value)
    above = spectrum.largest + attention_norm * torch.linalg.matrix_norm(tokens @ value, 2)
    return torch.where(below > 0, above / below, torch.inf)


def gaussian_sine_limit(rows: int, dimension: int) -> float:
    r""":math:`1 - 2nT/d`, the limit of :math:`\sin\vartheta` for Gaussian :math:`W_V`; 0 if
    2nT > d.

    ``rows`` nT and d grow at a fixed ratio; the entries of :math:`W_V` are independent and of one
    variance, which does not matter. Raises ValueError for sizes below 1.
    """
    require_integer("rows", rows, minimum=1)
    require_integer("dimension", dimension, minimum=1)
    return max(0.0, 1 - 2 * rows / dimension)


def gaussian_sine_bound(rows: int, dimension: int, failure: float) -> float:
    r"""
    .. math:: \tan\vartheta \ge \frac{\sqrt{d - nT} - \sqrt{nT} - t}{2\sqrt{nT} + t}, \qquad
        t = \sqrt{2 \log(2/\delta)},

    with probability at least :math:`1 - \delta` over a Gaussian :math:`W_V`, as a bound of
    :math:`\sin\vartheta`; 0 where the numerator is not positive. ``failure`` is :math:`\delta` in
    (0, 1). Raises ValueError out of these ranges.
    """
    gaussian_sine_limit(rows, dimension)
    require_number("failure", failure, positive=True)
    if failure >= 1:
        raise ValueError(f"failure: expected a probability below 1, got {failure}")
    t = math.sqrt(2 * math.log(2 / failure))
    top = math.sqrt(max(dimension - rows, 0)) - math.sqrt(rows) - t
    return math.sin(math.atan(max(top, 0.0) / (2 * math.sqrt(rows) + t)))


def softmax_rank_bound(degree: int, logit_bound: float, key_dimension: int) -> RankBound:
    r"""
    .. math:: \sigma_{r+1}(A) \le e^s \sum_{q > p} \frac{s^q}{q!}, \qquad
        r = \binom{d_k + p}{p}, \qquad p = \text{degree},

    for a softmax matrix A of any number of tokens whose logits have rank at most :math:`d_k`
    (``key_dimension``) and lie in :math:`[-s, s]` (``logit_bound``). Raises ValueError for sizes
    out of range.
    """
    require_integer("degree", degree, minimum=0)
    require_integer("key_dimension", key_dimension, minimum=1)
    require_number("logit_bound", logit_bound)
    # The tail of the exponential series over e^s is a regularised incomplete gamma function.
    tail = float(gammainc(degree + 1, logit_bound))
    log_tail = 2 * logit_bound + (math.log(tail) if tail > 0 else -math.inf)
    remainder = math.exp(log_tail) if log_tail < 700 else math.inf
    return RankBound(math.comb(key_dimension + degree, degree), remainder)


def _row_basis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal columns that span the row space, (..., d, r), zero beyond the rank; the rank."""
    _, values, right = torch.linalg.svd(matrix, full_matrices=False)
    relative = max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps
    kept = values > relative * values[..., :1]
    return right.mT * kept[..., None, :], kept.sum(dim=-1)


def _matrix(name: str, value: Tensor) -> Tensor:
    require_matrix(name, value, ("nT", "d"))
    if 0 in value.shape[-2:]:
        raise ValueError(f"{name}: a matrix of shape {tuple(value.shape[-2:])} has no spectrum")
    require_floating(name, value)
    require_finite(name, value)
    return value.to(working_dtype(value.dtype))


def _pair(tokens: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    tokens = _matrix("tokens", tokens)
    require_matrix("value", value, ("d", "d"), {"d": tokens.shape[-1]})
    require_floating("value", value, tokens.dtype)
    try:
        torch.broadcast_shapes(tokens.shape[:-2], value.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"value: its batch {tuple(value.shape[:-2])} does not fit that of the tokens, "
            f"{tuple(tokens.shape[:-2])}"
        ) from None
    return tokens, _matrix("value", value)
