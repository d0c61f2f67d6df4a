r"""The convergence theorem at many settings: a frame in which every number is a calculator's.

.. math:: (m, n, T, d, \tau, \eta) \mapsto
    (\text{optimisation}, \text{approximation}, \text{linearisation}, \text{total}), \qquad
    \rho = \nu,

a priori, in two versions: the calculator's own, and the one with the paper's dependences. For few
heads the second can be the smaller one.
The rows are a full product of stops, T among them: the bound of each length is asked for, not
copied from another one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Literal

import pandas as pd

from attention_dynamics.theory.bounds import UNIT_BALL
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.setting import TERMS, ErrorBound, Setting
from attention_dynamics.theory.transport import TransportNorms
from attention_dynamics.training.projection import Radii
from attention_dynamics.validation import require_number

Version = Literal["book", "paper"]
Rule = Literal["decreasing", "constant"]

VERSIONS: dict[Version, BoundCalculator] = {
    "book": BoundCalculator(),
    "paper": BoundCalculator(form="paper", concentration="largest", tail="mcdiarmid", error="sup"),
}
"""The calculator as it comes, and the one that depends on D, d and log n as the paper's bound."""

RULES: dict[Rule, float | None] = {"decreasing": None, "constant": 0.02}
r"""The step size :math:`\eta = 1/\sqrt\tau` of the paper, and a constant one."""


@dataclass(frozen=True)
class Stops:
    r"""The values of m (``heads``), n, T, d and :math:`\tau` at which a table has rows."""

    heads: tuple[int, ...] = tuple(2**power for power in range(3, 25))
    samples: tuple[int, ...] = (100, 5000, 100_000)
    length: tuple[int, ...] = (4, 16, 256, 4096)
    dimension: tuple[int, ...] = (2, 8, 32, 128)
    steps: tuple[int, ...] = (10, 100, 1000, 4000, 10_000, 100_000, 1_000_000, 10_000_000)


def bound_table(stops: Stops | None = None, *, norm: float = 3.0) -> pd.DataFrame:
    r"""
    .. math:: L_n(\bar\phi) \le \text{total}, \qquad
        \nu_c = \nu_u = \nu_w = \rho_c = \rho_u = \rho_w = \texttt{norm}.

    One row for each combination of ``version`` ("book", "paper"), ``step_rule`` ("decreasing",
    "constant") and the stops of ``heads``, ``samples``, ``length``, ``dimension`` and ``steps``.
    ``optimisation``, ``approximation``, ``linearisation`` and ``total`` are **in the unit of the
    loss**: the terms of the fast form, which add in the root of the loss, are squared, so that
    :math:`\sqrt{\text{total}} \le \sqrt{\text{optimisation}} + \sqrt{\text{approximation}}
    + \sqrt{\text{linearisation}}`; in the paper's form the three add up to the total. Further
    columns: ``step_size`` (:math:`\eta`), ``kappa``, ``form``, ``probability``. ``attrs`` holds the
    ``assumptions`` in words. tanh, :math:`\delta = \delta' = 0.05`, tokens and query of norm at
    most 1.

    Raises ValueError for a stop out of range or a negative ``norm``.
    """
    require_number("norm", norm)
    stops = Stops() if stops is None else stops
    names = [axis.name for axis in fields(stops)]
    nu, rho = TransportNorms(norm, norm, norm), Radii(norm, norm, norm)
    rows = []
    for sizes in itertools.product(*(getattr(stops, name) for name in names)):
        named = dict(zip(names, sizes, strict=True))
        for rule, step_size in RULES.items():
            setting = Setting(
                **named, radii=rho, transport_norms=nu, inputs=UNIT_BALL, step_size=step_size
            )
            for version, calculator in VERSIONS.items():
                key = {"version": version, "step_rule": rule, "step_size": setting.eta}
                rows.append(named | key | _in_units_of_the_loss(calculator.bound(setting)))
    table = pd.DataFrame(rows)
    table.attrs["assumptions"] = (
        f"ν = ρ = {norm:g} in each block, tanh, tokens and query of norm at most 1, "
        f"δ = δ′ = {Setting.delta:g}"
    ).replace(" = ", "\u00a0=\u00a0")
    return table


def _in_units_of_the_loss(bound: ErrorBound) -> dict[str, float | str]:
    power = 2 if bound.unit == "root loss" else 1
    return {term: getattr(bound.terms, term) ** power for term in TERMS} | {
        "total": bound.total,
        "kappa": bound.kappa,
        "form": bound.form,
        "probability": bound.probability,
    }
