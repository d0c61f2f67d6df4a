r"""The error of the tangent model, :math:`f - f_{\mathrm{lin}}`: random against worst directions.

Inside the projection set the error is at most :math:`E_{\mathrm{lin}}/\sqrt m`. A random direction
does not show this: signs cancel over the heads and leave :math:`1/m`. The worst direction aligns
the heads and reaches :math:`m^{-1/2}`. Tokens may have any norm here; the bound
:math:`E_{\mathrm{lin}}` asks for :func:`~attention_dynamics.theory.bounds.input_bounds`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import shallow
from attention_dynamics.models._pass import require_tokens
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.attention import Query, resolve_query
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import require_cpu_generator, require_integer


def linearised(
    initial: Parameters,
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
) -> Float[Tensor, " n"]:
    r""":math:`f_{\mathrm{lin}} = f(X; \phi_0) + \langle\nabla f(X; \phi_0), \phi - \phi_0\rangle`.

    Raises ValueError or TypeError for tokens or parameters that do not fit, NaN or infinity.
    """
    if parameters.W.shape != initial.W.shape:
        raise ValueError(
            f"parameters: expected W of shape {tuple(initial.W.shape)}, as in initial, got "
            f"{tuple(parameters.W.shape)}; compare parameters of one model"
        )
    value = shallow.forward(
        initial, tokens, query=query, activation=activation, scale=scale, mask=mask
    )
    return value + shallow.jvp(
        initial,
        tokens,
        parameters.minus(initial),
        query=query,
        activation=activation,
        scale=scale,
        mask=mask,
    )


def linearisation_error(
    initial: Parameters,
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
) -> Float[Tensor, " n"]:
    r""":math:`f(X_j; \phi) - f_{\mathrm{lin}}(X_j; \phi)`, signed, (n,).

    The difference is of second order: in float32 it drowns in rounding from about m = 64 on, so it
    is computed, and returned, in float64.

    Raises ValueError or TypeError for tokens or parameters that do not fit, NaN or infinity.
    """
    require_tokens(tokens, initial.dimension)
    initial, parameters = initial.to(dtype=torch.float64), parameters.to(dtype=torch.float64)
    tokens = tokens.double()
    if isinstance(query, Tensor):
        query = query.double()
    value = shallow.forward(
        parameters, tokens, query=query, activation=activation, scale=scale, mask=mask
    )
    return value - linearised(
        initial, parameters, tokens, query=query, activation=activation, scale=scale, mask=mask
    )


def random_perturbation(
    initial: Parameters, radii: Radii, *, generator: torch.Generator
) -> Parameters:
    r""":math:`\phi_i = \phi_i^0 + (\rho/\sqrt m)\, g_i/\|g_i\|`, g Gaussian, block by block.

    Independent over heads and uniform on the boundary of each ball. Drawn in float64 on the CPU.

    Raises ValueError if a radius is None, or the generator is not on the CPU.
    """
    require_cpu_generator(generator)
    limits = _limits(radii, initial.heads)
    noise = initial.map(
        lambda block: torch.randn(block.shape, generator=generator, dtype=torch.float64)
    )
    c, U, W = (
        limit * block / norms.reshape(-1, *(1,) * (block.ndim - 1))
        for block, norms, limit in zip(noise, noise.block_norms(), limits, strict=True)
    )
    step = Parameters(c, U, W).to(device=initial.U.device)
    return initial.to(dtype=torch.float64).plus(step).to(dtype=initial.dtype)


class AdversarialPerturbation(NamedTuple):
    r""":math:`\phi` with a large :math:`|f - f_{\mathrm{lin}}|`, its size, and at which sample."""

    parameters: Parameters
    error: float
    sample: int


def adversarial_perturbation(
    initial: Parameters,
    radii: Radii,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    generator: torch.Generator,
    candidates: int = 4,
    starts: int = 8,
    steps: int = 30,
) -> AdversarialPerturbation:
    r"""
    .. math:: \max_j \sup_{\phi \in \Omega_\rho} |f(X_j; \phi) - f_{\mathrm{lin}}(X_j; \phi)|
        = \max_{j,\pm} m^{-1/2} \sum_i \sup_{\delta_i} \pm\, e_i(X_j; \delta_i), \\
        e_i = (c + \delta_c)\,\sigma(s(\delta)) - c\,\sigma - \delta_c\,\sigma
        - c\,\sigma'(\delta_U \cdot a + r \cdot \delta_W q).

    For one sample and one sign the heads decouple, and the supremum of a sum is the sum of the
    suprema: each head climbs on its own, from ``starts`` directions of the gradient of its
    second-order term, by ``steps`` steps to the boundary point along the gradient, and keeps the
    best point it has seen. Only :math:`p = \delta_W q` matters, and
    :math:`\delta_W = p q^\top/\|q\|^2` reaches every p with the least Frobenius norm. The
    ``candidates`` samples with the largest mean second-order term are tried with both signs.

    ``tokens`` (n, T, d); ``generator`` is a CPU generator for the starts. The ascent runs in
    float64 on the device of the tokens. Returns the perturbed parameters, each head within its
    ball up to rounding, the error over all samples and the sample where it is largest: a lower
    bound of the supremum.

    Raises ValueError if a radius is None, a count is below 1, or the inputs do not fit.
    """
    for name, value in (("candidates", candidates), ("starts", starts), ("steps", steps)):
        require_integer(name, value, minimum=1)
    require_cpu_generator(generator)
    require_tokens(tokens, initial.dimension)
    sigma, limits = get_activation(activation), _limits(radii, initial.heads)
    exact, X = initial.to(dtype=torch.float64), tokens.double()
    queries = resolve_query(X, query.double() if isinstance(query, Tensor) else query, mask)
    direction = random_perturbation(exact, radii, generator=generator).minus(exact)
    order = _by_second_order(exact, X, queries, sigma, scale, mask, direction)
    best: AdversarialPerturbation | None = None
    for j in order[:candidates]:
        row = X[j] if mask is None else X[j][mask[j]]
        ascent = _HeadAscent(exact, row, queries[j], sigma, scale, limits)
        for sign in (1.0, -1.0):
            parameters = ascent.climb(sign, starts, steps, generator).to(dtype=initial.dtype)
            errors = linearisation_error(
                initial,
                parameters,
                tokens,
                query=query,
                activation=sigma,
                scale=scale,
                mask=mask,
            ).abs()
            worst = int(errors.argmax())
            if best is None or float(errors[worst]) > best.error:
                best = AdversarialPerturbation(parameters, float(errors[worst]), worst)
    assert best is not None
    return best


class _HeadAscent:
    """Ascent of +-e_i at one sample, for all heads and several starts at once."""

    def __init__(
        self,
        initial: Parameters,
        row: Float[Tensor, "T d"],
        query: Float[Tensor, " d"],
        sigma: Activation,
        scale: float,
        limits: tuple[float, float, float],
    ) -> None:
        self.initial, self.row, self.query, self.sigma = initial, row, scale * query, sigma
        self.length = float(torch.linalg.vector_norm(self.query))
        self.limits = (limits[0], limits[1], limits[2] * self.length)
        self.logit = initial.W @ self.query
        weights = torch.softmax(self.logit @ row.mT, dim=-1)
        self.a = weights @ row
        projections = initial.U @ row.mT
        self.s = (weights * projections).sum(dim=-1)
        self.r = (weights * (projections - self.s[:, None])) @ row

    def error(self, c: Tensor, U: Tensor, p: Tensor) -> Tensor:
        """Return e_i for displacements c (k, m), U (k, m, d), p (k, m, d); shape (k, m)."""
        c0, U0, _ = self.initial
        weights = torch.softmax((self.logit + p) @ self.row.mT, dim=-1)
        s = ((U0 + U) * (weights @ self.row)).sum(dim=-1)
        value, slope = self.sigma.value(self.s), self.sigma.first(self.s)
        linear = c * value + c0 * slope * ((U * self.a).sum(-1) + (p * self.r).sum(-1))
        return (c0 + c) * self.sigma.value(s) - c0 * value - linear

    def climb(self, sign: float, starts: int, steps: int, generator: torch.Generator) -> Parameters:
        """Return the parameters of the best heads found for the given sign."""
        point = [self._directions(block, starts, generator) for block in (self.s, self.a, self.a)]
        # Near the centre the gradient is that of the second-order term: an aligned start.
        point = self._along_gradient(sign, [1e-2 * block for block in point], point)
        best, best_value = point, self._value(sign, point)
        for _ in range(steps):
            point = self._along_gradient(sign, point, point)
            value = self._value(sign, point)
            better = value > best_value
            best_value = torch.where(better, value, best_value)
            best = [
                torch.where(better.reshape(better.shape + (1,) * (new.ndim - 2)), new, old)
                for new, old in zip(point, best, strict=True)
            ]
        winner, heads = best_value.argmax(dim=0), torch.arange(self.s.shape[0])
        c, U, p = (block[winner, heads.to(winner.device)] for block in best)
        q = self.query / self.length**2 if self.length > 0 else self.query
        return self.initial.plus(Parameters(c, U, p[:, :, None] * q))

    def _value(self, sign: float, point: list[Tensor]) -> Tensor:
        return sign * self.error(*point)

    def _along_gradient(
        self, sign: float, point: list[Tensor], fallback: list[Tensor]
    ) -> list[Tensor]:
        """Farthest points of the balls along the gradient; the fallback where it vanishes."""
        leaves = [block.detach().requires_grad_() for block in point]
        gradient = torch.autograd.grad(self._value(sign, leaves).sum(), leaves)
        return [
            torch.where(norms > 0, limit * block / norms, other)
            for block, norms, other, limit in zip(
                gradient, _head_norms(gradient), fallback, self.limits, strict=True
            )
        ]

    def _directions(self, like: Tensor, starts: int, generator: torch.Generator) -> Tensor:
        limit = self.limits[0] if like.ndim == 1 else self.limits[1]
        noise = torch.randn((starts, *like.shape), generator=generator, dtype=torch.float64)
        (norms,) = _head_norms((noise,))
        return (limit * noise / norms).to(like.device)


def _head_norms(blocks: tuple[Tensor, ...]) -> list[Tensor]:
    """Norms over the last axis of (k, m, d), absolute values of (k, m)."""
    return [
        block.abs() if block.ndim == 2 else torch.linalg.vector_norm(block, dim=-1, keepdim=True)
        for block in blocks
    ]


def _by_second_order(
    initial: Parameters,
    tokens: Tensor,
    queries: Tensor,
    sigma: Activation,
    scale: float,
    mask: Tensor | None,
    direction: Parameters,
) -> list[int]:
    """Samples by decreasing mean_i |h_i''| along a direction."""
    samples, length, _ = tokens.shape
    chunk = max(1, 2**20 // (length * initial.heads))
    sizes = []
    for start in range(0, samples, chunk):
        rows = slice(start, start + chunk)
        second = shallow.head_second_derivative(
            initial, tokens[rows], direction.U, direction.W, query=queries[rows],
            activation=sigma, scale=scale, mask=None if mask is None else mask[rows],
        )  # fmt: skip
        sizes.append(second.abs().mean(dim=-1))
    return torch.cat(sizes).argsort(descending=True).tolist()


def _limits(radii: Radii, heads: int) -> tuple[float, float, float]:
    root = math.sqrt(heads)
    c, U, W = bounded_radii(radii, remedy="a perturbation needs a bounded set")
    return c / root, U / root, W / root
