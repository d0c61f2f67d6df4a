"""The built site, a server for it and a browser; none of them is made twice in a worker."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tools.browse import HOW_TO_GET_CHROMIUM, find_chromium, open_browser, serve
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


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if find_chromium() is None:
        message = f"browser tests need a browser: {HOW_TO_GET_CHROMIUM}"
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with open_browser() as chromium:
        yield chromium
