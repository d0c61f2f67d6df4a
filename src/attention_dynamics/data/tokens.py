r"""Tokens in the unit ball, the assumption :math:`\|x_t\| \le 1` of every bound in the theory."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.validation import (
    require_cpu_generator,
    require_finite,
    require_floating,
    require_integer,
    require_mask,
    require_number,
    require_one_of,
    require_shape,
)

Law = Literal["iid", "sphere", "sequence_means"]


def unit_ball_tokens(
    samples: int,
    length: int,
    dimension: int,
    *,
    generator: torch.Generator,
    law: Law = "iid",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, "n T d"]:
    r""":math:`X_{j,t} = z_{j,t}`, or :math:`X_{j,t} = (b_j + z_{j,t})/2`: random tokens, norm <= 1.

    ``law`` is one of

    - ``"iid"``: :math:`X_{j,t} = z_{j,t}`, independent and uniform in the unit ball;
    - ``"sphere"``: independent and uniform on the unit sphere;
    - ``"sequence_means"``: :math:`X_{j,t} = (b_j + z_{j,t})/2` with one :math:`b_j` a sequence and
      one :math:`z_{j,t}` a token, all independent and uniform in the unit ball. The norm is at most
      1 by convexity. Under the uniform attention weight the pooled token is
      :math:`\mu_j = (b_j + \bar z_j)/2` and
      :math:`\mathrm{Var}\,\mu_j = \tfrac{1}{4(d+2)}(1 + 1/T) I`: it does not vanish as T grows,
      while under the other two laws it falls like :math:`1/T`.

    Numbers are drawn on the CPU in float64, then cast and moved, so that every dtype and device
    sees the same sample.

    ``generator`` is a CPU generator, for example from
    :func:`attention_dynamics.data.streams.generator`.

    Raises ValueError if a size is below 1, the law is unknown or the generator is not on the CPU.
    """
    for name, size in (("samples", samples), ("length", length), ("dimension", dimension)):
        require_integer(name, size, minimum=1)
    require_one_of("law", law, get_args(Law))
    require_cpu_generator(generator)
    if law == "iid":
        tokens = _uniform_in_ball((samples, length), dimension, generator)
    elif law == "sphere":
        tokens = _uniform_on_sphere((samples, length), dimension, generator)
    else:
        means = _uniform_in_ball((samples, 1), dimension, generator)
        tokens = 0.5 * (means + _uniform_in_ball((samples, length), dimension, generator))
    return tokens.to(dtype=dtype, device=device)


def query_vector(
    dimension: int,
    *,
    generator: torch.Generator,
    norm: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Float[Tensor, " d"]:
    r""":math:`q = \|q\|\, g/\|g\|`: a fixed query, uniform on the sphere of radius ``norm``.

    Raises ValueError if the dimension is below 1, or the norm negative or not finite.
    """
    require_integer("dimension", dimension, minimum=1)
    require_cpu_generator(generator)
    require_number("norm", norm)
    query = norm * _uniform_on_sphere((), dimension, generator)
    return query.to(dtype=dtype, device=device)


def check_token_norms(
    tokens: Float[Tensor, "n T d"],
    token_bound: float | None = None,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
) -> float:
    r""":math:`\max_{j,t} \|X_{j,t}\| \le b`, with b = 1 unless ``token_bound`` says otherwise.

    The bounds of the theory hold on the unit ball. A larger ball is allowed, but only when its
    radius is stated: then the b-rescaled constants apply. Tokens are never rescaled silently.

    ``mask`` (n, T) is True where a token is kept; the others are not looked at. Returns the bound b
    that the tokens respect, up to rounding in their dtype.

    Raises ValueError if there is no token, one is NaN or infinite, a norm exceeds b, or b is not
    positive.
    """
    bound = 1.0 if token_bound is None else token_bound
    require_number("token_bound", bound, positive=True)
    require_shape("tokens", tokens, ("n", "T", "d"))
    require_floating("tokens", tokens)
    if tokens.numel() == 0:
        raise ValueError(
            f"tokens: expected at least one sample and token, got shape {tuple(tokens.shape)}"
        )
    kept = tokens.detach()
    if mask is not None:
        require_mask(mask, tokens.shape[0], tokens.shape[1])
        kept = torch.where(mask[..., None], kept, torch.zeros_like(kept))
    require_finite("tokens", kept, remedy="remove those samples, or drop the tokens with mask=")
    largest = float(torch.linalg.vector_norm(kept, dim=-1, dtype=torch.float64).max())
    if largest > bound * (1 + 8 * torch.finfo(tokens.dtype).eps):
        enough = float(f"{largest * (1 + 1e-3):.4g}")
        remedy = (
            f"pass token_bound={enough} to use the constants rescaled to that ball, or divide the "
            f"tokens with rescale_tokens(tokens, {enough})"
            if token_bound is None
            else f"raise token_bound to {enough} or rescale the tokens"
        )
        raise ValueError(f"tokens: expected norms <= {bound:g}, got {largest:.6g}; {remedy}")
    return float(bound)


def rescale_tokens(
    tokens: Float[Tensor, "n T d"],
    token_bound: float,
    *,
    mask: Bool[Tensor, "n T"] | None = None,
) -> Float[Tensor, "n T d"]:
    r""":math:`X \mapsto X/b`: tokens of norm at most b become tokens of norm at most 1.

    Padding, where ``mask`` (n, T) is False, is divided too and not looked at. Raises ValueError if
    a token is not finite, a norm exceeds b, or b is not positive.
    """
    return tokens / check_token_norms(tokens, token_bound, mask=mask)


def _uniform_on_sphere(
    shape: tuple[int, ...], dimension: int, generator: torch.Generator
) -> Tensor:
    normal = torch.randn(
        (*shape, dimension), generator=generator, dtype=torch.float64, device="cpu"
    )
    return normal / torch.linalg.vector_norm(normal, dim=-1, keepdim=True)


def _uniform_in_ball(shape: tuple[int, ...], dimension: int, generator: torch.Generator) -> Tensor:
    direction = _uniform_on_sphere(shape, dimension, generator)
    uniform = torch.rand((*shape, 1), generator=generator, dtype=torch.float64, device="cpu")
    return direction * uniform ** (1.0 / dimension)
