r"""The error of the tangent model, :math:`f - f_{\mathrm{lin}}`: random against worst directions.

Inside the projection set the error is at most :math:`E_{\mathrm{lin}}/\sqrt m`. A random direction
does not show this: signs cancel over the heads and leave :math:`1/m`. The worst direction aligns
the heads and reaches :math:`m^{-1/2}`. Tokens may have any norm here; the bound
:math:`E_{\mathrm{lin}}` asks for :func:`~attention_dynamics.theory.bounds.input_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attention_dynamics.models import shallow
from attention_dynamics.models._network import like_parameters, prepare, twin_heads
from attention_dynamics.models._pass import Inputs, require_tokens
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.attention import Query
from attention_dynamics.models.engines.selection import choose
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory._head_ascent import Displacements, HeadAscent
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import known_truth, require_cpu_generator, require_integer


def linearised(
    initial: Parameters,
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    engine: str = "auto",
) -> Float[Tensor, " n"]:
    r""":math:`f_{\mathrm{lin}} = f(X; \phi_0) + \langle\nabla f(X; \phi_0), \phi - \phi_0\rangle`.

    One pass over the tokens, and at the symmetric initialisation over half of the heads.

    Raises ValueError or TypeError for tokens or parameters that do not fit, NaN or infinity.
    """
    if parameters.W.shape != initial.W.shape:
        raise ValueError(
            f"parameters: expected W of shape {tuple(initial.W.shape)}, as in initial, got "
            f"{tuple(parameters.W.shape)}; compare parameters of one model"
        )
    sigma, inputs, initial = prepare(initial, tokens, query, activation, mask, True)
    parameters.require_valid()
    direction = like_parameters("parameters", parameters, initial).minus(initial)
    heads = initial.heads
    U, W, in_value, tangent = _merged(initial, direction)
    chosen = choose(engine, inputs, U.shape[0], *initial, *direction)
    s, slope = chosen.slopes(inputs, U, W, tangent.U, tangent.W, scale)
    value, first = sigma.value_and_first(s)
    return ((in_value + tangent.c) * value + first * slope).sum(dim=-1) * heads**-0.5


def linearisation_error(
    initial: Parameters,
    parameters: Parameters,
    tokens: Float[Tensor, "n T d"],
    *,
    query: Query,
    activation: str | Activation = "tanh",
    scale: float = 1.0,
    mask: Bool[Tensor, "n T"] | None = None,
    engine: str = "auto",
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
        parameters, tokens, query=query, activation=activation, scale=scale, mask=mask,
        engine=engine,
    )  # fmt: skip
    return value - linearised(
        initial, parameters, tokens, query=query, activation=activation, scale=scale, mask=mask,
        engine=engine,
    )  # fmt: skip


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
        lambda block: torch.randn(
            block.shape, generator=generator, dtype=torch.float64, device="cpu"
        )
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
    engine: str = "auto",
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
    wide = query.double() if isinstance(query, Tensor) else query
    _, inputs, _ = prepare(exact, X, wide, sigma, mask, True)
    queries = inputs.query.expand(X.shape[0], -1)
    direction = random_perturbation(exact, radii, generator=generator).minus(exact)
    order = _by_second_order(exact, inputs, sigma, scale, direction, engine)
    best: AdversarialPerturbation | None = None
    for j in order[:candidates]:
        row = X[j] if mask is None else X[j][mask[j]]
        ascent = HeadAscent(exact, row, scale * queries[j], sigma, limits)
        for parameters in _climbed(ascent, starts, steps, generator):
            errors = linearisation_error(
                initial, parameters.to(dtype=initial.dtype), tokens, query=query,
                activation=sigma, scale=scale, mask=mask, engine=engine,
            ).abs()  # fmt: skip
            worst = int(errors.argmax())
            if best is None or float(errors[worst]) > best.error:
                found = parameters.to(dtype=initial.dtype)
                best = AdversarialPerturbation(found, float(errors[worst]), worst)
    assert best is not None
    return best


def _climbed(
    ascent: HeadAscent, starts: int, steps: int, generator: torch.Generator
) -> Iterator[Parameters]:
    """The best heads found for the sign + and for the sign -, climbed together."""
    heads, d = ascent.initial.U.shape
    device = ascent.row.device
    draws = [
        [
            torch.randn(
                (starts, *shape), generator=generator, dtype=torch.float64, device="cpu"
            ).to(device)
            for shape in ((heads,), (heads, d), (heads, d))
        ]
        for _ in range(2)
    ]
    noise = Displacements(*(torch.cat(blocks) for blocks in zip(*draws, strict=True)))
    start = Displacements(
        *(
            limit * x / size
            for limit, x, size in zip(ascent.limits, noise, noise.norms(), strict=True)
        )
    )
    signs = torch.ones(2 * starts, 1, dtype=torch.float64, device=device)
    signs[starts:] = -1
    values, points = ascent.climb(signs, start, steps)
    every = torch.arange(heads, device=device)
    for half in (slice(0, starts), slice(starts, None)):
        winner = values[half].argmax(dim=0)
        yield ascent.displaced(Displacements(*(x[half][winner, every] for x in points)))


def _merged(
    initial: Parameters, direction: Parameters
) -> tuple[Tensor, Tensor, Tensor, Parameters]:
    r"""
    Heads (U, W) with coefficients of :math:`\sigma` and tangents
    :math:`(v_c, c v_U, c v_W)`: twins have the same features, so their tangents add up.
    """
    c, U, W = initial
    tangent = Parameters(direction.c, c[:, None] * direction.U, c[:, None, None] * direction.W)
    twins = twin_heads(initial)
    if twins is None or known_truth(twins.all()) is not True:
        return U, W, c, tangent
    half = initial.heads // 2
    return (
        U[:half], W[:half], c[:half] + c[half:],
        tangent.map(lambda block: block[:half] + block[half:]),
    )  # fmt: skip


def _by_second_order(
    initial: Parameters,
    inputs: Inputs,
    sigma: Activation,
    scale: float,
    direction: Parameters,
    engine: str,
) -> list[int]:
    r"""Samples by decreasing mean_i |h_i''| along a direction.

    h'' is the central difference of the closed form h' = sigma'(s) s', good to ten digits: enough
    to rank samples, at the price of two slopes.
    """
    step = 1e-5
    c, V, Z = direction
    ends = [initial.plus(Parameters(0 * c, V, Z).scaled(h)) for h in (step, -step)]
    samples, heads = inputs.tokens.shape[0], initial.heads
    chunk = max(1, 2**20 // heads)
    sizes = []
    for start in range(0, samples, chunk):
        rows = inputs.rows(slice(start, start + chunk))
        slopes = []
        for end in ends:
            chosen = choose(engine, rows, heads, *end, V, Z)
            s, slope = chosen.slopes(rows, end.U, end.W, V, Z, scale)
            slopes.append(sigma.first(s) * slope)
        sizes.append((slopes[0] - slopes[1]).abs().mean(dim=-1))
    return torch.cat(sizes).argsort(descending=True).tolist()


def _limits(radii: Radii, heads: int) -> tuple[float, float, float]:
    root = math.sqrt(heads)
    c, U, W = bounded_radii(radii, remedy="a perturbation needs a bounded set")
    return c / root, U / root, W / root
