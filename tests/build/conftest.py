"""The small book, built once a worker, and copies of it to be broken."""

import shutil
from pathlib import Path

import pytest
from small_book import FAULTY, Changed, FixtureBook, write_book


@pytest.fixture(scope="session")
def built_book(tmp_path_factory: pytest.TempPathFactory) -> FixtureBook:
    """The unbroken book, executed and built once; tests copy it and never change it."""
    book = write_book(tmp_path_factory.mktemp("unbroken"))
    executed = book.execute()
    assert executed.returncode == 0, executed.stdout + executed.stderr
    built = book.build()
    assert built.returncode == 0, built.stdout + built.stderr
    return book


@pytest.fixture
def book(built_book: FixtureBook, tmp_path: Path) -> FixtureBook:
    """A copy of the built book, to be broken."""
    return FixtureBook(shutil.copytree(built_book.root, tmp_path / "copy"))


@pytest.fixture(scope="session")
def changed_book(built_book: FixtureBook, tmp_path_factory: pytest.TempPathFactory) -> Changed:
    """Another answer of the library, and faults that pass the builder; executed and built anew."""
    book = FixtureBook(shutil.copytree(built_book.root, tmp_path_factory.mktemp("new") / "copy"))
    (book.library.parent / "answer.txt").write_text("42", "utf8")
    book.append(book.index, FAULTY)
    refused = book.build()
    assert book.execute().returncode == 0
    built = book.build()
    assert built.returncode == 0, built.stdout + built.stderr
    return Changed(book, refused)
