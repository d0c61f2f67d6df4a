"""The small book, built once a worker, and copies of it to be broken."""

import shutil
from pathlib import Path

import pytest
from small_book import FixtureBook, write_book


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
