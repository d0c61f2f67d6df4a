r"""What a bound is asked about, what it may look at, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pandas as pd
from jaxtyping import Float
from torch import Tensor

from attention_dynamics.models.activations import Activation, get_activation
from attention_dynamics.models.parameters import Parameters
from attention_dynamics.theory.approximation import independent_heads, require_probability
from attention_dynamics.theory.bounds import InputBounds, require_inputs, require_radii_above
from attention_dynamics.theory.convergence import Decomposition, Form, Ingredients
from attention_dynamics.theory.transport import (
    MultiAnchorTransport,
    TransportNorms,
    approximation_error,
)
from attention_dynamics.training.projection import Radii, bounded_radii
from attention_dynamics.validation import require_integer, require_number

Label = Literal["a priori", "at initialisation", "post hoc"]
TERMS = ("optimisation", "approximation", "linearisation")


@dataclass(frozen=True)
class Setting:
    r"""
    .. math:: m,\; n,\; T,\; d,\; \tau,\; \eta,\; \rho \ge \nu,\; (b, b_q),\; \delta,\; \delta',\;
        \sigma, \qquad \text{noise} = \bigl(\tfrac1n\textstyle\sum_j
        (y_j - \tilde f(X_j; v))^2\bigr)^{1/2}.

    ``heads`` (m), ``samples`` (n), ``length`` (T), ``dimension`` (d), ``steps`` (:math:`\tau`),
    ``step_size`` (:math:`\eta`, None for :math:`1/\sqrt\tau`), ``radii`` (:math:`\rho`),
    ``transport_norms`` (:math:`\nu`, bounds of the map itself: for anchors
    :meth:`.MultiAnchorTransport.sup_norm_bounds`), ``inputs`` from
    :func:`~attention_dynamics.theory.bounds.input_bounds`: for b or :math:`b_q` other than 1 every
    constant is the rescaled one. T is part of the description and enters no bound.

    Raises ValueError if a value is out of its range, m is odd, or a radius is None or below its
    transport norm, TypeError if a value is of another type.
    """

    heads: int
    samples: int
    length: int
    dimension: int
    steps: int
    radii: Radii
    transport_norms: TransportNorms
    inputs: InputBounds
    step_size: float | None = None
    delta: float = 0.05
    delta_prime: float = 0.05
    activation: str | Activation = "tanh"
    noise: float = 0.0

    def __post_init__(self) -> None:
        independent_heads(self.heads, paired=True)
        for name in ("samples", "length", "dimension", "steps"):
            require_integer(name, getattr(self, name), minimum=1)
        require_probability("delta", self.delta)
        require_probability("delta_prime", self.delta_prime)
        if self.step_size is not None:
            require_number("step_size", self.step_size, positive=True)
        require_number("noise", self.noise)
        require_inputs(self.inputs)
        get_activation(self.activation)
        if not isinstance(self.transport_norms, TransportNorms):
            raise TypeError(
                f"transport_norms: expected TransportNorms(c, U, W), got {self.transport_norms!r}"
            )
        rho = bounded_radii(self.radii, remedy="a block without projection has no bound")
        require_radii_above(TransportNorms(*rho), self.transport_norms)

    @property
    def eta(self) -> float:
        r""":math:`\eta`: the given step size, or :math:`1/\sqrt\tau`."""
        return self.steps**-0.5 if self.step_size is None else self.step_size


@dataclass(frozen=True, eq=False)
class Start:
    r"""What can be measured before the first step: :math:`\phi_0` and, if known, what it fits.

    ``initial`` is :math:`\phi_0`; ``approximation_error`` is
    :math:`\mathrm{rms}(\langle\nabla f(X_j; \phi_0), v/\sqrt m\rangle - y_j)`, noise included;
    ``distance`` is :math:`\|\phi^\star - \phi_0\| = (\frac1m\sum_i \|v(c_i, U_i, W_i)\|^2)^{1/2}`.
    ``norms`` are the largest norms of v at these heads, block by block, which may not exceed those
    of the setting; ``target_rms`` is :math:`\mathrm{rms}(y)`. What is None is bounded, and norms
    are believed, instead. :meth:`measure` takes the four from a transport map and data, and then
    nothing is assumed of the targets.

    Raises ValueError for parameters that are not finite, heads that are not those of the symmetric
    initialisation (the theorem needs :math:`f(\phi_0) = 0` and :math:`c_i = \pm1`), or a negative
    number.
    """

    initial: Parameters
    approximation_error: float | None = None
    distance: float | None = None
    norms: TransportNorms | None = None
    target_rms: float | None = None

    def __post_init__(self) -> None:
        self.initial.require_valid("initial")
        if not self.initial.is_symmetric():
            raise ValueError(
                "initial: expected the symmetric initialisation, where f(phi_0) = 0, got heads "
                "that are not paired; take a snapshot before the first step, or certify the run"
            )
        sizes = self.initial.c.abs()
        if not bool((sizes == 1).all()):
            odd = float(sizes[sizes != 1][0])
            raise ValueError(
                f"initial: expected c_i = +-1, got {odd:g}; the bounds are about coefficients of "
                "this size"
            )
        for name in ("approximation_error", "distance", "target_rms"):
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name))

    @classmethod
    def measure(
        cls,
        initial: Parameters,
        transport: MultiAnchorTransport,
        tokens: Float[Tensor, "n T d"],
        targets: Float[Tensor, " n"],
    ) -> Start:
        r""":math:`\epsilon_{\mathrm{app}}`, :math:`\|\phi^\star - \phi_0\|`, norms and rms(y).

        ``tokens`` (n, T, d), ``targets`` (n,). Raises ValueError or TypeError if they do not fit.
        """
        error = approximation_error(targets, transport, initial, tokens)
        direction = transport(initial)
        squared = float(direction.inner(direction)) / initial.heads
        largest = (float(sizes.max()) for sizes in direction.block_norms())
        rms = float(targets.double().square().mean().sqrt())
        return cls(initial, error.rms, squared**0.5, TransportNorms(*largest), rms)


@dataclass(frozen=True)
class ErrorBound:
    r""":math:`L_n(\bar\phi) \le` ``total`` and :math:`\frac1\tau\sum_k L_k \le` ``average``.

    With probability at least ``probability`` over :math:`\phi_0`; for ProjSGD both bound the
    conditional expectation given :math:`\phi_0`, in a certificate the run itself. ``quantity`` says
    which. ``terms`` is the decomposition in the ``form`` it has, ``labels`` say what each term
    looked at, ``initial_loss`` bounds :math:`L_n(\phi_0)`, ``flags`` are remarks a reader needs.
    """

    terms: Decomposition
    form: Form
    quantity: str
    probability: float
    labels: dict[str, Label]
    ingredients: Ingredients
    kappa: float
    initial_loss: float
    flags: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        r"""The bound of :math:`L_n(\bar\phi)`."""
        return self.terms.total

    @property
    def average(self) -> float:
        r"""The bound of :math:`\frac1\tau\sum_k L_k`, hence of :math:`\min_k L_k`."""
        return self.terms.average

    @property
    def unit(self) -> Literal["root loss", "loss"]:
        """What the three terms are in; the fast form bounds the root of the loss."""
        return "root loss" if self.form == "fast" else "loss"

    @property
    def vacuous(self) -> bool:
        r"""Whether ``total`` is no better than what is known of :math:`L_n(\phi_0)`."""
        return not self.total < self.initial_loss

    def table(self) -> pd.DataFrame:
        r"""Three terms, average and total, each with its unit, label and probability.

        ``attrs`` holds :math:`\kappa` and the flags: ``kappa``, ``flags``.
        """
        kinds = (*TERMS, "average", "total")
        frame = pd.DataFrame(
            {
                "value": [getattr(self.terms, kind) for kind in kinds],
                "unit": [self.unit if kind in TERMS else "loss" for kind in kinds],
                "label": [self.labels[kind] for kind in kinds],
                "probability": self.probability,
            },
            index=pd.Index(kinds, name="term"),
        )
        frame.attrs |= {"kappa": self.kappa, "flags": self.flags}
        return frame
