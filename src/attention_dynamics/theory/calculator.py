r"""The convergence theorem in numbers: :class:`BoundCalculator`, from a setting to a small table.

Three modes, by what may be looked at: nothing (*a priori*), the drawn heads (*posterior*, labelled
"at initialisation"), or a whole run (*certificate*, "post hoc"). Only the first two predict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch

from attention_dynamics.theory._remembered import (
    a_priori_constants,
    approximation_bound,
    bernstein_approximation_bound,
    head_second_moment,
    target_bound,
)
from attention_dynamics.theory.a_priori import Concentration
from attention_dynamics.theory.approximation import value_radius
from attention_dynamics.theory.bounds import NetworkConstants, network_constants
from attention_dynamics.theory.convergence import (
    Form,
    Ingredients,
    fast_form,
    paper_form,
    path_length,
    path_length_limit,
    steps_without_projection,
)
from attention_dynamics.theory.setting import TERMS, ErrorBound, Label, Setting, Start
from attention_dynamics.theory.trajectory import Trajectory
from attention_dynamics.training.projection import Radii
from attention_dynamics.validation import require_one_of

Mode = Literal["a priori", "posterior", "certificate"]
Descent = Literal["ProjGD", "ProjSGD"]
Evidence = Start | Trajectory | None


class NoProjection(NamedTuple):
    r"""Whether the projection never acts in :math:`\tau` steps, and in how many it cannot.

    ``holds`` means ``path_length`` (:math:`S_\tau`) :math:`\le` ``limit`` (:math:`S_{\max}`);
    ``steps`` is the largest :math:`\tau` for which it does, ``probability`` as in the bound.
    """

    holds: bool
    steps: int
    path_length: float
    limit: float
    probability: float


@dataclass(frozen=True)
class BoundCalculator:
    r"""
    .. math:: L_n(\bar\phi) \le \text{optimisation} + \text{approximation} + \text{linearisation}
        \quad\text{with probability} \ge 1 - \delta - \delta'.

    - ``mode``: ``"a priori"`` needs a :class:`~attention_dynamics.theory.setting.Setting` only,
      ``"posterior"`` a :class:`~attention_dynamics.theory.setting.Start` too, ``"certificate"`` a
      :class:`~attention_dynamics.theory.trajectory.Trajectory`;
    - ``form``: ``"fast"``, additive in the root of the loss, for :math:`\kappa = \eta G^2 < 1`, or
      ``"paper"``, additive in the loss, for any :math:`\eta, \tau`. Where :math:`\kappa \ge 1` the
      fast form does not exist: the paper's form is returned and flagged. For few heads, where
      :math:`\epsilon > F + Y`, the paper's form can be the smaller one; both hold;
    - ``descent``: for ``"ProjSGD"`` the same numbers bound the conditional expectation;
    - ``concentration``: ``"mean"`` of the heads, without :math:`\log m`, or ``"largest"`` head, the
      paper's D (:func:`~attention_dynamics.theory.a_priori.a_priori_constants`);
    - ``tail``: ``"bernstein"`` (free of d and :math:`\log m`, fails with :math:`\delta` only) or
      ``"mcdiarmid"`` (heads cut at :math:`R_0`, fails with :math:`\delta + \delta'`);
    - ``error``: ``"rms"`` over the samples, free of n, or ``"sup"``, the paper's :math:`\log n`.

    With ``form="paper", concentration="largest", tail="mcdiarmid", error="sup"`` it has the paper's
    dependences. The probability counts each event once: :math:`1 - \delta - \delta'`, or
    :math:`1 - \delta - 2\delta'` for ``"mean"`` with ``"mcdiarmid"``, which needs the largest and
    the mean head. Raises ValueError for an unknown word.
    """

    mode: Mode = "a priori"
    form: Form = "fast"
    descent: Descent = "ProjGD"
    concentration: Concentration = "mean"
    tail: Literal["bernstein", "mcdiarmid"] = "bernstein"
    error: Literal["rms", "sup"] = "rms"

    def __post_init__(self) -> None:
        for name, known in (
            ("mode", get_args(Mode)),
            ("form", get_args(Form)),
            ("descent", get_args(Descent)),
            ("concentration", get_args(Concentration)),
            ("tail", ("bernstein", "mcdiarmid")),
            ("error", ("rms", "sup")),
        ):
            require_one_of(name, getattr(self, name), known)

    def bound(self, setting: Setting, evidence: Evidence = None) -> ErrorBound:
        r"""The bound for ``setting``, with the evidence that the mode asks for.

        Raises TypeError for evidence of another mode, ValueError for evidence that does not belong
        to the setting (heads, dimension, :math:`\tau`, :math:`\eta`, stochastic or not).
        """
        self._require_evidence(setting, evidence)
        ingredients, events, labels = self._ingredients(setting, evidence)
        kappa = ingredients.kappa(setting.eta)
        form, flags = self.form, []
        if setting.inputs != (1.0, 1.0):
            b, b_q = setting.inputs
            flags.append(f"constants rescaled to tokens of norm <= {b:g}, query <= {b_q:g}")
        if kappa >= 1.0 and self.mode != "certificate":
            form = "paper"
            flags.append(
                f"kappa = eta G^2 = {kappa:.4g} >= 1: the fast form needs a step size below "
                f"{1 / ingredients.gradient_squared:.4g}; this is the paper's form"
            )
        if form == "fast" and isinstance(evidence, Trajectory):
            terms = evidence.certificate()
        else:
            terms = (fast_form if form == "fast" else paper_form)(
                ingredients, setting.eta, setting.steps
            )
        quantity = "L_n(averaged)"
        if self.descent == "ProjSGD" and self.mode != "certificate":
            quantity = "E[L_n(averaged) | phi_0]"
        initial_loss = self._target_rms(setting, evidence) ** 2
        if isinstance(evidence, Trajectory):
            initial_loss = float(evidence.history["loss"].iloc[0])
        return ErrorBound(
            terms, form, quantity, max(0.0, 1.0 - sum(events.values())), labels, ingredients, kappa,
            initial_loss, tuple(flags),
        )  # fmt: skip

    def ingredients(self, setting: Setting, evidence: Evidence = None) -> Ingredients:
        r""":math:`D_0, G^2, \epsilon, 2E_{\mathrm{lin}}/\sqrt m, F + Y`: what the bound is made of.

        Raises TypeError or ValueError as :meth:`bound` does.
        """
        self._require_evidence(setting, evidence)
        return self._ingredients(setting, evidence)[0]

    def no_projection(self, setting: Setting, evidence: Evidence = None) -> NoProjection:
        r"""Does the projection never act? :func:`.path_length` against :func:`.path_length_limit`.

        If so the run is one of plain gradient descent, stopped after :math:`\tau` steps. For ProjGD
        only: what bounds ProjSGD bounds an expectation, and no single path.

        Raises ValueError for ProjSGD, for a certificate (count the column ``active`` of its
        history), or if :math:`\kappa \ge 1`.
        """
        if self.descent != "ProjGD" or self.mode == "certificate":
            raise ValueError(
                f"descent: expected ProjGD, a priori or at initialisation, got {self.descent} in "
                f"mode {self.mode!r}; of a recorded run count the column 'active' of its history"
            )
        self._require_evidence(setting, evidence)
        ingredients, events, _ = self._ingredients(setting, evidence)
        value_norm, coefficient = 0.0, 1.0
        if isinstance(evidence, Start):
            norms = evidence.initial.to(dtype=torch.float64).block_norms()
            value_norm, coefficient = float(norms.U.max()), float(norms.c.max())
        else:
            value_norm = value_radius(setting.heads, setting.dimension, setting.delta_prime)
            events = events | {"largest head": setting.delta_prime}
        limit = path_length_limit(
            setting.radii, setting.heads, value_norm, inputs=setting.inputs,
            coefficient=coefficient, activation=setting.activation,
        )  # fmt: skip
        length = path_length(ingredients, setting.eta, setting.steps)
        steps = steps_without_projection(ingredients, setting.eta, limit)
        probability = max(0.0, 1.0 - sum(events.values()))
        return NoProjection(length <= limit, steps, length, limit, probability)

    def _ingredients(
        self, setting: Setting, evidence: Evidence
    ) -> tuple[Ingredients, dict[str, float], dict[str, Label]]:
        label: Label = "a priori"
        events: dict[str, float] = {}
        nu = setting.transport_norms
        if isinstance(evidence, Trajectory):
            label = "post hoc"
            return evidence.ingredients(), events, self._labels(label, label)
        if isinstance(evidence, Start):
            label = "at initialisation"
        else:
            events[f"{self.concentration} head"] = setting.delta_prime
        constants, at_target = self._constants(setting, evidence)
        assert constants.remainder_error is not None
        measured = isinstance(evidence, Start) and evidence.approximation_error is not None
        if isinstance(evidence, Start) and evidence.approximation_error is not None:
            approximation = evidence.approximation_error
        else:
            approximation = self._approximation(setting) + setting.noise
            events["approximation"] = setting.delta
            if self.tail == "mcdiarmid":
                events["largest head"] = setting.delta_prime
        distance = nu.norm
        if isinstance(evidence, Start) and evidence.distance is not None:
            distance = evidence.distance
        ingredients = Ingredients(
            distance_squared=distance**2,
            gradient_squared=constants.gradient_squared,
            approximation=approximation,
            linearisation=at_target.linearisation_error + constants.remainder_error,
            averaging=2 * constants.linearisation_error,
            size=constants.output + self._target_rms(setting, evidence),
        )
        return ingredients, events, self._labels(label, label if measured else "a priori")

    def _constants(
        self, setting: Setting, evidence: Evidence
    ) -> tuple[NetworkConstants, NetworkConstants]:
        """Constants on the projection set of rho, and on that of nu."""
        nu = setting.transport_norms
        inner = Radii(nu.c, nu.U, nu.W)
        common: dict[str, Any] = {"inputs": setting.inputs, "activation": setting.activation}
        if isinstance(evidence, Start):
            start = evidence.initial
            return (
                network_constants(start, setting.radii, transport_norms=nu, **common),
                network_constants(start, inner, **common),
            )
        sizes = (setting.heads, setting.dimension)
        law: dict[str, Any] = {
            "delta": setting.delta_prime,
            "concentration": self.concentration,
        } | common
        return (
            a_priori_constants(*sizes, setting.radii, transport_norms=nu, **law),
            a_priori_constants(*sizes, inner, **law),
        )

    def _approximation(self, setting: Setting) -> float:
        arguments: dict[str, Any] = {
            "norms": setting.transport_norms, "heads": setting.heads,
            "delta": setting.delta, "inputs": setting.inputs,
            "samples": setting.samples if self.error == "sup" else None,
            "activation": setting.activation,
        }  # fmt: skip
        if self.tail == "bernstein":
            found = bernstein_approximation_bound(**arguments)
            return found.rms if self.error == "rms" else float(found.sup or 0.0)
        cut = approximation_bound(
            **arguments, dimension=setting.dimension, delta_prime=setting.delta_prime
        )
        return cut.rms if self.error == "rms" else float(cut.sup or 0.0)

    @staticmethod
    def _target_rms(setting: Setting, evidence: Evidence) -> float:
        """rms(y), or Y + noise; Y is g(1), or E g(|U|) if less: E |U| < 1, hence d = 1."""
        if isinstance(evidence, Start) and evidence.target_rms is not None:
            return evidence.target_rms
        common: dict[str, Any] = {"inputs": setting.inputs, "activation": setting.activation}
        flat = math.sqrt(head_second_moment(setting.transport_norms, **common))
        if setting.dimension > 1:
            return flat + setting.noise
        return min(flat, target_bound(setting.transport_norms, 1, **common)) + setting.noise

    @staticmethod
    def _labels(label: Label, approximation: Label) -> dict[str, Label]:
        labels: dict[str, Label] = dict.fromkeys((*TERMS, "average", "total"), label)
        labels["approximation"] = approximation
        return labels

    def _require_evidence(self, setting: Setting, evidence: Evidence) -> None:
        kind = {"a priori": type(None), "posterior": Start, "certificate": Trajectory}[self.mode]
        if not isinstance(evidence, kind):
            expected = "no evidence" if self.mode == "a priori" else f"a {kind.__name__}"
            raise TypeError(
                f"evidence: mode {self.mode!r} expected {expected}, got {type(evidence).__name__}"
            )
        if evidence is None:
            return
        if isinstance(evidence, Start) and evidence.norms is not None:
            for block in ("c", "U", "W"):
                size, nu = getattr(evidence.norms, block), getattr(setting.transport_norms, block)
                if size > nu * (1 + 1e-5):
                    raise ValueError(
                        f"evidence: expected a transport map within transport_norms.{block} = "
                        f"{nu:g}, got one of size {size:.6g}; take sup_norm_bounds() of the map"
                    )
        found: dict[str, Any] = {
            "heads": evidence.initial.heads,
            "dimension": evidence.initial.dimension,
        }
        if isinstance(evidence, Trajectory):
            found |= {"steps": evidence.steps, "eta": evidence.step_size}
            found["descent"] = "ProjSGD" if evidence.stochastic else "ProjGD"
        for name, value in found.items():
            own = self.descent if name == "descent" else getattr(setting, name)
            if own != value:
                raise ValueError(
                    f"evidence: expected {name} = {own}, as in the setting, got {value}; measure "
                    "the problem that the setting describes"
                )
