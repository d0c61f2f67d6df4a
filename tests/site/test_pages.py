"""Every page of the built book, opened over http and from disk with the network blocked."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tools.browse import PHONE, visit
from tools.links import broken_links, html_files
from tools.sources import Book

pytestmark = pytest.mark.site

BOOK = Book(Path(__file__).resolve().parents[2])
SCREENSHOTS = BOOK.root / "build" / "screenshots"
#: The book's own pages, and what the builder adds: search, index, source listings.
PAGES = [path.relative_to(BOOK.html).as_posix() for path in html_files(BOOK.html)]
WRITTEN = [page for page in PAGES if page.startswith("book/")]
ADDED = [page for page in PAGES if page not in WRITTEN and page != "index.html"]


def test_every_page_of_the_contents_was_built(site: Path) -> None:
    assert sorted(WRITTEN) == sorted(f"{page}.html" for page in BOOK.pages)


def test_internal_links_and_anchors_resolve(site: Path) -> None:
    assert broken_links(site) == []


@pytest.mark.parametrize("page", WRITTEN)
def test_page_is_clean_over_http(page: str, origin: str, browser: Browser) -> None:
    name = page.removesuffix(".html").removeprefix("book/").replace("/", "-")
    light = visit(browser, origin, page, screenshot=SCREENSHOTS / f"{name}-light.png")
    dark = visit(browser, origin, page, dark=True, screenshot=SCREENSHOTS / f"{name}-dark.png")
    phone = visit(browser, origin, page, size=PHONE, screenshot=SCREENSHOTS / f"{name}-phone.png")
    assert light.faults + dark.faults + phone.faults == []
    assert (light.theme, dark.theme) == ("light", "dark")


@pytest.mark.parametrize("page", WRITTEN)
def test_page_is_clean_from_disk(page: str, site: Path, browser: Browser) -> None:
    assert visit(browser, site.as_uri(), page).faults == []


def test_added_pages_are_clean(origin: str, browser: Browser) -> None:
    assert "search.html" in ADDED
    assert [fault for page in ADDED for fault in visit(browser, origin, page).faults] == []
    small = [page for page in ADDED if not page.startswith("_modules/")]
    assert "genindex.html" in small
    faults = [visit(browser, origin, page, size=PHONE).faults for page in small]
    assert [fault for found in faults for fault in found] == []


@pytest.mark.parametrize("from_disk", [False, True], ids=["http", "disk"])
def test_the_front_door_leads_to_the_landing_page(
    from_disk: bool, origin: str, site: Path, browser: Browser
) -> None:
    page = browser.new_page()
    try:
        page.goto(f"{site.as_uri() if from_disk else origin}/index.html")
        page.wait_for_url(f"**/{BOOK.pages[0]}.html")
        assert page.title().startswith(BOOK.config["title"])
    finally:
        page.close()
