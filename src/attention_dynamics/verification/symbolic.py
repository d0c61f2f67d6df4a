"""Checks on formulas: an identity proved in SymPy, a maximum certified by interval arithmetic."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import sympy as sp

from attention_dynamics.verification.enclosure import enclose
from attention_dynamics.verification.identity import prove, statement_of
from attention_dynamics.verification.outcome import caller, finish, require_label
from attention_dynamics.verification.record import CheckRecord
from attention_dynamics.verification.source import call_arguments


def identity(
    label: str,
    lhs: Any,
    rhs: Any,
    *,
    wrong: Any,
    uses: Sequence[str] = (),
    given: Mapping[Any, Any] | None = None,
    title: str = "",
    method: Literal["exact", "numeric"] = "exact",
) -> CheckRecord:
    r""":math:`\mathrm{lhs} = \mathrm{rhs}` for every length, every dimension and all real values.

    Sides are SymPy expressions, or matrices of one shape, that may hold ``Sum`` with symbolic
    bounds, ``IndexedBase`` entries, ``Derivative``, ``exp``, ``KroneckerDelta`` and undefined
    functions. ``given`` maps expressions to what they equal by hypothesis; an indexed key with
    free indices, ``{mu[i]: Sum(...)}``, holds for every value of its indices.
    ``method="numeric"`` compares at 40 digits at 20 random points instead of proving.

    Raises ``CheckFailed`` with a numeric witness when the sides differ, with another message when
    neither a proof nor a witness was found, and when ``wrong``, a wrong right-hand side, is not
    refuted by a witness. Raises ``ValueError`` for sides that are structurally equal.
    """
    require_label(label)
    proof = prove(label, lhs, rhs, wrong, dict(given or {}), method)
    return finish(
        label,
        "proved" if method == "exact" else "numeric",
        title,
        uses,
        statement=statement_of(lhs, rhs),
        notation="latex",
        scope=proof.scope,
        detail=proof.detail,
        wrong_twin={"statement": statement_of(lhs, wrong), "refuted": proof.refutation},
    )


def enclosure(
    label: str,
    function: Any,
    interval: tuple[Any, Any],
    bound: Any,
    *,
    wrong: Any,
    tolerance: float = 1e-6,
    uses: Sequence[str] = (),
    title: str = "",
) -> CheckRecord:
    r""":math:`\sup_{x \in [a, b]} f(x) \le \mathrm{bound} + \mathrm{tolerance}`, certified.

    ``function`` is a SymPy expression in one symbol, or a callable on ``flint.arb`` balls.
    Branch and bound over the finite interval; every step is rigorous. Needs python-flint.

    Raises ``CheckFailed`` with a point where the bound is passed, or when no point rigorously
    passes ``wrong``, a smaller bound; ``ValueError`` for an infinite interval.
    """
    require_label(label)
    arguments = call_arguments(caller(), label)
    expression = function if isinstance(function, sp.Expr) else None
    result = enclose(label, function, interval, bound, wrong, tolerance)
    if expression is None:
        statement = (
            f"sup {arguments.get(1, 'f')} over {interval} ≤ {arguments.get(3, bound)} + {tolerance}"
        )
    else:
        statement = result.statement
    return finish(
        label,
        "certified",
        title,
        uses,
        statement=statement,
        notation="code" if expression is None else "latex",
        scope=f"on {interval}",
        detail=result.detail,
        wrong_twin={"statement": str(wrong), "refuted": result.refutation},
    )
