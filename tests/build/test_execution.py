"""The step that executes: what must stop it, what must not be executed, and where kernels run."""

import json
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import nbformat
import pytest
from small_book import REPOSITORY, FixtureBook

from tools.execute import execute, run_notebooks
from tools.sources import Book, BookError

pytestmark = [pytest.mark.build, pytest.mark.xdist_group("build")]

FAILING_CELL = """
```{code-cell} ipython3
raise ValueError("the measure is negative")
```
"""

SLEEPING_CELL = """
```{code-cell} ipython3
import time

time.sleep(600)
```
"""


def test_every_chapter_is_executed_once_and_its_seconds_are_kept(built_book: FixtureBook) -> None:
    record = json.loads((built_book.root / "build" / "executed.json").read_text("utf8"))
    assert sorted(record) == ["book/chapter", "book/second", "book/third"]
    assert all(0 < entry["seconds"] < 60 for entry in record.values())
    again = built_book.execute()
    assert again.returncode == 0
    assert again.stdout.count("unchanged, outputs kept") == 3


class Failure(NamedTuple):
    """A book with two chapters that fail, and the command that should have published it."""

    book: FixtureBook
    published: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def failure(built_book: FixtureBook, tmp_path_factory: pytest.TempPathFactory) -> Failure:
    """One cell raises, another sleeps; the execution is piped, and a copy step follows."""
    book = FixtureBook(
        shutil.copytree(built_book.root, tmp_path_factory.mktemp("failure") / "copy")
    )
    book.edit(book.root / "_config.yml", "timeout: 20\n", "timeout: 3\n")
    book.append(book.chapter, FAILING_CELL)
    book.append(book.root / "book" / "second.md", SLEEPING_CELL)
    rules = book.root / "publish.mk"
    rules.write_text(
        "publish:\n"
        f"\tcd {REPOSITORY} && {sys.executable} -m tools.execute --root {book.root} | cat; \\\n"
        f"\tcp -r {book.root}/_build/html {book.root}/published\n"
        "\n"
        ".PHONY: publish\n",
        "utf8",
    )
    makefile = REPOSITORY / "Makefile"
    command = ["make", "-f", str(makefile), "-f", str(rules), "publish"]
    done = subprocess.run(command, cwd=book.root, text=True, capture_output=True, timeout=240)
    return Failure(book, done)


def test_a_failing_cell_stops_the_build_and_shows_its_traceback(failure: Failure) -> None:
    assert "ValueError: the measure is negative" in plain(failure.published.stdout)
    assert "error: chapters that failed: book/chapter, book/second" in failure.published.stderr
    built = failure.book.build()
    assert built.returncode == 1
    assert "stale outputs: book/chapter (never executed)" in built.stderr


def test_a_cell_that_takes_too_long_stops_the_build(failure: Failure) -> None:
    assert "timed out" in failure.published.stdout
    assert "after 3 seconds" in failure.published.stdout
    assert "time.sleep(600)" in failure.published.stdout


def test_a_copy_step_after_a_failing_cell_is_never_reached(failure: Failure) -> None:
    """Case 18: under the Makefile's shell neither a pipe nor a later line hides the failure."""
    assert failure.published.returncode == 2
    assert (failure.book.root / "_build" / "html").is_dir()
    assert not (failure.book.root / "published").exists()


CELL = """
```{{code-cell}} ipython3
{}

raise ValueError("the measure is negative")
```
"""


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (":tags: [raises-exception]", "tag raises-exception"),
        (":tags: [skip-execution]", "tag skip-execution"),
        (":tags: [hide-input, remove-output]", "tag remove-output"),
        (":tags: [remove-cell]", "tag remove-cell"),
        (":tags: [hide-output]", "tag hide-output"),
        (":nbmake: {mock: {a: 1}}", "nbmake"),
        (":mystnb: {output_stderr: remove}", "mystnb output_stderr"),
    ],
)
def test_a_cell_cannot_hide_its_failure(book: FixtureBook, header: str, named: str) -> None:
    book.append(book.chapter, CELL.format(header))
    with pytest.raises(BookError, match=f"book/chapter: {named} could hide a failure"):
        execute(Book(book.root))


@pytest.mark.parametrize("setting", ["execution: {allow_errors: true}", "mystnb: {a: b}"])
def test_a_chapter_cannot_allow_its_errors(book: FixtureBook, setting: str) -> None:
    book.edit(book.chapter, "kernelspec:\n", f"{setting}\nkernelspec:\n")
    book.append(book.chapter, FAILING_CELL)
    with pytest.raises(BookError, match=f"{setting.split(':')[0]} could hide a failure"):
        execute(Book(book.root))


def test_a_record_cannot_be_made_by_hand(book: FixtureBook) -> None:
    book.edit(book.chapter, "import os\n", "import os\nfrom library import CheckRecord\n")
    with pytest.raises(BookError, match="book/chapter: a record made by hand could hide"):
        execute(Book(book.root))


def test_a_virtual_environment_in_the_project_is_left_alone(built_book: FixtureBook) -> None:
    """Case 19: neither executed nor indexed, though it holds a page, a notebook and a script."""
    assert len(list((built_book.root / ".venv").rglob("foreign.*"))) == 3
    assert not built_book.marker.exists()
    html = built_book.root / "_build" / "html"
    assert not list(html.rglob("*foreign*"))
    assert "foreign" not in (html / "searchindex.js").read_text("utf8").lower()


def test_kernels_find_the_library_from_wherever_they_start(built_book: FixtureBook) -> None:
    """Case 20: the path comes from the package, which reads a file beside itself."""
    notebook = built_book.root / "build" / "nb" / "book" / "chapter.ipynb"
    outputs = [cell.outputs for cell in nbformat.read(notebook, 4).cells if cell.get("outputs")]
    assert outputs[0][0].data["text/plain"] == "'answer 41'"
    assert outputs[1][0].text == "threads: 1\n"


@pytest.mark.parametrize(("workers", "expected"), [(2, "2"), (16, "3")])
def test_kernels_are_never_more_than_the_workers_or_the_chapters(
    built_book: FixtureBook, monkeypatch: pytest.MonkeyPatch, workers: int, expected: str
) -> None:
    """Case 20: three chapters share the workers asked for."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr("tools.execute.write_notebook", lambda book, page: book.notebook(page))
    with pytest.raises(BookError, match="pytest stopped before running them"):
        run_notebooks(Book(built_book.root), list(Book(built_book.root).chapters), workers)
    assert commands[0][commands[0].index("-n") + 1] == expected


def test_no_built_file_is_tracked() -> None:
    # A checkout that belongs to another user is read all the same.
    command = ["git", "-c", "safe.directory=*", "ls-files"]
    command += ["*.ipynb", "build", "_build", ".venv", "*/.jupyter_cache/*"]
    listed = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True, check=True)
    assert listed.stdout == ""


def plain(text: str) -> str:
    """Terminal text without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
