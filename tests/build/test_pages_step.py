"""The step that builds pages: the unbroken book is green, each fault red for its own reason."""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from small_book import Changed, FixtureBook

from tools.build import build
from tools.sources import Book, BookError

pytestmark = [pytest.mark.build, pytest.mark.xdist_group("build")]

STALE = "error: stale outputs: book/chapter "


class Refusal(NamedTuple):
    """A book and the build that refused it."""

    book: FixtureBook
    built: subprocess.CompletedProcess[str]


def test_pages_show_the_executed_outputs(built_book: FixtureBook) -> None:
    page = built_book.page("chapter")
    assert "answer 41" in page
    assert "threads: 1" in page
    assert (built_book.root / "_build" / "html" / "index.html").is_file()


def test_nothing_is_done_when_nothing_changed(built_book: FixtureBook) -> None:
    built = built_book.build()
    assert built.returncode == 0
    assert built.stdout.startswith("pages up to date")


CAPTURED = r"""
$$ (a + 1)^2 = a^2 + 2a + 1 $$ (eq-captured)

```{code-cell} ipython3
%%capture
import sympy as sp

from attention_dynamics.verification import check

a = sp.Symbol("a")
check.identity("eq-captured", (a + 1) ** 2, a**2 + 2 * a + 1, wrong=a**2 + 1)
```

```{code-cell} ipython3
import sys

print("beware", file=sys.stderr)
```
"""

#: Text of the first page, or of the chapter, and what the builder must say about it.
FAULTS = {
    "See {eq}`def-nowhere`.": "equation not found: def-nowhere",
    "See {doc}`nowhere`.": "unknown document: 'nowhere'",
    "$$ a = b $$ (def-mean)": "duplicate label of equation def-mean",
    "See {cite:p}`nobody1900`.": 'could not find bibtex key "nobody1900"',
    "$$ a = b $$ (eq-unchecked)": "equation 'eq-unchecked' has no passing check",
    "$$ a = b $$ (unnamed)": "equation 'unnamed' is numbered, but its label says neither",
    CAPTURED: "equation 'eq-captured' has no passing check",
    "": "stderr was found in the cell outputs",
}


@pytest.fixture(scope="module")
def refusal(built_book: FixtureBook, tmp_path_factory: pytest.TempPathFactory) -> Refusal:
    """One build with every fault: each must be named, and any one is enough for red."""
    root = shutil.copytree(built_book.root, tmp_path_factory.mktemp("faults") / "copy")
    book = FixtureBook(root)
    book.append(book.chapter, CAPTURED)
    book.append(
        book.index, "\n\n".join(["", *(text for text in FAULTS if text != CAPTURED)]) + "\n"
    )
    executed = book.execute()
    assert executed.returncode == 0, executed.stdout
    return Refusal(book, book.build())


@pytest.mark.parametrize("fault", FAULTS.values())
def test_each_fault_is_among_the_reasons_to_stop(refusal: Refusal, fault: str) -> None:
    """Reasons are the builder's warnings, repeated at the end; with one of them it stops."""
    _, _, reasons = refusal.built.stderr.partition("error: the pages were not built")
    assert "every warning counts" in reasons
    assert fault in reasons


def test_a_red_build_leaves_no_pages(refusal: Refusal) -> None:
    assert refusal.built.returncode == 1
    assert not (refusal.book.root / "_build" / "html").exists()


def test_one_warning_is_enough(
    built_book: FixtureBook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder is told to count warnings, and its status is the driver's."""
    commands: list[list[str]] = []

    def run(command: list[str], environment: dict[str, str]) -> tuple[int, list[str]]:
        commands.append(command)
        return 1, ["index.md:3: WARNING: one"]

    monkeypatch.setattr("tools.build.run_builder", run)
    book = FixtureBook(shutil.copytree(built_book.root, tmp_path / "copy"))
    with pytest.raises(BookError, match=r"every warning counts:\n  index\.md:3: WARNING: one"):
        build(Book(book.root), force=True)
    assert {"-W", "-n", "--keep-going", "--all"} <= set(commands[0])


def test_outputs_of_another_text_are_refused(book: FixtureBook) -> None:
    book.edit(book.chapter, "small_library.answer()", "small_library.answer().upper()")
    built = book.build()
    assert built.returncode == 1
    assert built.stderr.startswith(f"{STALE}(chapter text changed since it was executed)")


def test_outputs_of_another_library_are_refused_and_then_renewed(changed_book: Changed) -> None:
    """The builder's own cache would print the old number here."""
    assert changed_book.refused.returncode == 1
    assert changed_book.refused.stderr.startswith(
        f"{STALE}(library (src/) changed since it was executed)"
    )
    assert "answer 42" in changed_book.book.page("chapter")
    assert "answer 41" not in changed_book.book.page("chapter")


def test_outputs_changed_by_hand_are_refused(book: FixtureBook) -> None:
    notebook = book.root / "build" / "nb" / "book" / "chapter.ipynb"
    book.edit(notebook, "answer 41", "answer 43")
    built = book.build()
    assert built.returncode == 1
    assert built.stderr.startswith(f"{STALE}(its executed notebook was changed by hand)")


def test_a_page_forgotten_in_the_contents_stops_the_build(book: FixtureBook) -> None:
    (book.root / "book" / "forgotten.md").write_text("# Forgotten\n", "utf8")
    for step in (book.execute, book.build):
        done = step()
        assert done.returncode == 1
        assert done.stderr == "error: pages missing from _toc.yml: book/forgotten\n"
