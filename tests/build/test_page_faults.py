"""What no builder warns about: the browser and the reader of links must find each of these."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser
from small_book import Changed, FixtureBook

from tools.browse import PHONE, serve, visit
from tools.links import broken_links

pytestmark = [pytest.mark.build, pytest.mark.site, pytest.mark.xdist_group("build")]


def faults(browser: Browser, site: Path, page: str) -> list[str]:
    with serve(site) as origin:
        wide = visit(browser, origin, page)
        narrow = visit(browser, origin, page, size=PHONE)
    return wide.faults + narrow.faults + visit(browser, site.as_uri(), page).faults


def test_the_unbroken_book_is_clean(built_book: FixtureBook, browser: Browser) -> None:
    site = built_book.root / "_build" / "html"
    assert broken_links(site) == []
    for page in ("book/index.html", "book/chapter.html"):
        assert faults(browser, site, page) == []


def test_each_fault_of_a_page_is_found(changed_book: Changed, browser: Browser) -> None:
    site = changed_book.book.root / "_build" / "html"
    found = "\n".join(faults(browser, site, "book/index.html"))
    for fault in (
        r"bad formula, MathJax says: Undefined control sequence \undefinedmacro",
        r"unrendered formula: \[ \frac{1}{2 \]",
        "3 formulas but 2 rendered",
        "image without a meaningful alt text: ../_images/favicon.svg",
        "external request: https://example.org/picture.png",
        "px wide in a window of 390 px",
        "console warning: something is wrong",
        "undefinedFunction is not defined",
    ):
        assert fault in found
    links = "\n".join(broken_links(site))
    assert "book/index.html: nowhere.html leads to no file" in links
    assert "book/index.html: chapter.html#no-such-place leads to no such anchor" in links
