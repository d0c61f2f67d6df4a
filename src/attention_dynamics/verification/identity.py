r"""Whether two sides are equal: a witness first, then a proof, never an opinion."""

from dataclasses import dataclass
from typing import Any

import sympy as sp

from attention_dynamics.verification import polynomial as poly
from attention_dynamics.verification.calculus import resolve
from attention_dynamics.verification.decide import simplifies_to_zero, vanishes
from attention_dynamics.verification.instances import DIGITS, Instances
from attention_dynamics.verification.normal_form import NormalForm
from attention_dynamics.verification.ranges import sizes_of
from attention_dynamics.verification.record import CheckFailed
from attention_dynamics.verification.typeset import latex

NUMERIC_POINTS = 20
GUARD_POINTS = 6  # a proof is also evaluated, by code that shares nothing with it
TWIN_POINTS = 12


@dataclass(frozen=True)
class Proof:
    """For which sizes a statement holds, how it was shown, and how its twin was refuted."""

    scope: str
    detail: dict[str, Any]
    refutation: str


def statement_of(lhs: Any, rhs: Any) -> str:
    """``lhs = rhs`` in LaTeX."""
    return f"{latex(_sympified(lhs))} = {latex(_sympified(rhs))}"


def prove(label: str, lhs: Any, rhs: Any, wrong: Any, given: dict[Any, Any], method: str) -> Proof:
    """A proof that ``lhs = rhs`` and a witness that ``lhs = wrong`` fails.

    Raises ``CheckFailed`` (with a witness; undecided; twin not refuted) and ``ValueError`` for
    sides that are structurally equal, of different shapes, or an unknown method.
    """
    if method not in ("exact", "numeric"):
        raise ValueError(f'{label}: method={method!r} must be "exact" or "numeric"')
    left, right, twin = (_sympified(side) for side in (lhs, rhs, wrong))
    if left == right:
        raise ValueError(f"{label}: lhs and rhs are structurally equal; this checks nothing")
    if twin in (left, right):
        raise ValueError(f"{label}: wrong is structurally equal to a side; change a sign or factor")
    for key, value in given.items():
        if {_sympified(key), _sympified(value)} == {left, right}:
            raise ValueError(
                f"{label}: the statement is its own hypothesis, given: {key} = {value}"
            )
    pairs = _entries(label, left, right, "rhs")
    twins = _entries(label, left, twin, "wrong")
    if method == "exact":
        NormalForm(given)  # refuses hypotheses it cannot use before anything is evaluated
    instances = Instances(label, given)
    points = NUMERIC_POINTS if method == "numeric" else GUARD_POINTS
    gaps = []
    for a, b in pairs:
        for point in instances.points(a, b, points):
            if point.differs:
                raise CheckFailed(f"{label}: the sides differ {point}")
            gaps.append(point.gap)
    sizes = [str(size) for size in sizes_of([left, right])]
    if method == "numeric":
        scope = ", ".join(f"small {size}" for size in sizes) or "random points"
        detail: dict[str, Any] = {
            "points": len(gaps),
            "digits": DIGITS,
            "worst_gap": float(max(gaps)),
        }
    else:
        detail, restrictions = _exact(label, pairs, given, sizes)
        scope = f"for every {', '.join(sizes)}" if sizes else "exactly"
        scope += f" with {', '.join(restrictions)}" if restrictions else ""
    detail["sizes"] = sizes
    detail["given"] = [f"{latex(k)} = {latex(sp.sympify(v))}" for k, v in given.items()]
    return Proof(scope, detail, _refute(label, twins, instances))


def _exact(
    label: str,
    pairs: list[tuple[sp.Expr, sp.Expr]],
    given: dict[Any, Any],
    sizes: list[str],
) -> tuple[dict[str, Any], list[str]]:
    """What the record keeps, and the restrictions on lengths, such as ``T ≥ 2``."""
    routes: list[str] = []
    assumptions: list[sp.Basic] = []
    for a, b in pairs:
        route, used = _prove_entry(label, a, b, given)
        routes += [route] if route not in routes else []
        assumptions += [u for u in used if u not in assumptions]
    restrictions = [
        str(relation.reversed if relation.lhs.is_number else relation)
        .replace(">=", "≥")
        .replace("<=", "≤")
        for relation in assumptions
        if {str(symbol) for symbol in relation.free_symbols} <= set(sizes)
    ]
    written = [sp.latex(relation) for relation in assumptions]
    return {"route": ", ".join(routes), "assumptions": written}, restrictions


def _prove_entry(
    label: str, a: sp.Expr, b: sp.Expr, given: dict[Any, Any]
) -> tuple[str, list[sp.Basic]]:
    sizes = sizes_of([a, b, *map(sp.sympify, [*given, *given.values()])])
    form = NormalForm(given, sizes)
    difference = _difference(form, a, b)
    if vanishes(form, difference):
        return "normal form", form.assumptions
    # Hyperbolic and trigonometric identities are identities in exponentials.
    exponential = NormalForm(given, sizes)
    rewritten = _difference(exponential, resolve(a).rewrite(sp.exp), resolve(b).rewrite(sp.exp))
    if vanishes(exponential, rewritten):
        return "normal form in exponentials", exponential.assumptions
    route = simplifies_to_zero(poly.to_sympy(difference))
    if route is not None:
        return route, form.assumptions
    raise CheckFailed(
        f"{label}: could not decide: no proof was found, and no random point tells the sides "
        f'apart. Split the statement, pass given={{...}}, or use method="numeric". Left over: '
        f"{str(poly.to_sympy(difference))[:300]}"
    )


def _difference(form: NormalForm, a: sp.Expr, b: sp.Expr) -> poly.Polynomial:
    return poly.add([form.of(a), poly.scale(form.of(b), sp.S.NegativeOne)])


def _refute(label: str, twins: list[tuple[sp.Expr, sp.Expr]], instances: Instances) -> str:
    for a, b in twins:
        for point in instances.points(a, b, TWIN_POINTS):
            if point.differs:
                return str(point)
    raise CheckFailed(
        f"{label}: the wrong twin agrees with lhs at every random point, so the check cannot tell "
        "right from wrong here; change a sign, a factor or an exponent in wrong"
    )


def _sympified(side: Any) -> Any:
    value = sp.sympify(side)
    if isinstance(value, sp.MatrixBase):
        return sp.ImmutableDenseMatrix(value)
    if not isinstance(value, sp.Expr):
        raise TypeError(f"{side!r} is no SymPy expression or matrix; pass both sides")
    # Products are taken to commute, and entries to be numbers.
    if value.is_commutative is False or value.atoms(sp.MatrixSymbol):
        raise TypeError(f"{side!r} holds factors that do not commute; write its entries out")
    return value


def _entries(label: str, left: Any, right: Any, name: str) -> list[tuple[sp.Expr, sp.Expr]]:
    matrices = [isinstance(side, sp.MatrixBase) for side in (left, right)]
    if not any(matrices):
        return [(left, right)]
    if not all(matrices) or left.shape != right.shape:
        shapes = [getattr(side, "shape", "a scalar") for side in (left, right)]
        raise ValueError(f"{label}: lhs is {shapes[0]} and {name} is {shapes[1]}; they must agree")
    return [
        (a, b) for a, b in zip(left.flat(), right.flat(), strict=True) if a != b or name == "wrong"
    ]
