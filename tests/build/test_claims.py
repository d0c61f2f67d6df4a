"""The rule of checks, the ledger and the map, on a small book that is broken on purpose."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "book" / "_ext"))

from bookext.claim_layout import COLUMN, lay_out, plain, text_width  # noqa: E402
from bookext.claim_map import STATUS, draw  # noqa: E402
from bookext.ledger_page import write  # noqa: E402
from bookext.rule import breaches  # noqa: E402
from bookext.statements import CLAIMED, Page, Statement, claims_of  # noqa: E402

from attention_dynamics.verification import MIME_TYPE, CheckRecord  # noqa: E402

pytestmark = pytest.mark.build

CONFIG = """\
import sys
sys.path.insert(0, {extension!r})
project = "A small book"
extensions = ["myst_nb", "sphinx_proof", "bookext.claims"]
myst_enable_extensions = ["amsmath", "dollarmath", "colon_fence"]
nb_execution_mode = "off"
source_suffix = {{".md": "myst-nb", ".ipynb": "myst-nb"}}
numfig = True
"""

INDEX = """\
# A small book

```{claim-map}
```

```{ledger}
```

```{toctree}
chapter
```
"""

PROSE = r"""
# A chapter

$$ \mu = \frac12 (a + b) $$ (def-mean)

$$ (a+b)^2 = a^2 + 2ab + b^2 $$ (eq-square)

:::{prf:lemma} A bound on $\mu$ [ours]
:label: lem-bound
It is below one.
:::

:::{prf:observation} A slope
:label: obs-slope
It is near a half.
:::

:::{prf:definition} Something
:label: def-thing
It is what it is.
:::
"""

CHECKS = {
    "setup": "import sympy as sp\nfrom attention_dynamics.verification import check\n"
    "a, b = sp.symbols('a b')",
    "eq-square": "check.identity('eq-square', (a + b)**2, a**2 + 2*a*b + b**2, wrong=a**2 + b**2,"
    "\n    uses=('def-mean',), title='square of a sum')",
    "lem-bound": "check.bound('lem-bound', [0.5, 0.9], 1.0, wrong=0.6, uses=('eq-square',))",
    "obs-slope": "check.band('obs-slope', 0.3, (0.2, 0.4), (0.45, 0.55), wrong=(0.1, 0.5),"
    "\n    missed_because='too few steps', uses=('lem-bound',))",
}


@pytest.fixture(scope="session")
def executed():
    """The chapter, executed once by a real kernel."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [
        nbformat.v4.new_markdown_cell(PROSE),
        *(nbformat.v4.new_code_cell(code) for code in CHECKS.values()),
    ]
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return notebook


def build(folder, notebook, prose=PROSE):
    """Build the book with ``sphinx -W``; the site's folder and the process."""
    source, site = folder / "source", folder / "site"
    source.mkdir(exist_ok=True)
    extension = str(REPOSITORY / "book" / "_ext")
    (source / "conf.py").write_text(CONFIG.format(extension=extension), "utf8")
    (source / "index.md").write_text(INDEX, "utf8")
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    notebook.cells[0].source = prose
    nbformat.write(notebook, source / "chapter.ipynb")
    process = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", source, site],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return site, process


def without(notebook, label):
    """The notebook after somebody deleted the cell that checks ``label``."""
    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    call = re.compile(rf"check\.\w+\('{label}'")
    copy.cells = [cell for cell in copy.cells if not call.match(cell.source)]
    assert len(copy.cells) == len(notebook.cells) - 1
    return copy


def node_classes(page, label):
    return re.search(rf'class="claim ([^"]*)"[^>]* data-label="{label}"', page)[1].split()


@pytest.fixture(scope="session")
def sound(executed, tmp_path_factory):
    """The sound book, built: its folder, its site and the process."""
    folder = tmp_path_factory.mktemp("sound")
    return folder, *build(folder, executed)


def test_a_book_whose_claims_are_checked_is_green(sound):
    _, site, process = sound
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""  # no unknown output, no missing reference
    index = (site / "index.html").read_text("utf8")
    chapter = (site / "chapter.html").read_text("utf8")
    assert node_classes(index, "def-mean")[0] == "claim-definition"
    assert node_classes(index, "eq-square")[0] == "claim-proved"
    assert node_classes(index, "lem-bound")[0] == "claim-attacked"
    assert node_classes(index, "obs-slope")[0] == "claim-missed"
    assert "claim-unchecked" not in re.sub(r"<style>.*?</style>", "", index)
    for target in re.findall(r'href="chapter\.html#([^"]+)"', index):
        assert f'id="{target}"' in chapter
    assert chapter.count('<div class="check-line') == 3
    assert "3 numbered claims" in index
    assert "1 is measured outside the band" in index
    assert "mathjax" in index.lower()  # the ledger's formulas need it
    assert "A bound on μ" in index


def test_deleting_one_check_turns_its_node_red_and_the_build_too(sound, executed, tmp_path):
    """In a second build over the first: the map is redrawn though only a chapter changed."""
    shutil.copytree(sound[0], tmp_path / "book")
    site, process = build(tmp_path / "book", without(executed, "lem-bound"))
    assert process.returncode != 0
    assert re.search(r"chapter\.ipynb.*lemma 'lem-bound' has no passing check", process.stderr)
    index = (site / "index.html").read_text("utf8")
    assert node_classes(index, "lem-bound")[0] == "claim-unchecked"
    assert node_classes(index, "eq-square")[0] == "claim-proved"
    assert "1 has no passing check" in index


def test_renamed_unprefixed_and_unlabelled_statements_are_seen(executed, tmp_path):
    prose = PROSE.replace("(eq-square)", "(eq-binomial)")
    prose += "\n$$ 1 = 1 $$ (unit)\n\n:::{prf:lemma}\nNobody checks this.\n:::\n"
    prose += "\n\\begin{equation}\n2 = 2\n\\end{equation}\n"
    _, process = build(tmp_path, executed, prose)
    assert process.returncode != 0
    assert "equation 'eq-binomial' has no passing check" in process.stderr
    assert "a check names 'eq-square', which stands nowhere" in process.stderr
    assert "the check of 'lem-bound' uses 'eq-square', which stands nowhere" in process.stderr
    assert "equation 'unit' is numbered, but its label says neither" in process.stderr
    assert "a lemma has no label" in process.stderr
    assert process.stderr.count("is numbered, but its label says neither") == 2


# The rule and the drawings on pages made by hand -------------------------------------------------


def record(label, kind="proved", status="passed", uses=(), title=""):
    detail = {
        "proved": {"sizes": ["T"], "assumptions": ["r \\neq 1"], "given": []},
        "band": {
            "estimate": 1.0, "interval": [0.9, 1.1], "band": [0.5, None], "missed_because": "late",
        },
        "attacked": {"tightest_ratio": 0.99987, "at_least": 0.999, "attack": "ascent"},
        "autograd": {"worst_relative_error": 2e-15, "rtol": 1e-10, "atol": 0.0, "entries": 12},
    }[kind]  # fmt: skip
    scope = "for every T" if kind == "proved" else ""
    return CheckRecord(
        label, kind, status, title, tuple(uses), "x < y", "code", scope, detail, {"refuted": "so"}
    )


def page(doc, statements, records=()):
    made = [Statement(label, kind, doc, 3, title, label) for label, kind, title in statements]
    return Page(doc, f"Chapter {doc}", tuple(made), tuple(records))


FIRST = page(
    "one",
    [("def-a", "definition", "Thing"), ("eq-b", "equation", ""), ("cited-c", "equation", "")],
    [record("eq-b", uses=["def-a"], title="first identity")],
)
SECOND = page(
    "two",
    [("lem-d", "lemma", "A bound"), ("obs-e", "observation", "A slope")],
    [
        record("lem-d", "attacked", uses=["eq-b", "cited-c"]),
        record("lem-d", "autograd"),
        record("obs-e", "band", "missed", uses=["lem-d"]),
    ],
)
BOOK = [FIRST, SECOND]


def link(doc, anchor):
    return f"{doc}.html#{anchor}"


def messages(pages):
    return [breach.message for breach in breaches(pages)]


def test_a_sound_book_breaks_no_rule():
    assert messages(BOOK) == []


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ([FIRST, replace(SECOND, records=SECOND.records[1:2])], "'obs-e' has no passing check"),
        (
            [FIRST, replace(SECOND, records=(*SECOND.records, record("eq-b")))],
            "checked here and on",
        ),
        ([FIRST, replace(SECOND, records=(*SECOND.records, record("eq-z")))], "stands nowhere"),
        (
            [FIRST, replace(SECOND, records=(*SECOND.records, record("lem-d", uses=["eq-y"])))],
            "uses 'eq-y', which stands nowhere",
        ),
        (
            [FIRST, replace(SECOND, records=(*SECOND.records, record("lem-d", uses=["lem-d"])))],
            "uses itself",
        ),
        (
            [
                replace(FIRST, records=()),
                replace(SECOND, records=(*SECOND.records, record("eq-b"))),
            ],
            "belongs under the statement",
        ),
        (
            [FIRST, replace(SECOND, statements=(*SECOND.statements, SECOND.statements[0]))],
            "lemma 'lem-d' stands 2 times",
        ),
        (
            [
                FIRST,
                replace(SECOND, records=(SECOND.records[2], record("lem-d", "band", "missed"))),
            ],
            "lemma 'lem-d' has no passing check, only a band it missed",
        ),
    ],
)
def test_each_breach_is_named_with_its_label(spoilt, message):
    assert any(message in text for text in messages(spoilt))


@pytest.mark.parametrize("kind", CLAIMED)
def test_every_kind_of_claim_needs_a_check(kind):
    assert messages([page("one", [("x", kind, "")])]) == [f"{kind} 'x' has no passing check"]


@pytest.mark.parametrize("kind", ["definition", "assumption", "remark", "example"])
def test_what_claims_nothing_needs_none(kind):
    assert messages([page("one", [("x", kind, "")])]) == []


def test_the_map_shows_every_statement_once_with_its_colour_and_its_arrows():
    drawn = draw(BOOK, claims_of(BOOK), link)
    labels = re.findall(r'data-label="([^"]+)"', drawn)
    assert labels == ["def-a", "eq-b", "cited-c", "lem-d", "obs-e"]
    statuses = [node_classes(drawn, label)[0] for label in labels]
    assert statuses == [
        "claim-definition", "claim-proved", "claim-cited", "claim-autograd", "claim-missed",
    ]  # fmt: skip
    arrows = set(re.findall(r"from-(\d) into-(\d)\" d=", drawn))
    assert arrows == {("0", "1"), ("1", "3"), ("2", "3"), ("3", "4")}
    assert 'href="two.html#lem-d"' in drawn
    assert "First identity" in drawn
    assert drawn.count("<li>") == len(set(statuses))
    assert "<title id=" in drawn
    assert "5 statements in 2 chapters" in drawn


def test_the_map_is_the_same_each_time():
    assert draw(BOOK, claims_of(BOOK), link) == draw(BOOK, claims_of(BOOK), link)


def test_every_status_has_a_shape_and_a_colour_of_its_own():
    from bookext.claim_map import ICONS

    assert len(set(ICONS.values())) == len(ICONS) == len(STATUS)
    style = (REPOSITORY / "book/_ext/bookext/static/claims.css").read_text("utf8")
    for status in STATUS:
        assert style.count(f"--claim-{status}:") == 2  # light and dark
        assert f".claim-{status} {{ --status: var(--claim-{status}); }}" in style


def test_nodes_neither_overlap_nor_overflow():
    words = ["a", "rather", "long", "title", "of", "one", "statement", "to", "be", "broken"]
    statements = [
        (f"eq-{n}", "equation" if n % 3 else "lemma", " ".join(words[: 1 + n % len(words)]))
        for n in range(40)
    ]
    pages = [page(str(k), statements[k::6], []) for k in range(6)]
    layout = lay_out(pages, claims_of(pages))
    assert len(layout.nodes) == 40
    for node in layout.nodes:
        assert all(text_width(line, 13) <= COLUMN for line in node.lines)
        assert 0 <= node.x <= layout.width - COLUMN
        assert node.y + node.height <= layout.height
    boxes = [(n.x, n.y, n.height) for n in layout.nodes]
    for number, (x, y, height) in enumerate(boxes):
        for other_x, other_y, other_height in boxes[number + 1 :]:
            apart = y + height <= other_y or other_y + other_height <= y
            assert x != other_x or apart


def test_titles_lose_their_markup():
    assert plain(r"Third cumulant $|\kappa_3| \le \kappa^*$") == "Third cumulant |κ₃| ≤ κ*"
    assert plain(r"falls as $m^{-1/2}$, $T^2$") == "falls as m^(−1/2), T²"


def test_the_ledger_counts_what_ran():
    written = write(BOOK, claims_of(BOOK), link)
    assert "<strong>3 numbered claims</strong> and states 2 definitions" in written
    assert "2 claims are checked and hold, 1 is measured outside the band" in written
    counts = re.findall(r'<td class="number">(\d+)</td><td>([^<]*)</td>', written)
    assert counts == [
        ("1", "1 of them for every length or dimension"),
        ("1", "worst relative error 2.0e-15"),
        ("1", "tightest ratios 0.9998 to 0.9998, 1 shown sharp"),
        ("1", "0 met, 1 missed"),
    ]
    assert written.count("<tr id=") == 3
    assert re.search(r'id="ledger-lem-d".*?<a href="one\.html#eq-b">First identity</a>', written)
    assert "x &lt; y" in written
    assert r"Assumes <span" in written
    assert "Wrong twin: so." in written


def test_a_claim_without_a_check_is_red_in_map_and_ledger():
    spoilt = [replace(FIRST, records=()), SECOND]
    claims = claims_of(spoilt)
    assert node_classes(draw(spoilt, claims, link), "eq-b")[0] == "claim-unchecked"
    assert "1 has no passing check" in write(spoilt, claims, link)


def test_the_executed_notebook_holds_one_record_a_check(executed):
    found = [
        output["data"][MIME_TYPE]["label"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if MIME_TYPE in output.get("data", {})
    ]
    assert found == ["eq-square", "lem-bound", "obs-slope"]
    assert not any(
        output["output_type"] == "execute_result"
        for cell in executed.cells
        for output in cell.get("outputs", [])
    )
