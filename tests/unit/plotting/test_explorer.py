r"""The bound explorer's HTML: all numbers of the table, the first view as text, nothing fetched."""

from __future__ import annotations

import itertools
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_dynamics.plotting import bound_explorer
from attention_dynamics.plotting._digits import integer, number, power_of_ten, rounded_up
from attention_dynamics.theory.bound_table import Stops, bound_table

TERMS = ("optimisation", "approximation", "linearisation", "total")
FEW = Stops((8, 64, 2**20), (100, 5000), (4, 16, 4096), (2, 8), (10, 4000, 10**6))
VOID = {"input", "br", "hr", "img", "meta", "link"}


@pytest.fixture(scope="module")
def table():
    return bound_table(FEW)


@pytest.fixture(scope="module")
def page(table):
    return bound_explorer(table)._repr_html_()


def payload(page):
    return json.loads(re.search(r'application/json">(.*?)</script>', page, re.S).group(1))


class Reader(HTMLParser):
    """Elements, their nesting, and the text outside of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.stack, self.elements, self.words = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.stack):
            self.words.append(data)

    @property
    def text(self):
        return re.sub(r"[ \n]+", " ", "".join(self.words))


def test_the_page_holds_every_number_of_the_table(table, page):
    data = payload(page)
    for _, row in table.iterrows():
        node = data["pool"][data["root"]]
        for name in data["order"]:
            if name in data["choices"]:
                at = data["choices"][name].index(row[name])
            else:
                at = data["stops"][name].index(integer(row[name]))
            if name == data["order"][-1]:
                break
            node = data["pool"][node[at]]
        found = {c: data["pool"][i][at] for c, i in zip(data["columns"], node, strict=True)}
        for name in (*TERMS, "kappa"):
            assert row[name] <= found[name] <= 1.0101 * row[name]
        assert found["step_size"] == pytest.approx(row["step_size"], rel=0.006)
        assert found["fast"] == (row["form"] == "fast")
        assert found["small"] == (row["kappa"] < 1)


def test_equal_lengths_are_stored_once_because_their_numbers_are_equal(table, page):
    data = payload(page)
    assert data["order"][:2] == ["version", "length"]
    for version in data["pool"][data["root"]]:
        assert len(set(data["pool"][version])) == 1
    changed = table.copy()
    changed.loc[changed["length"] == 16, "linearisation"] *= 1.02
    data = payload(bound_explorer(changed)._repr_html_())
    assert [len(set(data["pool"][node])) for node in data["pool"][data["root"]]] == [2, 2]


def test_the_first_view_is_there_without_a_script(table, page):
    view = {"version": "book", "step_rule": "decreasing", "heads": 64, "samples": 5000,
            "length": 16, "dimension": 8, "steps": 4000}  # fmt: skip
    row = table.set_index(list(view)).loc[tuple(view.values())]
    text = Reader(page).text
    for term in TERMS:
        assert f"{term} {number(float(rounded_up(np.array(row[term]))))}" in text
    assert "a priori, with probability at least 0.9" in text.lower()
    assert "m = 64, τ = 4000, d = 8, n = 5000, T = 16" in text
    assert "the sliders need JavaScript" in text
    assert "ν\u00a0=\u00a0ρ\u00a0=\u00a03" in page
    assert repr(bound_explorer(table)).endswith(f"total {number(float(rounded_up(row['total'])))}")


def test_another_first_view_and_another_mark(table):
    wide = bound_explorer(table, first={"heads": 2**20, "steps": 10**6, "dimension": 8}, mark=1e-9)
    assert "m = 1\u202f048\u202f576" in repr(wide)
    visible = re.findall(r'<span data-when="(\w+)">', wide._repr_html_())
    assert sorted(visible) == ["fast", "vacuous"]
    assert 'data-when="vacuous">vacuous: above 1.00 × 10⁻⁹' in wide._repr_html_()


def test_the_html_is_whole_and_labelled(page):
    reader = Reader(page)
    assert reader.stack == []
    ranges = [a for tag, a in reader.elements if tag == "input" and a["type"] == "range"]
    assert [a["aria-label"] for a in ranges] == [
        "m, heads", "τ, steps", "d, token dimension", "n, samples", "T, tokens"
    ]  # fmt: skip
    assert all(re.fullmatch(r"[\d\u202f]+ [a-z ]+", a["aria-valuetext"]) for a in ranges)
    assert sum(a.get("role") == "status" for _, a in reader.elements) == 1
    assert sum(tag == "legend" for tag, _ in reader.elements) == 2


def test_nothing_is_fetched_and_nothing_is_named_twice_on_a_page(page):
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|\burl\(|@import|\bfetch\(", page)
    for _, attributes in Reader(page).elements:
        assert not {"id", "src", "href", "onclick"} & set(attributes)


def test_the_script_computes_no_bound(page):
    script = re.search(r"<script>\n(.*?)</script>", page, re.S).group(1)
    assert len(script) < 8000
    assert not re.search(r"sqrt|\*\*(?! exponent)|Math\.(?!log10|max)", script)


def test_a_whole_table_is_light_and_its_bytes_are_the_same_every_time():
    whole = bound_table()
    page = bound_explorer(whole)._repr_html_()
    assert len(page.encode()) < 120_000
    shuffled = whole.sample(frac=1, random_state=0).sort_values(
        ["version", "step_rule"], ascending=[True, False], kind="stable"
    )
    assert bound_explorer(shuffled)._repr_html_() == page


def test_what_the_sliders_cannot_show_is_refused(table):
    with pytest.raises(ValueError, match=r"\['kappa'\] missing"):
        bound_explorer(table.drop(columns="kappa"))
    with pytest.raises(ValueError, match="one row for each of the 432 combinations"):
        bound_explorer(table.iloc[1:])
    with pytest.raises(ValueError, match="one row for each"):
        bound_explorer(table.assign(length=4))
    for bad in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            bound_explorer(table.assign(total=bad))


@given(st.floats(1e-12, 1e12))
def test_rounding_goes_up_by_less_than_one_unit_of_the_third_digit(value):
    up = float(rounded_up(np.array(value)))
    assert value <= up
    assert up == float(f"{up:.2e}")
    assert float(rounded_up(np.array(up))) == up
    assert up - value < 10 ** (np.floor(np.log10(value)) - 2) * (1 + 1e-9)


def test_three_digits_stay_as_they_are():
    digits, powers = range(100, 1000), range(-9, 9)
    values = np.array([float(f"{d}e{p}") for d, p in itertools.product(digits, powers)])
    np.testing.assert_array_equal(rounded_up(values), values)


@pytest.mark.parametrize(
    ("value", "text"),
    [(22900, "22\u202f900"), (0.0158, "0.0158"), (1, "1"), (9990, "9990"), (0.001, "0.001"),
     (0.00099, "9.90 × 10⁻⁴"), (2.29e7, "2.29 × 10⁷"), (999_000, "999\u202f000"), (63.3, "63.3")],
)  # fmt: skip
def test_numbers_as_readers_like_them(value, text):
    assert number(value) == text


def test_integers_and_powers_of_ten():
    assert [integer(v) for v in (8, 5000, 16384)] == ["8", "5000", "16\u202f384"]
    assert [power_of_ten(k) for k in (-2, 0, 1, 12)] == ["10⁻²", "1", "10", "10¹²"]
