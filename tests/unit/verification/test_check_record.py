"""The record: JSON and back, one line in a notebook and out of it, collected from outputs."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import sympy as sp

from attention_dynamics.verification import MIME_TYPE, CheckRecord, check
from attention_dynamics.verification.ledger import count_by_kind, records_in
from attention_dynamics.verification.myst import RECORD_ATTRIBUTE, CheckRecordRenderer

a, b = sp.symbols("a b")


def square(label="eq-square", **options):
    expanded = a**2 + 2 * a * b + b**2
    return check.identity(label, (a + b) ** 2, expanded, wrong=a**2 + b**2, **options)


def some_records():
    return [
        square(title="square of a sum", uses=("def-a",)),
        check.close("eq-close", np.array([1.0]), np.array([1.0]), wrong=np.array([2.0])),
        check.bound("lem-bound", [0.4, 0.9], 1.0, wrong=0.5),
        check.band("obs-met", 1.0, (0.9, 1.1), (0.5, 1.5), wrong=(2.0, 3.0)),
        check.band("obs-not", 1.0, (0.9, 1.1), (2.0, 3.0), wrong=(0, 2), missed_because="why"),
    ]


@pytest.mark.parametrize("place", range(5))
def test_a_record_survives_json(place):
    record = some_records()[place]
    data = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert CheckRecord.from_json(data) == record
    assert data["wrong_twin"]["refuted"]


def test_an_unknown_kind_is_refused():
    data = square().to_json()
    with pytest.raises(ValueError, match="kind='believed'"):
        CheckRecord.from_json(data | {"kind": "believed"})
    with pytest.raises(ValueError, match="status='hoped'"):
        CheckRecord.from_json(data | {"status": "hoped"})


def test_outside_a_notebook_a_check_prints_one_line(capsys):
    square()
    assert capsys.readouterr().out == "✓ eq-square: proved exactly\n"


def test_the_line_typesets_the_very_expression_checked():
    line = square().to_html()
    assert r"\(\left(a + b\right)^{2} = a^{2} + 2 a b + b^{2}\)" in line
    assert line.startswith('<div class="check-line check-proved check-passed"')
    assert 'class="math notranslate nohighlight"' in line
    assert line.count("<div") == line.count("</div>") == 1
    assert "\n" not in line


def test_the_line_escapes_what_html_would_eat():
    small, large = np.array([1.0]), np.array([2.0])
    line = check.close(
        "eq-escape", np.where(small < large, 1.0, 2.0), np.array([1.0]), wrong=large
    ).to_html()
    assert "np.where(small &lt; large, 1.0, 2.0) ≈ np.array([1.0])" in line
    assert not re.search(r"<(?!/?(div|span|code)\b)", line)


def test_the_source_of_the_right_call_is_shown():
    """Two calls on one line, the same label twice, arguments by keyword."""
    one, two = np.array([1.0]), np.array([2.0])
    pair = (
        check.close("eq-x", one * 1, one, wrong=two),
        check.close("eq-x", two * 1, two, wrong=one),
    )
    assert [record.statement for record in pair] == ["one * 1 ≈ one", "two * 1 ≈ two"]
    record = check.close(label="eq-x", actual=one + 1, expected=two, wrong=one)
    assert record.statement == "one + 1 ≈ two"


def test_source_that_cannot_be_read_is_replaced_by_names():
    space = {"check": check, "np": np}
    exec('record = check.bound("lem-x", np.array([1.0]), 2.0, wrong=0.5)', space)
    assert space["record"].statement == "observed ≤ bound"


def test_in_a_notebook_the_cell_holds_line_text_and_record():
    """A real shell: one display a check, and no second output for the returned record."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    shell = InteractiveShell.instance()
    try:
        with capture_output() as captured:
            result = shell.run_cell(
                "import sympy as sp\n"
                "from attention_dynamics.verification import check\n"
                "a = sp.Symbol('a')\n"
                "check.identity('eq-x', (a + 1)**2, a**2 + 2*a + 1, wrong=a**2 + 1)\n"
            )
        result.raise_error()
    finally:
        InteractiveShell.clear_instance()
    (output,) = captured.outputs
    assert set(output.data) == {"text/html", "text/plain", MIME_TYPE}
    assert output.data[MIME_TYPE]["label"] == "eq-x"
    assert "CheckRecord" not in captured.stdout


def notebook(records):
    outputs = [{"output_type": "display_data", "data": record.to_bundle()} for record in records]
    return {
        "cells": [
            {"cell_type": "markdown", "source": "text"},
            {"cell_type": "code", "outputs": [{"output_type": "stream", "text": "x"}, *outputs]},
        ]
    }


def test_records_are_collected_from_executed_notebooks():
    records = some_records()
    executed = json.loads(json.dumps(notebook(records)))
    assert records_in(executed) == records


def test_records_are_counted_by_kind_strongest_first():
    counts = count_by_kind(some_records())
    assert [(count.kind, count.checks, count.missed) for count in counts] == [
        ("proved", 1, 0),
        ("autograd", 1, 0),
        ("attacked", 1, 0),
        ("band", 2, 1),
    ]
    assert counts[2].note == "tightest ratios 0.9000 to 0.9000, 0 shown sharp"
    assert counts[3].note == "1 met, 1 missed"


def test_myst_keeps_the_record_and_shows_nothing():
    record = square()
    data = SimpleNamespace(mime_type=MIME_TYPE, content=record.to_json())
    (node,) = CheckRecordRenderer.handle_mime(None, data, False)
    assert CheckRecord.from_json(json.loads(node[RECORD_ATTRIBUTE])) == record
    assert node.astext() == ""
    other = SimpleNamespace(mime_type="text/plain", content="x")
    assert CheckRecordRenderer.handle_mime(None, other, False) is None
