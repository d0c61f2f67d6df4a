r"""The table of bounds: a fresh calculator's numbers in every row, T asked for, no effect."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_dynamics.theory import UNIT_BALL, TransportNorms, _remembered
from attention_dynamics.theory.bound_table import RULES, VERSIONS, Stops, bound_table
from attention_dynamics.theory.calculator import BoundCalculator
from attention_dynamics.theory.setting import TERMS, Setting
from attention_dynamics.training import Radii

SIZES = ["heads", "samples", "length", "dimension", "steps"]
NUMBERS = ["optimisation", "approximation", "linearisation", "total", "kappa", "step_size"]
FEW = Stops((8, 1024, 2**20), (100, 5000), (1, 16, 4096), (2, 32), (10, 4000, 10**6))


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return bound_table()


def forget() -> None:
    """Let every constant be computed anew."""
    for name in ("a_priori_constants", "approximation_bound", "bernstein_approximation_bound",
                 "head_second_moment", "target_bound"):  # fmt: skip
        getattr(_remembered, name).cache_clear()


def fresh(row: pd.Series, norm: float = 3.0):
    """The bound of a row, from a calculator that is spelled out here and remembers nothing."""
    forget()
    calculator = BoundCalculator()
    if row["version"] == "paper":
        calculator = BoundCalculator(
            form="paper", concentration="largest", tail="mcdiarmid", error="sup"
        )
    setting = Setting(
        **{name: int(row[name]) for name in SIZES}, radii=Radii(norm, norm, norm),
        transport_norms=TransportNorms(norm, norm, norm), inputs=UNIT_BALL,
        step_size=None if row["step_rule"] == "decreasing" else 0.02,
    )  # fmt: skip
    return setting, calculator.bound(setting)


def assert_row_is_the_calculators(row: pd.Series, norm: float = 3.0) -> None:
    setting, bound = fresh(row, norm)
    power = 2 if bound.form == "fast" else 1
    for term in TERMS:
        assert row[term] == getattr(bound.terms, term) ** power
    assert (row["total"], row["kappa"], row["form"]) == (bound.total, bound.kappa, bound.form)
    assert (row["step_size"], row["probability"]) == (setting.eta, bound.probability)


def test_rows_are_the_full_product_of_the_stops(table):
    stops = Stops()
    count = len(VERSIONS) * len(RULES) * np.prod([len(getattr(stops, name)) for name in SIZES])
    assert len(table) == count
    assert not table.duplicated(["version", "step_rule", *SIZES]).any()
    for name in SIZES:
        assert set(table[name]) == set(getattr(stops, name))


def test_every_row_of_a_small_table_is_a_fresh_calculators():
    for _, row in bound_table(FEW).iterrows():
        assert_row_is_the_calculators(row)


def test_rows_drawn_from_the_whole_table_are_a_fresh_calculators(table):
    for _, row in table.sample(100, random_state=0).iterrows():
        assert_row_is_the_calculators(row)


@settings(max_examples=25)
@given(
    pairs=st.integers(1, 2**25), n=st.integers(1, 10**9), T=st.integers(1, 10**9),
    d=st.integers(1, 512), tau=st.integers(1, 10**9), norm=st.floats(0.01, 10.0),
)  # fmt: skip
def test_a_table_at_any_stops_is_a_fresh_calculators(pairs, n, T, d, tau, norm):
    table = bound_table(Stops((2 * pairs,), (n,), (T,), (d,), (tau,)), norm=norm)
    assert len(table) == 4
    for _, row in table.iterrows():
        assert_row_is_the_calculators(row, norm)


def test_the_sequence_length_was_asked_for_and_has_no_effect(table, monkeypatch):
    others = ["version", "step_rule", *(name for name in SIZES if name != "length")]
    assert (table.groupby("length").size() == len(table) / 4).all()
    distinct = table.groupby(others)[[*NUMBERS, "form"]].nunique()
    assert (distinct == 1).all(axis=None)

    asked = []
    bound = BoundCalculator.bound

    def listening(self, setting, evidence=None):
        asked.append(setting.length)
        return bound(self, setting, evidence)

    monkeypatch.setattr(BoundCalculator, "bound", listening)
    rows = bound_table(FEW)["length"]
    assert sorted(asked) == sorted(rows), "a length of the table was not asked for"


def test_samples_matter_where_the_paper_has_them_and_nowhere_else(table):
    book, paper = (table[table["version"] == name] for name in ("book", "paper"))
    others = ["step_rule", "heads", "length", "dimension", "steps"]
    assert (book.groupby(others)[NUMBERS].nunique() == 1).all(axis=None)
    by_samples = paper.pivot(columns="samples", index=others, values="approximation")
    assert (by_samples.diff(axis=1).iloc[:, 1:] > 0).all(axis=None)


def test_terms_are_in_the_unit_of_the_loss_and_combine_as_said(table):
    fast = table["form"] == "fast"
    roots = sum(np.sqrt(table.loc[fast, term]) for term in TERMS)
    assert (np.sqrt(table.loc[fast, "total"]) <= roots * (1 + 1e-12)).all()
    np.testing.assert_allclose(table.loc[~fast, "total"], table.loc[~fast, list(TERMS)].sum(axis=1))


def test_a_long_step_has_no_fast_form(table):
    book = table["version"] == "book"
    assert ((table["form"] == "fast") == (book & (table["kappa"] < 1))).all()
    assert (table["kappa"] >= 1).any()


def test_the_paper_s_defaults_are_vacuous_and_a_million_heads_are_not(table):
    row = {"version": "book", "step_rule": "decreasing", "samples": 5000, "length": 16,
           "dimension": 8, "steps": 4000}  # fmt: skip
    chosen = table[(table[list(row)] == pd.Series(row)).all(axis=1)].set_index("heads")["total"]
    assert chosen[64] > 1e4
    assert chosen[2**20] < 1


def test_what_is_out_of_range_is_refused():
    with pytest.raises(ValueError, match="even number of paired heads, got 7"):
        bound_table(replace(FEW, heads=(7,)))
    with pytest.raises(ValueError, match="length"):
        bound_table(replace(FEW, length=(0,)))
    with pytest.raises(ValueError, match="norm"):
        bound_table(FEW, norm=-1.0)


def test_what_is_remembered_is_what_is_computed_and_no_integer_passes_for_a_float():
    norms = TransportNorms(1.0, 2.0, 3.0)
    ask = {"delta": 0.05, "inputs": UNIT_BALL, "samples": None}
    forget()
    first = _remembered.bernstein_approximation_bound(norms, 64, **ask)
    assert _remembered.bernstein_approximation_bound(norms, 64, **ask) is first
    forget()
    assert _remembered.bernstein_approximation_bound(norms, 64, **ask) == first
    with pytest.raises(ValueError, match="expected an integer >= 2"):
        _remembered.bernstein_approximation_bound(norms, 64.0, **ask)
