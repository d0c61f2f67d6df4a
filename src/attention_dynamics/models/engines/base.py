r"""What an engine is: per-head features :math:`(s, a, r)` of a batch, and what is read off them.

Engines take what the public functions have checked and brought to one dtype and device, and check
nothing again. They agree with each other to rounding; tests hold each against the formulas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models._network import head_sum, twin_heads
from attention_dynamics.models._pass import HeadFeatures, Inputs
from attention_dynamics.models.activations import Activation
from attention_dynamics.models.parameters import Parameters

P = ParamSpec("P")
R = TypeVar("R")


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` outside of autograd and of autocast: in the dtype of its arguments."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad():
            if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
                return function(*args, **kwargs)
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
                return function(*args, **kwargs)

    return run


class Engine(Protocol):
    r"""One way to compute :math:`s = U \cdot a`, :math:`a = X\alpha`, :math:`r = M U`, n times m.

    ``inputs`` are n samples, ``U`` (m, d) and ``W`` (m, d, d) the heads, ``scale`` is
    :math:`\gamma`, ``chunk`` a number of samples handled at once, which an engine may ignore.
    """

    name: str

    def refusal(self, inputs: Inputs, heads: int) -> str | None:
        """Why this engine can't serve these inputs here ("no C++ compiler"), or None."""
        ...

    def features(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> HeadFeatures:
        r""":math:`(s, a, r)`: (n, m), (n, m, d), (n, m, d)."""
        ...

    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        """Only s, without the memory of a and r."""
        ...

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
        r""":math:`s` and :math:`s' = V \cdot a + r \cdot \gamma Z q`, V (m, d), Z (m, d, d)."""
        ...

    def values(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        *,
        chunk: int | None = None,
    ) -> Float[Tensor, " n"]:
        r""":math:`f(X_j)`, (n,): exactly 0 where twin heads cancel."""
        ...

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
        r""":math:`f(X_j)`, (n,), and :math:`\nabla \frac1n \sum_j (f(X_j) - y_j)^2`."""
        ...

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
        ...


class ByScores(ABC):
    r""":math:`f = m^{-1/2} \sum_i c_i\, \sigma(s_i)` for an engine that knows the scores."""

    @abstractmethod
    def scores(
        self, inputs: Inputs, U: Tensor, W: Tensor, scale: float, *, chunk: int | None = None
    ) -> Float[Tensor, "n m"]:
        """Only s, without the memory of a and r."""

    def values(
        self,
        inputs: Inputs,
        parameters: Parameters,
        sigma: Activation,
        scale: float,
        *,
        chunk: int | None = None,
    ) -> Float[Tensor, " n"]:
        r""":math:`f(X_j)`, (n,)."""
        c, U, W = parameters
        s = self.scores(inputs, U, W, scale, chunk=chunk)
        return head_sum(c, sigma.value(s), twin_heads(parameters))
