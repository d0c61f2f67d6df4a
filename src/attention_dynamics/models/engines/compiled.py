r"""``torch.compile`` of the closed forms without matrix products, one compilation a shape.

Unrolled over the d coordinates, with the heads innermost and sums over tokens, a block becomes a
few vectorised loops. Compiling takes seconds to minutes a shape, so ``"auto"`` takes this engine
on accelerators only.
"""

from __future__ import annotations

import importlib.util
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models import _pass
from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines.base import ByScores, plainly
from attention_dynamics.models.parameters import Parameters

_SHAPES_KEPT = 32


class Compiled(ByScores):
    r""":math:`(s, a, r)` and their pull-back by compiled loops over blocks of samples."""

    name = "compiled"

    def __init__(self) -> None:
        self._functions: OrderedDict[tuple, Callable] = OrderedDict()

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """Name what ``torch.compile`` lacks here: support, a C++ compiler, Triton."""
        tokens = inputs.tokens
        if tokens.dtype not in (torch.float32, torch.float64):
            return f"the dtype is {tokens.dtype}"
        return _missing(tokens.device.type)

    @plainly
    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        r""":math:`(s, a, r)`: (n, m), (n, m, d), (n, m, d)."""
        samples, new = inputs.tokens.shape[0], inputs.tokens.new_empty
        out = HeadFeatures(new(samples, len(U)), new(samples, *U.shape), new(samples, *U.shape))
        for block, count, (s, a, r), _ in self._pooled(inputs, U, W, scale, chunk, _features):
            out.s[block] = s[:count]
            out.a[block] = a[:, :count].permute(1, 2, 0)
            out.r[block] = r[:, :count].permute(1, 2, 0)
        return out

    @plainly
    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        r""":math:`s`."""
        out = inputs.tokens.new_empty(inputs.tokens.shape[0], U.shape[0])
        for block, count, s, _ in self._pooled(inputs, U, W, scale, chunk, _scores):
            out[block] = s[:count]
        return out

    @plainly
    def slopes(
        self,
        inputs: Inputs,
        U: Tensor,
        W: Tensor,
        V: Tensor,
        Z: Tensor,
        scale: float,
        *,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, "n m"]]:
        r""":math:`s` and :math:`s' = V \cdot a + r \cdot \gamma Z q`."""
        scores = inputs.tokens.new_empty(inputs.tokens.shape[0], U.shape[0])
        slopes = torch.empty_like(scores)
        VT = V.mT.contiguous()
        for block, count, (s, a, r), q in self._pooled(inputs, U, W, scale, chunk, _features):
            slope = self._function(_along, a, r, VT, _directions(Z, q, scale))
            scores[block], slopes[block] = s[:count], slope[:count]
        return scores, slopes

    @plainly
    def step(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        targets: Float[Tensor, " n"],
        *,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, " n"], Parameters]:
        r""":math:`f(X_j)` and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`."""
        twins, factor = twin_heads(parameters), 2.0 / targets.shape[0]
        values = torch.empty_like(targets)

        def cotangent(sigmas: Tensor, block: slice) -> Tensor:
            values[block] = head_sum(parameters.c, sigmas, twins)
            return factor * (values[block] - targets[block])

        return values, self._pulled_back(parameters, inputs, sigma, scale, chunk, cotangent)

    @plainly
    def vjp(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        cotangent: Float[Tensor, " n"],
        *,
        chunk: int | None = None,
    ) -> Parameters:
        r""":math:`\sum_j g_j \nabla f(X_j)`."""
        return self._pulled_back(
            parameters, inputs, sigma, scale, chunk, lambda _, block: cotangent[block]
        )

    def _pulled_back(
        self,
        parameters: Parameters,
        inputs: Inputs,
        sigma: Activation,
        scale: float,
        chunk: int | None,
        cotangent: Callable[[Tensor, slice], Tensor],
    ) -> Parameters:
        c, U, W = parameters
        norm, fixed = parameters.heads**-0.5, inputs.query.ndim == 1
        in_c, in_U, in_W = torch.zeros_like(c), torch.zeros_like(U), torch.zeros_like(W)
        if fixed:
            in_W = torch.zeros_like(U)
        pooled = self._pooled(inputs, U, W, scale, chunk, _features)
        for block, count, (s, a, r), q in pooled:
            sigmas, slopes = sigma.value_and_first(s[:count])
            g = cotangent(sigmas, block)
            in_c += g @ sigmas
            weight = torch.zeros_like(s)  # samples that fill up the block weigh nothing
            torch.mul(torch.outer(g, c * norm), slopes, out=weight[:count])
            part_U, part_W = self._function(_totals, a, r, weight, q)
            in_U += part_U
            in_W += part_W
        if fixed:
            in_W = in_W[:, :, None] * inputs.query
        return Parameters(in_c * norm, in_U, scale * in_W)

    def _pooled(
        self,
        inputs: Inputs,
        U: Tensor,
        W: Tensor,
        scale: float,
        chunk: int | None,
        function: Callable,
    ) -> Any:
        """Yield block, its samples, what ``function`` returns and the queries, block by block.

        Every block is filled up to one size, so that there is one compilation a shape.
        """
        samples = inputs.tokens.shape[0]
        UT = U.mT.contiguous()
        for block in _pass.blocks(inputs, U.shape[0], chunk):
            count = min(block.stop, samples) - block.start
            size = block.stop - block.start
            if samples < size:  # a small batch: the next power of two rather than a full block
                size = min(size, 1 << (samples - 1).bit_length())
            x, q, mask = _filled(inputs.rows(block), size)
            result = self._function(function, x, _directions(W, q, scale), UT, mask)
            yield block, count, result, q

    def _function(self, function: Callable, *tensors: Tensor | None) -> Any:
        """Call ``function``, compiled for exactly these shapes.

        A copy of its code for each shape: the compiler counts recompilations of one code and gives
        up silently, ten times slower, after a few.
        """
        shapes = tuple(None if t is None else (*t.shape, t.dtype, t.device) for t in tensors)
        key = (function.__name__, *shapes)
        own = self._functions.get(key)
        if own is None:
            copy = types.FunctionType(function.__code__.replace(), function.__globals__)
            own = torch.compile(copy, dynamic=False, fullgraph=True)
            self._functions[key] = own
            if len(self._functions) > _SHAPES_KEPT:
                self._functions.popitem(last=False)
            with warnings.catch_warnings():  # the compiler's own, about its inner workings
                warnings.simplefilter("ignore")
                return own(*tensors)
        self._functions.move_to_end(key)
        return own(*tensors)


def _features(x: Tensor, w: Tensor, UT: Tensor, mask: Tensor | None) -> tuple:
    """S (b, m), a and r (d, b, m) from tokens (b, T, d) and directions (d, m) or (b, d, m)."""
    e = _weights(x, w, mask)
    d, Z = x.shape[2], e.sum(dim=1)
    p = _projected(x, UT)
    s = (e * p).sum(dim=1) / Z
    centred = e * (p - s[:, None])
    a = torch.stack([(e * x[:, :, k, None]).sum(dim=1) / Z for k in range(d)])
    r = torch.stack([(centred * x[:, :, k, None]).sum(dim=1) / Z for k in range(d)])
    return s, a, r


def _scores(x: Tensor, w: Tensor, UT: Tensor, mask: Tensor | None) -> Tensor:
    """Only s of the features."""
    e = _weights(x, w, mask)
    return (e * _projected(x, UT)).sum(dim=1) / e.sum(dim=1)


def _weights(x: Tensor, w: Tensor, mask: Tensor | None) -> Tensor:
    logits = _projected(x, w)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None], -torch.inf)
    return torch.exp(logits - logits.amax(dim=1, keepdim=True))


def _projected(x: Tensor, w: Tensor) -> Tensor:
    """Inner products (b, T, m) of tokens with (d, m) or (b, d, m), unrolled over d."""
    w = w.reshape(-1, *w.shape[-2:])[:, :, None]
    total = x[:, :, 0, None] * w[:, 0]
    for k in range(1, x.shape[2]):
        total = total + x[:, :, k, None] * w[:, k]
    return total


def _along(a: Tensor, r: Tensor, VT: Tensor, w: Tensor) -> Tensor:
    """V . a + r . w, (b, m), from a and r (d, b, m) and w (d, m) or (b, d, m)."""
    return sum(a[k] * VT[k] + r[k] * w[..., k, :] for k in range(a.shape[0]))  # type: ignore[return-value]


def _totals(a: Tensor, r: Tensor, weight: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the samples of weight a, (m, d), and weight r, (m, d), or weight r q^T."""
    d = a.shape[0]
    in_U = torch.stack([(a[k] * weight).sum(dim=0) for k in range(d)], dim=-1)
    if q.ndim == 1:
        return in_U, torch.stack([(r[k] * weight).sum(dim=0) for k in range(d)], dim=-1)
    return in_U, torch.stack([(r[k] * weight).mT @ q for k in range(d)], dim=1)


def _directions(W: Tensor, query: Tensor, scale: float) -> Tensor:
    if query.ndim == 1:
        return (W @ (scale * query)).mT.contiguous()
    heads, d, _ = W.shape
    return ((scale * query) @ W.permute(2, 1, 0).flatten(1)).view(-1, d, heads)


def _filled(rows: Inputs, size: int) -> Inputs:
    """The block with its last sample repeated up to ``size`` samples, contiguous."""
    missing = size - rows.tokens.shape[0]

    def fill(tensor: Tensor) -> Tensor:
        if missing > 0:
            tensor = torch.cat((tensor, tensor[-1:].expand(missing, *tensor.shape[1:])))
        return tensor.contiguous()

    query = rows.query if rows.query.ndim == 1 else fill(rows.query)
    return Inputs(fill(rows.tokens), query, None if rows.mask is None else fill(rows.mask))


@cache
def _missing(device: str) -> str | None:
    if not torch._dynamo.is_dynamo_supported():
        return "torch.compile does not support this Python or platform"
    if device != "cpu":
        found = importlib.util.find_spec("triton") is not None
        return None if found else "torch.compile needs Triton for this device"
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # whatever the search raises, its first line says why
        return f"no C++ compiler for torch.compile: {str(error).strip().splitlines()[0]}"
    return None
