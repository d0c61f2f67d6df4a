r"""Launches of the Triton kernels for a stack of problems, and the arithmetic around them.

Every function takes one more axis in front: ten seeds, or a sweep of widths padded with heads of
coefficient c = 0, are one launch. A padded head adds exactly 0 to f, and its own gradients of U
and W are 0.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models.activations import ERF, ERF_PLAIN, TANH, Activation
from attention_dynamics.models.parameters import Parameters

#: Coordinates that the registers of a thread hold; longer tokens are work for matrix products.
MAX_DIMENSION = 24
# Limits of the one pass, which keeps the gradients of W in registers: d^2, or d for a fixed query.
_ONE_PASS = {"heads": 256, "d": 8, "fixed d": 16}
_SCRATCH = 2**25  # elements of G r, (S, n, m, d), that leave the kernel at once
_IN_KERNEL = {TANH: "tanh", ERF: "erf", ERF_PLAIN: "erf_plain"}
_LOG2_E = math.log2(math.e)


class Stack(NamedTuple):
    """S problems: tokens (S, n, T, d), mask (S, n, T), query (S, d) if fixed, else (S, n, d).

    An array that all problems share may have a first axis of length 1.
    """

    tokens: Tensor
    query: Tensor
    mask: Tensor | None

    @property
    def fixed(self) -> bool:
        """Whether the query is the same for all samples of a problem."""
        return self.query.ndim == 2

    def rows(self, block: slice) -> Stack:
        """The same samples of each problem."""
        return Stack(
            self.tokens[:, block],
            self.query if self.fixed else self.query[:, block],
            None if self.mask is None else self.mask[:, block],
        )


def refusal(tokens: Tensor) -> str | None:
    """Why the kernels can't serve these tokens, or None."""
    if tokens.dtype not in (torch.float32, torch.float64):
        return f"the dtype is {tokens.dtype}"
    if tokens.shape[-1] > MAX_DIMENSION:
        return f"d = {tokens.shape[-1]} is more than the {MAX_DIMENSION} that registers hold"
    if tokens.device.type not in ("cuda", "cpu"):
        return f"the tokens are on {tokens.device}"
    missing = _missing()
    if missing is not None:
        return missing
    if tokens.device.type == "cpu" and not _interpreting():
        return "the tokens are on the CPU, and Triton interprets only with TRITON_INTERPRET=1"
    return None


def step(
    stack: Stack,
    parameters: Parameters,
    sigma: Activation,
    scale: float,
    targets: Float[Tensor, "S n"],
) -> tuple[Float[Tensor, "S n"], Parameters]:
    r""":math:`f_S(X_j)`, (S, n), and :math:`\nabla \frac1n \sum_j (f_S(X_j) - y_{S,j})^2`.

    ``parameters`` and gradients have the shapes (S, m), (S, m, d), (S, m, d, d).
    """
    c, U, W = parameters
    heads, dimension = U.shape[1:]
    factor, norm = 2.0 / targets.shape[1], heads**-0.5
    longest = _ONE_PASS["fixed d" if stack.fixed else "d"]
    if sigma in _IN_KERNEL and heads <= _ONE_PASS["heads"] and dimension <= longest:
        f = torch.empty_like(targets, memory_format=torch.contiguous_format)
        sums = _gradient_sums(
            stack, parameters, scale, c=norm * c, y=targets, f=f, sigma=_IN_KERNEL[sigma]
        )
        gradients = _gradients(sums, stack, scale)
        return f, gradients._replace(c=norm * gradients.c).scaled(factor)
    s = features(stack, U, W, scale, sums=False)[0]
    values, slopes = sigma.value_and_first(s)
    twins = twin_heads(parameters)
    f = head_sum(c[:, None], values, None if twins is None else twins[:, None])
    return f, pull(stack, parameters, scale, values, slopes, factor * (f - targets))


def pull(
    stack: Stack, parameters: Parameters, scale: float, values: Tensor, slopes: Tensor, g: Tensor
) -> Parameters:
    """Sum g_j grad f(X_j), from sigma(s) and sigma'(s), (S, n, m)."""
    g = g * parameters.heads**-0.5
    weights = g[:, :, None] * parameters.c[:, None] * slopes
    sums = _gradient_sums(stack, parameters, scale, G=weights)
    in_c = (g[:, None] @ values)[:, 0]
    return _gradients(sums, stack, scale)._replace(c=in_c)


def _gradients(sums: tuple[Tensor, Tensor, Tensor], stack: Stack, scale: float) -> Parameters:
    """Parameters from the sums (S, m), (S, d, m) and (S, d, m), fixed query, or (S, d, d, m)."""
    in_c, in_U, in_W = sums
    if in_W.ndim == 3:
        in_W = in_W.mT[..., None] * stack.query[:, None, None]
    else:
        in_W = in_W.permute(0, 3, 1, 2)
    return Parameters(in_c, in_U.mT.contiguous(), (scale * in_W).contiguous())


def features(
    stack: Stack, U: Tensor, W: Tensor, scale: float, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return s (S, n, m), a and r (S, n, d, m); without ``sums`` the last two are empty."""
    problem = _Launch(stack, U, W, scale, one_pass=False)
    stacks, (heads, dimension), samples = U.shape[0], U.shape[1:], stack.tokens.shape[1]
    s = U.new_empty((stacks, samples, heads))
    a, r = (U.new_empty((stacks, samples, dimension, heads) if sums else 0) for _ in range(2))
    problem.run("features_kernel", s, a, r, SUMS=sums)
    return s, a, r


def _gradient_sums(
    stack: Stack,
    parameters: Parameters,
    scale: float,
    *,
    G: Tensor | None = None,
    c: Tensor | None = None,
    y: Tensor | None = None,
    f: Tensor | None = None,
    sigma: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over the samples of g sigma, G a, and G r (fixed query) or G r q^T, heads last."""
    U, W = parameters.U, parameters.W
    stacks, heads, dimension = U.shape
    nothing = U.new_empty(0)
    outer = not stack.fixed and dimension <= _ONE_PASS["d"]
    rest = dimension**2 if outer else dimension if stack.fixed else 0
    if outer or stack.fixed:
        blocks = [slice(None)]
    else:
        samples = stack.tokens.shape[1]
        length = max(1, _SCRATCH // (stacks * heads * dimension))
        blocks = [slice(first, first + length) for first in range(0, samples, length)]
    total, in_W = None, U.new_zeros((stacks, dimension * heads, dimension) if not rest else 0)
    for block in blocks:
        rows = stack.rows(block)
        problem = _Launch(rows, U, W, scale, one_pass=sigma is not None or outer)
        partial = U.new_empty((stacks, problem.slices, 1 + dimension + rest, heads))
        weights = nothing if G is None else G[:, block].contiguous()
        samples = rows.tokens.shape[1]
        P = nothing if rest else U.new_empty((stacks, samples, dimension * heads))
        problem.run(
            "gradient_kernel", weights, nothing if c is None else c.contiguous(),
            nothing if y is None else y.contiguous(), nothing if f is None else f,
            P, partial, SIGMA=sigma, OUTER=outer,
        )  # fmt: skip
        summed = partial.sum(dim=1)
        total = summed if total is None else total + summed
        if not rest:
            in_W = in_W + P.mT @ rows.query
    assert total is not None  # there is at least one sample
    in_c, in_U, in_w = total.split((1, dimension, rest), dim=1)
    if not rest:
        shaped = in_W.reshape(stacks, dimension, heads, dimension).mT
    else:
        shaped = in_w.unflatten(1, (dimension, dimension)) if outer else in_w
    return in_c[:, 0], in_U, shaped


class _Launch:
    """Arguments, tile and grid of one launch: B samples times M heads, one pair a thread."""

    def __init__(self, stack: Stack, U: Tensor, W: Tensor, scale: float, *, one_pass: bool) -> None:
        tokens, query, mask = stack
        stacks, heads, dimension = U.shape
        samples, length = tokens.shape[1:3]
        # Four numbers a load need rows that start at multiples of 16 bytes.
        self.wide = tokens.dtype == torch.float32 and tokens.is_cuda and not _interpreting()
        if self.wide and dimension % 4:
            tokens = torch.nn.functional.pad(tokens, (0, -dimension % 4))
        tokens = tokens.contiguous()
        if self.wide and tokens.data_ptr() % 16:
            tokens = tokens.clone()
        factor = scale * _LOG2_E
        if stack.fixed:
            w = factor * (W @ query[:, None, :, None]).squeeze(-1).mT
        else:
            w = factor * W.flatten(2).mT
        threads = 256 if one_pass else 128
        tile = min(threads, max(2, 1 << (heads - 1).bit_length()))
        self.blocks = -(-(heads + heads % 2) // tile)
        rows = threads // tile
        programs = _multiprocessors(tokens.device) * (1 if one_pass else 4)
        self.slices = max(1, min(-(-samples // rows), programs // (stacks * self.blocks)))
        self.grid = (stacks * self.slices * self.blocks,)
        steps = -(-length // _window(dimension, one_pass and not stack.fixed))
        window = -(-length // steps)
        self.before = (
            tokens, tokens, tokens if mask is None else mask.contiguous().view(torch.uint8),
            query.contiguous(), w.contiguous(), U.mT.contiguous(),
        )  # fmt: skip
        self.sizes = (
            samples, length, heads, self.slices, self.blocks,
            samples if tokens.shape[0] > 1 else 0, samples if query.shape[0] > 1 else 0,
        )  # fmt: skip
        self.constants: dict[str, Any] = {
            "d": dimension, "DX": tokens.shape[-1], "BT": window, "ONE": steps == 1,
            "TAIL": steps * window != length, "B": rows, "M": tile, "FIXED": stack.fixed,
            "MASKED": mask is not None, "WIDE": self.wide,
            "num_warps": threads // 32, "num_stages": 1, "enable_fp_fusion": False,
        }  # fmt: skip

    def run(self, kernel: str, *arrays: Tensor, **constants: Any) -> None:
        """Start the kernel on its own arrays, between the inputs and the sizes."""
        function = getattr(_kernels(), kernel)
        with _on(self.before[0].device):
            function[self.grid](*self.before, *arrays, *self.sizes, **self.constants, **constants)


def _window(dimension: int, outer: bool) -> int:
    """Tokens in a block: many, to move sums seldom, in registers left by d and gradients of W."""
    return 8 if outer else max(4, min(16, 192 // dimension))


@cache
def _kernels() -> ModuleType:
    from attention_dynamics.models.engines import triton_kernel

    return triton_kernel


@cache
def _missing() -> str | None:
    """Why there is no Triton, asked once: a failed import searches every folder again."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton can't be imported: {error}"
    return None


def _interpreting() -> bool:
    import triton

    return not isinstance(_kernels().features_kernel, triton.JITFunction)


@cache
def _multiprocessors(device: torch.device) -> int:
    """Programs that run side by side; a fixed number a device keeps the order of the sums."""
    if device.type != "cuda":
        return 3
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
