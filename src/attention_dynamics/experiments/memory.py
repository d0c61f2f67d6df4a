r"""Memory against the number of tokens: what a gradient, or a value, takes beyond its tokens.

A cell is one method at one length T. It computes loss and gradients (or the values) of n sequences
once and reports the largest number of bytes that lived at one time, the tokens not counted; the
count is exact and the same on every CPU. For each method the exponent of T follows. Compiled
kernels, whose memory no tensor holds, are measured by :func:`resident`, in pages, outside of the
cells: pages do not repeat to the byte.

Setting: the shallow Transformer and the recurrent units of arXiv 2601.16514, whose abstract says
that the memory of the Transformer grows with T. The bands were fixed before the first run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

import pandas as pd
import torch

from attention_dynamics.data import generator, query_vector, unit_ball_tokens
from attention_dynamics.experiments._memory_meter import (
    in_fresh_thread,
    peak_bytes,
    resident_bytes,
)
from attention_dynamics.experiments._memory_methods import METHODS, Method, Problem
from attention_dynamics.experiments._memory_state import (
    Summary,
    block_summary,
    checkpointed,
    forward_sensitivities,
    merge,
    streamed_step,
    streamed_summary,
    streamed_values,
)
from attention_dynamics.experiments.estimates import (
    Band,
    Estimate,
    Profile,
    band_table,
    slope_estimate,
)
from attention_dynamics.experiments.shape import columns_of, rows_of
from attention_dynamics.models.activations import get_activation
from attention_dynamics.models.indrnn import IndRNN
from attention_dynamics.models.parameters import symmetric_initialisation
from attention_dynamics.validation import require_one_of

__all__ = [
    "AGAINST",
    "BANDS",
    "COLUMNS",
    "KERNELS",
    "KERNEL_BAND",
    "KERNEL_LENGTHS",
    "LABELS",
    "LARGE",
    "METHODS",
    "NAME",
    "PROFILES",
    "RESIDENT_BAND",
    "SCHEMA",
    "Config",
    "Summary",
    "block_summary",
    "checkpointed",
    "computation",
    "estimate",
    "forward_sensitivities",
    "merge",
    "of",
    "peak_bytes",
    "problem_of",
    "resident",
    "run",
    "streamed_step",
    "streamed_summary",
    "streamed_values",
    "summarise",
]

NAME = "memory"
SCHEMA = 1
AGAINST = "length"
Asked = Literal["fixed", "last"]
SLOPE_FROM = 1024  # below, what does not depend on T is no small part of the whole


@dataclass(frozen=True)
class Config:
    """A ``method`` and a ``length`` T; the other sizes are those of the comparison.

    ``method`` is a key of ``METHODS``. ``query`` is ``"fixed"`` or ``"last"``; recurrent units
    have none. ``units`` are heads or recurrent units, m.
    """

    method: str
    length: int
    query: Asked = "fixed"
    samples: int = 32
    units: int = 64
    dimension: int = 8
    activation: str = "tanh"


COLUMNS = columns_of(Config)
LABELS = (*(name for name, method in METHODS.items() if method.counted), "streaming_last")
"""The methods that are compared, with ``_last`` where the last token asks."""


def _configs(
    base: Config, lengths: tuple[int, ...], recurrent: tuple[int, ...]
) -> tuple[Config, ...]:
    found = []
    for label in LABELS:
        name = label.removesuffix("_last")
        query: Asked = "fixed" if name == label else "last"
        own = recurrent if METHODS[name].model == "recurrent" else lengths
        found += [replace(base, method=name, query=query, length=T) for T in own]
    return tuple(found)


_PAPER = Config(method="autograd", length=2**8)
_BOOK = replace(_PAPER, samples=8)
_SMOKE = replace(_PAPER, samples=2, units=4, dimension=3)
_LENGTHS = (2**8, 2**10, 2**12, 2**14, 2**16)
PROFILES = {
    "smoke": Profile(_configs(_SMOKE, (64, 256), (64, 256)), seeds=(0, 1)),
    "book": Profile(_configs(_BOOK, _LENGTHS[:-1], (2**8, 2**10, 2**12)), seeds=(0, 1)),
    "paper": Profile(_configs(_PAPER, _LENGTHS, _LENGTHS), seeds=(0, 1)),
}
"""Two seeds tell that a count does not depend on the numbers; its interval has no width then."""

_ALL = "arrays of n m T numbers are kept for the way back, or for the softmax"
_STATE = "a state of fixed size, and blocks of fixed size"
BANDS = {
    "autograd": Band(0.9, 1.1, _ALL),
    "closed": Band(0.9, 1.1, _ALL),
    "streaming": Band(-0.05, 0.05, _STATE),
    "streaming_last": Band(-0.05, 0.05, _STATE),
    "blocks": Band(-0.05, 0.05, _STATE),
    "values": Band(0.9, 1.1, _ALL),
    "values_streaming": Band(-0.05, 0.05, _STATE),
    "recurrent_autograd": Band(0.9, 1.1, _ALL),
    "recurrent_closed": Band(0.9, 1.1, _ALL),
    "recurrent_checkpointed": Band(0.45, 0.55, "every sqrt(T)-th state, and one part of sqrt(T)"),
    "recurrent_forward": Band(-0.05, 0.05, _STATE),
    "recurrent_values": Band(-0.05, 0.05, _STATE),
}
"""The log-log slope of the extra bytes against T, over T >= ``SLOPE_FROM``."""
KERNELS = ("fused", "recurrent_fused")
KERNEL_LENGTHS = (2**12, 2**14)
KERNEL_BAND = Band(-0.05, 0.05, "the kernels hold blocks, and states up to 4 MiB")
"""The growth of the resident memory per byte of tokens between the two ``KERNEL_LENGTHS``."""
LARGE = ("autograd", "closed", "recurrent_closed")
RESIDENT_BAND = Band(0.9, 1.1, "what is counted is most of what is resident")
"""Resident over counted bytes for methods that hold large arrays."""


def run(config: Config, seed: int, device: str = "cpu") -> pd.DataFrame:
    r"""Rows (quantity, value) of one method and length; a pure function of its arguments.

    ``extra`` is the peak in bytes, ``arrays`` the same in arrays of n m T numbers, ``tokens`` the
    bytes of the tokens; ``loss`` and, in training, ``gradient``, its norm, tell whether all methods
    compute the same. Raises ValueError for an unknown method or query, and for a method whose
    memory cannot be counted.
    """
    method = _method(config)
    if not method.counted:
        raise ValueError(
            f"method: {config.method!r} is a compiled kernel, whose memory torch does not see; "
            "measure it with resident()"
        )
    problem = problem_of(config, seed, device)
    extra, result = peak_bytes(lambda: method.compute(problem), device)
    numbers = problem.tokens.itemsize * config.samples * config.units * config.length
    quantities = {
        "extra": float(extra),
        "arrays": extra / numbers,
        "tokens": float(problem.tokens.nbytes),
    }
    if method.task == "training":
        loss, gradients = result
        quantities["gradient"] = sum(float(g.double().square().sum()) for g in gradients) ** 0.5
    else:
        loss = (result - problem.targets).square().mean()
    return rows_of(NAME, config, seed, quantities | {"loss": float(loss)})


def resident(config: Config, seed: int) -> int:
    """The bytes of pages that one computation of ``config`` takes beyond its inputs, in a process
    of its own on the CPU; not repeatable to the byte.

    Raises RuntimeError where the system does not say, ValueError as :func:`run`.
    """
    _method(config)
    return resident_bytes(computation, config, seed)


def computation(config: Config, seed: int) -> Callable[[], object]:
    """The computation of a cell, after one of eight tokens that brings its libraries in."""
    compute = _method(config).compute
    small = problem_of(replace(config, length=8), seed)
    in_fresh_thread(lambda: compute(small))  # with its work space, which is not to be found there
    problem = problem_of(config, seed)
    return lambda: compute(problem)


def problem_of(
    config: Config, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Problem:
    """Tokens, targets, query and parameters of a seed; methods of one length share all of them."""
    d = config.dimension
    tokens = unit_ball_tokens(
        config.samples, config.length, d, generator=generator(seed, NAME, "tokens", config.length),
        dtype=dtype, device=device,
    )  # fmt: skip
    targets = torch.randn(
        config.samples, generator=generator(seed, NAME, "targets"), dtype=torch.float64
    )
    query = tokens[:, -1].clone()
    if config.query == "fixed":
        query = query_vector(
            d, generator=generator(seed, NAME, "query"), dtype=dtype, device=device
        )
    heads = symmetric_initialisation(
        config.units, d, generator=generator(seed, NAME, "heads"), dtype=dtype, device=device
    )
    # The symmetric start has f = 0 whatever the method does.
    heads = heads._replace(c=torch.ones_like(heads.c))
    units = IndRNN(
        config.units,
        d,
        recurrent_init=1.0,
        generator=generator(seed, NAME, "units"),
        dtype=dtype,
        device=device,
    ).snapshot()
    sigma = get_activation(config.activation)
    return Problem(tokens, targets.to(device=device, dtype=dtype), query, heads, units, sigma)


def estimate(frame: pd.DataFrame, label: str, quantity: str = "extra") -> Estimate | None:
    r"""The log-log slope against T of one of ``LABELS``, with its interval over seeds.

    Over :math:`T \ge` ``SLOPE_FROM`` where there are two such lengths, else over all; None for a
    frame without the method.
    """
    rows = of(frame, label)
    if rows.empty:
        return None
    late = rows[rows[AGAINST] >= SLOPE_FROM]
    return slope_estimate(late if late[AGAINST].nunique() > 1 else rows, quantity, AGAINST)


def of(frame: pd.DataFrame, label: str) -> pd.DataFrame:
    """The rows of one of ``LABELS``. Raises ValueError for another word."""
    require_one_of("label", label, LABELS)
    name = label.removesuffix("_last")
    query = "fixed" if name == label else "last"
    return frame[(frame["method"] == name) & (frame["query"] == query)]


def summarise(frame: pd.DataFrame) -> pd.DataFrame:
    """The exponent of each method with its interval over seeds, beside its band."""
    return band_table(BANDS, lambda label: estimate(frame, label), column="slope")


def _method(config: Config) -> Method:
    require_one_of("method", config.method, METHODS)
    require_one_of("query", config.query, get_args(Asked))
    return METHODS[config.method]
