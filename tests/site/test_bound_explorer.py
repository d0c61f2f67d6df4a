r"""The bound explorer in its chapter: found, moved, in both themes, on a phone, from disk."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tools.browse import DESKTOP, PHONE

pytestmark = pytest.mark.site

PAGE = "book/kernel/certificates.html"


def number(explorer, name: str) -> str:
    return explorer.locator(f'[data-number="{name}"]').last.text_content()


@pytest.mark.parametrize("from_disk", [False, True], ids=["http", "disk"])
@pytest.mark.parametrize(
    ("size", "theme"), [(DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light")]
)
def test_a_reader_moves_the_sliders_of_the_chapter(
    from_disk: bool, size: tuple[int, int], theme: str, origin: str, site: Path, browser: Browser
) -> None:
    address = (site / PAGE).as_uri() if from_disk else f"{origin}/{PAGE}"
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, is_mobile=size == PHONE
    )
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(error.stack))
    try:
        page.goto(address, wait_until="load")
        explorer = page.locator(".bound-explorer").first
        assert explorer.get_attribute("data-ready") is not None
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))

        first = number(explorer, "total")
        assert explorer.locator('[data-when="vacuous"]').is_visible()
        explorer.locator('[data-axis="length"] input').focus()
        for key in ("Home", "End"):
            page.keyboard.press(key)
            assert number(explorer, "total") == first, "T has an effect"
        explorer.locator('[data-axis="heads"] input').focus()
        page.keyboard.press("End")
        assert number(explorer, "total") != first
        assert float(number(explorer, "total")) < 1
        assert explorer.locator('[data-when="useful"]').is_visible()

        box = explorer.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size[0]
        assert explorer.evaluate("e => getComputedStyle(e).colorScheme") == theme
        assert explorer.evaluate("e => e.parentElement.scrollWidth <= e.parentElement.clientWidth")
        # the icon of the tab is asked for by the browser, at a time of its own
        assert faults + [url for url in asked if not url.endswith("favicon.svg")] == []
    finally:
        context.close()
