"""The built site and a server for it; neither is made twice in a worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.browse import serve
from tools.sources import Book


@pytest.fixture(scope="session")
def site() -> Path:
    html = Book(Path(__file__).resolve().parents[2]).html
    assert html.is_dir(), "the book is not built: make book"
    return html


@pytest.fixture(scope="session")
def origin(site: Path) -> Iterator[str]:
    with serve(site) as address:
        yield address
