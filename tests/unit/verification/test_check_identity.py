"""Identities: the real ones are proved for every length, their neighbours are refuted."""

import pytest
import sympy as sp

from attention_dynamics.verification import CheckFailed, check

T, d = sp.symbols("T d", integer=True, positive=True)
t, s, i, j, k = sp.symbols("t s i j k", integer=True, positive=True)
epsilon, r = sp.symbols("epsilon r", real=True)
logit, x, p, u = (sp.IndexedBase(name) for name in ("l", "x", "p", "u"))
alpha = sp.IndexedBase("alpha")
NORMALISED = {sp.Sum(alpha[t], (t, 1, T)): 1}


def weight(index, shift=0):
    """The softmax weight of a token, with logits moved by ``shift`` along p."""
    total = sp.Sum(sp.exp(logit[s] + shift * p[s]), (s, 1, T))
    return sp.exp(logit[index] + shift * p[index]) / total


def mean(entry, shift=0):
    return sp.Sum(weight(t, shift) * entry, (t, 1, T))


def at_zero(expression, order):
    return sp.Subs(sp.Derivative(expression, (epsilon, order)), epsilon, 0)


def centred(entry):
    return entry - mean(entry.subs(t, s).subs(s, t))


def third_cumulant():
    return sp.Sum(weight(t) * (u[t] - mean(u[t])) * (p[t] - mean(p[t])) ** 2, (t, 1, T))


def pooled(index):
    return sp.Sum(alpha[t] * x[t, index], (t, 1, T))


TRACE = (
    sp.Sum(alpha[t] * sp.Sum((x[t, i] - pooled(i)) ** 2, (i, 1, d)), (t, 1, T)),
    sp.Sum(alpha[t] * sp.Sum(x[t, i] ** 2, (i, 1, d)), (t, 1, T))
    - sp.Sum(pooled(i) ** 2, (i, 1, d)),
)

PROVED = {
    "softmax-jacobian": (
        sp.Derivative(weight(j), logit[k]),
        weight(j) * (sp.KroneckerDelta(j, k) - weight(k)),
        weight(j) * (sp.KroneckerDelta(j, k) + weight(k)),
        {},
    ),
    "pooled-derivative": (
        at_zero(mean(x[t, i], epsilon), 1),
        sp.Sum(weight(t) * (x[t, i] - mean(x[t, i])) * (p[t] - mean(p[t])), (t, 1, T)),
        sp.Sum(weight(t) * (x[t, i] - mean(x[t, i])) * p[t] ** 2, (t, 1, T)),
        {},
    ),
    "mean-derivative": (
        at_zero(mean(u[t], epsilon), 1),
        mean(u[t] * p[t]) - mean(u[t]) * mean(p[t]),
        mean(u[t] * p[t]) + mean(u[t]) * mean(p[t]),
        {},
    ),
    "third-cumulant": (
        at_zero(mean(u[t], epsilon), 2),
        third_cumulant(),
        2 * third_cumulant(),
        {},
    ),
    "trace": (*TRACE, TRACE[1] + 2 * sp.Sum(pooled(i) ** 2, (i, 1, d)), NORMALISED),
    "geometric": (
        sp.Sum(r**t, (t, 0, T - 1)),
        (1 - r**T) / (1 - r),
        (1 - r ** (T + 1)) / (1 - r),
        {},
    ),
    "two-point": (
        r * (1 - (2 * r - 1)) ** 3 + (1 - r) * (-1 - (2 * r - 1)) ** 3,
        8 * r * (1 - r) * (1 - 2 * r),
        8 * r * (1 - r) * (1 + 2 * r),
        {},
    ),
    "weights-sum-to-one": (sp.Sum(weight(t), (t, 1, T)), sp.Integer(1), sp.Integer(2), {}),
    "shift-invariance": (
        sp.exp(logit[j] + r) / sp.Sum(sp.exp(logit[s] + r), (s, 1, T)),
        weight(j),
        weight(j) * sp.exp(r),
        {},
    ),
}


@pytest.mark.parametrize("name", PROVED)
def test_identities_of_the_model_are_proved_for_every_length(name):
    lhs, rhs, wrong, given = PROVED[name]
    record = check.identity(f"eq-{name}", lhs, rhs, wrong=wrong, given=given)
    assert record.kind == "proved"
    assert record.status == "passed"
    assert "normal form" in record.detail["route"]
    if name != "two-point":
        assert "for every" in record.scope
        assert "T" in record.detail["sizes"]
    assert "T = 3" in record.wrong_twin["refuted"] or name == "two-point"


@pytest.mark.parametrize("name", PROVED)
def test_their_wrong_twins_are_refuted_with_a_witness(name):
    lhs, rhs, wrong, given = PROVED[name]
    with pytest.raises(CheckFailed, match=r"the sides differ at .* against "):
        check.identity(f"eq-{name}", lhs, wrong, wrong=rhs, given=given)


def test_the_hypothesis_is_needed_and_recorded():
    record = check.identity("eq-trace", *TRACE, wrong=TRACE[1] * 2, given=NORMALISED)
    assert any("alpha" in text for text in record.detail["given"])
    with pytest.raises(CheckFailed, match="differ"):
        check.identity("eq-trace", *TRACE, wrong=TRACE[1] * 2)


def test_the_geometric_ratio_is_assumed_not_to_be_one():
    lhs, rhs, wrong, _ = PROVED["geometric"]
    record = check.identity("eq-geometric", lhs, rhs, wrong=wrong)
    assert record.detail["assumptions"] == [r"r \neq 1"]


def test_a_single_token_has_no_covariance():
    entry = sp.Sum(weight(t) * (x[t, i] - mean(x[t, i])) * (x[t, j] - mean(x[t, j])), (t, 1, T))
    record = check.identity("eq-one", entry.subs(T, 1), sp.Integer(0), wrong=sp.Integer(1))
    assert record.scope == "exactly"


def test_antipodal_tokens_have_a_rank_one_covariance():
    tokens = {x[1, i]: u[i], x[2, i]: -u[i], x[1, j]: u[j], x[2, j]: -u[j]}
    entry = sp.Sum(alpha[t] * (x[t, i] - pooled(i)) * (x[t, j] - pooled(j)), (t, 1, T)).subs(T, 2)
    check.identity(
        "eq-antipodal",
        entry,
        4 * alpha[1] * alpha[2] * u[i] * u[j],
        wrong=2 * alpha[1] * alpha[2] * u[i] * u[j],
        given={**tokens, alpha[2]: 1 - alpha[1]},
    )


def test_an_indexed_hypothesis_holds_for_every_index():
    mu = sp.IndexedBase("mu")
    lhs = sp.Sum(alpha[t] * (x[t, i] - mu[i]) ** 2, (t, 1, T), (i, 1, d))
    rhs = sp.Sum(alpha[t] * x[t, i] ** 2, (t, 1, T), (i, 1, d)) - sp.Sum(mu[i] ** 2, (i, 1, d))
    given = {**NORMALISED, mu[i]: pooled(i)}
    assert check.identity("eq-mu", lhs, rhs, wrong=2 * rhs, given=given).scope == "for every T, d"


def test_a_shifted_hypothesis_pairs_the_heads():
    pairs = sp.Symbol("p", integer=True, positive=True)
    c, h = sp.IndexedBase("c"), sp.IndexedBase("h")
    first = sp.Sum(c[i] * h[i], (i, 1, pairs))
    second = sp.Sum(c[i + pairs] * h[i + pairs], (i, 1, pairs))
    given = {c[i + pairs]: -c[i], h[i + pairs]: h[i]}
    check.identity("eq-zero", first + second, sp.Integer(0), wrong=2 * first, given=given)
    with pytest.raises(CheckFailed, match="differ"):
        check.identity("eq-zero", first - second, sp.Integer(0), wrong=first, given=given)


def test_an_undefined_activation_obeys_the_chain_rule():
    sigma, y = sp.Function("sigma"), sp.Symbol("y")
    inner = sp.Sum(u[t] * p[t], (t, 1, T))
    outer = sp.Derivative(sigma(y), y)
    check.identity(
        "eq-chain",
        sp.Derivative(sigma(inner), u[k]),
        sp.Subs(outer, y, inner) * p[k],
        wrong=sigma(inner) * p[k],
    )


def test_a_derivative_does_not_capture_the_index_of_a_sum():
    record = check.identity(
        "eq-capture",
        sp.Derivative(sp.Sum(u[k] ** 2, (k, 1, T)), u[k]),
        2 * u[k],
        wrong=sp.Sum(2 * u[k], (k, 1, T)),
    )
    assert record.detail["assumptions"] == [r"k \leq T"]  # 1 <= k is known of k


def test_matrices_are_compared_entry_by_entry():
    a, b = sp.symbols("a b")
    left = sp.Matrix([[a, b], [b, a]]) * sp.Matrix([[a + 1, b], [b, a + 1]])
    right = sp.Matrix([[a**2 + a + b**2, 2 * a * b + b], [2 * a * b + b, a**2 + a + b**2]])
    check.identity("eq-matrix", left, right, wrong=right.subs(b, -b))
    with pytest.raises(ValueError, match="they must agree"):
        check.identity("eq-matrix", left, right[0, :], wrong=right)
    with pytest.raises(CheckFailed, match="differ"):
        check.identity("eq-matrix", left, right + sp.Matrix([[0, 0], [0, 1]]), wrong=right)


def test_the_numeric_method_says_what_it_is():
    lhs, rhs, wrong, _ = PROVED["third-cumulant"]
    record = check.identity("eq-numeric", lhs, rhs, wrong=wrong, method="numeric")
    assert record.kind == "numeric"
    assert record.detail["points"] == 20
    assert record.detail["worst_gap"] < 1e-40
    with pytest.raises(CheckFailed, match="differ"):
        check.identity("eq-numeric", lhs, wrong, wrong=rhs, method="numeric")


def test_undecided_is_a_failure_with_words_of_its_own():
    """No random point tells a sum from its rearrangement, and the normal form does not either."""
    f = sp.Function("f")
    lhs = sp.Sum(f(u[t]) / (1 + u[t]) + f(u[t]) * u[t] / (1 + u[t]), (t, 1, T))
    with pytest.raises(CheckFailed, match="could not decide"):
        check.identity("eq-undecided", lhs, sp.Sum(f(u[t]), (t, 1, T)), wrong=lhs * 2)


def test_empty_checks_are_rejected():
    lhs, rhs, wrong, _ = PROVED["two-point"]
    with pytest.raises(ValueError, match="structurally equal; this checks nothing"):
        check.identity("eq-empty", lhs, lhs, wrong=wrong)
    with pytest.raises(ValueError, match="wrong is structurally equal"):
        check.identity("eq-empty", lhs, rhs, wrong=rhs)
    with pytest.raises(ValueError, match="label"):
        check.identity("", lhs, rhs, wrong=wrong)
    with pytest.raises(TypeError, match="sequence of labels"):
        check.identity("eq-empty", lhs, rhs, wrong=wrong, uses="eq-other")


def test_a_twin_that_is_right_after_all_is_found_out():
    lhs, rhs, _, _ = PROVED["two-point"]
    with pytest.raises(CheckFailed, match="cannot tell right from wrong"):
        check.identity("eq-twin", lhs, rhs, wrong=sp.factor(rhs))


def test_floats_do_not_pass_for_exact_numbers():
    with pytest.raises(ValueError, match="Rational"):
        check.identity("eq-float", 0.5 * r, r / 2, wrong=r)


def test_a_circular_hypothesis_is_refused():
    with pytest.raises(ValueError, match="contains"):
        check.identity("eq-circle", r**2, r, wrong=2 * r, given={r: r + 1})


def test_an_unusable_hypothesis_is_refused():
    with pytest.raises(ValueError, match="cannot be used as a hypothesis"):
        check.identity("eq-given", r, sp.sin(r) + 1, wrong=2 * r, given={sp.sin(r): r - 1})
