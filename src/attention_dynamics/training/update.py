r"""One step of projected descent on preallocated memory: :math:`\phi' = \Pi(\phi - \eta\, g)`.

Two implementations do the same: C++ on a CPU where a compiler is found, plain torch elsewhere,
which never waits for an accelerator until :meth:`Update.report` is asked. Iterates lie in slots:
rows of one buffer, c | U | W one after the other.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.engines import native
from attention_dynamics.models.parameters import Parameters

Limits = tuple[float | None, float | None, float | None]

log = logging.getLogger("attention_dynamics")


class Update:
    r"""
    .. math:: \phi' = \Pi_{\Omega_\rho}(\phi - \eta\, g), \qquad \Sigma = \sum (\phi - \phi_0)

    between ``slots`` rows of memory, in torch operators that allocate nothing. Slot 0 starts at
    the ``centre`` :math:`\phi_0`. ``limits`` are :math:`\rho/\sqrt m` for c, U, W, None where the
    block is free. ``iterates[slot]`` are :class:`Parameters` that view the memory. W may have any
    number of columns.
    """

    def __init__(self, centre: Parameters, limits: Limits, eta: float, slots: int) -> None:
        self.heads, self.limits = centre.heads, limits
        self._eta, self._centre = eta, _flat(centre)
        like = self._centre
        self._shapes = [block.shape for block in centre]
        self._balls = [math.inf if limit is None else limit for limit in limits]
        self._rows = like.new_zeros((slots, like.numel())).unbind(0)
        self.iterates = [self._views(row) for row in self._rows]
        self._rows[0].copy_(like)
        self._sum = torch.zeros_like(like, dtype=torch.float64)
        self._prepare(slots)

    def _prepare(self, slots: int) -> None:
        like, heads = self._centre, self.heads
        self._radii = like.new_tensor(self._balls)[:, None]
        self._one = like.new_ones(())
        self._gradient, self._delta, self._scale = (torch.empty_like(like) for _ in range(3))
        self._outside = torch.empty_like(like, dtype=torch.bool)
        self._delta_views = [view.reshape(heads, -1) for view in self._views(self._delta)]
        self._factor = like.new_empty((3, heads))
        self._moved = like.new_zeros((slots, 3, heads)).unbind(0)
        self._norms = like.new_zeros((slots, 3), dtype=torch.float64).unbind(0)
        self._shift, self._exact_centre = torch.empty_like(self._sum), like.double()
        # The entry of (3, m) that belongs to each number of a row.
        sizes = torch.tensor([view.shape[1] for view in self._delta_views], device="cpu")
        entries = torch.arange(3 * heads, device="cpu").repeat_interleave(
            sizes.repeat_interleave(heads)
        )
        self._entries = entries.to(like.device)

    def step(self, source: int, target: int, gradients: Parameters) -> None:
        r""":math:`\phi' = \Pi(\phi - \eta\, g)` from one slot to another.

        A head inside its ball is exactly :math:`\phi_i - \eta\, g_i`.
        """
        candidate, delta, moved = self._rows[target], self._delta, self._moved[target]
        torch.cat([block.reshape(-1) for block in gradients], out=self._gradient)
        torch.sub(self._rows[source], self._gradient, alpha=self._eta, out=candidate)
        torch.sub(candidate, self._centre, out=delta)
        for view, norms in zip(self._delta_views, moved.unbind(0), strict=True):
            torch.linalg.vector_norm(view, dim=1, out=norms)
        torch.div(self._radii, moved, out=self._factor)
        torch.fmin(self._factor, self._one, out=self._factor)  # 0/0, a frozen head at rest, is 1
        torch.index_select(self._factor.view(-1), 0, self._entries, out=self._scale)
        torch.lt(self._scale, self._one, out=self._outside)
        torch.addcmul(self._centre, delta, self._scale, out=delta)
        torch.where(self._outside, delta, candidate, out=candidate)

    def measure(self, slot: int, gradients: Parameters) -> None:
        r""":math:`(\|g_c\|, \|g_U\|, \|g_W\|)`, kept with the slot."""
        for block, norm in zip(gradients, self._norms[slot].unbind(0), strict=True):
            torch.linalg.vector_norm(block, dtype=torch.float64, out=norm)

    def accumulate(self, slot: int) -> None:
        r""":math:`\Sigma \leftarrow \Sigma + (\phi - \phi_0)`, in float64."""
        torch.sub(self._rows[slot], self._exact_centre, out=self._shift)
        self._sum += self._shift

    def report(self, slots: Sequence[int]) -> list[list[float]]:
        r"""Nine numbers a slot, each for c, U, W: :math:`\|g\|`, :math:`\max_i \|\phi_i -
        \phi_{0,i}\|` before the projection, and how many heads it brought back.

        On an accelerator this waits for the work before it.
        """
        moved = torch.stack([self._moved[slot] for slot in slots])
        norms = torch.stack([self._norms[slot] for slot in slots])
        active = (moved > self._radii).sum(dim=-1)
        return torch.cat((norms, moved.amax(dim=-1).double(), active.double()), dim=1).tolist()

    def mean(self, count: int) -> Parameters:
        r""":math:`\phi_0 + \Sigma / \text{count}`, in the dtype of the parameters."""
        mean = self._centre.double() + self._sum * (1.0 / count)
        return self._views(mean.to(self._centre.dtype))

    def _views(self, row: Float[Tensor, " p"]) -> Parameters:
        sizes = [math.prod(shape) for shape in self._shapes]
        parts = zip(row.split(sizes), self._shapes, strict=True)
        return Parameters(*(part.view(shape) for part, shape in parts))


class FusedUpdate(Update):
    """The same in C++, each method one pass over memory that stays in cache."""

    def __init__(
        self, centre: Parameters, limits: Limits, eta: float, slots: int, functions: _Functions
    ) -> None:
        self._functions = functions
        super().__init__(centre, limits, eta, slots)

    def _prepare(self, slots: int) -> None:
        # Tensors for memory, numbers for the calls: an address costs more to ask for than to pass.
        self._reports = torch.zeros((slots, 9), dtype=torch.float64, device="cpu")
        self._table = self._reports.numpy()
        self._radii = torch.tensor(self._balls, dtype=torch.float64, device="cpu")
        self._widths = torch.tensor([math.prod(shape[1:]) for shape in self._shapes], device="cpu")
        self._at = [row.data_ptr() for row in self._rows]
        self._report_at = [row.data_ptr() for row in self._reports.unbind(0)]
        self._centre_at, self._sum_at = self._centre.data_ptr(), self._sum.data_ptr()
        self._sizes = (self.heads, self._widths.data_ptr())
        self._rule = (*self._sizes, self._radii.data_ptr(), self._eta)

    def step(self, source: int, target: int, gradients: Parameters) -> None:
        r""":math:`\phi' = \Pi(\phi - \eta\, g)`, and the norms that tell what it did."""
        c, U, W = gradients
        c, U, W = c.contiguous(), U.contiguous(), W.contiguous()
        self._functions.step(
            *self._rule, self._at[source], c.data_ptr(), U.data_ptr(), W.data_ptr(),
            self._centre_at, self._at[target], self._report_at[target] + 24,
        )  # fmt: skip

    def measure(self, slot: int, gradients: Parameters) -> None:
        r""":math:`(\|g_c\|, \|g_U\|, \|g_W\|)`, kept with the slot."""
        c, U, W = gradients
        c, U, W = c.contiguous(), U.contiguous(), W.contiguous()
        self._functions.measure(
            *self._sizes, c.data_ptr(), U.data_ptr(), W.data_ptr(), self._report_at[slot]
        )

    def accumulate(self, slot: int) -> None:
        r""":math:`\Sigma \leftarrow \Sigma + (\phi - \phi_0)`, in float64."""
        self._functions.accumulate(
            self._centre.numel(), self._at[slot], self._centre_at, self._sum_at
        )

    def report(self, slots: Sequence[int]) -> list[list[float]]:
        r"""Nine numbers a slot; see :meth:`Update.report`."""
        return [self._table[slot].tolist() for slot in slots]


def update_for(centre: Parameters, limits: Limits, eta: float, slots: int) -> Update:
    r"""The fastest way to take steps around ``centre``: C++ on a CPU, torch elsewhere.

    Without a compiler it is torch on a CPU too, after one line of log.
    """
    if centre.U.device.type == "cpu":
        functions = _functions(str(centre.dtype).removeprefix("torch."))
        if functions is not None:
            return FusedUpdate(centre, limits, eta, slots, functions)
    return Update(centre, limits, eta, slots)


class _Functions:
    """The C functions for one dtype, with the types of their arguments."""

    def __init__(self, library: ctypes.CDLL, dtype: str) -> None:
        count, address, number = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
        self.step = library[f"step_{dtype}"]
        self.step.argtypes = [count, address, address, number, *(7 * [address])]
        self.accumulate = library[f"accumulate_{dtype}"]
        self.accumulate.argtypes = [count, address, address, address]
        self.measure = library[f"measure_{dtype}"]
        self.measure.argtypes = [count, address, address, address, address, address]
        for function in (self.step, self.accumulate, self.measure):
            function.restype = None


@cache
def _functions(dtype: str) -> _Functions | None:
    try:
        return _Functions(native.library("projection.cpp", Path(__file__).parent), dtype)
    except native.Unavailable as reason:
        log.info("projected steps run in torch (%s); the results are the same", reason)
        return None


def _flat(parameters: Parameters) -> Float[Tensor, " p"]:
    return torch.cat([block.detach().reshape(-1) for block in parameters])
