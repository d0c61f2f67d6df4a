"""The chapters as they were executed for the pages: clean outputs, checks that ran, anatomy."""

import json
import re
from pathlib import Path

import pytest

from attention_dynamics.verification.ledger import records_in
from attention_dynamics.verification.record import MIME_TYPE
from tools.sources import Book

BOOK = Book(Path(__file__).resolve().parents[2])
LONGEST_CELL = 40  # lines
LONGEST_RUN = 60.0  # seconds
CLAIM = re.compile(
    r"\((eq-[\w-]+)\)\s*$|^:label:\s+((?:thm|lem|prop|cor|obs)-[\w-]+)", re.MULTILINE
)
CALL = re.compile(r"check\.(?:identity|close|bound|band|enclosure)\(\s*\"([^\"]+)\"")


@pytest.fixture(params=BOOK.chapters, ids=lambda page: page.rsplit("/", 1)[-1])
def page(request):
    """Name of a chapter, such as ``book/model/gradients``."""
    return request.param


@pytest.fixture
def notebook(page):
    """The executed notebook whose outputs stand on the page."""
    path = BOOK.notebook(page)
    assert path.is_file(), f"{page} was not executed; run: make book"
    return json.loads(path.read_text("utf8"))


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell):
    return "".join(cell["source"])


def test_outputs_are_those_of_the_current_sources(page):
    assert BOOK.staleness(page, BOOK.executed()) is None


def test_every_cell_ran_without_error_or_warning(notebook):
    for cell in code_cells(notebook):
        assert cell["execution_count"] is not None, f"not executed:\n{source(cell)}"
        for output in cell["outputs"]:
            assert output["output_type"] != "error", source(cell)
            assert output.get("name") != "stderr", source(cell)


def test_every_claim_of_the_text_has_a_record_that_holds(page, notebook):
    text = BOOK.source(page).read_text("utf8")
    claimed = {first or second for first, second in CLAIM.findall(text)}
    records = records_in(notebook)
    assert claimed, "a chapter without a claim"
    assert claimed == {record.label for record in records}
    assert all(record.status in ("passed", "missed") for record in records)


def test_no_check_ran_without_a_wrong_twin(notebook):
    for record in records_in(notebook):
        assert record.wrong_twin, record.label
        assert record.statement, record.label


def test_a_call_of_a_check_in_the_text_left_its_record(notebook):
    for cell in code_cells(notebook):
        if "except CheckFailed" in source(cell):  # a reader is shown how a check fails
            continue
        left = {
            output["data"][MIME_TYPE]["label"]
            for output in cell["outputs"]
            if MIME_TYPE in output.get("data", {})
        }
        assert set(CALL.findall(source(cell))) <= left, source(cell)


def test_anatomy_of_a_chapter(page):
    text = BOOK.source(page).read_text("utf8")
    for part in ("**Question.**", "**Settles.**", "**Run time.**", "**Read first.**"):
        assert part in text, f"{page}: the opening box has no {part}"
    assert re.search(r"^## Where .*differ", text, re.MULTILINE), (
        f"{page}: no section on differences"
    )
    assert len(re.findall(r"\{exercise\}", text)) >= 2
    assert text.count("{solution-start}") == len(re.findall(r"\{exercise\}", text))
    assert "{bibliography}" in text
    assert re.search(r"alt: \S", text), f"{page}: no figure with an alternative text"
    assert len(re.findall(r"^    ?alt: ", text, re.MULTILINE)) == text.count("mystnb:")


def test_captions_name_no_colour_that_dark_mode_turns_over(notebook):
    for cell in code_cells(notebook):
        shown = json.dumps(cell["metadata"].get("mystnb", {}))
        assert not re.search(r"\b(black|white|dark(er)?|light(er)?)\b", shown), shown


def test_cells_are_short(notebook):
    longest = max(map(source, code_cells(notebook)), key=lambda text: text.count("\n"))
    assert longest.count("\n") + 1 <= LONGEST_CELL, longest


def test_chapters_run_in_a_minute(page):
    assert (
        BOOK.executed()[page]["seconds"] <= 2 * LONGEST_RUN
    )  # a shared machine may be half as fast
