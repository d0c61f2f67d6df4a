r"""Three ways through a recurrence of independent units, chosen as the engines of attention are.

``reference`` is the formula, for autograd and ``torch.func``; ``eager`` the closed
back-propagation on blocks of samples, for any activation and device; ``fused`` the same in C++,
for tanh on a CPU. Each takes checked tensors of one dtype and returns the values (n,) and, given
targets (n,), the gradients of the mean squared error in w (m, d), u (m,) and c (m,).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines import native, selection
from attention_dynamics.models.engines.base import plainly
from attention_dynamics.models.places import Places

Blocks = tuple[Tensor, Tensor, Tensor]
"""One tensor each for w, u and c."""
Answer = tuple[Tensor, Blocks | None]
"""Values, and gradients where targets were given."""
Engine = Callable[[Blocks, Tensor, Tensor | None, Activation, int | None, Places | None], Answer]

# Elements b T m of a block of b samples on a CPU, by measurement: below, the calls of 4 T small
# operations cost more than they do; above, the arrays leave the cache.
_CPU_BLOCK = 2**19
# Elements b m of a step, at least: of a very long sequence more than one sample is handled at once,
# or the calls would cost far more than the numbers.
_LEAST_STEP = 2**8
_ACCELERATOR_BLOCK = 2**25


def reference(
    parameters: Blocks,
    tokens: Tensor,
    targets: Tensor | None,
    sigma: Activation,
    chunk: int | None = None,
    places: Places | None = None,
) -> Answer:
    """By automatic differentiation of the formula; all samples at once."""
    if targets is None:
        return formula(parameters, tokens, sigma), None

    w, u, c = parameters

    def loss(blocks: Blocks) -> tuple[Tensor, Tensor]:
        values = formula(blocks, tokens, sigma)
        return (values - targets).square().mean(), values

    gradients, values = torch.func.grad(loss, has_aux=True)((w, u, c))
    return values, gradients


def formula(parameters: Blocks, tokens: Tensor, sigma: Activation) -> Tensor:
    """Return m^{-1/2} sum_i c_i h_{i,T}, (n,), as it is written."""
    w, u, c = parameters
    state = tokens.new_zeros(tokens.shape[0], w.shape[0])
    # One product for all steps; unbind keeps the backward pass linear in T, indexing does not.
    for drive in (tokens @ w.mT).unbind(dim=1):
        state = sigma.value(drive + u * state)
    return (c * state).sum(dim=-1) * w.shape[0] ** -0.5


@plainly
def eager(
    parameters: Blocks,
    tokens: Tensor,
    targets: Tensor | None,
    sigma: Activation,
    chunk: int | None = None,
    places: Places | None = None,
) -> Answer:
    """In closed form on blocks of samples; without targets no more than one state is held."""
    w, u, c = parameters
    samples, length, dimension = tokens.shape
    units = w.shape[0]
    if chunk is None:
        elements = _CPU_BLOCK if tokens.device.type == "cpu" else _ACCELERATOR_BLOCK
        steps = 1 if targets is None else length
        chunk = max(1, elements // (steps * units), _LEAST_STEP // units)
    c = c * units**-0.5
    if targets is None:
        return torch.cat([_stream(w, u, part, sigma) @ c for part in tokens.split(chunk)]), None
    values = tokens.new_empty(samples)
    in_w, in_u, in_c = (torch.zeros_like(block) for block in parameters)
    tanh = sigma.value is torch.tanh and sigma.first_from_value is not None
    size = length * min(chunk, samples) * units
    one, back = tokens.new_ones(()), tokens.new_empty(min(chunk, samples), units)
    first, second = tokens.new_empty(size), tokens.new_empty(size + size // length)
    for start in range(0, samples, chunk):
        block = slice(start, start + chunk)
        rows = tokens[block].transpose(0, 1)
        width = rows.shape[1]
        rows = rows.reshape(length * width, dimension)
        z = first[: length * width * units].view(length, width, units)
        h = second[: (length + 1) * width * units].view(length + 1, width, units)
        torch.mm(rows, w.mT, out=z.view(-1, units))
        h[0] = 0
        for before, after, drive in zip(h[:-1].unbind(), h[1:].unbind(), z.unbind(), strict=True):
            drive.addcmul_(u, before)
            if tanh:
                torch.tanh(drive, out=after)  # 2 sigmoid(2z) - 1 would lose the digits of a small z
            else:
                after.copy_(sigma.value(drive))
        values[block] = f = h[-1] @ c
        g = (f - targets[block]) * (2.0 / samples)
        in_c += g @ h[-1]
        if tanh:
            torch.addcmul(one, h[1:], h[1:], value=-1, out=z)
        else:
            z.copy_(sigma.first(z))
        deltas = z.unbind()  # from here on z holds the slopes, and delta where it has been
        deltas[-1].mul_(torch.outer(g, c))
        for t in range(length - 1, 0, -1):
            deltas[t - 1].mul_(torch.mul(deltas[t], u, out=back[:width]))
        in_w += (rows.mT @ z.view(-1, units)).mT  # the short axis d in front is twice as fast
        in_u += h[:-1].mul_(z).sum(dim=(0, 1))
    return values, (in_w, in_u, in_c.mul_(units**-0.5))


def _stream(w: Tensor, u: Tensor, tokens: Tensor, sigma: Activation) -> Tensor:
    """Return the last states of a block, (b, m), from one token after another."""
    state = tokens.new_zeros(tokens.shape[0], w.shape[0])
    for t in range(tokens.shape[1]):  # unbind would make T views, megabytes at T = 2^15
        state = sigma.value(torch.addmm(u * state, tokens[:, t], w.mT))
    return state


@plainly
def fused(
    parameters: Blocks,
    tokens: Tensor,
    targets: Tensor | None,
    sigma: Activation,
    chunk: int | None = None,
    places: Places | None = None,
) -> Answer:
    """By ``recurrence.cpp``: the same bits for any number of threads, states kept up to 4 MiB.

    ``places`` are those of the tokens; with them a token costs as much as its own numbers.
    """
    w, u, c = parameters
    (units, dimension), (samples, length, _) = w.shape, tokens.shape
    _require_memory(tokens, dimension, targets)
    run, lanes = _kernel(tokens.itemsize)
    table, shared = None, 0
    if places is not None and places.serve(units):
        tokens, order = places.values, places.order()
        w, shared = w[:, order], dimension - tokens.shape[-1]
        table = places.places[:, order[tokens.shape[-1] :]].contiguous()
    tiles = -(-units // lanes)
    rows = tokens.new_zeros(dimension + 2, tiles * lanes)
    rows[:dimension, :units] = w.mT
    rows[dimension, :units] = u
    torch.mul(c, units**-0.5, out=rows[dimension + 1, :units])
    packed = rows.view(dimension + 2, tiles, lanes).transpose(0, 1).contiguous()
    sums, values = torch.empty_like(packed), tokens.new_empty(samples)
    tokens = tokens.contiguous()
    wanted = None if targets is None else targets.contiguous()
    if run(
        tokens.itemsize, packed.data_ptr(), tokens.data_ptr(),
        None if table is None else table.data_ptr(),
        None if wanted is None else wanted.data_ptr(), samples, length, tokens.shape[-1], shared,
        tiles,
        torch.get_num_threads(), values.data_ptr(), sums.data_ptr(),
    ):  # fmt: skip
        raise MemoryError(
            f"the states of {units} units over {length} tokens do not fit in memory; use fewer "
            "threads or units"
        )
    if targets is None:
        return values, None
    rows = sums.transpose(0, 1).reshape(dimension + 2, tiles * lanes)[:, :units]
    in_c = rows[dimension + 1] * units**-0.5
    in_w = rows[:dimension].mT.contiguous()
    if table is not None:
        in_w[:, order] = in_w.clone()
    return values, (in_w, rows[dimension].clone(), in_c)


def _require_memory(tokens: Tensor, dimension: int, targets: Tensor | None) -> None:
    """The kernel reads n T d tokens and n targets, whatever there is."""
    expected = {"tokens": (tokens, (*tokens.shape[:2], dimension))}
    if targets is not None:
        expected["targets"] = targets, tokens.shape[:1]
    for name, (array, shape) in expected.items():
        if array.shape != shape or array.dtype != tokens.dtype or array.device != tokens.device:
            raise ValueError(
                f"{name}: expected shape {tuple(shape)} and {tokens.dtype} on {tokens.device}, got "
                f"{tuple(array.shape)} and {array.dtype} on {array.device}; leave validate=True "
                "for a message before the call"
            )


@cache
def _kernel(size: int) -> tuple[Callable[..., int], int]:
    """Return the compiled function, and the units of a tile for numbers of ``size`` bytes."""
    library = native.library("recurrence.cpp")
    library.recurrence.argtypes = (
        ctypes.c_int, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 5, ctypes.c_int,
        *[ctypes.c_void_p] * 2,
    )  # fmt: skip
    return library.recurrence, library.recurrence_units(size)


def refusal(name: str, tokens: Tensor, sigma: Activation) -> str | None:
    """Why the engine of that name can't serve this recurrence here, or None."""
    if name in ("reference", "eager"):
        return None
    if name != "fused":
        return "it knows no recurrence"
    if tokens.device.type != "cpu":
        return f"the tokens are on {tokens.device}"
    if tokens.dtype not in (torch.float32, torch.float64):
        return f"the dtype is {tokens.dtype}"
    if sigma.value is not torch.tanh or sigma.first_from_value is None:
        return f"the activation is {sigma.name}"
    try:
        _kernel(tokens.itemsize)
    except native.Unavailable as reason:
        return str(reason)
    return None


def choose(engine: str, tokens: Tensor, sigma: Activation, *tensors: Tensor) -> Engine:
    """Return the engine named, or the fastest for ``"auto"``; one that refuses becomes eager.

    What autograd, ``torch.func`` or a tracer has to look into goes to the reference. Raises
    ValueError for an unknown name.
    """
    engine = selection.asked_for(engine)
    named = engine != "auto"
    if selection.looked_into(tokens, *tensors):
        return reference
    name = engine if named else "fused"
    reason = refusal(name, tokens, sigma)
    if reason is None:
        return {"reference": reference, "eager": eager, "fused": fused}[name]
    selection.report(
        f"{name} of the recurrence", reason, logging.WARNING if named else logging.INFO
    )
    return eager
