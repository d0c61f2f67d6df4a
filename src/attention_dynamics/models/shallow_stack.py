r"""Stacks of layers of the shallow Transformer: L - 1 layers from tokens to tokens, one read-out.

.. math:: X^{(l)}_t = X^{(l-1)}_t + m^{-1/2} \sum_{i=1}^m C^{(l)}_i\,
    \sigma\bigl(U^{(l)}_i \cdot a^{(l)}_{i,t}\bigr), \quad l < L, \qquad
    f_t = m^{-1/2} \sum_{i=1}^m c_i\, \sigma\bigl(U_i \cdot a_{i,t}\bigr),

where :math:`a_{i,t}` pools the tokens with the query :math:`q_t`, the token t itself, and the last
formula reads :math:`X^{(L-1)}`. The output is :math:`f_T`, or :math:`f_t` for every token. With
L = 1 and the output :math:`f_T` this is ``models.shallow`` with ``query="last"``. The paper, arXiv
2601.16514, treats one layer; the stack is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._network import twin_heads
from attention_dynamics.models._pass import block_elements, require_chunk, require_tokens
from attention_dynamics.models._token_layer import (
    Attended,
    LayerGradients,
    attend,
    output,
    pull_back,
)
from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.stack_parameters import StackParameters, TokenLayer
from attention_dynamics.validation import (
    require_finite,
    require_floating,
    require_one_of,
    require_shape,
    working_dtype,
)

Output = Literal["last", "each"]
OUTPUTS: tuple[Output, ...] = ("last", "each")


def hidden_tokens(
    parameters: StackParameters,
    tokens: Float[Tensor, "n T d"],
    *,
    activation: str | Activation = "tanh",
) -> tuple[Float[Tensor, "n T d"], ...]:
    r""":math:`X^{(0)}, \dots, X^{(L-1)}`: the tokens, and after each layer; all samples at once."""
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, None, True)
    return tuple(_inner(parameters, tokens, sigma)[0])


def forward(
    parameters: StackParameters,
    tokens: Float[Tensor, "n T d"],
    *,
    outputs: Output = "last",
    activation: str | Activation = "tanh",
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, "n ..."]:
    r"""
    .. math:: f_T(X_j; \phi), \quad \text{or } f_t(X_j; \phi), \; t = 1..T.

    Returns (n,) for the outputs ``"last"``, (n, T) for ``"each"``. Differentiable by autograd:
    what the closed forms are compared with. ``chunk`` is a number of samples handled at once.
    Raises ValueError for shapes that do not fit, numbers that are not finite or another kind of
    outputs, TypeError for dtypes; ``validate=False`` skips these checks.
    """
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, chunk, validate)
    require_one_of("outputs", outputs, OUTPUTS)
    found = []
    for rows in _blocks(parameters, tokens, outputs, chunk):
        stream, _ = _inner(parameters, tokens[rows], sigma)
        found.append(_read(parameters, stream[-1], sigma, outputs)[0])
    values = torch.cat(found)
    return values[:, 0] if outputs == "last" else values


def vjp(
    parameters: StackParameters,
    tokens: Float[Tensor, "n T d"],
    cotangent: Float[Tensor, "n ..."],
    *,
    outputs: Output = "last",
    activation: str | Activation = "tanh",
    chunk: int | None = None,
    validate: bool = True,
) -> StackParameters:
    r"""
    .. math:: \sum_{j} g_j\, \nabla_\phi f_T(X_j), \quad \text{or }
        \sum_{j,t} g_{j,t}\, \nabla_\phi f_t(X_j).

    In closed form; ``cotangent`` has the shape of the outputs. Errors as in :func:`forward`.
    """
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, chunk, validate)
    g = _per_output("cotangent", cotangent, tokens, outputs, validate)
    return _both_ways(parameters, tokens, sigma, outputs, chunk, lambda values, rows: g[rows])[1]


def loss_and_gradients(
    parameters: StackParameters,
    tokens: Float[Tensor, "n T d"],
    targets: Float[Tensor, "n ..."],
    *,
    outputs: Output = "last",
    activation: str | Activation = "tanh",
    chunk: int | None = None,
    validate: bool = True,
) -> tuple[Float[Tensor, ""], StackParameters]:
    r"""
    .. math:: L_n = \frac1n \sum_j (f_T(X_j) - y_j)^2, \quad \text{or }
        L_n = \frac1{nT} \sum_{j,t} (f_t(X_j) - y_{j,t})^2, \qquad \nabla L_n.

    The loss, 0-d, and the gradients in the shape of the parameters, in closed form: a block of
    samples goes through all layers and back, and is dropped. ``targets`` (n,), or (n, T) for the
    outputs ``"each"``. Errors as in :func:`forward`.
    """
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, chunk, validate)
    y = _per_output("targets", targets, tokens, outputs, validate)
    scale = 2.0 / y.numel()
    values, gradients = _both_ways(
        parameters, tokens, sigma, outputs, chunk, lambda values, rows: scale * (values - y[rows])
    )
    return (values - y).square().mean(), gradients


def sample_gradient_norms(
    parameters: StackParameters,
    tokens: Float[Tensor, "n T d"],
    *,
    activation: str | Activation = "tanh",
    chunk: int | None = None,
    validate: bool = True,
) -> Float[Tensor, "n L"]:
    r"""
    .. math:: \|\nabla_{\theta^{(l)}} f_T(X_j; \phi)\|, \qquad j = 1..n, \; l = 1..L.

    The read-out is the last; in float64. Errors as in :func:`forward`.
    """
    sigma, tokens, parameters = _prepare(parameters, tokens, activation, chunk, validate)
    norms = tokens.new_zeros((len(tokens), parameters.depth), dtype=torch.float64)
    for rows in _blocks(parameters, tokens, "last", chunk):
        stream, passed = _inner(parameters, tokens[rows], sigma)
        values, seen = _read(parameters, stream[-1], sigma, "last")
        for place, back in _back(parameters, passed, seen, torch.ones_like(values), each=True):
            for block in back[:3]:
                assert block is not None
                norms[rows, place] += block.double().square().flatten(1).sum(dim=1)
    return norms.sqrt()


def _both_ways(
    parameters: StackParameters,
    tokens: Tensor,
    sigma: Activation,
    outputs: Output,
    chunk: int | None,
    cotangent: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor, StackParameters]:
    """Values (n, P), and the gradient of what has the cotangent at these values."""
    total = [[torch.zeros_like(block) for block in layer] for layer in parameters.layers()]
    found = []
    for rows in _blocks(parameters, tokens, outputs, chunk):
        stream, passed = _inner(parameters, tokens[rows], sigma)
        values, seen = _read(parameters, stream[-1], sigma, outputs)
        found.append(values)
        for place, back in _back(parameters, passed, seen, cotangent(values, rows)):
            for block, term in zip(total[place], back[:3], strict=True):
                assert term is not None
                block += term.reshape(block.shape)
    inner = tuple(TokenLayer(*layer) for layer in total[:-1])
    return torch.cat(found), StackParameters(inner, Parameters(*total[-1]))


def _back(
    parameters: StackParameters,
    passed: list[Attended],
    seen: Attended,
    cotangent: Float[Tensor, "b P"],
    *,
    each: bool = False,
) -> Iterator[tuple[int, LayerGradients]]:
    """From the read-out down: the place of a layer, and what reaches it."""
    c, U, W = parameters.readout
    back = pull_back(
        c[:, None], U, W, seen, cotangent[..., None], inputs=bool(passed), each=each
    )  # fmt: skip
    yield len(passed), back
    if back.tokens is None or back.queries is None:
        return
    gamma = back.tokens
    gamma[:, -back.queries.shape[1] :] += back.queries
    for place in reversed(range(len(passed))):
        layer = parameters.inner[place]
        back = pull_back(*layer, passed[place], gamma, inputs=place > 0, each=each)
        yield place, back
        if back.tokens is not None and back.queries is not None:
            gamma = gamma + back.tokens + back.queries


def _inner(
    parameters: StackParameters, tokens: Tensor, sigma: Activation
) -> tuple[list[Tensor], list[Attended]]:
    stream, passed = [tokens], []
    for C, U, W in parameters.inner:
        seen = attend(U, W, stream[-1], stream[-1], sigma)
        passed.append(seen)
        stream.append(stream[-1] + output(C, seen.values, _twins(U, W)))
    return stream, passed


def _read(
    parameters: StackParameters, tokens: Tensor, sigma: Activation, outputs: Output
) -> tuple[Tensor, Attended]:
    """Values (b, P), one query or T."""
    c, U, W = parameters.readout
    seen = attend(U, W, tokens, tokens[:, -1:] if outputs == "last" else tokens, sigma)
    return output(c[:, None], seen.values, _twins(U, W))[..., 0], seen


def _twins(U: Tensor, W: Tensor) -> Tensor | None:
    return twin_heads(Parameters(U[:, 0], U, W))


def _blocks(
    parameters: StackParameters, tokens: Tensor, outputs: Output, chunk: int | None
) -> Iterator[slice]:
    """Slices of samples whose weights in one layer are as many as fit the cache."""
    samples, length, _ = tokens.shape
    asked = length if parameters.inner or outputs == "each" else 1
    if chunk is None:
        chunk = max(1, block_elements(tokens.device) // (asked * length * parameters.heads))
    for first in range(0, samples, chunk):
        yield slice(first, first + chunk)


def _per_output(
    name: str, given: Tensor, tokens: Tensor, outputs: Output, validate: bool
) -> Float[Tensor, "n P"]:
    require_one_of("outputs", outputs, OUTPUTS)
    if validate:
        sizes = {"n": tokens.shape[0], "T": tokens.shape[1]}
        symbols = ("n",) if outputs == "last" else ("n", "T")
        require_shape(name, given, symbols, sizes, remedy="one number for each output")
        require_floating(name, given, tokens.dtype)
        require_finite(name, given)
    given = given.to(tokens.dtype)
    return given[:, None] if outputs == "last" else given


def _prepare(
    parameters: StackParameters,
    tokens: Tensor,
    activation: str | Activation,
    chunk: int | None,
    validate: bool,
) -> tuple[Activation, Tensor, StackParameters]:
    """Check, and bring half precision to float32."""
    if validate:
        require_chunk(chunk)
        parameters.require_valid()
        require_tokens(tokens, parameters.dimension)
        require_floating("parameters", parameters.readout.U, tokens.dtype)
        require_finite("tokens", tokens)
    dtype = working_dtype(tokens.dtype)
    return get_activation(activation), tokens.to(dtype), parameters.map(lambda b: b.to(dtype))
