r"""The fused kernel for CPUs: features, values and gradients in one pass, written in C++.

Everything that depends on a sample and a head stays in the first cache; memory does not grow with
T. With tanh a training step is one call. For another activation the scores s come back first, the
weights :math:`g_j c_i \sigma'(s_{ji})` are formed by torch, and a second pass pulls them back.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.engines import native
from attention_dynamics.models.engines.base import ByScores, plainly
from attention_dynamics.models.parameters import Parameters

_SCORES, _FEATURES, _SLOPES, _SUMS, _VALUES, _STEP, _VJP, _PULL = range(8)
_INTEGERS = ("mode", "n", "T", "d", "m", "per_sample", "threads")
_ARRAYS = (
    *("tokens", "query", "mask", "U", "W", "c", "V", "Z", "C", "given"),
    *("s", "slope", "a", "r", "sum", "squares", "f", "grad_c", "grad_U", "grad_W"),
)


class _Problem(ctypes.Structure):
    """The struct of the same name in attention.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    )


class Fused(ByScores):
    """The engine of ``attention.cpp``: float32 and float64 on the CPU, any number of threads.

    Results are the same bit for bit for every number of threads.
    """

    name = "fused"

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """Name the device or dtype that the kernel does not know, or why it can't be built."""
        tokens = inputs.tokens
        if tokens.device.type != "cpu":
            return f"the tokens are on {tokens.device}"
        if tokens.dtype not in (torch.float32, torch.float64):
            return f"the dtype is {tokens.dtype}"
        try:
            _kernel(tokens.dtype)
        except native.Unavailable as reason:
            return str(reason)
        return None

    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        """Features of all samples."""
        samples, (heads, dimension) = inputs.tokens.shape[0], U.shape
        s = inputs.tokens.new_empty((samples, heads))
        a = inputs.tokens.new_empty((samples, heads, dimension))
        r = torch.empty_like(a)
        _call(_FEATURES, inputs, scale, U=U, W=W, s=s, a=a, r=r)
        return HeadFeatures(s, a, r)

    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        """Only s: half the work of the features."""
        s = inputs.tokens.new_empty((inputs.tokens.shape[0], U.shape[0]))
        _call(_SCORES, inputs, scale, U=U, W=W, s=s)
        return s

    def values(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        *,
        chunk: int | None = None,
    ) -> Float[Tensor, " n"]:
        r""":math:`f(X_j)`, (n,); with tanh no array (n, m) comes into being."""
        if sigma.value is not torch.tanh:
            return super().values(inputs, parameters, sigma, scale, chunk=chunk)
        c, U, W = parameters
        f = inputs.tokens.new_empty(inputs.tokens.shape[0])
        _call(_VALUES, inputs, scale, U=U, W=W, c=c, f=f)
        return f

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
        s = inputs.tokens.new_empty((inputs.tokens.shape[0], U.shape[0]))
        slope = torch.empty_like(s)
        _call(_SLOPES, inputs, scale, U=U, W=W, V=V, Z=Z, s=s, slope=slope)
        return s, slope

    def sums(
        self, inputs: Inputs, parameters: Parameters, tangent: Parameters, scale: float
    ) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
        r""":math:`\sum_i z_i` and :math:`\sum_i z_i^2` in float64, each (n,), no array (n, m):

        .. math:: z_i = v_{c,i} \tanh s_i + c_i \tanh'(s_i)\, s'_i, \qquad v = \text{tangent.}
        """
        c, U, W = parameters
        total = inputs.tokens.new_empty(inputs.tokens.shape[0], dtype=torch.float64)
        squares = torch.empty_like(total)
        _call(
            _SUMS, inputs, scale, U=U, W=W, c=c, V=tangent.U, Z=tangent.W, C=tangent.c,
            sum=total, squares=squares,
        )  # fmt: skip
        return total, squares

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
        r""":math:`f(X_j; \phi)` and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`."""
        c, U, W = parameters
        if sigma.value is torch.tanh:
            f = torch.empty_like(targets, memory_format=torch.contiguous_format)
            return f, _gradients(
                _STEP, inputs, scale, parameters, U=U, W=W, c=c, given=targets, f=f
            )
        values, slopes = sigma.value_and_first(self.scores(inputs, U, W, scale))
        f = head_sum(c, values, twin_heads(parameters))
        g = (f - targets) * (2.0 / targets.shape[0])
        return f, _pull(inputs, parameters, scale, values, slopes, g)

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
        r""":math:`\sum_j g_j \nabla f(X_j; \phi)`."""
        c, U, W = parameters
        if sigma.value is torch.tanh:
            return _gradients(_VJP, inputs, scale, parameters, U=U, W=W, c=c, given=cotangent)
        values, slopes = sigma.value_and_first(self.scores(inputs, U, W, scale))
        return _pull(inputs, parameters, scale, values, slopes, cotangent)


def _pull(
    inputs: Inputs, parameters: Parameters, scale: float, values: Tensor, slopes: Tensor, g: Tensor
) -> Parameters:
    """Sum g_j grad f(X_j), from sigma(s) and sigma'(s), (n, m)."""
    c, U, W = parameters
    g = g * c.shape[0] ** -0.5
    weights = g[:, None] * c * slopes
    pulled = _gradients(_PULL, inputs, scale, parameters, U=U, W=W, given=weights)
    return pulled._replace(c=g @ values)


def _gradients(
    mode: int, inputs: Inputs, scale: float, parameters: Parameters, **arrays: Tensor
) -> Parameters:
    gradients = Parameters(*(inputs.tokens.new_empty(block.shape) for block in parameters))
    for name, block in zip(("grad_c", "grad_U", "grad_W"), gradients, strict=True):
        arrays[name] = block
    if mode == _PULL:
        del arrays["grad_c"]
    _call(mode, inputs, scale, **arrays)
    return gradients


def _call(mode: int, inputs: Inputs, scale: float, **arrays: Tensor) -> None:
    """Run the kernel; ``arrays`` are its inputs and outputs by the names of the struct."""
    tokens, query, mask = inputs
    samples, length, dimension = tokens.shape
    arrays["tokens"], arrays["query"] = tokens, query
    if mask is not None:
        arrays["mask"] = mask
    _require_memory(mode, arrays)
    # Outputs are made contiguous by their makers; an input that is not is copied here, and the
    # dictionary keeps the copy alive during the call.
    arrays = {name: array.contiguous() for name, array in arrays.items()}
    problem = _Problem(
        mode, samples, length, dimension, arrays["U"].shape[0], query.ndim == 2,
        torch.get_num_threads(), scale,
        **{name: array.data_ptr() for name, array in arrays.items()},
    )  # fmt: skip
    if _kernel(tokens.dtype)(ctypes.byref(problem)):
        raise MemoryError("the fused kernel found no memory for its gradients: use fewer heads")


def _require_memory(mode: int, arrays: dict[str, Tensor]) -> None:
    """Hold all arrays against the tokens: the kernel would read past the end of a smaller one."""
    tokens = arrays["tokens"]
    samples, length, dimension = tokens.shape
    heads = arrays["U"].shape[0]
    shapes = {
        "query": (samples, dimension) if arrays["query"].ndim == 2 else (dimension,),
        "mask": (samples, length), "given": (samples, heads) if mode == _PULL else (samples,),
        "c": (heads,), "U": (heads, dimension), "W": (heads, dimension, dimension),
    }  # fmt: skip
    shapes["V"], shapes["Z"], shapes["C"] = shapes["U"], shapes["W"], shapes["c"]
    for name, array in arrays.items():
        shape = shapes.get(name)
        if shape is None:  # the kernel's own
            continue
        dtype = torch.bool if name == "mask" else tokens.dtype
        if array.shape != shape or array.dtype != dtype or not array.is_cpu:
            raise ValueError(
                f"{name}: expected shape {shape} and {dtype} on {tokens.device}, as the tokens ask "
                f"for, got {tuple(array.shape)} and {array.dtype} on {array.device}; bring all to "
                "one device, and leave validate=True for a message in your own names"
            )


@cache
def _kernel(dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    name = "attention_float" if dtype == torch.float32 else "attention_double"
    return getattr(native.library("attention.cpp"), name)
