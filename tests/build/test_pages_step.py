"""The step that builds pages: the unbroken book is green, each fault red for its own reason."""

import pytest
from small_book import FixtureBook

pytestmark = [pytest.mark.build, pytest.mark.xdist_group("build")]

STALE = "error: stale outputs: book/chapter "


def test_pages_show_the_executed_outputs(built_book: FixtureBook) -> None:
    page = built_book.page("chapter")
    assert "answer 41" in page
    assert "threads: 1" in page
    assert (built_book.root / "_build" / "html" / "index.html").is_file()


def test_nothing_is_done_when_nothing_changed(built_book: FixtureBook) -> None:
    built = built_book.build()
    assert built.returncode == 0
    assert built.stdout.startswith("pages up to date")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\nSee {eq}`def-nowhere`.\n", "equation not found: def-nowhere"),
        ("\nSee {doc}`nowhere`.\n", "unknown document: 'nowhere'"),
        ("\n$$ a = b $$ (def-mean)\n", "duplicate label of equation def-mean"),
        ("\nSee {cite:p}`nobody1900`.\n", 'could not find bibtex key "nobody1900"'),
    ],
    ids=["broken-reference", "missing-page", "duplicate-label", "missing-citation"],
)
def test_a_warning_stops_the_build(book: FixtureBook, text: str, reason: str) -> None:
    book.append(book.index, text)
    built = book.build()
    assert built.returncode == 1
    assert reason in built.stderr
    assert "error: the pages were not built" in built.stderr
    assert not (book.root / "_build" / "html").exists(), "a red build must leave no pages behind"


def test_output_on_standard_error_stops_the_build(book: FixtureBook) -> None:
    cell = "\n```{code-cell} ipython3\nimport sys\n\nprint('beware', file=sys.stderr)\n```\n"
    book.append(book.chapter, cell)
    executed = book.execute()
    assert executed.returncode == 0, executed.stdout
    built = book.build()
    assert built.returncode == 1
    assert "stderr was found in the cell outputs" in built.stderr


def test_outputs_of_another_text_are_refused(book: FixtureBook) -> None:
    book.edit(book.chapter, "small_library.answer()", "small_library.answer().upper()")
    built = book.build()
    assert built.returncode == 1
    assert built.stderr.startswith(f"{STALE}(chapter text changed since it was executed)")


def test_outputs_of_another_library_are_refused_and_then_renewed(book: FixtureBook) -> None:
    """The builder's own cache would print the old number here."""
    (book.library.parent / "answer.txt").write_text("42", "utf8")
    built = book.build()
    assert built.returncode == 1
    assert built.stderr.startswith(f"{STALE}(library (src/) changed since it was executed)")
    assert book.execute().returncode == 0
    assert book.build().returncode == 0
    assert "answer 42" in book.page("chapter")
    assert "answer 41" not in book.page("chapter")


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
