r"""The fused kernel for tokens that are a few numbers and a place: a training step in one call.

With :math:`x_{jt} = I z_{jt} + p_t` a logit costs as many products as z has numbers, whatever d is;
see ``placed.cpp``. Serves :class:`~attention_dynamics.models.engines.fused.Fused`.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.engines import native
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.models.places import Places

_INTEGERS = ("n", "T", "d", "m", "E", "own_query", "threads")
_ARRAYS = (
    *("values", "places", "zeta", "query", "own", "U", "W", "c", "targets"),
    *("f", "grad_c", "grad_U", "grad_W"),
)


class _Problem(ctypes.Structure):
    """PlacedProblem of placed.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    )


def unavailable(dtype: torch.dtype) -> str | None:
    """Why the kernel can't be had for this dtype here, or None."""
    if dtype not in (torch.float32, torch.float64):
        return f"the dtype is {dtype}"
    try:
        _kernel(dtype)
    except native.Unavailable as reason:
        return str(reason)
    return None


def values(places: Places, parameters: Parameters, scale: float) -> Float[Tensor, " n"]:
    r""":math:`f(X_j)`, (n,), for tanh."""
    return _call(places, parameters, scale, {})


def step(
    places: Places, parameters: Parameters, scale: float, targets: Float[Tensor, " n"]
) -> tuple[Float[Tensor, " n"], Parameters]:
    r""":math:`f(X_j)` and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`, for tanh."""
    gradients = Parameters(*(targets.new_empty(block.shape) for block in parameters))
    outputs = dict(zip(("grad_c", "grad_U", "grad_W"), gradients, strict=True))
    return _call(places, parameters, scale, {"targets": targets, **outputs}), gradients


def _call(
    places: Places, parameters: Parameters, scale: float, more: dict[str, Tensor]
) -> Float[Tensor, " n"]:
    samples, length, own = places.values.shape
    (heads, dimension), dtype = parameters.U.shape, places.values.dtype
    f = places.values.new_empty(samples)
    assert places.query is not None
    arrays = {
        "values": places.values, "places": places.places, "query": places.query,
        "own": places.own, **parameters._asdict(), "f": f, **more,
    }  # fmt: skip
    if places.zeta is not None:
        arrays["zeta"] = places.zeta
    shapes = {
        "places": (length, dimension), "query": (dimension,), "c": (heads,),
        "W": (heads, dimension, dimension), "targets": (samples,),
    }  # fmt: skip
    for name, shape in shapes.items():
        array = arrays.get(name, f)
        if name in arrays and (array.shape != shape or array.dtype != dtype or not array.is_cpu):
            raise ValueError(
                f"{name}: expected shape {shape} and {dtype} on the CPU, as the tokens ask for, "
                f"got {tuple(array.shape)} and {array.dtype} on {array.device}; bring all to one "
                "device, and leave validate=True for a message in your own names"
            )
    arrays = {name: array.contiguous() for name, array in arrays.items()}
    problem = _Problem(
        samples, length, dimension, heads, own, places.zeta is not None,
        torch.get_num_threads(), scale,
        **{name: array.data_ptr() for name, array in arrays.items()},
    )  # fmt: skip
    if _kernel(dtype)(ctypes.byref(problem)):
        raise MemoryError("the fused kernel found no memory for its gradients: use fewer heads")
    return f


@cache
def _kernel(dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    name = "placed_float" if dtype == torch.float32 else "placed_double"
    return getattr(native.library("placed.cpp"), name)
